"""The files that a reader needs, whatever is imported when: for a table of traces, a heatmap, the engine."""

import ast
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import kvatlas

ROOT = Path(kvatlas.__file__).parent


def _modules() -> dict[str, Path]:
    modules = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join([ROOT.name, *file.relative_to(ROOT).with_suffix("").parts])
        modules[name.removesuffix(".__init__")] = file
    return modules


def _imports(name: str, modules: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports when it runs, at the top or inside functions."""
    found = set()
    nodes: list[ast.AST] = [ast.parse(modules[name].read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == ROOT.name:
            for item in node.names:
                full = f"{node.module}.{item.name}"
                found.add(full if full in modules else node.module)
        nodes.extend(ast.iter_child_nodes(node))
    return {module for module in found if module in modules and module not in (name, ROOT.name)}


@cache
def needs() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    modules = _modules()
    return {name: _imports(name, modules) for name in modules}


def closure(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(needs()[module])
    return seen


# Maps need no evidence, evidence none of the words of a result, and a result no spec, model and grader.
MOST = [
    ("stats.table", 13),
    ("figures.heatmap", 45),
    ("engine.engine", 34),
    ("report.sources", 30),
    ("report.evidence", 48),
    ("report.result", 50),
]


# Lazy imports count. A sampled token lies as deep: command, library, run, worker, engine, rows, cache, bits, core.
@pytest.mark.parametrize(("module", "most"), MOST)
def test_few_files_are_needed_to_import_the_heart(module: str, most: int) -> None:
    needed = closure(f"{ROOT.name}.{module}")
    assert len(needed) <= most, sorted(needed)


@pytest.mark.parametrize("room", ["stats", "figures"])
def test_statistics_and_figures_know_no_policy_model_and_grader(room: str) -> None:
    foreign = ("policies", "models", "benchmarks", "answers", "engine", "bits")
    for module in needs():
        if module.startswith(f"{ROOT.name}.{room}"):
            rooms = {needed.split(".")[1] for needed in closure(module) if "." in needed}
            assert rooms.isdisjoint(foreign), module


def test_the_longest_chain_of_imports_is_short() -> None:
    sys.setrecursionlimit(10_000)
    known: dict[str, int] = {}

    def length(module: str, above: frozenset[str]) -> int:
        if module in above:
            return 0
        if module not in known:
            known[module] = 1 + max((length(other, above | {module}) for other in needs()[module]), default=0)
        return known[module]

    assert max(length(module, frozenset()) for module in needs()) <= 24

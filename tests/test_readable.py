"""Lines that are read once: what a reader has to unpack in the head is refused here; lengths are not counted."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("src/kvatlas/**/*.py"))
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Local names that do not say what they hold.
EMPTY_NAMES = {"own", "part", "number", "known", "there", "beside", "made"}


def is_packed(node: ast.AST) -> bool:
    """Return whether an assignment packs several values into a line; a swap of the same names does not."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    if not isinstance(node.value, ast.Tuple):
        return False
    targets = sorted(ast.unparse(target) for target in node.targets[0].elts)
    return targets != sorted(ast.unparse(value) for value in node.value.elts)


def is_nested(node: ast.AST) -> bool:
    """Return whether a comprehension holds another one, or runs over several loops."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inside = any(isinstance(other, COMPREHENSIONS) for other in ast.walk(node) if other is not node)
    return inside or len(node.generators) > 1


def is_double_condition(node: ast.AST) -> bool:
    """Return whether a conditional expression holds another one."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(other, ast.IfExp) for other in ast.walk(node) if other is not node)


def is_repeated_by_flag(node: ast.AST) -> bool:
    """Return whether a list is multiplied with a condition in place of an `if`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    if not isinstance(node.left, ast.List | ast.Tuple):
        return False
    called = node.right.func if isinstance(node.right, ast.Call) else None
    is_truth = isinstance(called, ast.Name) and called.id in ("bool", "any", "all", "isinstance")
    return is_truth or isinstance(node.right, ast.Compare | ast.BoolOp)


def empty_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of local variables that do not say what they hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield node.lineno, f"the name {node.id}"


CHECKS = {
    "a packed assignment": is_packed,
    "a comprehension in a comprehension": is_nested,
    "a condition in a condition": is_double_condition,
    "a list times a condition": is_repeated_by_flag,
}


def faults(file: Path) -> list[str]:
    tree = ast.parse(file.read_text("utf-8"))
    found = list(empty_names(tree))
    for node in ast.walk(tree):
        found += [(node.lineno, fault) for fault, check in CHECKS.items() if check(node)]
    return [f"{file.relative_to(ROOT)}:{line}: {fault}" for line, fault in sorted(found)]


def test_lines_are_read_once() -> None:
    found = []
    for file in FILES:
        found += faults(file)
    assert found == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("first, second = count, names[0]", "a packed assignment"),
        ("rows = [[cell for cell in row] for row in table]", "a comprehension in a comprehension"),
        ("cells = [cell for row in table for cell in row]", "a comprehension in a comprehension"),
        ("sign = 1 if x > 0 else 0 if x == 0 else -1", "a condition in a condition"),
        ("notes = ['partial'] * bool(missing)", "a list times a condition"),
        ("part = names[0]", "the name part"),
    ],
)
def test_each_fault_is_seen(line: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dense.py"
    file.write_text(line)
    monkeypatch.setattr("tests.test_readable.ROOT", tmp_path)
    assert faults(file) == [f"dense.py:1: {fault}"]


def test_swaps_and_unpacked_calls_are_no_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plain.py"
    file.write_text("low, high = high, low\nlow, high = interval(values)\nzeros = [0.0] * len(values)\n")
    monkeypatch.setattr("tests.test_readable.ROOT", tmp_path)
    assert faults(file) == []

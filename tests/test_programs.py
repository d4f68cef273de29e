"""The programs beside the package use what the package has: most of them are too long for tests to run."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(path for folder in ("bench", "docs", "examples", "recipes") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_of_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvatlas":
            module = importlib.import_module(str(node.module))
            missing = [
                name.name
                for name in node.names
                if not hasattr(module, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}")
            ]
            assert not missing, f"{node.module} has no {missing}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "kvatlas":
                    importlib.import_module(name.name)

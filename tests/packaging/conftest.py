"""Packages that are built once for all tests."""

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.packaging.environments import ROOT, build, packages


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """kvatlas' sdist (`gz`) and wheel (`whl`); the first of pytest-xdist's workers builds them for all."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    with FileLock(f"{out}.lock"):
        return packages(out) if out.exists() else build(ROOT, out)

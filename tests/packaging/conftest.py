"""What is built once for all tests of packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """kvatlas' sdist (`gz`) and wheel (`whl`)."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))

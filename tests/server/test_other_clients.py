"""Clients that people use besides OpenAI's own, each in an environment that `make test` installs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.r1 import FIRST_TEMPLATE, save_model
from tests.server.clients import programs
from tests.server.test_features import served
from tests.server.test_tools import TEMPLATE

ENVIRONMENTS = Path(sys.prefix) / "clients"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A model, and the same with a chat template that knows tools."""
    root = tmp_path_factory.mktemp("served")
    plain = save_model("llama", root / "plain" / "m", template=FIRST_TEMPLATE, tags=())
    tooled = save_model("llama", root / "tooled" / "m", template=TEMPLATE, tags=())
    with served(plain) as url, served(tooled) as url_with_tools:
        yield url, url_with_tools


@pytest.mark.skipif(not ENVIRONMENTS.is_dir(), reason="`make test` installs the clients in .venv/clients")
@pytest.mark.parametrize("client", programs.CLIENTS)
def test_structured_output_and_streams(client: str, urls: tuple[str, str], tmp_path: Path) -> None:
    versions = ENVIRONMENTS / programs.CLIENTS[client][0]
    done = subprocess.run(
        [sys.executable, "-P", programs.__file__, client, *urls],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(versions)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]

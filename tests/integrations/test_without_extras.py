"""Without the extras their benchmarks and commands say which one is missing; with one, it brings all that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.models.test_gguf import file as tiny_gguf  # noqa: F401


@pytest.mark.parametrize(
    ("hidden", "words", "what", "extra"),
    [
        ("inspect_ai", "import LOG.json run", "Reading Inspect logs needs", "inspect"),
        ("pyarrow", "benchmarks check file:x.parquet", "Reading x.parquet needs", "parquet"),
        ("fastapi", "serve embedded:tiny-llama", "Serving needs", "serve"),
        ("lm_eval", "lm-eval --help", "Running lm-eval needs", "lm-eval"),
        ("gguf", "models check hf:x.gguf", "Reading x.gguf needs", "gguf"),
        ("accelerate", "models check hf:x.gguf", "Reading x.gguf needs", "gguf"),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, hidden: str, words: str, what: str, extra: str) -> None:
    (tmp_path / "SPEC").write_text(
        "models: [embedded:tiny-llama]\nbenchmarks: [CHAIN4]\nsamples: 1\nbaseline: {policy: full}\n"
    )
    (tmp_path / "LOG.json").write_text("{}")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    code = f"import sys; sys.modules[{hidden!r}] = None; sys.argv[1:] = {words.split()}; "
    code += "from kvatlas.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == f"kvatlas: {what} the extra: pip install 'kvatlas[{extra}]'."


#: What a user of an extra does with it, {} being a GGUF.
USES = {
    "gguf": "from pathlib import Path; from kvatlas.models import gguf; gguf.converted(Path({!r}), 'cache')",
    "inspect": "import kvatlas.integrations.inspect_logs, kvatlas.integrations.inspect_provider",
    "lm-eval": "import kvatlas.integrations.lm_eval",
    "parquet": "import pandas; pandas.DataFrame([{{'answer': 1}}]).to_parquet('x.parquet'); from kvatlas.benchmarks "
    "import tables; from pathlib import Path; tables.read_rows(Path('x.parquet'))",
    "ray": "import ray, kvatlas.sweeps.ray",
    "serve": "import kvatlas.serve.app",
}
#: As if distributions were not installed whose modules are not given.
ALONE = """
import sys
from importlib.machinery import PathFinder
hidden = set({!r})
class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        # Some bring a copy of their own, which lies elsewhere.
        if path is None and name in hidden:
            path = [place for place in sys.path if not place.endswith("-packages")]
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Alone
"""


def brought(extra: str) -> set[str]:
    """The distributions that an installation with the extra brings."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"][extra]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        asked = waiting.pop()
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        for chosen in {"", *asked.extras} - {other for there, other in seen if there == name}:
            seen.add((name, chosen))
            try:
                needed = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:
                continue
            waiting += [item for item in needed if item.marker is None or item.marker.evaluate({"extra": chosen})]
    return {name for name, _ in seen}


@pytest.mark.parametrize("extra", USES)
def test_an_extra_brings_all_that_it_needs(extra: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue("tiny_gguf") if extra == "gguf" else ""
    there = brought(extra) | {"kvatlas", "setuptools"}
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if not there & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners}
    ]
    assert "pytest" in hidden
    code = ALONE.format(hidden) + USES[extra].format(str(file))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

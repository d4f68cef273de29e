"""A separate package, built and installed, adds a policy and a benchmark that every command knows."""

import json
from pathlib import Path

import pytest
import yaml

from tests.packaging.environments import ROOT, Environment, build

PLUGIN = ROOT / "examples" / "plugin"
SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["SUM3"],
    "problems": 3,
    "samples": 2,
    "sampling": {"max_new_tokens": 70},
    "settings": {"policy": "sinks", "kv_budget": 48, "ratio_over": "thinking", "sinks": 2},
    "axes": {"local_window": [4, 8], "ratio": [0.2]},
}


@pytest.fixture(scope="module")
def environment(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """kvatlas and the plug-ins from their wheels."""
    made = Environment.made(tmp_path_factory.mktemp("plugged") / "env")
    made.install(built["whl"])
    made.install(build(PLUGIN, tmp_path_factory.mktemp("plugin"))["whl"])
    return made


def test_a_sweep_runs_with_both(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    done = environment.commands(
        tmp_path,
        ["sweep", "spec.yaml", "--workers", "1", "--quiet", "--out", "run"],
        ["export", "run", "--format", "jsonl", "--out", "run.jsonl"],
    )
    assert [code for code, _, _ in done] == [0] * 2, done
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} == {"full", "sinks"}


def test_the_guides_show_the_same_files() -> None:
    for guide, file in (("adding-a-benchmark.md", "sums.py"), ("adding-a-policy.md", "sinks.py")):
        text = (ROOT / "docs" / guide).read_text()
        assert (PLUGIN / "src" / "kvatlas_example" / file).read_text().strip() in text

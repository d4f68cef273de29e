"""A separate package, built and installed, adds a policy, a benchmark and an executor that every command knows."""

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


def test_a_sweep_runs_through_all_three(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    executors = ("one-by-one", "local")
    begin = ["sweep", "spec.yaml", "--workers", "1", "--quiet", "--out"]
    *done, refused, unknown = environment.commands(
        tmp_path,
        *[[*begin, name, "--executor", name] for name in executors],
        *[["export", name, "--format", "jsonl", "--out", f"{name}.jsonl"] for name in executors],
        [*begin, "x", "--executor", "one-by-one@10.0.0.1:6379"],
        [*begin, "x", "--executor", "cloud"],
    )
    assert [code for code, _, _ in done] == [0] * 4, done
    traces = []
    for name in executors:
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        names = ("policy", "local_window", "problem", "sample", "text")
        traces.append(sorted(tuple(str(row.get(name)) for name in names) for row in rows))
    assert traces[0] == traces[1]
    assert {trace[0] for trace in traces[0]} == {"full", "sinks"}
    code, _, said = refused
    # What the plan warns of comes before.
    *_, sentence = said.splitlines()
    assert (code, said.count("kvatlas: ")) == (2, 1)
    assert "'one-by-one' has no cluster '10.0.0.1:6379'" in sentence
    code, _, said = unknown
    assert code == 2
    assert "Unknown executor 'cloud'; expected: local" in said
    assert "one-by-one" in said


def test_the_guides_show_the_same_files() -> None:
    for guide, file in (("adding-a-benchmark.md", "sums.py"), ("adding-a-policy.md", "sinks.py")):
        text = (ROOT / "docs" / guide).read_text()
        assert (PLUGIN / "src" / "kvatlas_example" / file).read_text().strip() in text

"""The recipes of the published grids, whole, on small random-weight models of the same architectures."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvatlas.core import Sampling, Status
from kvatlas.policies import policies
from kvatlas.sweeps import read_spec
from tests.r1 import AIME, save_model
from tests.stored import traces_of

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "src" / "kvatlas" / "sweeps"


def test_a_recipe_runs_through_to_its_figure(tmp_path: Path, succeed: Callable[..., str]) -> None:
    """On a small model that thinks to the end: three real problems, one sample, a tenth of all sizes."""
    path, model = tmp_path / "recipe.yaml", save_model("qwen2", tmp_path / "model")
    spec = yaml.safe_load((RECIPES / "dynts_r1_qwen.yaml").read_text())
    spec["models"][0] |= {"model": model.name, "dtype": "float32", "think_close": "</never>"}
    spec["benchmarks"] = [spec["benchmarks"][0] | {"file": str(AIME)}]
    spec["samples"] = 1
    spec["sampling"]["max_new_tokens"] = 600
    spec["settings"][0] |= {"kv_budget": 500, "predictor": ""}
    spec["axes"]["local_window"] = [window // 10 for window in spec["axes"]["local_window"]]
    path.write_text(yaml.safe_dump(spec))
    plan = json.loads(succeed("plan", path, "--json", "--memory", "1", "--tokens-per-second", "1000"))
    assert (plan["settings"], plan["traces"]) == (21, 21 * 3)
    assert plan["kv_bytes_per_sequence"] == 500 * 2 * 2 * 2 * 16 * 4
    assert plan["decoded_tokens"]["shared"] < plan["decoded_tokens"]["separate"]

    succeed("sweep", path, "--out", tmp_path / "run", "--workers", "1", "--quiet")
    traces = traces_of(tmp_path / "run")
    assert len(traces) == plan["traces"]
    # What follows the end of thinking always stays, which none of these traces writes.
    long = [t for t in traces if t.setting.policy == "dynts" and t.usage.output_tokens > 500]
    assert long
    assert all(t.usage.compressions >= 1 and t.usage.peak_kv_tokens == 500 for t in long)
    assert all(t.model == "R1-Qwen" for t in traces)
    assert {t.grade.status for t in traces} <= {Status.TRUNCATED, Status.NO_ANSWER, Status.OK}

    succeed("map", tmp_path / "run", "--out", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["dynts_r1_llama", "dynts_r1_qwen"])
def test_recipes_are_the_published_grid(name: str) -> None:
    spec = read_spec(RECIPES / f"{name}.yaml")
    cells = [setting for setting, baseline in spec.cells() if not baseline]
    assert {(s.values["local_window"], s.values["ratio"]) for s in cells} == {
        (window, ratio) for window in (500, 1000, 2000, 3000) for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)
    }
    assert all(s.policy == "dynts" and s.values["kv_budget"] == 5000 for s in cells)
    assert spec.sampling.sampling() == Sampling(0.6, 20, 0.95, 16_384)
    assert spec.samples == 5
    assert [entry.name for entry in spec.benchmarks] == ["AIME24", "AIME25", "AMC23", "GPQA_D"]
    assert {(entry.prompt, entry.grader) for entry in spec.benchmarks} == {("dynts", "dynts")}


def test_the_recipe_of_triattention_has_its_budgets() -> None:
    spec = read_spec(RECIPES / "triattention_qwen3.yaml")
    cells = [setting for setting, baseline in spec.cells() if not baseline]
    assert {(s.policy, s.values["kv_budget"], s.values["every"], s.values["local_window"]) for s in cells} == {
        (policy, budget, 128, 128)
        for policy in ("triattention", "rkv", "snapkv")
        for budget in (512, 1024, 2048, 3072, 4096)
    }
    assert spec.sampling.sampling() == Sampling(0.6, 0, 0.95, 32_768)
    assert spec.samples == 8


def test_the_arena_has_every_policy_at_equal_tokens() -> None:
    spec = read_spec(RECIPES / "arena.yaml")
    cells = [setting for setting, baseline in spec.cells() if not baseline]
    pairs = {(s.values["kv_budget"], s.values["keep_prompt"]) for s in cells}
    assert pairs == {(budget, keeps) for budget in (160, 208) for keeps in (True, False)}
    assert all((s.values["local_window"], s.values["every"]) == (16, 32) for s in cells)
    # The ablations of dynts are no rivals; the heads of `learned` are trained by its user.
    left_out = {"full", "dynts-random", "dynts-bottom", "dynts-noprompt", "learned"}
    assert {s.policy for s in cells} == set(policies.names()) - left_out
    by_cell = Counter((s.values["kv_budget"], s.values["keep_prompt"]) for s in cells)
    assert len(set(by_cell.values())) == 1


OLDEST = '''
from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy


@dataclass(frozen=True)
class Oldest(CompressingPolicy):
    """Keeps the oldest tokens."""

    name = "oldest"
    summary = "keeps the oldest tokens"

    def score(self, cached: CacheView):
        return -cached.positions
'''


#: Some settings in place of the arena's.
FEW = "settings=" + json.dumps(
    [
        {"policy": policy, "kv_budget": budget, "local_window": 16, "every": 32}
        for policy, budget in (("random", 160), ("h2o", 160), ("dynts", 208))
    ]
)


@pytest.mark.parametrize("changes", [[FEW], pytest.param([], marks=pytest.mark.deep)])
def test_one_file_and_one_command_add_a_policy_to_the_table_of_the_arena(
    tmp_path: Path, succeed: Callable[..., str], monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    models = ["embedded:tiny-llama", "embedded:tiny-qwen"]
    (tmp_path / "mine.py").write_text(OLDEST)

    def sweep(*changes: str) -> None:
        common = [f"models=[{', '.join(models)}]", "benchmarks=[CHAIN10-17]", "sampling.max_new_tokens=180"]
        words = [word for change in (*common, *changes) for word in ("--set", change)]
        succeed("sweep", "arena", "--problems", 1, *words, "--out", "run", "--workers", "1", "--quiet")

    def names_by_model() -> dict[str, list[str]]:
        tables = json.loads(succeed("describe", "run", "--json"))["tables"]
        return {table["model"]: [row["name"] for row in table["settings"]] for table in tables}

    sweep(*changes)
    before = names_by_model()
    sweep('settings=[{policy: "mine.py:Oldest", kv_budget: 160, local_window: 16, every: 32}]')
    after = names_by_model()
    assert list(after) == list(before) == models
    for model, names in after.items():
        assert len(names) == len(set(names))
        added = set(names) - set(before[model])
        assert added == {f"Oldest(keep_prompt={keeps})" for keeps in (False, True)}
        assert set(before[model]) < set(names)
    # Every compressed trace of a budget held as many tokens at its peak.
    compressed = [trace for trace in traces_of(tmp_path / "run") if trace.usage.compressions]
    assert {t.setting.values["kv_budget"]: t.usage.peak_kv_tokens for t in compressed} == {160: 192, 208: 240}
    assert {t.usage.peak_kv_tokens for t in compressed} == {192, 240}

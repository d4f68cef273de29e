"""A suggested grid: its settings compress, leave the policy a choice, and its sentences say what is solved."""

from pathlib import Path

import pytest
import yaml

from kvatlas.core import KvatlasError
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, read_spec, sweep
from kvatlas.sweeps.suggest import suggest
from tests.command_line import Call


@pytest.mark.parametrize(
    ("model", "benchmark"),
    [
        pytest.param("embedded:tiny-llama", "CHAIN6-12", marks=pytest.mark.deep),
        ("embedded:tiny-qwen", "LEDGER12-18"),
    ],
)
def test_a_suggested_grid_compresses_and_leaves_a_choice(model: str, benchmark: str, tmp_path: Path) -> None:
    """Measured on problems that the suggestion has not seen."""
    plan, text = suggest(model, {"name": benchmark})
    assert all(cell.audit.no_choice < 0.1 for cell in plan.audit)

    data = {**yaml.safe_load(text), "problems": 8}
    sweep(make_plan(parse_spec(data)), tmp_path / "run", workers=1)
    with Store.open(tmp_path / "run") as store:
        traces = [trace for _, trace in store.traces(texts=False) if trace.setting.policy != "full"]
    unseen = [trace for trace in traces if int(trace.problem.rsplit("-", 1)[1]) >= 5]
    assert sum((trace.usage.compressions or 0) > 0 for trace in unseen) > len(unseen) / 2


def test_thinking_that_is_too_short_gets_no_grid() -> None:
    with pytest.raises(KvatlasError, match="tokens on these problems"):
        suggest("embedded:tiny-llama", {"name": "CHAIN3"})


def test_the_spec_goes_to_standard_output_alone(kvatlas: Call, tmp_path: Path) -> None:
    code, out, err = kvatlas("plan", "--suggest", "embedded:tiny-llama", "CHAIN6")
    assert code == 0
    spec = tmp_path / "s.yaml"
    spec.write_text(out)
    assert read_spec(spec).settings
    assert "decoded tokens" in err
    for wrong in (["--problems", "3"], ["--json"], ["--set", "seed=1"]):
        kvatlas.refuse("plan", "--suggest", "embedded:tiny-llama", "CHAIN6", *wrong)
    kvatlas.refuse("plan", "demo", "--model-option", "dtype=float32")

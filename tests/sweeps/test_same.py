"""One set of traces, token by token, whatever way they were decoded: sharing, batch, resuming."""

from pathlib import Path
from typing import Any

import pytest

from kvatlas import models
from kvatlas.models import ModelHandle
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.sweeps.conftest import Build, contents

#: A budget a little above the prompts, which have 35 tokens.
COMMON: dict[str, Any] = {"kv_budget": 63, "ratio": 0.3, "ratio_over": "thinking"}
#: The full cache and six settings, one in packed bits.
SETTINGS: list[dict[str, Any]] = [
    {"policy": "full"},
    {"policy": "window", "local_window": 6, "kv_bits": 4, "residual": 4, **COMMON},
    *({"policy": name, "local_window": 6, **COMMON} for name in ("window", "random", "h2o", "tova")),
    {"policy": "random", "local_window": 12, **COMMON},
]


@pytest.fixture(scope="module")
def build(random_models: dict[str, ModelHandle]) -> Build:
    """A spec of an embedded model and of one with random weights."""

    def spec(**changes: Any) -> dict[str, Any]:
        return {
            "models": [models.embedded()[0], random_models["qwen2"].name],
            "benchmarks": ["CHAIN5"],
            "problems": 2,
            "seed": 11,
            "sampling": {"temperature": 0.8, "max_new_tokens": 52},
            "baseline": SETTINGS,
            **changes,
        }

    return spec


@pytest.fixture(scope="module")
def one_by_one(build: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Separate runs of every setting, one sequence at a time."""
    folder = tmp_path_factory.mktemp("one-by-one")
    for setting in SETTINGS:
        sweep(make_plan(parse_spec(build(baseline=[setting]))), folder, workers=1, batch_size=1)
    result = contents(folder)
    assert any(trace.usage.compressions for trace in result.values())
    return result


@pytest.mark.parametrize("batch_size", [None, 3])
def test_shared_trunks_and_batches_change_nothing(
    one_by_one: dict[Any, Any], build: Build, tmp_path: Path, batch_size: int | None
) -> None:
    sweep(make_plan(parse_spec(build())), tmp_path, workers=1, batch_size=batch_size)
    assert contents(tmp_path) == one_by_one


def test_a_run_that_goes_on_in_other_ways_is_the_same(one_by_one: dict[Any, Any], build: Build, tmp_path: Path) -> None:
    sweep(make_plan(parse_spec(build(problems=1, baseline=SETTINGS[:3]))), tmp_path, workers=1, batch_size=2)
    sweep(make_plan(parse_spec(build(baseline=SETTINGS[1:]))), tmp_path, workers=1, batch_size=64)
    sweep(make_plan(parse_spec(build())), tmp_path, workers=1)
    assert contents(tmp_path) == one_by_one

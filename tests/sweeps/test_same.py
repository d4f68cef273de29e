"""One set of traces, token by token, whatever way they were decoded: sharing, batch, workers, resuming, Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.models import ModelHandle
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.sweeps.conftest import contents

CHAINS = "CHAIN5"


@pytest.fixture(scope="module")
def settings() -> list[dict[str, Any]]:
    """The full cache and four settings whose budget is a little above the longest prompt."""
    benchmark = find(CHAINS)
    reader = models.find(models.embedded()[0])
    prompt = max(len(reader.encode(benchmark.prompt(problem))) for problem in benchmark.problems(3))
    common = {"kv_budget": prompt + 28, "ratio": 0.3, "ratio_over": "thinking"}
    chosen = (("window", 6), ("random", 6), ("random", 12), ("h2o", 6))
    return [{"policy": "full"}, *[{"policy": name, "local_window": window, **common} for name, window in chosen]]


@pytest.fixture(scope="module")
def build(random_models: dict[str, ModelHandle], settings: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A spec of an embedded model and of one with random weights."""

    def spec(**changes: Any) -> dict[str, Any]:
        return {
            "models": [models.embedded()[0], random_models["qwen2"].name],
            "benchmarks": [CHAINS],
            "problems": 3,
            "samples": 1,
            "seed": 11,
            "sampling": {"temperature": 0.8, "max_new_tokens": 70},
            "baseline": settings,
            **changes,
        }

    return spec


@pytest.fixture(scope="module")
def one_by_one(
    build: Callable[..., dict[str, Any]], settings: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, Any]:
    """Separate runs of every setting, one sequence at a time."""
    folder = tmp_path_factory.mktemp("one-by-one")
    for setting in settings:
        sweep(make_plan(parse_spec(build(baseline=[setting]))), folder, workers=1, batch_size=1)
    result = contents(folder)
    assert any(trace.usage.compressions for trace in result.values())
    return result


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A Ray on this machine that is there already: sweeps do not start one for every model.

    Of one core: two workers are tried in test_ray.py.
    """
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    "options",
    [{"workers": 1}, {"workers": 1, "batch_size": 3}, {"workers": 2, "batch_size": 5}, {"executor": "ray"}],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items()),
)
def test_shared_trunks_batches_workers_and_ray_change_nothing(
    one_by_one: dict[Any, Any],
    build: Callable[..., dict[str, Any]],
    tmp_path: Path,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    spec = build()
    if "executor" in options:
        request.getfixturevalue("ray_here")
        # Its workers start anew for each model, and do the same for any.
        del spec["models"][1]
    plan = make_plan(parse_spec(spec))
    sweep(plan, tmp_path, **options)
    asked = set(plan.keys.values())
    assert contents(tmp_path) == {key: trace for key, trace in one_by_one.items() if key[0] in asked}


def test_a_run_that_goes_on_in_other_ways_is_the_same(
    one_by_one: dict[Any, Any], build: Callable[..., dict[str, Any]], settings: list[dict[str, Any]], tmp_path: Path
) -> None:
    sweep(make_plan(parse_spec(build(problems=1, baseline=settings[:3]))), tmp_path, workers=1, batch_size=2)
    sweep(make_plan(parse_spec(build(problems=2, baseline=settings[1:]))), tmp_path, workers=1, batch_size=64)
    sweep(make_plan(parse_spec(build())), tmp_path, workers=1)
    assert contents(tmp_path) == one_by_one

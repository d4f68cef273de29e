"""The Ray executor on loopback, with real nodes and real losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError
from kvatlas.sweep import Progress, make_plan, parse_spec, sweep
from kvatlas.sweep.executors import Crew
from kvatlas.sweep.ray_executor import Desk, difference, on_ray
from kvatlas.sweep.work import Job
from tests.sweep.test_run import contents

ray = pytest.importorskip("ray")

Build = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def finished(spec_data: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run in this process."""
    folder = tmp_path_factory.mktemp("run")
    sweep(make_plan(parse_spec(spec_data())), folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes of one core each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    common = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    for _ in range(2):
        found.add_node(num_cpus=1, **common)
    yield found
    ray.shutdown()
    found.shutdown()


def workers() -> list[dict[str, Any]]:
    """The processes of living workers."""
    from ray.util.state import list_actors

    return [
        {"pid": each.pid, "node": each.node_id}
        for each in list_actors(filters=[("class_name", "=", "Worker"), ("state", "=", "ALIVE")])
    ]


def test_a_ray_started_here_changes_nothing_and_goes_on_with_a_local_run(
    finished: Path, spec_data: Build, tmp_path: Path
) -> None:
    sweep(make_plan(parse_spec(spec_data(samples=1))), tmp_path, workers=1)
    told: list[Progress] = []
    sweep(make_plan(parse_spec(spec_data())), tmp_path, executor="ray", workers=1, tell=told.append)
    assert len(told) == 1 * 3 * 2 * 9
    assert contents(tmp_path) == contents(finished)
    assert not ray.is_initialized()

"""The Ray executor on loopback, with real nodes and real losses."""

import inspect
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError
from kvatlas.ray.cluster import WorkQueue, _connect, difference_of_node
from kvatlas.sweeps import Progress, make_plan, parse_spec, sweep
from kvatlas.sweeps.executors import WorkerPool
from tests.sweeps.conftest import Build, contents, job

pytestmark = pytest.mark.newest

ray = pytest.importorskip("ray")
#: The real function, before tests replace it.
_start = ray.init


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head of one core and a node of one core."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    common = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **common})
    result.add_node(num_cpus=1, **common)
    yield result
    ray.shutdown()
    result.shutdown()


def workers(cluster: Any) -> list[int]:
    """Process ids of this cluster's workers that have begun; other tests may have Rays of their own."""
    session = Path(cluster.head_node.get_session_dir_path()).name.encode()
    results = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if (folder / "cmdline").read_bytes().startswith(b"ray::Worker"):
                    parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
                    if session in (Path("/proc") / parent / "cmdline").read_bytes():
                        results.append(int(folder.name))
            except OSError:
                continue
    return results


def test_without_an_address_a_ray_of_its_own_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a core for each worker, and not joined to another cluster of the machine."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **given: options.update(given))
    _connect(ray, WorkerPool(64))
    assert (options["address"], options["num_cpus"]) == ("local", 64)
    inspect.signature(_start).bind(**options)


@pytest.mark.deep
def test_a_killed_worker_and_a_lost_node_cost_only_their_unfinished_problems(
    finished: Path, spec_data: Build, tmp_path: Path, cluster: Any
) -> None:
    """A run that began on this machine goes on."""
    sweep(make_plan(parse_spec(spec_data(samples=1))), tmp_path, workers=1)
    killed: list[int] = []
    lost: list[Any] = []
    told: list[Progress] = []

    def on_trace(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 5:
            killed.append(workers(cluster)[0])
            os.kill(killed[-1], signal.SIGKILL)
        elif len(told) == 30:
            lost.append(cluster.list_all_nodes()[-1])
            cluster.remove_node(lost[-1], allow_graceful=False)

    plan = make_plan(parse_spec(spec_data()))
    sweep(plan, tmp_path, executor="ray", workers=2, address=cluster.address, batch_size=4, on_trace=on_trace)
    assert killed
    assert lost
    assert len(told) == plan.traces / 2
    assert contents(tmp_path) == contents(finished)


def test_a_cluster_that_is_not_there_is_a_sentence(spec_data: Build, tmp_path: Path) -> None:
    ray.shutdown()
    with pytest.raises(KvatlasError, match=r"'127.0.0.1:1' cannot be reached .* expected HOST:PORT of its head node"):
        sweep(make_plan(parse_spec(spec_data())), tmp_path, executor="ray", address="127.0.0.1:1")


def test_a_node_unlike_the_drivers_is_refused(spec_data: Build, tmp_path: Path) -> None:
    own = job(spec_data())
    assert difference_of_node(own) is None
    assert "finds other weights of the model" in str(difference_of_node(replace(own, weights="0" * 64)))
    assert "has torch" in str(difference_of_node(replace(own, made_with={**own.made_with, "torch": "1.0"})))
    gone = replace(own, model=replace(own.model, folder=tmp_path / "gone"))
    assert "finds no folder" in str(difference_of_node(gone))


def test_a_queue_gives_out_every_unit_once() -> None:
    queue = WorkQueue(3)
    assert [queue.claim(0), queue.claim(1), queue.left(), queue.claim(0)] == [0, 1, 1, 2]
    assert (queue.claim(1), queue.left(), queue.takers()) == (None, 0, {0, 1})
    queue.lose(0)
    assert queue.takers() == {1}

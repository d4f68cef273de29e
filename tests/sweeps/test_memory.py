"""Memory of a worker: its use, its choice of a batch size, and too little memory."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvatlas
from kvatlas import models, policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.cache import KVCache
from kvatlas.engine.memory_plan import CPU_BATCH, MARGIN, peak
from kvatlas.machine import left_in_group
from kvatlas.models import ModelHandle
from kvatlas.predictor.learning import TrainingData, learn
from kvatlas.serve.service import GenerationRequest, Service
from kvatlas.sweeps import make_plan, parse_spec, sweep
from kvatlas.sweeps import worker as jobs
from kvatlas.sweeps.executors import WorkerPool, executors, local_workers, shares
from kvatlas.sweeps.worker import Job, decode, fitting_batch, worker_needs
from tests.decoding import endless, grid, requests, run
from tests.engine.gpu_stand_in import gpu
from tests.sweeps.conftest import Build, contents, job

__all__ = ["gpu"]


@pytest.mark.parametrize(("rows", "chosen"), [(4, slice(None)), (32, slice(1, None))])
def test_the_cache_is_as_large_as_predicted(random_models: dict[str, ModelHandle], rows: int, chosen: slice) -> None:
    model = endless(random_models["llama"])
    settings = grid()[chosen]
    work = requests(model, settings, 3)
    engine, _ = run(model, work, rows, max_new_tokens=300)
    longest = max(len(request.prompt) for request in work)
    predicted = peak(model, settings, rows, len(work), longest, 300)
    assert engine.cache.bytes == pytest.approx(predicted.slots + predicted.snapshots, rel=0.1)


def test_a_batch_is_what_fits(spec_data: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(spec_data())
    settings = grid()
    assert fitting_batch(work, settings) == CPU_BATCH
    assert fitting_batch(work.shared_by(40, 40), settings) == 3
    for size in (48, 32, 8, 1):
        taken = peak(work.model, settings, size, len(work.units), work.prompt, work.sampling.max_new_tokens)
        monkeypatch.setattr(jobs, "free_memory", lambda _, taken=taken: int(taken.total / 0.9 - taken.weights) + 1)
        assert fitting_batch(work, settings) == size
    monkeypatch.setattr(jobs, "free_memory", lambda _: None)
    assert fitting_batch(work, settings) == CPU_BATCH


@pytest.mark.parametrize("baseline", ["none", "full"])
def test_a_plan_and_its_workers_have_one_batch(baseline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count the full cache where it is decoded, and only there."""
    window = {"policy": "window", "kv_budget": 150, "local_window": 16, "ratio": 0.3}
    others = {"none": [], "full": [{"policy": "full"}]}[baseline]
    spec = {
        "models": ["embedded:tiny-llama"],
        "benchmarks": ["CHAIN6"],
        "problems": 40,
        "sampling": {"max_new_tokens": 700},
        "settings": [window],
        "baseline": others,
    }
    plan = make_plan(parse_spec(spec))
    (model,) = plan.models
    units = tuple(plan.units(plan.expected(), {}))
    work = Job(model, "", plan.benchmarks, units, plan.spec.sampling.sampling(), 0)
    work = replace(work, prompt=plan.longest_prompt(model))
    chosen = [policies.from_setting(setting) for setting in units[0].settings]
    sizes = []
    for rows in (32, 8):
        needed = peak(model, chosen, rows, len(units), work.prompt, work.sampling.max_new_tokens)
        memory = int(needed.total / MARGIN) + 1
        monkeypatch.setattr(jobs, "free_memory", lambda _, memory=memory: memory)
        planned = plan.estimate(memory=memory)["batch_size"]
        assert worker_needs(work)[0] == planned
        sizes.append(planned)
    assert sizes == [32, 8]


def test_a_batch_before_and_after_loading_is_the_same(spec_data: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep says the batch of its workers before they load weights of their own."""
    work = job(spec_data())
    weights = work.model.weight_bytes
    assert weights
    assert not work.model.shares_weights
    free = 5 * weights
    monkeypatch.setattr(jobs, "free_memory", lambda _: free)
    before = fitting_batch(work, grid(), loaded=False)
    monkeypatch.setattr(jobs, "free_memory", lambda _: free - weights)
    assert fitting_batch(work, grid()) == before


@pytest.mark.parametrize("loaded", [False, True])
def test_workers_of_one_gpu_share_its_memory(
    spec_data: Build, monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    """Of three workers on two GPUs, the first and the last are on the first one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    work = job(spec_data())
    work = replace(work, model=models.find(work.model.name, device="cuda"))
    eight_rows = peak(work.model, grid(), 8, len(work.units), work.prompt, work.sampling.max_new_tokens)
    memory = int(2 * eight_rows.total / MARGIN) + 2
    # Each has loaded its own weights, or none has.
    free = memory - (work.model.weight_bytes or 0) if loaded else memory
    monkeypatch.setattr(jobs, "free_memory", lambda _: free)
    taken: Counter[str] = Counter()
    batches = []
    for share in shares(work, 3):
        batch = fitting_batch(share, grid(), loaded=loaded)
        needed = peak(share.model, grid(), batch, len(work.units), work.prompt, work.sampling.max_new_tokens)
        taken[share.model.device] += needed.total
        batches.append(batch)
    assert max(taken.values()) <= memory
    assert (batches[0], batches[2]) == (8, 8)
    assert batches[1] > 8


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("DefaultCPUAllocator: can't allocate memory", KvatlasError, "does not suffice for one sequence"),
        ("shapes do not match", RuntimeError, "shapes do not match"),
    ],
)
def test_no_memory_for_one_sequence_is_a_sentence_and_other_errors_stay(
    spec_data: Build, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], sentence: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(Engine, "_step", fail)
    with pytest.raises(error, match=sentence):
        list(decode(job(spec_data(), batch_size=4), range(2)))


def alive() -> Counter[str]:
    """Engines, caches and parts of models that are in memory."""
    kinds = (Engine, KVCache, torch.nn.Module)
    return Counter(type(item).__name__ for item in gc.get_objects() if issubclass(type(item), kinds))


@contextmanager
def nothing_left(monkeypatch: pytest.MonkeyPatch, loads: int) -> Iterator[None]:
    """Models are loaded so many times, when all of before is freed already, and so is all in the end: by itself, since
    Python's garbage collector comes late where few objects hold much memory."""
    gc.collect()
    gc.disable()
    before, load, found = alive(), ModelHandle.load, []

    def noted(self: ModelHandle) -> Any:
        found.append(alive() - before)
        return load(self)

    monkeypatch.setattr(ModelHandle, "load", noted)
    try:
        yield
        assert found == [Counter()] * loads
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_leaves_its_memory_to_the_next(
    spec_data: Build,
    random_models: dict[str, ModelHandle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    device: str,
) -> None:
    """Two models, each of which is loaded once."""
    if device == "cuda":
        request.getfixturevalue("gpu")
    names = [random_models[kind].name for kind in ("llama", "qwen2")]
    settings = [{"policy": "window", "kv_budget": 64, "ratio_over": "thinking", "local_window": 4, "ratio": 0.2}]
    data = spec_data(models=names, benchmarks=["CHAIN4"], problems=1, samples=1, settings=settings, axes={})
    plan = make_plan(parse_spec({**data, "sampling": {"max_new_tokens": 30}}))
    assert plan.models[0].device.startswith(device)
    # What torch keeps of a first use may hold the engine that made it; a cycle of ours holds every one.
    for attempt in ("first", "second"):
        try:
            with nothing_left(monkeypatch, loads=2):
                sweep(plan, tmp_path / attempt, workers=1, batch_size=2)
            break
        except AssertionError:
            if attempt == "second":
                raise


def _decoded(handle: ModelHandle, _: Path) -> None:
    values = {"kv_budget": 48, "local_window": 8, "ratio": 0.3}
    chosen = [policies.from_setting(Setting.from_parameters(name, **values)) for name in ("dynts", "h2o", "snapkv")]
    engine = Engine(handle, handle.load(), chosen, Sampling(max_new_tokens=30), 4)
    assert list(engine.run([Request(0, tuple(range(5, 40)), 0, tuple(chosen))]))


def _served(handle: ModelHandle, _: Path) -> None:
    """A closed service lets them go, though its owner keeps it."""
    before = alive()
    service = Service(handle, policies.from_setting(Setting.from_parameters("full")), batch_size=2).start()
    (asked,) = service.ask([GenerationRequest((5, 6, 7), Sampling(max_new_tokens=5), 0)])
    assert asked.generation.result(60).tokens
    service.close()
    assert alive() - before == Counter()


def _generated(handle: ModelHandle, _: Path) -> None:
    model = handle.load()
    model.generate(torch.tensor([[5, 6, 7]]), custom_generate=kvatlas.generate, max_new_tokens=5)


def _trained(handle: ModelHandle, folder: Path) -> None:
    data = {"models": [handle.name], "benchmarks": ["CHAIN3"], "problems": 2, "settings": []}
    spec = parse_spec({**data, "sampling": {"temperature": 0.0, "max_new_tokens": 200}})
    learn(TrainingData(spec), folder, folder / "head.safetensors", steps=1, workers=1)


@pytest.mark.parametrize(
    ("work", "loads"),
    [
        pytest.param(_decoded, 1, id="engine"),
        pytest.param(_served, 1, id="service"),
        pytest.param(_generated, 1, id="generate"),
        pytest.param(_trained, 2, id="predictor"),
    ],
)
def test_engine_cache_and_model_are_freed_by_themselves(
    tiny_llama: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any, loads: int
) -> None:
    with nothing_left(monkeypatch, loads):
        work(tiny_llama, tmp_path)


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_limits_of_control_groups_of_both_versions_are_read(tmp_path: Path) -> None:
    """In a container of 1 GB workers took what the whole machine had, and were killed for it."""
    assert left_in_group(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    mine = tmp_path / "proc/self/cgroup"
    mine.write_text("0::/pods/mine\n")
    assert left_in_group(tmp_path) is None
    stat = "anon 5\ninactive_file 100\nactive_file 7"
    group(tmp_path, "pods/mine", memory__max="max", memory__current=700, memory__stat=stat)
    assert left_in_group(tmp_path) is None
    # The group above has the limit; 100 bytes of cached files may be dropped.
    group(tmp_path, "pods", memory__max=1000, memory__current=800, memory__stat=stat)
    assert left_in_group(tmp_path) == 1000 - (800 - 100)
    group(tmp_path, "pods/mine", memory__max=750)
    assert left_in_group(tmp_path) == 750 - (700 - 100)
    # Version 1, named as the host names it: within the container its files are at the top.
    mine.write_text("4:cpu,memory:/docker/abc\n1:cpu:/\n")
    group(tmp_path, "memory", memory__limit_in_bytes=500, memory__usage_in_bytes=400, memory__stat="rss 1")
    assert left_in_group(tmp_path) == 100
    group(tmp_path, "memory", memory__stat="total_inactive_file 30")
    assert left_in_group(tmp_path) == 130


def test_one_worker_goes_on_however_often_workers_died(spec_data: Build) -> None:
    work = job(spec_data())
    numbers = [local_workers(replace(work, halvings=number), WorkerPool(workers=2)) for number in range(4)]
    assert numbers == [2, 1, 1, 1]


def test_workers_that_die_are_followed_by_fewer_with_half_the_batch(
    finished: Path, spec_data: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(parse_spec(spec_data()))
    halvings: list[int] = []

    def dying(job: Job, pool: WorkerPool) -> Any:
        """An executor whose workers are gone after three traces, twice."""
        halvings.append(job.halvings)
        traces = decode(job, range(len(job.units)))
        yield from (next(traces) for _ in range(3)) if len(halvings) < 3 else traces

    monkeypatch.setitem(executors.added, "local", dying)
    said: list[str] = []
    sweep(plan, tmp_path / "run", batch_size=64, on_message=said.append)
    assert halvings == [0, 1, 2]
    assert [sentence.partition(" the traces")[0] for sentence in said] == ["Workers ended without"] * 2
    assert contents(tmp_path / "run") == contents(finished)

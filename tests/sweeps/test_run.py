import contextlib
import json
import math
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvatlas import cli, open_run
from kvatlas.answers.reading import read_tokens
from kvatlas.benchmarks import find
from kvatlas.benchmarks.base import grade_reading
from kvatlas.benchmarks.chain import Chain
from kvatlas.core import Grade, KvatlasError, Problem, Sampling, Setting, Status
from kvatlas.models import ModelHandle
from kvatlas.policies import policies
from kvatlas.predictor.training import new_head
from kvatlas.report.materials import RunMaterials
from kvatlas.results import Manifest, Store
from kvatlas.sweeps import Progress, make_plan, parse_spec, sweep
from kvatlas.sweeps import run as driver
from kvatlas.sweeps.executors import WorkerPool, executors, take_worker, useful_workers
from kvatlas.sweeps.plan import Plan, WorkItem
from kvatlas.sweeps.worker import Job
from tests.stored import traces_of
from tests.sweeps.conftest import Build, contents
from tests.test_own_parts import CODE, SUMS


def test_a_sweep_stores_every_trace_once(finished: Path, spec_data: Build) -> None:
    plan = make_plan(parse_spec(spec_data()))
    result = contents(finished)
    assert len(result) == plan.traces
    assert any(trace.usage.compressions for trace in result.values())
    assert {trace.grade.status for trace in result.values()} <= set(Status)
    assert all(not trace.grade.correct for trace in result.values() if trace.grade.status is Status.TRUNCATED)


@pytest.mark.usefixtures("forked")
def test_a_trace_that_no_store_holds_ends_a_sweep_after_the_others_are_stored(
    spec_data: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(parse_spec(spec_data()))
    damaged: list[str] = []

    def one_is_damaged(job: Job, pool: WorkerPool) -> Any:
        for trace, decoded in driver.local(job, pool):
            if not damaged:
                damaged.append(trace.problem)
                trace = replace(trace, usage=replace(trace.usage, mean_kv_tokens=math.nan))
            yield trace, decoded

    monkeypatch.setitem(executors.added, "local", one_is_damaged)
    with pytest.raises(KvatlasError, match=r"^Sample \d of \S+ in .* cannot be stored: mean_kv_tokens is nan"):
        sweep(plan, tmp_path / "run", workers=1)
    assert len(contents(tmp_path / "run")) == plan.traces - 1
    # The next start decodes it alone.
    sweep(plan, tmp_path / "run", workers=1)
    assert len(contents(tmp_path / "run")) == plan.traces


@pytest.mark.usefixtures("forked")
def test_workers_stay_for_the_next_sweep_and_end_with_their_pool(
    finished: Path, spec_data: Build, tmp_path: Path
) -> None:
    """Of two idle ones one has died: the next sweep takes the other and starts one. A worker's error is the sweep's."""
    plan = make_plan(parse_spec(spec_data()))
    weights = plan.models[0].folder / "model.safetensors"
    with WorkerPool(2) as pool:
        sweep(make_plan(parse_spec(spec_data(samples=1))), tmp_path / "first", pool=pool)
        lost, stays = pool.idle.values()
        lost.kill()
        lost.join()
        sweep(plan, tmp_path / "run", pool=pool)
        now = list(pool.idle.values())
        assert stays in now
        assert lost not in now
        assert all(process.is_alive() for process in now)
        moved = weights.rename(weights.with_suffix(".gone"))
        try:
            with pytest.raises(KvatlasError, match=r"weights of the model .* cannot be loaded"):
                sweep(plan, tmp_path / "broken", pool=pool)
        finally:
            moved.rename(weights)
    assert contents(tmp_path / "run") == contents(finished)
    assert not any(process.is_alive() for process in now)


@pytest.mark.usefixtures("forked")
def test_a_worker_ends_with_its_pool_though_it_catches_signals() -> None:
    """Libraries that a policy imports install handlers: Ray does."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        line, process = take_worker(WorkerPool())
    finally:
        signal.signal(signal.SIGTERM, before)
    end = threading.Thread(target=WorkerPool(idle={line: process}).__exit__, daemon=True)
    end.start()
    end.join(20)
    ended = not process.is_alive()
    process.kill()
    assert ended


def test_a_second_start_does_only_what_is_missing(finished: Path, spec_data: Build, tmp_path: Path) -> None:
    told: list[Progress] = []
    sweep(make_plan(parse_spec(spec_data(problems=2))), tmp_path, workers=1, on_trace=told.append)
    assert len(told) == 2 * 2 * 2 * 9
    assert told[-1].done == told[-1].total
    assert told[-1].saved_tokens > 0
    again: list[Progress] = []
    sweep(make_plan(parse_spec(spec_data())), tmp_path, workers=1, on_trace=again.append)
    assert len(again) == 2 * 1 * 2 * 9
    assert (again[0].done, again[-1].done) == (len(told) + 1, again[-1].total)
    assert contents(tmp_path) == contents(finished)
    once_more: list[Progress] = []
    sweep(make_plan(parse_spec(spec_data())), tmp_path, workers=1, on_trace=once_more.append)
    assert once_more == []


def test_workers_that_die_while_they_start_end_the_sweep(
    spec_data: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiprocessing.resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(shutil.which("false") or ""))
    plan = make_plan(parse_spec(spec_data(problems=300, samples=1, settings=[], axes={})))
    # More than a pipe holds: a driver that sends it to a dead worker would wait for ever.
    assert len(pickle.dumps(plan.problems)) > 2**16
    with pytest.raises(KvatlasError, match="without a result even with one sequence at a time"):
        sweep(plan, tmp_path / "run", workers=2, batch_size=8)


#: A script that sweeps at once when it is run, without `if __name__ == "__main__"`.
SCRIPT = f"""
import sys
import kvatlas
{CODE}
kvatlas.register(Newest)
setting = {{"policy": sys.argv[1], "kv_budget": 64, "ratio": 0.3, "local_window": 8}}
spec = {{"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4", *sys.argv[2:]], "problems": 2}}
kvatlas.sweep({{**spec, "settings": [setting], "sampling": {{"max_new_tokens": 40}}}}, "run", workers=2)
print("finished")
"""


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs code as the main module of this process, a script with these arguments in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "added", {})

    def run(code: str, *arguments: object) -> None:
        script = tmp_path / "script.py"
        script.write_text(code)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        main = ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)
        policies.added.clear()
        exec(compile(code, script, "exec", dont_inherit=True), vars(main))  # noqa: S102

    return run


def test_a_script_of_policies_that_workers_have_needs_no_guard(
    run_script: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers are processes of their own, as Python starts them: they load the files of a policy and of a benchmark."""
    file, sums = tmp_path / "mine.py", tmp_path / "sums.py"
    file.write_text(CODE)
    sums.write_text(SUMS)
    run_script(SCRIPT, f"{file}:Newest", f"{sums}:Sum3")
    assert capfd.readouterr().out == "finished\n"
    run_script(SCRIPT.replace("workers=2", "workers=1").replace('"run"', '"window"'), "window")
    by_workers = [trace for trace in traces_of(tmp_path / "run") if trace.setting.policy != "full"]
    expected = [trace for trace in traces_of(tmp_path / "window") if trace.setting.policy != "full"]
    assert all(trace.usage.compressions for trace in expected)
    texts = {trace.problem: trace.text for trace in by_workers if trace.benchmark == "CHAIN4"}
    assert texts == {trace.problem: trace.text for trace in expected}
    assert len(texts) == 2
    assert [trace.benchmark for trace in by_workers].count("SUM3") == 2


@pytest.mark.usefixtures("forked")
def test_workers_import_a_script_for_its_classes_if_its_sweep_is_guarded(
    run_script: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KvatlasError) as refused:
        run_script(SCRIPT, "newest")
    assert str(refused.value).count("below `if __name__ == '__main__':`") == 1
    # The workers say nothing themselves.
    assert "Traceback" not in capfd.readouterr().err
    run_script(SCRIPT.replace("kvatlas.sweep(", "if __name__ == '__main__': kvatlas.sweep("), "newest")
    assert "finished" in capfd.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux' list of processes")
def test_kill_9_of_a_driver_ends_its_workers_and_loses_nothing(
    finished: Path, spec_data: Build, tmp_path: Path, forked: None
) -> None:
    folder, plan = tmp_path / "run", make_plan(parse_spec(spec_data()))

    def drive() -> None:
        os.setsid()
        sweep(plan, folder, workers=2, batch_size=2)

    driver = multiprocessing.get_context("fork").Process(target=drive)
    driver.start()

    def group() -> int:
        """Processes of the driver's group that are alive, from Linux' list of them."""
        result = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group, *_ = path.read_text().rpartition(")")[2].split()
                result += int(group) == driver.pid and state != "Z"
        return result

    wait_for(lambda: _stored(folder) > 0)
    # The driver, its two workers, and perhaps those that compare answers.
    assert group() >= 3
    driver.kill()
    driver.join()
    # Killed while at work, not after it was done.
    assert driver.exitcode == -signal.SIGKILL
    wait_for(lambda: group() == 0)
    assert 0 < _stored(folder) < len(contents(finished))
    sweep(plan, folder, workers=1)
    assert contents(folder) == contents(finished)
    # All that is said of it, too: only wall times and the folder in commands are its own.
    assert _without_times(folder) == _without_times(finished)


def _without_times(folder: Path) -> Any:
    """Return what `describe --json` says of a run, without wall times and its folder."""

    def strip(value: Any) -> Any:
        if isinstance(value, list):
            return [strip(item) for item in value if not (isinstance(item, dict) and item.get("cost") == "seconds")]
        if isinstance(value, dict):
            return {name: strip(item) for name, item in value.items() if name != "seconds_mean"}
        return value.replace(str(folder), "RUN") if isinstance(value, str) else value

    return strip(json.loads(json.dumps(open_run(folder).describe().to_json())))


@pytest.mark.usefixtures("forked")
def test_interrupting_keeps_what_is_finished_and_says_how_to_go_on(
    write_spec: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / "run", tmp_path / "said.txt"
    words = ["sweep", str(write_spec()), "--out", str(folder), "--workers", "2", "--batch-size", "2"]

    def drive() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with said.open("w") as sys.stderr:
            cli.main()

    monkeypatch.setattr(sys, "argv", ["kvatlas", *words])
    driver = multiprocessing.get_context("fork").Process(target=drive)
    driver.start()
    wait_for(lambda: _stored(folder) > 0)
    os.kill(driver.pid or 0, signal.SIGINT)
    driver.join(60)
    assert driver.exitcode == 130
    assert 0 < _stored(folder) < 108
    assert "the same command goes on from there" in said.read_text()
    assert "Traceback" not in said.read_text()


def wait_for(enough: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not enough() and time.monotonic() < end:
        time.sleep(0.02)
    assert enough()


def _stored(folder: Path) -> int:
    try:
        with Store.open(folder) as store:
            return len(store.keys())
    except KvatlasError:
        return 0


def test_a_small_job_is_not_worth_several_processes(tiny_llama: ModelHandle) -> None:
    chain = find("CHAIN6")
    units = tuple(WorkItem("CHAIN6", problem, 0, (Setting.from_parameters("full"),)) for problem in chain.problems(20))
    job = Job(tiny_llama, "digest", (chain,), units, Sampling(), 0)
    assert useful_workers(job) == 1
    assert useful_workers(replace(job, units=units * 200)) > 8
    large, unknown = replace(tiny_llama), replace(tiny_llama)
    vars(large)["weight_bytes"], vars(unknown)["weight_bytes"] = 2 * 10**9, None
    assert useful_workers(replace(job, model=large)) > 8
    assert useful_workers(replace(job, model=unknown)) == 20


def test_traces_follow_the_problems_of_a_file(
    spec_data: Build, r1_model: Callable[..., ModelHandle], tmp_path: Path
) -> None:
    """Each problem by itself: a row that is added or changed costs the others nothing."""
    file, run = tmp_path / "own.jsonl", tmp_path / "run"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(3)]
    added = [*rows, {"question": "What is 7 - 7?", "answer": "0"}]
    edited = [rows[0], rows[1] | {"question": "What is 2 - 1?"}, *added[2:]]
    settings = [{"policy": "window", "kv_budget": 90, "ratio_over": "thinking"}]
    data = spec_data(models=[r1_model().name], benchmarks=[f"file:{file}"], settings=settings, problems=None, samples=1)

    def decoded(rows: list[dict[str, str]], folder: Path = run, changed: str = "") -> set[str]:
        """The problems that are decoded, all of each; a run of other problems is refused unless it is replaced."""
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        told: list[Progress] = []
        plan = make_plan(parse_spec(data))
        if changed:
            with pytest.raises(KvatlasError, match=re.escape(f" problems of own ({changed}) that this spec lacks or")):
                sweep(plan, folder, workers=1)
        sweep(plan, folder, workers=1, on_trace=told.append, replace=bool(changed))
        problems = [progress.trace.problem for progress in told]
        assert all(problems.count(problem) == 5 for problem in problems)
        return {problem.removeprefix("own-") for problem in problems}

    assert decoded(rows) == {"001", "002", "003"}
    assert decoded(added) == {"004"}
    assert decoded(rows, changed="own-004") == set()
    assert decoded(edited, changed="own-002") == {"002"}
    assert decoded(edited, tmp_path / "fresh") == {"001", "002", "003", "004"}
    assert contents(run) == contents(tmp_path / "fresh")
    with Store.open(run) as store:
        assert store.copy(tmp_path / "copy") == 5 * 5
    # Traces that were set aside come back; another answer makes another problem, another id does not.
    assert decoded(added, changed="own-002") == set()
    assert decoded([added[0] | {"answer": "1"}, *added[1:]], changed="own-001") == {"001"}
    assert decoded([row | {"id": "x"} for row in added], changed="own-001") == set()
    assert decoded(added[1:], changed="own-001, own-002, own-003, ...") == {"001", "002", "003"}


def test_a_run_holds_one_version_of_a_benchmark(
    spec_data: Build, r1_model: Callable[..., ModelHandle], tmp_path: Path
) -> None:
    """Fewer problems, or others beside another setting: refused before anything is decoded, and nothing is changed."""
    file, run = tmp_path / "own.jsonl", tmp_path / "run"

    def plan(count: int, version: int, policy: str = "window", problems: int | None = None) -> Plan:
        rows = [{"question": f"What is {n} + {version}?", "answer": str(n + version)} for n in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        setting = {"policy": policy, "kv_budget": 90, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
        data = spec_data(
            models=[r1_model().name],
            benchmarks=[f"file:{file}"],
            settings=[setting],
            axes={},
            problems=problems,
            samples=1,
        )
        return make_plan(parse_spec(data))

    def promise() -> Manifest:
        with Store.open(run) as store:
            return store.manifest()

    sweep(plan(6, 1), run, workers=1)
    before = promise()
    for other, changed in (
        (plan(4, 2), "6 of 6 problems of own (own-001, own-002, own-003, ...)"),
        (plan(6, 2, "random"), "6 of 6 problems of own (own-001, own-002, own-003, ...)"),
        (plan(4, 1), "2 of 6 problems of own (own-005, own-006)"),
        (plan(4, 1, problems=2), "2 of 6 problems of own (own-005, own-006)"),
    ):
        with pytest.raises(KvatlasError, match=re.escape(f"has {changed} that this spec lacks or changes; ")):
            sweep(other, run, workers=1, on_trace=lambda _: pytest.fail("decoded"))
        assert promise() == before
    # The app shows no question of another version.
    plan(6, 2)
    assert RunMaterials.from_manifest(promise()).problems == {"own": {}}
    plan(6, 1)
    assert len(RunMaterials.from_manifest(promise()).problems["own"]) == 6
    # The first problems of the same version are no other version.
    sweep(plan(6, 1, problems=2), run, workers=1, on_trace=lambda _: pytest.fail("decoded"))
    assert {len(cell.problems) for cell in promise().expected} == {6}
    sweep(plan(4, 2), run, workers=1, replace=True)
    assert {len(cell.problems) for cell in promise().expected} == {4}
    assert set(promise().contents["own"]) == {f"own-00{number}" for number in range(1, 5)}


def test_another_prompt_is_said_and_former_traces_are_not_shown(
    spec_data: Build, r1_model: Callable[..., ModelHandle], tmp_path: Path
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(3))
    )
    told: list[str] = []

    def decoded(prompt: str) -> int:
        benchmark = {"name": f"file:{file}", "prompt": prompt}
        full = {"policy": "full"}
        data = spec_data(
            models=[r1_model().name],
            benchmarks=[benchmark],
            settings=[full],
            axes={},
            baseline=[],
            problems=None,
            samples=1,
        )
        traces: list[Progress] = []
        told.clear()
        sweep(make_plan(parse_spec(data)), tmp_path / "run", workers=1, on_trace=traces.append, on_message=told.append)
        assert len(list(open_run(tmp_path / "run").traces())) == 3
        return len(traces)

    assert decoded("{question}") == 3
    assert not any("decoded again" in sentence for sentence in told)
    assert decoded("Think: {question}") == 3
    assert any("1 cell of the run had other weights, prompts, code or versions" in sentence for sentence in told)
    # The former traces come back with the former prompt.
    assert decoded("{question}") == 0


def test_a_replaced_file_of_a_policy_is_read_or_refused(spec_data: Build, tmp_path: Path) -> None:
    def planned(file: Path) -> Plan:
        setting = {"policy": "dynts", "kv_budget": 64, "ratio_over": "thinking", "local_window": 4, "ratio": 0.4}
        setting["predictor"] = str(file)
        return make_plan(parse_spec(spec_data(settings=[setting], axes={}, baseline=[], benchmarks=["CHAIN4"])))

    def traces(file: Path, folder: str) -> list[tuple[int, ...]]:
        sweep(planned(file), tmp_path / folder, workers=1)
        with Store.open(tmp_path / folder) as store:
            return [trace.tokens for _, trace in store.traces()]

    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    for file in (first, second):
        save_file({name: torch.randn_like(value) for name, value in new_head(64).state_dict().items()}, file)
    before, wanted = traces(first, "1"), traces(second, "2")
    assert before != wanted
    planned_before = planned(first)
    assert planned_before.compute_keys()
    shutil.copy(second, first)
    assert traces(first, "3") == wanted
    with pytest.raises(KvatlasError, match="was replaced after the sweep began; start the sweep again"):
        sweep(planned_before, tmp_path / "4", workers=1)


@dataclass(frozen=True)
class Measured(Chain):
    """A plug-in that grades as CHAIN4 does but for one field."""

    field: str = "correct"
    value: Any = False

    def grade(self, problem: Problem, answer: str) -> Grade:
        value = {"extra": self.value} if self.field == "metrics" else self.value
        return replace(super().grade(problem, answer), **{self.field: value})


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("correct", np.bool_(True), True),
        ("progress", np.float32(0.5), 0.5),
        ("progress", torch.tensor(0.25), 0.25),
        ("status", "ok", Status.OK),
        ("metrics", np.int64(3), {"extra": 3}),
        ("correct", None, "correct None; expected true or false"),
        ("progress", math.nan, "progress nan; expected a number from 0 to 1"),
        ("progress", 1.5, "progress 1.5; expected a number from 0 to 1"),
        ("answer", "\ud800", r"answer '\ud800'; expected a text or None"),
        ("answer", 7, "answer 7; expected a text or None"),
        ("status", "fine", "status 'fine'; expected a Status"),
        ("metrics", np.float64("inf"), "metrics inf; expected finite numbers and texts"),
        ("metrics", [1], "metrics [1]; expected finite numbers and texts"),
        ("metrics", np.zeros(2), "cannot grade an answer to 'CHAIN4-0000' ("),
    ],
)
def test_grades_of_plugins_are_stored_or_refused_before_anything_is_decoded(
    spec_data: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, stored: Any
) -> None:
    data = spec_data(benchmarks=["PLUGIN"], problems=1, samples=1, settings=[], axes={})
    data |= {"sampling": {"temperature": 0, "max_new_tokens": 90}, "models": ["embedded:tiny-llama"]}
    monkeypatch.setattr("kvatlas.benchmarks.find", lambda *_, **__: Measured(4, 4, field, value))
    if not isinstance(stored, str) or isinstance(stored, Status):
        sweep(make_plan(parse_spec(data)), tmp_path, workers=1)
        (trace,) = contents(tmp_path).values()
        assert (getattr(trace.grade, field), type(getattr(trace.grade, field))) == (stored, type(stored))
        return
    with pytest.raises(KvatlasError) as caught:
        make_plan(parse_spec(data))
    assert str(caught.value).startswith("The benchmark 'CHAIN4' ")
    assert stored in str(caught.value)


def test_a_grader_that_ends_the_process_is_refused(spec_data: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "grade", lambda *_: sys.exit(0))
    monkeypatch.setattr("kvatlas.benchmarks.find", lambda *_, **__: Measured(4, 4))
    with pytest.raises(KvatlasError, match=r"cannot grade an answer to 'CHAIN4-0000' \(it called sys.exit\(0\)\)"):
        make_plan(parse_spec(spec_data(benchmarks=["PLUGIN"])))


def test_an_answer_is_something_said_after_thinking_by_a_trace_that_ends(tiny_llama: ModelHandle) -> None:
    chain = find("CHAIN4")
    (problem,) = chain.problems(1)
    answer = tuple(tiny_llama.tokenizer(problem.answer)["input_ids"])
    (end,) = tiny_llama.stops
    close = tiny_llama.think_close
    for tokens, status in (
        ((close, *answer, end), Status.OK),
        ((*answer, close, *answer, end), Status.OK),
        ((*answer, close, *answer), Status.TRUNCATED),
        (answer, Status.TRUNCATED),
        ((*answer, close, end), Status.NO_ANSWER),
        ((*answer, end), Status.NO_ANSWER),
    ):
        read = read_tokens(tiny_llama, tokens, tokens[-1] == end)
        graded = grade_reading(chain, problem, read)
        assert graded.status is read.status is status
        assert graded.correct is (status is Status.OK)

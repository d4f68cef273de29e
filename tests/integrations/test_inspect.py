"""Under Inspect: our tasks with scripted answers, and its logs in our stores."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import format_plan, parse_plan
from kvatlas.core import SERVED, KvatlasError, Status
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from tests.command_line import Call
from tests.stored import decode_run, traces_of

pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log, write_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, exact, includes, mean, scorer
from inspect_ai.solver import TaskState

from kvatlas.integrations import inspect_logs
from kvatlas.integrations.inspect_logs import import_log
from kvatlas.integrations.inspect_task import benchmark

pytestmark = pytest.mark.newest

NAME = "SEQBENCH-5x5"


def run_task(folder: Path, answers: list[tuple[str, str]], **changes: Any) -> Path:
    """An Inspect log of the maze task, answered by these (text, stop reason), one problem each."""
    outputs = [ModelOutput.from_content("mockllm/model", text, stop_reason=stop) for text, stop in answers]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=100, output_tokens=40, total_tokens=140, reasoning_tokens=30)
    task = changes.pop("task", None) or benchmark(NAME, problems=len(answers) // changes.get("epochs", 1))
    (log,) = inspect_eval(
        task,
        model=get_model("mockllm/model", custom_outputs=outputs, memoize=False),
        model_args={"api_key": "sk-not-a-real-key"},
        log_dir=str(folder),
        display="none",
        max_samples=1,
        **changes,
    )
    return Path(log.location.removeprefix("file://"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first, second, third, *_ = find(NAME).problems(4)
    lost = list(parse_plan(second.answer))
    lost[1] = ("move_to", "Z1")
    answers = [
        (f"<think>[1]</think>\n{first.answer}", "stop"),
        (format_plan(lost), "stop"),
        (third.answer, "max_tokens"),
        ("<think>I never stop to think", "stop"),
    ]
    return run_task(tmp_path_factory.mktemp("logs"), answers, temperature=0.6)


def test_inspect_shows_our_metrics(log: Path) -> None:
    read = read_eval_log(str(log))
    assert (read.status, read.eval.task) == ("success", "kvatlas/benchmark")
    shown = {score.name: score.metrics["mean"].value for score in read.results.scores}
    assert shown["correct"] == 0.25
    lost = len(parse_plan(find(NAME).problems(2)[1].answer))
    assert shown["progress"] == pytest.approx((1 + 1 / lost) / 4)
    assert {"valid", "progress_valid", "precision", "recall"} <= set(shown)
    samples = {sample.id: next(iter(sample.scores.values())) for sample in read.samples}
    assert samples[f"{NAME}-0001"].metadata == {"status": "ok", "first_error": "no_such_door"}


def test_an_imported_log_stands_in_the_store_as_graded_traces(log: Path, tmp_path: Path) -> None:
    cell, added, _ = import_log(log, tmp_path / "run")
    assert (cell.model, cell.benchmark, cell.setting, added) == ("mockllm/model", NAME, SERVED, 4)
    import_log(log, tmp_path / "run")
    with Store.open(tmp_path / "run") as store:
        manifest = store.manifest()
    traces = traces_of(tmp_path / "run")
    assert [cell.problems for cell in manifest.expected] == [tuple(p.id for p in find(NAME).problems(4))]
    assert manifest.about[NAME][f"{NAME}-0000"]["L"] == find(NAME).problems(1)[0].about["L"]
    assert manifest.provenance["imported"][f"mockllm/model {NAME}"]["sampling"] == {"temperature": 0.6}
    assert [t.grade.status for t in traces] == [Status.OK, Status.OK, Status.TRUNCATED, Status.NO_ANSWER]
    assert [t.grade.correct for t in traces] == [True, False, False, False]
    assert traces[1].grade.metrics["first_error"] == "no_such_door"
    usage = traces[0].usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.thinking_tokens) == (100, 40, 30)
    assert (usage.peak_kv_tokens, usage.mean_kv_tokens, usage.compressions) == (None, None, None)
    assert b"sk-not-a-real-key" not in b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir())


def changed(log: Path, copy: Path, change: Callable[[Any], object]) -> Path:
    read = read_eval_log(str(log))
    change(read)
    write_eval_log(read, str(copy))
    return copy


def test_other_logs_are_refused_in_one_sentence(log: Path, tmp_path: Path) -> None:
    def refused(path: Path, sentence: str, run: str = "run") -> None:
        with pytest.raises(KvatlasError, match=sentence):
            import_log(path, tmp_path / run)

    other = run_task(tmp_path / "logs", [("4", "stop"), ("6", "stop")], task=sums(None))
    refused(other, "of the task 'sums' has no scores; `inspect score` adds them")
    refused(tmp_path / "none.eval", "is not there")
    (tmp_path / "text.eval").write_text("no log")
    refused(tmp_path / "text.eval", "is no Inspect log")
    (tmp_path / "text.json").write_text("{}")
    refused(tmp_path / "text.json", "is no Inspect log")

    changes: list[tuple[str, Callable[[Any], object]]] = [
        ("asks version 99 of SEQB", lambda read: read.eval.metadata.update(kvatlas_version=99)),
        ("in another way than", lambda read: setattr(read.samples[0], "input", "Find Alice!")),
        ("asks 'x' in another way than", lambda read: setattr(read.samples[0], "id", "x")),
        ("lacks 1 of the 4 samples of its data set", lambda read: read.samples.pop()),
        ("has the status 'cancelled' and 4 samples", lambda read: setattr(read, "status", "cancelled")),
        ("has no samples", lambda read: read.samples.clear()),
        (
            r"seconds is -1\.0, expected a finite number from 0",
            lambda read: setattr(read.samples[1], "total_time", -1.0),
        ),
    ]
    for number, (sentence, change) in enumerate(changes):
        refused(changed(log, tmp_path / f"{number}.eval", change), sentence)

    def two(read: Any) -> None:
        read.eval.model = "another/model"
        del read.samples[2:]
        read.eval.dataset.sample_ids = [sample.id for sample in read.samples]

    import_log(log, tmp_path / "held")
    refused(changed(log, tmp_path / "two.eval", two), "holds other problems of SEQBENCH-5x5 than the log", "held")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def sums(scorers: Any, name: str = "sums") -> Any:
    samples = [Sample("2 + 2?", target="4", id="two"), Sample("3 + 3?", target="6", id=3)]
    return Task(dataset=samples, scorer=scorers, name=name)


def marked() -> Any:
    @scorer(metrics={"*": [mean()]})
    def shares() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            right = target.text in state.output.completion
            return Score(value={"steps": 1.0 if right else 0.25, "tone": 0.5}, answer=state.output.completion[:3])

        return score

    return shares()


def test_logs_of_two_foreign_tasks_are_imported_at_once_and_drawn(
    tmp_path: Path, succeed: Callable[..., str], kvatlas: Call
) -> None:
    replies = [("it is 4", "stop"), ("it is 5", "max_tokens")]
    first = run_task(tmp_path / "a", [*replies, *replies], task=sums(includes()), epochs=2)
    second = run_task(tmp_path / "b", replies, task=sums(marked(), "marks"))
    run = tmp_path / "run"
    said = succeed("import", first, second, run).splitlines()
    graded = "; its scores are graded, not right or wrong: see them by --metric steps"
    assert said == [
        f"{run}: 4 of 4 traces of mockllm/model on sums",
        f"{run}: 2 of 2 traces of mockllm/model on marks{graded}",
    ]
    by_name = {(trace.benchmark, trace.problem, trace.sample): trace for trace in traces_of(run)}
    assert {trace.setting for trace in by_name.values()} == {SERVED}
    right, cut, marked_cut = by_name["sums", "two", 0], by_name["sums", "3", 0], by_name["marks", "3", 0]
    assert (right.grade.correct, right.grade.answer) == (True, "it is 4")
    assert (cut.grade.correct, cut.grade.status) == (False, Status.TRUNCATED)
    assert (marked_cut.grade.correct, marked_cut.grade.progress) == (False, 0.25)
    assert marked_cut.grade.metrics == {"steps": 0.25, "tone": 0.5}
    assert (right.usage.output_tokens, right.usage.peak_kv_tokens, right.usage.compressions) == (40, None, None)
    # Right and wrong beside graded scores: progress is the metric that all traces have.
    assert RunData.open(run, None).metric == "progress"
    succeed("export", run, "--format", "jsonl", "--out", tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {row["peak_kv_tokens"] for row in rows} == {None}

    assert kvatlas("import", second, run, "--scorer", "tone")[2].strip().endswith("expected: shares.")


def test_models_under_other_conditions_are_no_sides_of_a_gate(tmp_path: Path, kvatlas: Call) -> None:
    replies = [("4", "stop"), ("6", "stop")]
    first = run_task(tmp_path / "a", replies, task=sums(includes()), temperature=0.6)
    warmer = run_task(tmp_path / "b", replies, task=sums(exact()), temperature=0.9)
    second = changed(warmer, tmp_path / "second.eval", lambda read: setattr(read.eval, "model", "another/model"))
    run = tmp_path / "run"
    kvatlas.succeed("import", first, run)
    assert kvatlas.succeed("import", second, run) == f"{run}: 2 of 2 traces of another/model on sums\n"
    sentence = kvatlas.refuse("gate", f"{run}@mockllm/model", f"{run}@another/model")
    assert "differ in metric ('includes' before, 'exact' after)" in sentence


def test_a_packed_log_is_imported(log: Path, tmp_path: Path) -> None:
    plain = changed(log, tmp_path / "plain.json", lambda read: None)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert import_log(packed, tmp_path / "run")[1] == 4
    packed.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(KvatlasError, match="is no Inspect log"):
        import_log(packed, tmp_path / "cut")


def test_scores_that_are_no_shares_are_refused(tmp_path: Path) -> None:
    log = run_task(tmp_path / "a", [("4", "stop"), ("6", "stop")], task=sums(includes()))

    def scored(name: str, value: float) -> Path:
        return changed(log, tmp_path / name, lambda read: setattr(read.samples[0].scores["includes"], "value", value))

    with pytest.raises(KvatlasError, match="of the log has the score 7; expected numbers from 0 to 1 and"):
        import_log(scored("b.eval", 7), tmp_path / "run")
    cell, added, _ = import_log(scored("c.json", float("nan")), tmp_path / "run")
    assert (len(cell.problems), added) == (2, 1)


def test_graded_scores_are_a_metric_of_their_own_and_no_wrong_answers(
    tmp_path: Path, succeed: Callable[..., str], kvatlas: Call
) -> None:
    log = run_task(tmp_path / "a", [("4", "stop"), ("6", "stop")], task=sums(includes()))

    def graded(read: Any) -> None:
        for sample, value in zip(read.samples, (0.7, 0.9), strict=True):
            sample.scores["includes"].value = value

    run = tmp_path / "run"
    (line,) = succeed("import", changed(log, tmp_path / "g.eval", graded), run).splitlines()
    assert line.endswith("; its scores are graded, not right or wrong: see them by --metric includes")
    document = json.loads(succeed("describe", run, "--metric", "includes", "--json"))
    assert "80" in json.dumps(document)
    (cell,) = RunData.open(run, None).cells
    assert cell.cell.estimate.value == pytest.approx(0.8)
    sweep = decode_run(
        {
            "models": ["embedded:tiny-llama"],
            "benchmarks": ["CHAIN4"],
            "problems": 1,
            "sampling": {"max_new_tokens": 20},
        },
        tmp_path / "sweep",
    )
    with pytest.raises(KvatlasError, match=r"g\.eval.*'includes' are graded, and the run has right and wrong answers"):
        import_log(tmp_path / "g.eval", sweep)
    for metric in ("pass@1", "pass@2", "maj@2"):
        sentence = kvatlas.refuse("describe", run, "--metric", metric)
        assert f"has graded scores, which have no {metric}; expected 'includes' or 'progress'" in sentence


def _said(text: str) -> Callable[[Any], None]:
    return lambda read: setattr(read.samples[0].output.choices[0].message, "content", text)


def test_a_second_log_of_one_task_is_refused(tmp_path: Path) -> None:
    replies = [("4", "stop"), ("6", "stop")]
    first, second = (run_task(tmp_path / name, replies, task=sums(includes())) for name in "ab")
    run = tmp_path / "run"
    imported = import_log(first, run)
    with pytest.raises(
        KvatlasError, match=r"answers of mockllm/model to .*\.eval; import the log into a run of its own"
    ):
        import_log(second, run)
    # The same log again: nothing is added, nothing is lost.
    assert import_log(first, run) == imported
    assert len(traces_of(run)) == 2
    edited = changed(first, tmp_path / "edited.eval", _said("5"))
    with pytest.raises(KvatlasError, match="import the log into a run of its own"):
        import_log(edited, run)


def test_tasks_of_one_name_are_told_apart_by_their_whole_names_and_their_questions(tmp_path: Path) -> None:
    logs = [
        run_task(tmp_path / suite, [("4", "stop"), ("6", "stop")], task=sums(includes(), f"{suite}/sums"))
        for suite in ("one", "two")
    ]
    cells = [import_log(log, tmp_path / "run")[0] for log in logs]
    assert [cell.benchmark for cell in cells] == ["one/sums", "two/sums"]

    def other_questions(read: Any) -> None:
        read.eval.model = "another/model"
        read.samples[0].input = "2 + 3?"

    with pytest.raises(KvatlasError, match=r"q\.eval.* has other contents of 1 of 2 problems of one/sums"):
        import_log(changed(logs[0], tmp_path / "q.eval", other_questions), tmp_path / "run")


def _odd_sample(**values: Any) -> Callable[[Any], None]:
    def change(read: Any) -> None:
        for name, value in values.items():
            setattr(read.samples[0], name, value)

    return change


def _tokens(count: int) -> Callable[[Any], None]:
    usage = ModelUsage(input_tokens=count, output_tokens=1, total_tokens=1)
    return _odd_sample(model_usage={"m": usage})


def _twice(read: Any) -> None:
    read.samples.append(read.samples[0])


def _two_ids(read: Any) -> None:
    read.samples[0].id, read.samples[1].id = 3, "3"


#: Logs that claim what cannot be, and what the refusal says beside their names.
CLAIMS: dict[str, tuple[Callable[[Any], object], str]] = {
    "cancelled": (lambda read: setattr(read, "status", "cancelled"), "has the status 'cancelled'"),
    "error": (lambda read: setattr(read, "status", "error"), "has the status 'error'"),
    "started": (lambda read: setattr(read, "status", "started"), "has the status 'started'"),
    "an invalidated sample": (_odd_sample(invalidation=object()), "has the invalidated sample"),
    "part of the data set": (
        lambda read: setattr(read.eval.dataset, "sample_ids", ["two", 3, 4]),
        "lacks 1 of the 3 samples of its data set and epochs (first '4')",
    ),
    "another data set": (lambda read: setattr(read.eval.dataset, "sample_ids", ["two"]), "which its data set lacks"),
    "fewer samples than it counts": (
        lambda read: (setattr(read.eval.dataset, "sample_ids", None), setattr(read.eval.dataset, "samples", 9)),
        "expected all of them",
    ),
    "a task without a name": (lambda read: setattr(read.eval, "task", " "), "expected a name of printable characters"),
    "a task in colours": (lambda read: setattr(read.eval, "task", "a\x1b[31m"), "expected a name of printable"),
    "an epoch missing": (lambda read: setattr(read.eval.config, "epochs", 2), "lacks 2 of the 4 samples"),
    "epoch 2 ** 31": (_odd_sample(epoch=2**31), "has a sample of epoch 2147483648; expected epochs from 1 to 1"),
    "epochs 2 ** 31": (lambda read: setattr(read.eval.config, "epochs", 2**31), "samples of its data set and epochs"),
    "a sample twice": (_twice, "has the sample"),
    "ids 3 and '3'": (_two_ids, "has the samples 3 and '3'; expected unlike names"),
    "10 ** 400 tokens": (_tokens(10**400), "expected an integer from 0"),
    "2 ** 64 tokens": (_tokens(2**64), "expected an integer from 0"),
    "negative tokens": (_tokens(-1), "expected an integer from 0"),
    "infinite time": (_odd_sample(total_time=float("inf")), "expected a finite number from 0"),
    "half a character": (_said("\ud83d"), "expected a text of whole characters"),
    "a score of 2": (
        lambda read: setattr(read.samples[0].scores["includes"], "value", 2),
        "has the score 2; expected numbers from 0 to 1",
    ),
}


@pytest.fixture(scope="module")
def sums_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_task(tmp_path_factory.mktemp("sums"), [("4", "stop"), ("6", "stop")], task=sums(includes()))


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_log_whose_claims_cannot_be_is_refused_by_name_and_leaves_no_promise(
    sums_log: Path, tmp_path: Path, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, sentence = CLAIMS[claim]
    run = tmp_path / "run"
    import_log(sums_log, run)
    before = (traces_of(run), RunData.open(run, None).manifest)
    log = read_eval_log(str(sums_log))
    change(log)
    log.eval.model = "another/model"
    # Not through a file, where JSON would refuse some of these.
    monkeypatch.setattr(inspect_logs, "_read_log", lambda _: log)
    with pytest.raises(KvatlasError) as caught:
        import_log(tmp_path / "claim.eval", run)
    assert "claim.eval" in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (traces_of(run), RunData.open(run, None).manifest) == before


def test_scores_in_another_order_in_one_sample_are_those_of_the_same_scorer(tmp_path: Path) -> None:
    log = run_task(tmp_path / "a", [("4", "stop"), ("5", "stop")], task=sums([includes(), marked()]))

    def turned(read: Any) -> None:
        sample = read.samples[0]
        sample.scores = dict(reversed(sample.scores.items()))
        sample.scores["shares"].value = dict(reversed(sample.scores["shares"].value.items()))

    logs = {"as it is": log, "turned": changed(log, tmp_path / "turned.eval", turned)}
    for chosen in ("includes", "shares"):
        grades = []
        for name, path in logs.items():
            import_log(path, tmp_path / f"{chosen} {name}", chosen)
            grades.append([trace.grade for trace in traces_of(tmp_path / f"{chosen} {name}")])
        assert grades[0] == grades[1]


@pytest.mark.parametrize("epoch", [0, -5])
def test_a_sample_of_an_impossible_epoch_is_refused(log: Path, tmp_path: Path, epoch: int) -> None:
    wrong = changed(log, tmp_path / "wrong.json", lambda read: setattr(read.samples[0], "epoch", epoch))
    with pytest.raises(KvatlasError, match=f"has a sample of epoch {epoch}; expected epochs from 1"):
        import_log(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_of_other_problems_than_those_of_the_run_is_refused(log: Path, tmp_path: Path) -> None:
    """Our own tasks, whose problems are known by their contents."""
    run = tmp_path / "run"
    import_log(log, run)
    with Store.create(run) as store:
        before = store.manifest()
        (name,) = before.contents
        first, *_ = before.contents[name]
        store.put_manifest(replace(before, contents={name: {**before.contents[name], first: "another content"}}))
    sentence = rf"has other contents of 1 of 4 problems of {name} \({first}\) than the log"
    with pytest.raises(KvatlasError, match=sentence):
        import_log(log, run)


def test_a_log_that_unpacks_to_too_much_is_refused_unread(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MB unpacked to 2 GB."""
    monkeypatch.setattr(inspect_logs, "MAX_BYTES", 5000)
    with pytest.raises(KvatlasError, match=r"holds [\d,]+ bytes; expected up to 5,000"):
        import_log(log, tmp_path / "run")
    assert not (tmp_path / "run").exists()

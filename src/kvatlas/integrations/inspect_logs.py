"""Import of Inspect's logs into a run, so that remote models stand beside local ones in every comparison.

Answers to our tasks are graded here, from the text in the log; for other tasks the log's scores count. Only the
sampling settings of a log are stored: no base address, no arguments of the model, nothing of the environment.

A log is a claim. It is imported if it is finished and whole, and if all of it can be stored; else the refusal names it.
"""

from __future__ import annotations

import gzip
import itertools
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark, find, problems_of, prompt_of
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import (
    SERVED,
    Costs,
    Grade,
    KvatlasError,
    Problem,
    Status,
    Trace,
    changed_problems,
    digest,
    importing,
    refusal,
)
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import contents_of
from kvatlas.results.records import row_of

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample, EvalSpec

#: The largest log, in bytes.
MAX_BYTES = 2**29
#: The letter scores of Inspect's graders: correct, incorrect, partially correct, no answer.
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "reasoning_effort", "reasoning_tokens")
#: Stop reasons of truncated answers.
CUT = ("max_tokens", "model_length")
#: Names of metrics that every run has.
_TAKEN = ("progress", "pass@", "maj@", "graded:")
#: Errors of a file that is no log.
_DAMAGE = (LookupError, ValueError, TypeError, OSError, EOFError, RecursionError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class LogTask:
    """The task of a log: its benchmark, what identifies its answers, its problems, and the grade of a sample.

    `about` has the problems by id in the order of the data set, `contents` their digests, `metric` is the graded score.
    `scorer` is the scorer, with its key if it gives several scores, `other_scorers` are all others of the log.
    `is_verdict` is True if scores are letters, of which the right one is known.
    """

    benchmark: str
    identity: Sequence[Any]
    about: Mapping[str, Mapping[str, Any]]
    contents: Mapping[str, str]
    grade: Callable[[EvalSample], Grade | None]
    metric: str = ""
    scorer: str = ""
    other_scorers: tuple[str, ...] = ()
    is_verdict: bool = True


@dataclass(frozen=True)
class GradedLog:
    """A log that is finished and whole: its cell, its graded traces, its task, and what else may change an answer.

    `conditions` are all settings of the log but those of the generation, which are `generation`, both as plain data;
    what they lack was not set. `prompts` are digests of what the model read first, by problem and sample.
    """

    path: Path
    about: EvalSpec
    cell: Expected
    traces: list[Trace]
    task: LogTask
    sampling: Mapping[str, Any]
    conditions: Mapping[str, Any]
    generation: Mapping[str, Any]
    questions: Mapping[str, str]
    prompts: Mapping[tuple[str, int], str]


def import_log(log: Path, run: Path, scorer: str = "") -> tuple[Expected, int, str]:
    """Import the answers of a log into a run, new or not.

    Returns its cell, the number of its traces in the run, and the metric of graded scores, "" for right and wrong.

    Answers to our own tasks are graded here; for others the log's scores count, by the first scorer or the one named.
    A log that is imported again replaces itself. Raises KvatlasError for another file, for a log that is not finished
    or lacks scores, for one of our tasks with other prompts than this version's, for a second log of the same model and
    task, and for a log whose problems are not those of the run.
    """
    graded = read_graded_log(log, scorer)
    cell = graded.cell
    task = graded.task
    # Values of the log that no store holds; other errors are ours.
    with (
        _naming(log, "cannot be imported", ValueError, OverflowError, RecursionError),
        Store.create(run, {"kvatlas": __version__}) as store,
    ):
        stored = store.manifest(Manifest((), (), {}, {"kvatlas": __version__}))
        if "answers" in stored.provenance:
            raise KvatlasError("The run holds a file of answers; import the log into a run of its own.")
        imported = stored.provenance.get("imported", {})
        swept = [other for other in stored.expected if f"{other.model} {other.benchmark}" not in imported]
        if task.metric and swept:
            raise KvatlasError(
                f"Its scores {task.metric!r} are graded, and the run has right and wrong answers of a sweep; "
                "import it into a run of its own."
            )

        texts = [[trace.problem, trace.sample, trace.text] for trace in graded.traces]
        log_id = digest([graded.about.eval_id, cell.run_key, texts])[:16]
        # Arguments may hold secrets: of all but a few conditions only digests are stored.
        conditions = {name: value if name in _PLAIN else digest(value)[:8] for name, value in graded.conditions.items()}
        source = {
            "log": log.name,
            "id": log_id,
            "sampling": graded.sampling,
            "metric": task.metric,
            "conditions": {**conditions, **graded.generation},
        }
        manifest = _run_manifest(stored, cell, task, source)

        # The manifest promises nothing that could not be stored.
        store.add_all((cell.run_key, trace) for trace in graded.traces)
        store.put_manifest(manifest)
    return cell, len(graded.traces), task.metric


@contextmanager
def _naming(log: Path, fault: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn these errors (see `refusal`) into a sentence with the log and what it cannot be."""
    sentence = f"The log {str(log)!r} {fault}"
    try:
        with refusal(sentence, *errors):
            yield
    except KvatlasError as error:
        if str(log) in str(error):
            raise
        raise KvatlasError(f"{sentence}: {error}") from error


def read_graded_log(log: Path, scorer: str = "") -> GradedLog:
    """Return a log with its graded traces. Raises KvatlasError for one that is not finished and whole."""
    read = _read_log(log)
    with _naming(log, "cannot be read"):
        return _graded_log(log, read, scorer)


def _graded_log(log: Path, read: EvalLog, scorer: str) -> GradedLog:
    where = f"The log {str(log)!r}"
    for kind, claimed_name in (("task", read.eval.task), ("model", read.eval.model)):
        if not claimed_name.strip() or not claimed_name.isprintable():
            raise KvatlasError(f"{where} has the {kind} {claimed_name!r}; expected a name of printable characters.")
    # All settings of requests; those of the plan win.
    configs = (read.eval.model_generate_config, read.plan.config)
    first_config, plan_config = (config.model_dump(mode="json", exclude_none=True) for config in configs)
    config = {**first_config, **plan_config}
    sampling = {name: config[name] for name in _SAMPLING if name in config}
    if any(isinstance(value, float) and not math.isfinite(value) for value in sampling.values()):
        raise KvatlasError(f"{where} was sampled with {sampling}; expected finite numbers.")
    samples = read.samples or []
    epochs = _check_samples(read, samples, where)
    task = _log_task(read, samples, where, scorer)
    _check_whole_log(read, samples, epochs, where)

    cell = Expected(
        model=read.eval.model,
        benchmark=task.benchmark,
        setting=SERVED,
        run_key=digest(["inspect", read.eval.model, *task.identity, sampling])[:32],
        problems=tuple(task.about),
        samples=epochs,
        baseline=True,
    )
    traces = list(_log_traces(samples, cell, task.grade))
    if not traces:
        raise KvatlasError(f"No sample of the {where[4:]} has an answer with a score: all ended in an error.")

    questions = {}
    prompts = {}
    for sample in samples:
        questions[str(sample.id)] = sample.input if isinstance(sample.input, str) else sample.input_text
        first = list(itertools.takewhile(lambda message: message.role != "assistant", sample.messages))
        if first:
            prompts[str(sample.id), sample.epoch - 1] = digest([[message.role, message.text] for message in first])
    conditions = _log_conditions(read, config, task)
    generation = {_CALLED.get(name, name): value for name, value in config.items() if name not in _NO_SAMPLING}
    return GradedLog(log, read.eval, cell, traces, task, sampling, conditions, generation, questions, prompts)


def _log_conditions(read: EvalLog, config: Mapping[str, Any], task: LogTask) -> dict[str, Any]:
    """Return the settings of a log that may change an answer or its score, but those of the generation."""
    about = read.eval
    steps = [step.model_dump(include={"solver", "params"}) for step in read.plan.steps]
    solver = ", ".join(step["solver"] for step in steps) or about.solver
    parameters = [step["params"] for step in steps if step["params"]] or about.solver_args
    scorer = task.scorer.partition(":")[0]
    # The models of other roles, as of the one that grades, with digests: addresses and arguments may hold keys.
    roles = {}
    for role, models in (about.model_roles or {}).items():
        listed = models if isinstance(models, list) else [models]
        settings = [model.model_dump(mode="json", exclude={"base_url"}) for model in listed]
        roles[role] = [f"{each['model']} ({digest(each)[:8]})" for each in settings]

    values: dict[str, Any] = {
        "task version": about.task_version,
        "task arguments": about.task_args,
        "system message": config.get("system_message"),
        "solver": solver,
        "solver parameters": parameters,
        "metric": task.scorer,
        "scorer options": [each.options for each in about.scorers or () if each.name == scorer and each.options],
        "seed": config.get("seed"),
        "models of roles": roles,
        "sandbox": about.sandbox and about.sandbox.type,
        "revision": about.revision and about.revision.commit,
        "model arguments": digest([about.model_base_url, about.model_args])[:8] if about.model_args else "",
    }
    limits = about.config.model_dump(include={name for name in type(about.config).model_fields if "limit" in name})
    values |= {name.replace("_", " "): value for name, value in limits.items() if name != "limit"}
    values |= {f"version of {name}": version for name, version in about.packages.items()}
    return {name: value for name, value in values.items() if value not in (None, "", {}, [])}


#: Conditions that are stored as they are.
_PLAIN = ("task version", "metric", "solver")
#: Other names of settings of a request, those that change no answer, and those that are conditions of their own.
_CALLED = {"max_tokens": "most new tokens", "stop_seqs": "stop sequences"}
_NO_SAMPLING = (
    *("max_retries", "timeout", "attempt_timeout", "max_connections", "adaptive_connections"),
    *("batch", "cache", "cache_prompt", "seed", "system_message"),
)


def _log_task(read: EvalLog, samples: Sequence[EvalSample], where: str, scorer: str) -> LogTask:
    """Return the task of a log, one of ours or another one."""
    metadata = read.eval.metadata or {}
    name = metadata.get("kvatlas_benchmark")
    if isinstance(name, str):
        ours = find(name)
        version = metadata.get("kvatlas_version")
        if ours.version != version:
            raise KvatlasError(f"{where} asks version {version} of {name}; this kvatlas has version {ours.version}.")
        problems = _problems_of_log(samples, ours, where)

        def grade(sample: EvalSample) -> Grade | None:
            read = reading.read_text(_answer_text(sample), cut=sample.output.stop_reason in CUT)
            return grade_reading(ours, problems[str(sample.id)], read, all_metrics=True)

        ordered = [problems[id_] for id_ in _dataset_order(read, samples)]
        about = {problem.id: dict(problem.about) for problem in ordered}
        return LogTask(ours.name, [ours.name, ours.version], about, contents_of(ordered), grade, scorer="kvatlas")

    contents: dict[str, str] = {}
    for sample in samples:
        # The text of the question, or roles and texts of a conversation.
        conversation: Any = sample.input
        if not isinstance(conversation, str):
            conversation = [[message.role, message.text] for message in conversation]
        content = digest([conversation, sample.target, sample.choices])
        if contents.setdefault(str(sample.id), content) != content:
            raise KvatlasError(f"{where} asks the sample {sample.id!r} in two ways.")
    task = read.eval.task
    chosen, key, others = _chosen_scorer(read, samples, where, scorer)
    name = f"{chosen}:{key}" if key else chosen
    metric = _metric_name(key or chosen)

    def scored(sample: EvalSample) -> Grade | None:
        shares = _score_shares(sample, chosen)
        main = shares.get(metric)
        if main is None:
            return None
        answer = (sample.scores or {})[chosen].answer
        truncated = sample.output.stop_reason in CUT and main < 1
        return Grade(main >= 1, main, answer, Status.TRUNCATED if truncated else Status.OK, shares)

    # Scores are letters, of which the right one is known, or numbers; NaN is no score.
    given = [sample.scores[chosen].value for sample in samples if chosen in (sample.scores or {})]
    values = [value.get(key) if isinstance(value, dict) else value for value in given]
    shares = {_score_shares(sample, chosen).get(metric) for sample in samples}
    steps = [[step.solver, step.params] for step in read.plan.steps]
    return LogTask(
        task,
        [task, read.eval.task_version, read.eval.task_args, steps, chosen, key, contents],
        {id_: {} for id_ in _dataset_order(read, samples)},
        contents,
        scored,
        metric="" if shares <= {None, 0.0, 1.0} else metric,
        scorer=name,
        other_scorers=tuple(others),
        is_verdict=all(isinstance(value, str) for value in values if value == value),
    )


def _dataset_order(read: EvalLog, samples: Sequence[EvalSample]) -> list[str]:
    """Return the ids of the samples, each once, in the order of the data set."""
    present = dict.fromkeys(str(sample.id) for sample in samples)
    ordered = [str(id_) for id_ in read.eval.dataset.sample_ids or () if str(id_) in present]
    return list(dict.fromkeys([*ordered, *present]))


def _check_samples(read: EvalLog, samples: Sequence[EvalSample], where: str) -> int:
    """Return the number of epochs; KvatlasError for a log that is not finished, and for repeated samples."""
    if read.status != "success":
        raise KvatlasError(
            f"{where} has the status {read.status!r} and {len(samples):,} samples, and those that finish first are no "
            "fair part of a task; finish it with `inspect eval-retry`."
        )

    seen: set[tuple[str, int]] = set()
    names: dict[str, int | str] = {}
    for sample in samples:
        if getattr(sample, "invalidation", None) is not None:
            raise KvatlasError(f"{where} has the invalidated sample {sample.id!r}; run it with `inspect eval-retry`.")
        key = str(sample.id), sample.epoch
        if names.setdefault(key[0], sample.id) != sample.id:
            raise KvatlasError(f"{where} has the samples {names[key[0]]!r} and {sample.id!r}; expected unlike names.")
        if key in seen:
            raise KvatlasError(f"{where} has the sample {sample.id!r} of epoch {sample.epoch} twice.")
        seen.add(key)

    found = [sample.epoch for sample in samples]
    epochs: int = max(1, read.eval.config.epochs or max(found))
    wrong = [epoch for epoch in found if not 1 <= epoch <= epochs]
    if wrong:
        raise KvatlasError(f"{where} has a sample of epoch {wrong[0]}; expected epochs from 1 to {epochs:,}.")
    return epochs


def _check_whole_log(read: EvalLog, samples: Sequence[EvalSample], epochs: int, where: str) -> None:
    """Raise KvatlasError for a log that lacks samples of its data set, or has others."""
    counts = Counter(str(sample.id) for sample in samples)
    ids = dict.fromkeys(map(str, read.eval.dataset.sample_ids or counts))
    strange = sorted(counts.keys() - ids.keys())
    if strange:
        raise KvatlasError(f"{where} has the sample {strange[0]!r}, which its data set lacks.")

    # Samples that ended in an error are in the log, too.
    missing = len(ids) * epochs - len(samples)
    if missing:
        # Epochs of a damaged log are of any number: no list of them is made.
        first = next(id_ for id_ in ids if counts[id_] < epochs)
        of_all = f"{missing:,} of the {len(ids) * epochs:,} samples of its data set and epochs"
        raise KvatlasError(f"{where} lacks {of_all} (first {first!r}); expected the whole log.")

    # A log without ids may count more samples than it has.
    counted = 0
    if not read.eval.dataset.sample_ids:
        counted = read.results.total_samples if read.results else 0
        if read.eval.config.limit is None:
            counted = max(counted, (read.eval.dataset.samples or 0) * epochs)
    if counted > len(samples):
        raise KvatlasError(
            f"{where} has {len(samples):,} samples of the {counted:,} that it counts; expected all of them."
        )


def _run_manifest(stored: Manifest, cell: Expected, task: LogTask, source: Mapping[str, Any]) -> Manifest:
    """Return the manifest of the run with this cell, which replaces one of the same name.

    Raises KvatlasError if the run has answers of the model to the task that are not of this log, other problems of the
    task, or other contents of them.
    """
    imported = stored.provenance.get("imported", {})
    name = f"{cell.model} {cell.benchmark}"
    earlier = imported.get(name, {})
    if cell.name in [other.name for other in stored.expected] and earlier.get("id") != source["id"]:
        raise KvatlasError(
            f"The run has answers of {cell.model} to {cell.benchmark} from {earlier.get('log', 'a sweep')}; import the "
            "log into a run of its own. (More answers to a problem are the epochs of one log.)"
        )
    manifest = stored.with_cells([cell], imported={**imported, name: dict(source)})
    same_benchmark = [other for other in manifest.expected if other.benchmark == cell.benchmark]
    if any(set(other.problems) != set(cell.problems) for other in same_benchmark):
        raise KvatlasError(
            f"The run holds other problems of {cell.benchmark} than the log; import it into a run of its own."
        )
    recorded = manifest.contents.get(cell.benchmark, {})
    changed = changed_problems(cell.benchmark, task.contents, {**task.contents, **recorded})
    if changed:
        raise KvatlasError(f"The run has other contents of {changed} than the log; import it into a run of its own.")

    contents = {**manifest.contents, cell.benchmark: {**recorded, **task.contents}}
    about = {**manifest.about}
    values = {id_: dict(problem_values) for id_, problem_values in task.about.items() if problem_values}
    if values:
        about[cell.benchmark] = values
    return replace(manifest, about=about, contents=contents)


def _read_log(log: Path) -> EvalLog:
    """Read a log. A missing or too large file is refused before anything is unpacked or imported."""
    if not log.is_file():
        state = "is a folder; name the logs in it, or give it to kvatlas gate" if log.is_dir() else "is not there"
        raise KvatlasError(f"The log {str(log)!r} {state}.")
    with refusal(f"{str(log)!r} is no Inspect log", *_DAMAGE):
        size = log.stat().st_size
        content = b""
        if zipfile.is_zipfile(log):
            with zipfile.ZipFile(log) as archive:
                size = max(size, sum(entry.file_size for entry in archive.infolist()))
        elif log.suffix == ".gz":
            with gzip.open(log) as file:
                content = file.read(MAX_BYTES + 1)
            size = len(content)
        elif log.suffix != ".json":
            raise KvatlasError(
                f"{str(log)!r} is no Inspect log (it is no archive, and no JSON by its suffix); expected a .eval, "
                ".json or .json.gz file that `inspect eval` wrote."
            )
        if size > MAX_BYTES:
            raise KvatlasError(f"The log {str(log)!r} holds {size:,} bytes; expected up to {MAX_BYTES:,}.")
        with importing("Reading Inspect logs", "inspect"):
            from inspect_ai.log import read_eval_log

        read = read_eval_log(BytesIO(content) if content else str(log))
    if not read.samples:
        raise KvatlasError(f"The log {str(log)!r} has no samples (its status is {read.status!r}).")
    return read


def _problems_of_log(samples: Sequence[EvalSample], benchmark: Benchmark, where: str) -> dict[str, Problem]:
    """Return the problems of the log by id. Raises KvatlasError for another prompt than ours."""
    ids = [str(sample.id) for sample in samples]
    problems = {problem.id: problem for problem in problems_of(benchmark)}
    if not set(ids) <= problems.keys():
        # Generated benchmarks have any number of problems; the ids tell the highest one of the log.
        endings = [id_.rpartition("-")[2] for id_ in ids]
        indices = [int(ending) for ending in endings if ending.isdecimal() and len(ending) < 7]
        problems = {problem.id: problem for problem in problems_of(benchmark, max(indices, default=0) + 1)}

    for sample in samples:
        problem = problems.get(str(sample.id))
        question = sample.input
        if not isinstance(question, str):
            question = "\n".join(message.text for message in question if message.role == "user")
        if problem is None or question != prompt_of(benchmark, problem):
            raise KvatlasError(f"{where} asks {sample.id!r} in another way than {benchmark.name} does.")
    return {id_: problems[id_] for id_ in ids}


def _score_share(value: Any, sample: EvalSample) -> float | None:
    """Return letters, truth values and numbers as a share in [0, 1]; None for a missing score (NaN)."""
    if isinstance(value, str) and value in _LETTERS:
        return _LETTERS[value]
    if isinstance(value, bool | int | float):
        if math.isnan(value):
            return None
        if 0 <= value <= 1:
            return float(value)
    raise KvatlasError(
        f"The sample {sample.id!r} of the log has the score {value!r}; expected numbers from 0 to 1 and the "
        "letters C, I, P and N."
    )


def _chosen_scorer(read: EvalLog, samples: Sequence[EvalSample], where: str, scorer: str) -> tuple[str, str, list[str]]:
    """Return the scorer of that name (SCORER or SCORER:KEY), else the task's first one, its main score, and the others.

    The main score is "" of a scorer that gives one alone. Raises KvatlasError for a log without scores.
    """
    given = list(dict.fromkeys(itertools.chain.from_iterable(sample.scores or () for sample in samples)))
    if not given:
        raise KvatlasError(f"{where} of the task {read.eval.task!r} has no scores; `inspect score` adds them.")
    key = ""
    if scorer not in given:
        scorer, _, key = scorer.rpartition(":") if ":" in scorer else (scorer, "", "")
    if scorer and scorer not in given:
        raise KvatlasError(f"{where} has no scorer {scorer!r}; expected: {', '.join(given)}.")

    # The order in the task, since a sample may have its scores in any order.
    ordered = [declared.name for declared in read.eval.scorers or () if declared.name in given]
    chosen = scorer or [*ordered, *given][0]

    # The names of the scores of a scorer that gives several.
    values = [sample.scores[chosen].value for sample in samples if chosen in (sample.scores or {})]
    keys = list(dict.fromkeys(itertools.chain.from_iterable(value for value in values if isinstance(value, dict))))
    if key and key not in keys:
        raise KvatlasError(f"{where} has no score {key!r} of {chosen}; expected: {', '.join(keys) or 'none'}.")
    results = read.results.scores if read.results else []
    shown = [result.name for result in results if result.scorer == chosen and result.name in keys]
    key = key or [*shown, *keys, ""][0]
    others = [name for name in given if name != chosen] + [f"{chosen}:{name}" for name in keys if name != key]
    return chosen, key, others


def _metric_name(score: str) -> str:
    return f"score:{score}" if score.startswith(_TAKEN) else score


def _score_shares(sample: EvalSample, scorer: str) -> dict[str, float]:
    """Return the scores of a sample by their names as metrics, without missing ones."""
    score = (sample.scores or {}).get(scorer)
    if score is None:
        return {}
    values = score.value if isinstance(score.value, dict) else {scorer: score.value}
    shares = {_metric_name(name): _score_share(value, sample) for name, value in values.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _log_traces(
    samples: Sequence[EvalSample], cell: Expected, grade: Callable[[EvalSample], Grade | None]
) -> Iterator[Trace]:
    for sample in samples:
        answered = sample.error is None and bool(sample.output.choices)
        result = grade(sample) if answered else None
        if result is None:
            continue
        name = (cell.model, cell.benchmark, str(sample.id), sample.epoch - 1, cell.setting)
        trace = Trace(*name, (), _answer_text(sample), result, _sample_costs(sample))
        # A side of a gate holds no trace that a store would refuse.
        row_of(cell.run_key, trace)
        yield trace


def _answer_text(sample: EvalSample) -> str:
    message = sample.output.choices[0].message
    contents = [] if isinstance(message.content, str) else message.content
    thinking = "".join(content.reasoning for content in contents if content.type == "reasoning")
    return reading.join_thinking(thinking, message.text)


def _sample_costs(sample: EvalSample) -> Costs:
    """Return the costs in the log; those of a cache are not known."""
    # A sample may have asked several models.
    usages = sample.model_usage.values()
    prompt = sum(usage.input_tokens for usage in usages)
    output = sum(usage.output_tokens for usage in usages)
    thinking = sum(usage.reasoning_tokens or 0 for usage in usages)
    costs = Costs(None, None, None, None, None, None, sample.total_time or None)
    if not sample.model_usage:
        return costs
    return replace(costs, prompt_tokens=prompt, output_tokens=output, thinking_tokens=thinking)

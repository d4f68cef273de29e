"""Import of Inspect's logs into a run, so that remote models stand beside local ones in every comparison.

Answers to our tasks are graded here, from the text in the log; for other tasks the log's scores count. Only the
sampling settings of a log are stored: no base address, no arguments of the model, nothing of the environment.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__
from kvatlas.benchmarks import Benchmark, find, reading
from kvatlas.core import SERVED, Costs, Grade, KvatlasError, Problem, Setting, Status, Trace, digest, reason
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import changed_problems, contents_of

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

#: The largest log, in bytes.
MAX_BYTES = 2**29
#: The letter scores of Inspect's graders: correct, incorrect, partially correct, no answer.
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "reasoning_effort", "reasoning_tokens")
#: Stop reasons of truncated answers.
CUT = ("max_tokens", "model_length")
_ARCHIVE = (zipfile.BadZipFile, zlib.error)


def import_log(log: Path, run: Path, scorer: str = "") -> tuple[Expected, int]:
    """Import the answers of a log into a run, new or not; return its cell and the number of traces.

    Answers to our own tasks are graded here; for others the log's scores count, by the first scorer or the one named.
    A repeated import replaces the first. Raises KvatlasError for another file, for a log without scores, and for one of
    our tasks with other prompts than this version's.
    """
    where = f"The log {str(log)!r}"
    read = _read(log)
    samples = read.samples or []
    sampling = _sampling(read, where)
    ours = _benchmark(read, where)
    about: dict[str, dict[str, Any]]
    problems: dict[str, Problem] = {}
    if ours is None:
        about = {str(sample.id): {} for sample in samples}
        task = read.eval.task
        name = task.rpartition("/")[2]
        identity = [task, read.eval.task_version, read.eval.task_args]
        grade = _scored(read, where, scorer)
    else:
        problems = _problems(samples, ours, where)
        about = {id_: dict(problem.about) for id_, problem in problems.items()}
        name = ours.name
        identity = [ours.name, ours.version]

        def grade(sample: EvalSample) -> Grade | None:
            read = reading.read_text(_text(sample), cut=sample.output.stop_reason in CUT)
            return reading.grade(ours, problems[str(sample.id)], read, all_metrics=True)

    epochs = [sample.epoch for sample in samples]
    if min(epochs) < 1:
        raise KvatlasError(f"{where} has a sample of epoch {min(epochs)}; expected epochs from 1.")
    setting = _setting(samples)
    model = read.eval.model.removeprefix("kvatlas/") if setting != SERVED else read.eval.model
    cell = Expected(
        model=model,
        benchmark=name,
        setting=setting,
        run_key=digest(["inspect", model, *identity, sampling])[:32],
        problems=tuple(about),
        samples=max(epochs),
        baseline=True,
    )
    traces = list(_traces(samples, cell, grade))
    if not traces:
        raise KvatlasError(f"No sample of the log {str(log)!r} has an answer with a score: all ended in an error.")
    with Store.create(run, {"kvatlas": __version__}) as store:
        before = store.manifest(Manifest((), (), {}, {"kvatlas": __version__}))
        manifest = _manifest(before, cell, about, {"log": log.name, "sampling": sampling})
        store.put_manifest(_with_contents(manifest, cell, problems))
        store.add_all((cell.run_key, trace) for trace in traces)
    return cell, len(traces)


def _sampling(read: EvalLog, where: str) -> dict[str, Any]:
    """Return the sampling settings of a log; those of the plan win. Raises KvatlasError for infinite numbers."""
    sampling: dict[str, Any] = {}
    for config in (read.eval.model_generate_config.model_dump(), read.plan.config.model_dump()):
        sampling.update({name: config[name] for name in _SAMPLING if config.get(name) is not None})
    if any(isinstance(value, float) and not math.isfinite(value) for value in sampling.values()):
        raise KvatlasError(f"{where} was sampled with {sampling}; expected finite numbers.")
    return sampling


def _manifest(
    before: Manifest, cell: Expected, about: Mapping[str, Mapping[str, Any]], source: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of the run with this cell, which replaces one of the same name."""
    imported = {**before.provenance.get("imported", {}), f"{cell.model} {cell.benchmark}": dict(source)}
    manifest = before.with_cells([cell], imported=imported)
    same_benchmark = [other for other in manifest.expected if other.benchmark == cell.benchmark]
    if any(set(other.problems) != set(cell.problems) for other in same_benchmark):
        raise KvatlasError(
            f"The run holds other problems of {cell.benchmark} than the log; import it into a run of its own."
        )
    values = {id_: dict(problem_values) for id_, problem_values in about.items() if problem_values}
    if not values:
        return manifest
    return replace(manifest, about={**manifest.about, cell.benchmark: values})


def _with_contents(manifest: Manifest, cell: Expected, problems: Mapping[str, Problem]) -> Manifest:
    """Return the manifest with the contents of our own problems; KvatlasError if the run has other ones."""
    if not problems:
        return manifest
    contents = contents_of(problems.values())
    recorded = manifest.contents.get(cell.benchmark, {})
    changed = changed_problems(cell.benchmark, contents, {**contents, **recorded})
    if changed:
        raise KvatlasError(f"The run has other contents of {changed} than the log; import it into a run of its own.")
    return replace(manifest, contents={**manifest.contents, cell.benchmark: {**recorded, **contents}})


def _read(log: Path) -> EvalLog:
    """Read a log. A missing or too large file is refused before anything is unpacked or imported."""
    if not log.is_file():
        raise KvatlasError(f"The log {str(log)!r} is not there.")
    try:
        size = log.stat().st_size
        if zipfile.is_zipfile(log):
            with zipfile.ZipFile(log) as archive:
                size = max(size, sum(entry.file_size for entry in archive.infolist()))
        elif log.suffix != ".json":
            raise KvatlasError(f"{str(log)!r} is no Inspect log (it is no archive, and no JSON by its suffix).")
        if size > MAX_BYTES:
            raise KvatlasError(f"The log {str(log)!r} holds {size:,} bytes; expected up to {MAX_BYTES:,}.")
        from inspect_ai.log import read_eval_log

        read = read_eval_log(str(log))
    except ImportError as error:
        raise KvatlasError("Reading Inspect logs needs the extra: pip install 'kvatlas[inspect]'.") from error
    except (LookupError, ValueError, TypeError, OSError, EOFError, RecursionError, *_ARCHIVE) as error:
        raise KvatlasError(f"{str(log)!r} is no Inspect log ({reason(error)}).") from error
    if not read.samples:
        raise KvatlasError(f"The log {str(log)!r} has no samples (its status is {read.status!r}).")
    return read


def _benchmark(read: EvalLog, where: str) -> Benchmark | None:
    """Return the benchmark of one of our tasks; None for other tasks."""
    about = read.eval.metadata or {}
    name = about.get("kvatlas_benchmark")
    version = about.get("kvatlas_version")
    if not isinstance(name, str):
        return None
    benchmark = find(name)
    if benchmark.version != version:
        raise KvatlasError(f"{where} asks version {version} of {name}; this kvatlas has version {benchmark.version}.")
    return benchmark


def _problems(samples: Sequence[EvalSample], benchmark: Benchmark, where: str) -> dict[str, Problem]:
    """Return the problems of the log by id. Raises KvatlasError for another prompt than ours."""
    ids = [str(sample.id) for sample in samples]
    problems = _candidates(ids, benchmark)
    for sample in samples:
        problem = problems.get(str(sample.id))
        if problem is None or _question(sample) != benchmark.prompt(problem):
            raise KvatlasError(f"{where} asks {sample.id!r} in another way than {benchmark.name} does.")
    return {id_: problems[id_] for id_ in ids}


def _candidates(ids: Sequence[str], benchmark: Benchmark) -> dict[str, Problem]:
    """Return the problems of a benchmark by id, as many as the ids of a log need."""
    problems = {problem.id: problem for problem in benchmark.problems(None)}
    if set(ids) <= problems.keys():
        return problems
    # Generated benchmarks have any number of problems; the ids tell the highest one of the log.
    endings = [id_.rpartition("-")[2] for id_ in ids]
    indices = [int(ending) for ending in endings if ending.isdecimal() and len(ending) < 7]
    highest = max(indices, default=0)
    return {problem.id: problem for problem in benchmark.problems(highest + 1)}


def _question(sample: EvalSample) -> str:
    """Return the text of a sample's user messages."""
    if isinstance(sample.input, str):
        return sample.input
    return "\n".join(message.text for message in sample.input if message.role == "user")


def _scored(read: EvalLog, where: str, scorer: str) -> Callable[[EvalSample], Grade | None]:
    """Return a function that gives the grade of a sample by the log's score; None for a sample without score."""
    found: dict[str, None] = {}
    for sample in read.samples or []:
        found.update(dict.fromkeys(sample.scores or {}))
    names = list(found)
    if not names:
        raise KvatlasError(f"{where} of the task {read.eval.task!r} has no scores; `inspect score` adds them.")
    if scorer and scorer not in names:
        raise KvatlasError(f"{where} has no scorer {scorer!r}; expected: {', '.join(names)}.")
    chosen = scorer or names[0]
    return partial(_grade_of, chosen)


def _share(value: Any, sample: EvalSample) -> float | None:
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


def _grade_of(scorer: str, sample: EvalSample) -> Grade | None:
    """Return the grade of a sample by the score of one scorer; None for a sample without it."""
    score = (sample.scores or {}).get(scorer)
    if score is None:
        return None
    values = score.value if isinstance(score.value, dict) else {scorer: score.value}
    shares = {name: _share(value, sample) for name, value in values.items()}
    # The first entry of a dictionary is the scorer's main score.
    first = next(iter(shares.values()), None)
    if first is None:
        return None
    truncated = sample.output.stop_reason in CUT and first < 1
    status = Status.TRUNCATED if truncated else Status.OK
    further: dict[str, Any] = {}
    if len(shares) > 1:
        further = {name: value for name, value in shares.items() if value is not None}
    return Grade(first >= 1, first, score.answer, status, further)


def _setting(samples: Sequence[EvalSample]) -> Setting:
    """Return the setting in the answers of our own provider; `served` for every other model."""
    notes = [_provider_note(sample) for sample in samples if sample.output.choices]
    settings = {_noted_setting(note["setting"]) for note in notes if isinstance(note, dict) and "setting" in note}
    return settings.pop() if len(settings) == 1 and all(notes) else SERVED


def _provider_note(sample: EvalSample) -> Any:
    """Return the note of our own provider in an answer: its setting and its usage; None for other models."""
    return (sample.output.metadata or {}).get("kvatlas")


def _noted_setting(noted: Mapping[str, Any]) -> Setting:
    """Return the setting in a note of our own provider; raises KvatlasError for one that no provider writes."""
    policy = noted["policy"]
    values = dict(noted["values"])
    if not isinstance(policy, str) or not all(isinstance(value, str | int | float) for value in values.values()):
        raise KvatlasError(f"The log names the policy {policy!r} with {values}; expected a name and plain values.")
    return Setting.from_parameters(policy, **values)


def _traces(
    samples: Sequence[EvalSample], cell: Expected, grade: Callable[[EvalSample], Grade | None]
) -> Iterator[Trace]:
    for sample in samples:
        answered = sample.error is None and bool(sample.output.choices)
        result = grade(sample) if answered else None
        if result is None:
            continue
        name = (cell.model, cell.benchmark, str(sample.id), sample.epoch - 1, cell.setting)
        yield Trace(*name, (), _text(sample), result, _costs(sample))


def _text(sample: EvalSample) -> str:
    message = sample.output.choices[0].message
    contents = [] if isinstance(message.content, str) else message.content
    thinking = "".join(content.reasoning for content in contents if content.type == "reasoning")
    return reading.joined(thinking, message.text)


def _costs(sample: EvalSample) -> Costs:
    """Return the costs in the log; those of the cache are known for our own provider only."""
    prompt, output, thinking = _token_counts(sample)
    seconds = float(sample.total_time or 0.0)
    if not (math.isfinite(seconds) and min(seconds, prompt, output, thinking) >= 0):
        raise KvatlasError(
            f"The sample {sample.id!r} of the log took {seconds} s and {prompt} + {output} tokens ({thinking} of "
            "reasoning); expected finite numbers from 0."
        )
    provider_usage = (_provider_note(sample) or {}).get("usage") or {}
    if provider_usage.get("output_tokens") == output:
        # The sample consists of this one answer.
        return Costs(**provider_usage)
    costs = Costs(None, None, None, None, None, None, seconds or None)
    if not sample.model_usage:
        return costs
    return replace(costs, prompt_tokens=prompt, output_tokens=output, thinking_tokens=thinking)


def _token_counts(sample: EvalSample) -> tuple[int, int, int]:
    """Return the numbers of prompt, output and reasoning tokens of a sample, which may have asked several models."""
    usages = sample.model_usage.values()
    prompt = sum(usage.input_tokens for usage in usages)
    output = sum(usage.output_tokens for usage in usages)
    thinking = sum(usage.reasoning_tokens or 0 for usage in usages)
    return prompt, output, thinking

"""Inspect's logs brought into a run: remote models then stand beside local ones in every comparison.

Answers to our tasks are graded here, from the text in the log; of other tasks the log's scores count. Of the log's
settings only those of sampling are kept: no base address, no arguments of the model, nothing of the environment.
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
from kvatlas.benchmarks import Benchmark, find, grade_text
from kvatlas.core import SERVED, Costs, Grade, KvatlasError, Problem, Setting, Status, Trace, digest, reason
from kvatlas.results import Expected, Manifest, Store

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

#: Bytes of a log.
MAX_BYTES = 2**29
#: Scores that graders of Inspect give as letters: correct, incorrect, partially correct, no answer.
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "reasoning_effort", "reasoning_tokens")
#: Stop reasons of models that were not done.
CUT = ("max_tokens", "model_length")
_ARCHIVE = (zipfile.BadZipFile, zlib.error)


def import_log(log: Path, run: Path, scorer: str = "") -> tuple[Expected, int]:
    """Bring the log's answers into the run, new or not; returns the cell that it is now to hold and the traces added.

    Answers to our own tasks are graded here; of others the log's scores count, by their first scorer unless one is
    named. Importing again replaces. Raises KvatlasError for a file that is no Inspect log or holds no scores, and for
    one of our tasks whose problems are not asked as this version asks them.
    """
    read = _read(log)
    samples = read.samples or []
    given = (read.eval.model_generate_config.model_dump(), read.plan.config.model_dump())
    sampling = {name: config[name] for config in given for name in _SAMPLING if config.get(name) is not None}
    if any(isinstance(value, float) and not math.isfinite(value) for value in sampling.values()):
        raise KvatlasError(f"The log {str(log)!r} was sampled with {sampling}; expected finite numbers.")
    ours = _benchmark(read, log)
    if ours is None:
        known: dict[str, dict[str, Any]] = {str(sample.id): {} for sample in samples}
        about = read.eval
        name, identity = about.task.rpartition("/")[2], [about.task, about.task_version, about.task_args]
        grade = _scored(read, log, scorer)
    else:
        asked = _problems(read, ours, log)
        known = {id_: dict(problem.about) for id_, problem in asked.items()}
        name, identity = ours.name, [ours.name, ours.version]
        grade = partial(_graded, ours, asked)
    setting = _setting(samples)
    model = read.eval.model.removeprefix("kvatlas/") if setting != SERVED else read.eval.model
    cell = Expected(
        model=model,
        benchmark=name,
        setting=setting,
        run_key=digest(["inspect", model, *identity, sampling])[:32],
        problems=tuple(known),
        samples=max(sample.epoch for sample in samples),
        baseline=True,
    )
    traces = list(_traces(samples, cell, grade))
    if not traces:
        raise KvatlasError(f"No sample of the log {str(log)!r} has an answer with a score: all ended in an error.")
    with Store.create(run, {"kvatlas": __version__}) as store:
        store.put_manifest(_joined(store, cell, known, {"log": log.name, "sampling": sampling}))
        store.add_all((cell.run_key, trace) for trace in traces)
    return cell, len(traces)


def _joined(
    store: Store, cell: Expected, known: Mapping[str, Mapping[str, Any]], source: Mapping[str, Any]
) -> Manifest:
    """The manifest of the run with this cell, in place of an earlier one of the same name."""
    try:
        manifest = store.manifest()
    except KvatlasError:
        manifest = Manifest((), (), {}, {"kvatlas": __version__})
    others = tuple(other for other in manifest.expected if other.name != cell.name)
    if any(other.benchmark == cell.benchmark and set(other.problems) != set(cell.problems) for other in others):
        raise KvatlasError(
            f"The run holds other problems of {cell.benchmark} than the log; import it into a run of its own."
        )
    about = {id_: dict(values) for id_, values in known.items() if values}
    imported = {**manifest.provenance.get("imported", {}), f"{cell.model} {cell.benchmark}": dict(source)}
    return replace(
        manifest,
        expected=(*others, cell),
        provenance={**manifest.provenance, "imported": imported},
        about={**manifest.about, cell.benchmark: about} if about else manifest.about,
    )


def _read(log: Path) -> EvalLog:
    """Read a log; a file that is not there, or holds too much, is refused before anything is unpacked or imported."""
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


def _benchmark(read: EvalLog, log: Path) -> Benchmark | None:
    """The benchmark of one of our tasks; None for the tasks of others."""
    about = read.eval.metadata or {}
    name, version = about.get("kvatlas_benchmark"), about.get("kvatlas_version")
    if not isinstance(name, str):
        return None
    benchmark = find(name)
    if benchmark.version != version:
        raise KvatlasError(
            f"The log {str(log)!r} asks version {version} of {name}; this kvatlas has version {benchmark.version}."
        )
    return benchmark


def _problems(read: EvalLog, benchmark: Benchmark, log: Path) -> dict[str, Problem]:
    """The problems of the log by id, each asked as we ask it."""
    samples = {str(sample.id): sample for sample in read.samples or []}
    # Generated benchmarks have as many problems as are asked for; no log asks more than it has ids or a standard set.
    known = {problem.id: problem for problem in benchmark.problems(None)}
    if not samples.keys() <= known.keys():
        numbers = [id_.rpartition("-")[2] for id_ in samples]
        highest = max((int(number) for number in numbers if number.isdecimal() and len(number) < 7), default=0)
        known = {problem.id: problem for problem in benchmark.problems(highest + 1)}
    for sample in read.samples or []:
        problem, question = known.get(str(sample.id)), sample.input
        if not isinstance(question, str):
            question = "\n".join(message.text for message in question if message.role == "user")
        if problem is None or question != benchmark.prompt(problem):
            raise KvatlasError(f"The log {str(log)!r} asks {sample.id!r} in another way than {benchmark.name} does.")
    return {id_: known[id_] for id_ in samples}


def _graded(benchmark: Benchmark, problems: dict[str, Problem], sample: EvalSample) -> Grade:
    text = sample.output.choices[0].message.text
    return grade_text(benchmark, problems[str(sample.id)], text, cut=sample.output.stop_reason in CUT)


def _scored(read: EvalLog, log: Path, scorer: str) -> Callable[[EvalSample], Grade | None]:
    """The grade by which a log's scores say what a sample's answer is worth; None for one that has no score."""
    names = list(dict.fromkeys(name for sample in read.samples or [] for name in sample.scores or {}))
    if not names:
        raise KvatlasError(
            f"The log {str(log)!r} of the task {read.eval.task!r} has no scores; `inspect score` adds them."
        )
    if scorer and scorer not in names:
        raise KvatlasError(f"The log {str(log)!r} has no scorer {scorer!r}; expected: {', '.join(names)}.")
    chosen = scorer or names[0]

    def grade(sample: EvalSample) -> Grade | None:
        score = (sample.scores or {}).get(chosen)
        if score is None:
            return None
        # A dictionary's first entry is what its scorer is about.
        values = score.value if isinstance(score.value, dict) else {chosen: score.value}
        shares = {name: _share(value, f"The sample {sample.id!r} of the log") for name, value in values.items()}
        share = next(iter(shares.values()), None)
        if share is None:
            return None
        cut = sample.output.stop_reason in CUT
        status = Status.TRUNCATED if cut and share < 1 else Status.OK
        further = {name: value for name, value in shares.items() if len(shares) > 1 and value is not None}
        return Grade(share >= 1, share, score.answer, status, further)

    return grade


def _share(value: Any, where: str) -> float | None:
    """A score as a share: letters, truth values, numbers from 0 to 1; None for what was not scored (NaN).

    Raises KvatlasError for other scores, which cannot be Pass@1.
    """
    if isinstance(value, str) and value in _LETTERS:
        return _LETTERS[value]
    if isinstance(value, bool | int | float):
        if math.isnan(value):
            return None
        if 0 <= value <= 1:
            return float(value)
    raise KvatlasError(f"{where} has the score {value!r}; expected numbers from 0 to 1 and the letters C, I, P and N.")


def _setting(samples: Sequence[EvalSample]) -> Setting:
    """The setting that our own provider noted with its answers; `served` for every other model."""
    notes = [(sample.output.metadata or {}).get("kvatlas") for sample in samples if sample.output.choices]
    settings = set()
    for setting in (note["setting"] for note in notes if isinstance(note, dict) and "setting" in note):
        policy, values = setting["policy"], dict(setting["values"])
        if not isinstance(policy, str) or not all(isinstance(value, str | int | float) for value in values.values()):
            raise KvatlasError(f"The log names the policy {policy!r} with {values}; expected a name and plain values.")
        settings.add(Setting.of(policy, **values))
    return settings.pop() if len(settings) == 1 and all(notes) else SERVED


def _traces(
    samples: Sequence[EvalSample], cell: Expected, grade: Callable[[EvalSample], Grade | None]
) -> Iterator[Trace]:
    for sample in samples:
        answered = sample.error is None and bool(sample.output.choices)
        result = grade(sample) if answered else None
        if result is None:
            continue
        message = sample.output.choices[0].message
        parts = [] if isinstance(message.content, str) else message.content
        thinking = "".join(part.reasoning for part in parts if part.type == "reasoning")
        text = f"<think>{thinking}</think>{message.text}" if thinking else message.text
        name = (cell.model, cell.benchmark, str(sample.id), sample.epoch - 1, cell.setting)
        yield Trace(*name, (), text, result, _costs(sample))


def _costs(sample: EvalSample) -> Costs:
    """The costs that the log knows: a provider's cache is its own affair, ours is noted with the answer."""
    used = list(sample.model_usage.values())
    prompt, output = (sum(getattr(usage, name) for usage in used) for name in ("input_tokens", "output_tokens"))
    thought = sum(usage.reasoning_tokens or 0 for usage in used)
    seconds = float(sample.total_time or 0.0)
    if not (math.isfinite(seconds) and min(seconds, prompt, output, thought) >= 0):
        raise KvatlasError(
            f"The sample {sample.id!r} of the log took {seconds} s and {prompt} + {output} tokens ({thought} of "
            "reasoning); expected finite numbers from 0."
        )
    noted = ((sample.output.metadata or {}).get("kvatlas") or {}).get("usage") or {}
    if noted.get("output_tokens") == output:
        # One answer is all that the sample is made of.
        return Costs(**noted)
    known = [count if used else None for count in (prompt, output, thought)]
    return Costs(known[0], known[1], known[2], None, None, None, seconds or None)

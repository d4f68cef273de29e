"""Inspect's logs of our tasks, brought into a run: remote models then stand beside local ones in every comparison.

Answers are graded here, from the text in the log. Of the log's settings only those of sampling are kept: no base
address, no arguments of the model, nothing of the environment.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__
from kvatlas.benchmarks import Benchmark, find
from kvatlas.core import SERVED, Grade, KvatlasError, Problem, Status, Trace, Usage, digest, reason
from kvatlas.results import Expected, Manifest, Store

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalSample

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "reasoning_effort", "reasoning_tokens")
#: Why a model stopped although it was not done.
_CUT = ("max_tokens", "model_length")
_ARCHIVE = (zipfile.BadZipFile, zlib.error)
#: Bytes of a log, unpacked.
MOST_BYTES = 2**29
_OPEN, _CLOSE = "<think>", "</think>"


def import_log(log: Path, run: Path) -> tuple[Expected, int]:
    """Bring the log's answers into the run, new or not; returns the cell that it is now to hold and the traces added.

    Importing again replaces. Raises KvatlasError for a file that is no Inspect log, for a log of another task, and for
    one whose problems are not asked as this version asks them.
    """
    read = _read(log)
    benchmark = _benchmark(read, log)
    problems = _problems(read, benchmark, log)
    given = (read.eval.model_generate_config.model_dump(), read.plan.config.model_dump())
    sampling = {name: config[name] for config in given for name in _SAMPLING if config.get(name) is not None}
    if any(isinstance(value, float) and not math.isfinite(value) for value in sampling.values()):
        raise KvatlasError(f"The log {str(log)!r} was sampled with {sampling}; valid are finite numbers.")
    cell = Expected(
        model=read.eval.model,
        benchmark=benchmark.name,
        setting=SERVED,
        run_key=digest(["inspect", read.eval.model, benchmark.name, benchmark.version, sampling])[:32],
        problems=tuple(problems),
        samples=max(sample.epoch for sample in read.samples or []),
        baseline=True,
    )
    traces = list(_traces(read, cell, benchmark, problems))
    if not traces:
        raise KvatlasError(f"No sample of the log {str(log)!r} has an answer: all ended in an error.")
    with Store.create(run, {"kvatlas": __version__}) as store:
        store.put_manifest(_joined(store, cell, benchmark, problems, {"log": log.name, "sampling": sampling}))
        for trace in traces:
            store.add(cell.run_key, trace)
    return cell, len(traces)


def verdict(benchmark: Benchmark, problem: Problem, text: str, stop: str | None) -> Grade:
    """The grade of a completion: what comes after thinking counts, and a completion cut off is wrong."""
    _, closed, answer = text.rpartition(_CLOSE)
    if stop not in _CUT and (closed or _OPEN not in text):
        return benchmark.grade(problem, answer)
    # With the metrics of an empty answer: Inspect wants the same numbers of every sample.
    nothing = benchmark.grade(problem, "").metrics
    return Grade(False, 0.0, None, Status.TRUNCATED if stop in _CUT else Status.NO_ANSWER, nothing)


def _read(log: Path) -> EvalLog:
    try:
        _check_size(log)
        from inspect_ai.log import read_eval_log

        read = read_eval_log(str(log))
    except ImportError as error:
        raise KvatlasError("Reading Inspect logs needs the extra: pip install 'kvatlas[inspect]'.") from error
    except (LookupError, ValueError, TypeError, OSError, EOFError, RecursionError, *_ARCHIVE) as error:
        raise KvatlasError(f"{str(log)!r} is no Inspect log ({reason(error)}).") from error
    if not read.samples:
        raise KvatlasError(f"The log {str(log)!r} has no samples (its status is {read.status!r}).")
    return read


def _check_size(log: Path) -> None:
    """Before anything is unpacked or imported: whether the log is there and not too much."""
    if not log.is_file():
        raise KvatlasError(f"The log {str(log)!r} is not there.")
    size = log.stat().st_size
    if zipfile.is_zipfile(log):
        with zipfile.ZipFile(log) as archive:
            size = max(size, sum(entry.file_size for entry in archive.infolist()))
    elif log.suffix != ".json":
        raise KvatlasError(f"{str(log)!r} is no Inspect log (it is no archive, and no JSON by its suffix).")
    if size > MOST_BYTES:
        raise KvatlasError(f"The log {str(log)!r} holds {size:,} bytes; valid are up to {MOST_BYTES:,}.")


def _benchmark(read: EvalLog, log: Path) -> Benchmark:
    about = read.eval.metadata or {}
    name, version = about.get("kvatlas_benchmark"), about.get("kvatlas_version")
    if not isinstance(name, str):
        raise KvatlasError(
            f"The log {str(log)!r} is of the task {read.eval.task!r}; valid are logs of kvatlas/seqbench and "
            "kvatlas/benchmark."
        )
    benchmark = find(name)
    if benchmark.version != version:
        raise KvatlasError(
            f"The log {str(log)!r} asks version {version} of {name}; this kvatlas has version {benchmark.version}."
        )
    return benchmark


def _problems(read: EvalLog, benchmark: Benchmark, log: Path) -> dict[str, Problem]:
    """The problems of the log by id, each asked as we ask it."""
    samples = read.samples or []
    wanted = {str(sample.id) for sample in samples}
    # Generated benchmarks have as many problems as are asked for; no log asks more than it has ids or a standard set.
    known = {problem.id: problem for problem in benchmark.problems(None)}
    if not wanted <= known.keys():
        known = {problem.id: problem for problem in benchmark.problems(_highest(wanted) + 1)}
    for sample in samples:
        problem = known.get(str(sample.id))
        if problem is None or _asked(sample) != benchmark.prompt(problem):
            raise KvatlasError(f"The log {str(log)!r} asks {sample.id!r} in another way than {benchmark.name} does.")
    return {str(sample.id): known[str(sample.id)] for sample in samples}


def _highest(ids: set[str]) -> int:
    numbers = [int(number) for id_ in ids if (number := id_.rpartition("-")[2]).isdecimal() and len(number) < 7]
    return max(numbers, default=0)


def _asked(sample: EvalSample) -> str:
    if isinstance(sample.input, str):
        return sample.input
    return "\n".join(message.text for message in sample.input if message.role == "user")


def _traces(read: EvalLog, cell: Expected, benchmark: Benchmark, problems: dict[str, Problem]) -> Iterator[Trace]:
    for sample in read.samples or []:
        if sample.error is not None or not sample.output.choices:
            continue
        message = sample.output.choices[0].message
        text = message.text
        grade = verdict(benchmark, problems[str(sample.id)], text, sample.output.stop_reason)
        thinking = (
            "".join(part.reasoning for part in message.content if part.type == "reasoning")
            if not isinstance(message.content, str)
            else ""
        )
        used = list(sample.model_usage.values())
        prompt, output = (sum(getattr(usage, name) for usage in used) for name in ("input_tokens", "output_tokens"))
        thought = sum(usage.reasoning_tokens or 0 for usage in used)
        seconds = float(sample.total_time or 0.0)
        if not (math.isfinite(seconds) and min(seconds, prompt, output, thought) >= 0):
            raise KvatlasError(
                f"The sample {sample.id!r} of the log took {seconds} s and {prompt} + {output} tokens ({thought} of "
                "reasoning); valid are finite numbers from 0."
            )
        yield Trace(
            model=cell.model,
            benchmark=cell.benchmark,
            problem=str(sample.id),
            sample=sample.epoch - 1,
            setting=cell.setting,
            tokens=(),
            text=f"{_OPEN}{thinking}{_CLOSE}{text}" if thinking else text,
            grade=grade,
            # As a cache that keeps everything would hold; what the provider's does is not known.
            usage=Usage(
                prompt_tokens=prompt,
                output_tokens=output,
                thinking_tokens=thought,
                peak_kv_tokens=prompt + output,
                mean_kv_tokens=prompt + output / 2,
                compressions=0,
                seconds=seconds,
            ),
        )


def _joined(
    store: Store, cell: Expected, benchmark: Benchmark, problems: dict[str, Problem], source: dict[str, Any]
) -> Manifest:
    """What the run is to hold with this cell, in place of an earlier one of the same name."""
    try:
        manifest = store.manifest()
    except KvatlasError:
        manifest = Manifest((), (), {}, {"kvatlas": __version__})
    name = cell.model, cell.benchmark, cell.setting
    others = tuple(each for each in manifest.expected if (each.model, each.benchmark, each.setting) != name)
    if any(each.benchmark == cell.benchmark and set(each.problems) != set(cell.problems) for each in others):
        raise KvatlasError(
            f"The run holds other problems of {cell.benchmark} than the log; import it into a run of its own."
        )
    about = {id_: dict(problem.about) for id_, problem in problems.items() if problem.about}
    imported = {**manifest.provenance.get("imported", {}), f"{cell.model} {cell.benchmark}": source}
    return replace(
        manifest,
        expected=(*others, cell),
        provenance={**manifest.provenance, "imported": imported},
        about={**manifest.about, benchmark.name: about} if about else manifest.about,
    )

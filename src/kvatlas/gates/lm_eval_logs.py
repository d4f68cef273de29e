"""Samples of lm-eval (`--log_samples`): one file for each task, and the results file beside it.

A row has a document, the prompts, the responses and the values of the metrics under one filter. Several logs of one
task under equal conditions are its samples, in the order of their dates: lm-eval repeats a task by another seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason
from kvatlas.gates.outcomes import (
    AnswerName,
    AnswerTexts,
    GradedAnswer,
    Side,
    SideOptions,
    digest_of,
    file_digest,
    fingerprint_of,
    score_of,
)

#: The name of a file of samples: its task and its date.
NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
#: What lm-eval's own filters return where they find nothing.
_INVALID = "[invalid]"
#: The longest condition that is printed.
_LONGEST = 120


@dataclass(frozen=True)
class SampleLog:
    """A file of samples with its task, its date, and the results file beside it, {} without one."""

    path: Path
    task: str
    date: str
    results: Mapping[str, Any]


def is_row(row: Any) -> bool:
    """Return whether this is a row of lm-eval's samples."""
    return isinstance(row, dict) and "doc_id" in row and ("resps" in row or "doc" in row)


def files_in(folder: Path) -> list[Path]:
    """Return the files of samples in a folder and in the folders below it."""
    return sorted(path for path in folder.rglob("samples_*.jsonl") if path.is_file())


def side_of_samples(path: Path, name: str, options: SideOptions) -> Side:
    """Return the side of a file of samples, or of a folder with some."""
    logs = _logs_of_tasks(path, options)
    grading = {}
    conditions = {}
    for task, of_task in logs.items():
        grading[task] = _grading(of_task[0], options)
        conditions[task] = _shared_conditions(of_task, grading[task], f"{name!r} ({task})")

    # A note on metrics and filters that are there, too: one for all tasks with the same.
    tasks_by_grading: dict[SampleGrading, list[str]] = {}
    for task, of_task_grading in grading.items():
        tasks_by_grading.setdefault(of_task_grading, []).append(task)
    notes = []
    for counted, tasks in tasks_by_grading.items():
        others = [f"metric {metric}" for metric in counted.metrics if metric != counted.metric]
        others += [f"filter {filter_}" for filter_ in counted.filters if filter_ != counted.filter]
        if others:
            chosen = f"{counted.metric}, filter {counted.filter}"
            notes.append(f"{', '.join(tasks)}: compared by {chosen}; the log also has {', '.join(others)}")
    notes += [f"{task} has no results file beside it" for task, of_task in logs.items() if not of_task[0].results]

    every_log = list(chain.from_iterable(logs.values()))
    temperatures = {values.get("temperature", "0") for values in conditions.values()}
    return Side(
        name,
        "lm-eval",
        partial(_sample_answers, logs, grading),
        partial(_sample_texts, logs, grading),
        conditions,
        length_unit="characters",
        independent="0" not in temperatures,
        begun=min(log.date for log in every_log),
        identity=file_digest(log.path for log in every_log),
        notes=tuple(notes),
    )


def _logs_of_tasks(path: Path, options: SideOptions) -> dict[str, list[SampleLog]]:
    """Return the logs of each task in the order of their dates."""
    files = [path] if path.is_file() else files_in(path)
    folders = {file.parent for file in files}
    if len(folders) > 1:
        named = ", ".join(sorted(str(folder) for folder in folders))
        raise KvatlasError(f"{str(path)!r} holds lm-eval's samples in {len(folders)} folders ({named}); name one.")

    every = [_sample_log(file) for file in files]
    logs: dict[str, list[SampleLog]] = {}
    for log in sorted(every, key=lambda log: log.date):
        if options.has_task(log.task):
            logs.setdefault(log.task, []).append(log)
    lacking = ", ".join(task for task in options.tasks if task not in logs)
    if lacking:
        tasks = ", ".join(sorted({log.task for log in every}))
        raise KvatlasError(f"{str(path)!r} has no task {lacking!r}; there are: {tasks}.")
    return logs


def _sample_log(file: Path) -> SampleLog:
    """Return the log of a file of samples, with the results file beside it."""
    match = NAME.fullmatch(file.name)
    if match is None:
        return SampleLog(file, file.stem, "", {})
    results_file = file.with_name(f"results_{match['date']}.json")
    results = {}
    if results_file.is_file():
        try:
            results = json.loads(results_file.read_text("utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise KvatlasError(f"{str(results_file)!r} is no results file of lm-eval ({reason(error)}).") from error
    return SampleLog(file, match["task"], match["date"], results if isinstance(results, dict) else {})


def _log_rows(log: SampleLog) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a log with the name of each for a sentence."""
    with log.path.open(encoding="utf-8") as file:
        for row_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"Line {row_number} of {log.path.name}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise KvatlasError(f"{where} is no JSON ({reason(error)}): the log is cut off or damaged.") from error
            if not is_row(row):
                raise KvatlasError(f"{where} is no sample of lm-eval: it has no doc_id, or neither resps nor doc.")
            yield where, row


# -- metric and filter -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleGrading:
    """The metric and the filter that count, and all that the log has."""

    metric: str
    filter: str
    metrics: tuple[str, ...]
    filters: tuple[str, ...]


def _grading(log: SampleLog, options: SideOptions) -> SampleGrading:
    """Return the metric and the filter of a log: those chosen, else the first."""
    filters: dict[str, tuple[str, ...]] = {}
    for _, row in _log_rows(log):
        # Rows lie filter by filter, all documents of one before the next.
        name = str(row.get("filter", "none"))
        if name not in filters:
            # A log that does not list its metrics has the usual ones.
            names = row.get("metrics")
            if not isinstance(names, list):
                names = [usual for usual in ("acc", "acc_norm", "exact_match") if usual in row]
            filters[name] = tuple(map(str, names))
    if not filters:
        raise KvatlasError(f"{log.path.name} is empty.")

    chosen_filter = options.filter or next(iter(filters))
    if chosen_filter not in filters:
        raise KvatlasError(f"{log.task} has no filter {options.filter!r}; there are: {', '.join(filters)}.")
    metrics = filters[chosen_filter]
    metric = options.metric or next(iter(metrics), "")
    if metric not in metrics:
        raise KvatlasError(f"{log.task} has no metric {metric!r}; there are: {', '.join(metrics) or 'none'}.")

    higher = log.results.get("higher_is_better", {}).get(log.task, {}).get(metric)
    if higher is False:
        raise KvatlasError(f"Of {metric!r} of {log.task} less is better; name a metric of right answers with --metric.")
    return SampleGrading(metric, chosen_filter, metrics, tuple(filters))


# -- conditions --------------------------------------------------------------------------------------------------------


#: Conditions in which several logs of one side may differ: such logs are samples.
_FREE = ("seed",)


def _shared_conditions(logs: Sequence[SampleLog], grading: SampleGrading, where: str) -> dict[str, str]:
    """Return the conditions that logs of one task share; KvatlasError names the first that differs."""
    first = _conditions_of_log(logs[0], grading)
    for log in logs[1:]:
        other = _conditions_of_log(log, grading)
        for condition in first.keys() | other.keys():
            values = (first.get(condition), other.get(condition))
            if condition not in _FREE and values[0] != values[1]:
                raise KvatlasError(
                    f"{where} holds logs of one task under unlike conditions: {condition} is {values[0]!r} in "
                    f"{logs[0].path.name} and {values[1]!r} in {log.path.name}. Name one of them."
                )
    return {name: value for name, value in first.items() if name not in _FREE or len(logs) == 1}


def _conditions_of_log(log: SampleLog, grading: SampleGrading) -> dict[str, str]:
    """Return what a results file and the first row say about the conditions of a log."""
    results = log.results
    config = results.get("config") or {}
    values: dict[str, Any] = {"metric": grading.metric, "filter": grading.filter}
    values["task version"] = results.get("versions", {}).get(log.task)
    values["few-shot examples"] = results.get("n-shot", {}).get(log.task)
    values["system message"] = results.get("system_instruction_sha")
    values["chat template"] = results.get("chat_template_sha")
    values["model type"] = config.get("model")

    arguments = config.get("model_args")
    if isinstance(arguments, str):
        arguments = dict(pair.partition("=")[::2] for pair in arguments.split(","))
    for name, value in (arguments or {}).items():
        values["model" if name == "pretrained" else f"model argument {name}"] = value

    values["data type"] = config.get("model_dtype")
    values["weights"] = config.get("model_sha")
    values["problems at most"] = config.get("limit")
    values["seed"] = config.get("torch_seed")
    values["lm-eval"] = results.get("lm_eval_version")
    values["transformers"] = results.get("transformers_version")

    # The arguments of a generation; greedy ones have the temperature 0, and so have log-likelihoods.
    _, row = next(_log_rows(log))
    generation = _first_arguments(row).get("arg_1")
    temperature: Any = 0
    if isinstance(generation, dict):
        named = {f"generation {name}": value for name, value in generation.items()}
        temperature = named.pop("generation temperature", None)
        do_sample = named.pop("generation do_sample", None)
        values["most new tokens"] = named.pop("generation max_gen_toks", None)
        values |= named
        if do_sample is False or (not do_sample and not temperature):
            temperature = 0
    values["temperature"] = "the model's" if temperature is None else f"{temperature:g}"
    return {name: str(value)[:_LONGEST] for name, value in values.items() if value not in (None, "")}


def _first_arguments(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the first request of a row: its prompt and how it was generated; {} without them."""
    arguments = row.get("arguments")
    first = arguments.get("gen_args_0") if isinstance(arguments, dict) else None
    return first if isinstance(first, dict) else {}


# -- answers -----------------------------------------------------------------------------------------------------------


def _sample_answers(
    logs: Mapping[str, Sequence[SampleLog]], grading: Mapping[str, SampleGrading]
) -> Iterator[GradedAnswer]:
    for task, of_task in logs.items():
        metric = grading[task].metric
        for sample, log in enumerate(of_task):
            for where, row in _log_rows(log):
                if str(row.get("filter", "none")) != grading[task].filter:
                    continue
                if metric not in row:
                    raise KvatlasError(f"{where} has no {metric!r}, which other rows have.")
                text = _response_text(row)
                has_no_answer = row.get("filtered_resps") == [_INVALID]
                if text == "" and "resps" in row and _is_generation(row):
                    has_no_answer = True
                yield GradedAnswer(
                    task,
                    str(row["doc_id"]),
                    sample,
                    score_of(row[metric], f"{where}: {metric!r}"),
                    _document_digest(row),
                    _prompt_digest(row),
                    fingerprint_of(text),
                    "no answer" if has_no_answer else "",
                    float(len(text)) if _is_generation(row) else float("nan"),
                )


def _document_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of document and target, from their texts or as the log has them."""
    if "doc" in row:
        return digest_of(row["doc"], row.get("target"))
    if "doc_hash" in row:
        return digest_of(row["doc_hash"], row.get("target_hash"))
    return ""


def _prompt_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of the texts that the model read."""
    arguments = row.get("arguments")
    if not isinstance(arguments, dict):
        return str(row.get("prompt_hash", ""))
    texts = []
    for values in arguments.values():
        if isinstance(values, dict):
            texts += [value for value in values.values() if not isinstance(value, dict)]
    return digest_of(texts)


def _is_generation(row: Mapping[str, Any]) -> bool:
    return isinstance(_first_response(row), str)


def _first_response(row: Mapping[str, Any]) -> Any:
    response = row.get("resps")
    while isinstance(response, list) and response:
        response = response[0]
    return response


def _response_text(row: Mapping[str, Any]) -> str:
    """Return the text of the first response; of log-likelihoods their numbers, which tell logs apart."""
    response = _first_response(row)
    return response if isinstance(response, str) else json.dumps(row.get("resps"))


def _sample_texts(
    logs: Mapping[str, Sequence[SampleLog]], grading: Mapping[str, SampleGrading], names: Collection[AnswerName]
) -> dict[AnswerName, AnswerTexts]:
    requested = set(names)
    texts: dict[AnswerName, AnswerTexts] = {}
    for task, of_task in logs.items():
        for sample, log in enumerate(of_task):
            for _, row in _log_rows(log):
                name = (task, str(row["doc_id"]), sample)
                is_counted = str(row.get("filter", "none")) == grading[task].filter
                if name not in requested or not is_counted or not _is_generation(row):
                    continue
                prompt = _first_arguments(row).get("arg_0")
                texts[name] = (prompt if isinstance(prompt, str) else "", _response_text(row))
    return texts

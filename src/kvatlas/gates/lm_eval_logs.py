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
    Answer,
    AnswerName,
    Choice,
    Side,
    Texts,
    agreed,
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
class Log:
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


def side_of(path: Path, name: str, choice: Choice) -> Side:
    """Return the side of a file of samples, or of a folder with some."""
    logs = _logs(path, choice)
    grading = {task: _grading(of_task[0], choice) for task, of_task in logs.items()}
    conditions = {task: _conditions(task, of_task, grading[task], name) for task, of_task in logs.items()}
    notes = _choice_notes(grading)
    notes += [f"{task} has no results file beside it" for task, of_task in logs.items() if not of_task[0].results]
    every_log = list(chain.from_iterable(logs.values()))
    temperatures = {values.get("temperature", "0") for values in conditions.values()}
    return Side(
        name,
        "lm-eval",
        partial(_answers, logs, grading),
        partial(_texts, logs, grading),
        conditions,
        length_unit="characters",
        independent="0" not in temperatures,
        begun=min(log.date for log in every_log),
        identity=file_digest(log.path for log in every_log),
        notes=tuple(notes),
    )


def _logs(path: Path, choice: Choice) -> dict[str, list[Log]]:
    """Return the logs of each task in the order of their dates."""
    files = [path] if path.is_file() else files_in(path)
    folders = {file.parent for file in files}
    if len(folders) > 1:
        named = ", ".join(sorted(str(folder) for folder in folders))
        raise KvatlasError(f"{str(path)!r} holds lm-eval's samples in {len(folders)} folders ({named}); name one.")
    every = [_log(file) for file in files]
    logs: dict[str, list[Log]] = {}
    for log in sorted(every, key=lambda log: log.date):
        if choice.has_task(log.task):
            logs.setdefault(log.task, []).append(log)
    lacking = ", ".join(task for task in choice.tasks if task not in logs)
    if lacking:
        tasks = ", ".join(sorted({log.task for log in every}))
        raise KvatlasError(f"{str(path)!r} has no task {lacking!r}; there are: {tasks}.")
    return logs


def _log(file: Path) -> Log:
    """Return the log of a file of samples."""
    match = NAME.fullmatch(file.name)
    if match is None:
        return Log(file, file.stem, "", {})
    return Log(file, match["task"], match["date"], _results(file, match["date"]))


def _results(samples: Path, date: str) -> Mapping[str, Any]:
    file = samples.with_name(f"results_{date}.json")
    if not date or not file.is_file():
        return {}
    try:
        results = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise KvatlasError(f"{str(file)!r} is no results file of lm-eval ({reason(error)}).") from error
    return results if isinstance(results, dict) else {}


def _rows(log: Log) -> Iterator[tuple[str, dict[str, Any]]]:
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
class Grading:
    """The metric and the filter that count, and all that the log has."""

    metric: str
    filter: str
    metrics: tuple[str, ...]
    filters: tuple[str, ...]


def _grading(log: Log, choice: Choice) -> Grading:
    """Return the metric and the filter of a log: those chosen, else the first."""
    filters: dict[str, tuple[str, ...]] = {}
    for _, row in _rows(log):
        # Rows lie filter by filter, all documents of one before the next.
        filters.setdefault(str(row.get("filter", "none")), _metric_names(row))
    if not filters:
        raise KvatlasError(f"{log.path.name} is empty.")
    chosen_filter = choice.filter or next(iter(filters))
    if chosen_filter not in filters:
        raise KvatlasError(f"{log.task} has no filter {choice.filter!r}; there are: {', '.join(filters)}.")
    metrics = filters[chosen_filter]
    metric = choice.metric or next(iter(metrics), "")
    if metric not in metrics:
        raise KvatlasError(f"{log.task} has no metric {metric!r}; there are: {', '.join(metrics) or 'none'}.")
    higher = log.results.get("higher_is_better", {}).get(log.task, {}).get(metric)
    if higher is False:
        raise KvatlasError(f"Of {metric!r} of {log.task} less is better; name a metric of right answers with --metric.")
    return Grading(metric, chosen_filter, metrics, tuple(filters))


def _metric_names(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = row.get("metrics")
    if isinstance(names, list):
        return tuple(str(name) for name in names)
    # Logs of earlier versions do not list them.
    usual = ("acc", "acc_norm", "exact_match")
    return tuple(name for name in usual if name in row)


def _choice_notes(grading: Mapping[str, Grading]) -> list[str]:
    """Return notes on metrics and filters that were there, too: one for all tasks of the same choice."""
    tasks: dict[Grading, list[str]] = {}
    for task, choice in grading.items():
        if len(choice.metrics) > 1 or len(choice.filters) > 1:
            tasks.setdefault(choice, []).append(task)
    notes = []
    for choice, names in tasks.items():
        others = [f"metric {name}" for name in choice.metrics if name != choice.metric]
        others += [f"filter {name}" for name in choice.filters if name != choice.filter]
        chosen = f"{choice.metric}, filter {choice.filter}"
        notes.append(f"{', '.join(names)}: compared by {chosen}; the log also has {', '.join(others)}")
    return notes


# -- conditions --------------------------------------------------------------------------------------------------------


def _conditions(task: str, logs: Sequence[Log], grading: Grading, side: str) -> dict[str, str]:
    every = [(log.path.name, _conditions_of_log(log, grading)) for log in logs]
    return agreed(every, f"{side!r} ({task})")


def _conditions_of_log(log: Log, grading: Grading) -> dict[str, str]:
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
    values |= _generation(next(_rows(log))[1])
    return {name: str(value)[:_LONGEST] for name, value in values.items() if value not in (None, "")}


def _generation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a generation; greedy ones have the temperature 0, and so have log-likelihoods."""
    first = (row.get("arguments") or {}).get("gen_args_0") if isinstance(row.get("arguments"), dict) else None
    arguments = first.get("arg_1") if isinstance(first, dict) else None
    if not isinstance(arguments, dict):
        return {"temperature": "0"}
    values = {f"generation {name}": value for name, value in arguments.items()}
    temperature = values.pop("generation temperature", None)
    do_sample = values.pop("generation do_sample", None)
    values["most new tokens"] = values.pop("generation max_gen_toks", None)
    if do_sample is False or (not do_sample and not temperature):
        temperature = 0
    values["temperature"] = "the model's" if temperature is None else f"{temperature:g}"
    return values


# -- answers -----------------------------------------------------------------------------------------------------------


def _answers(logs: Mapping[str, Sequence[Log]], grading: Mapping[str, Grading]) -> Iterator[Answer]:
    for task, of_task in logs.items():
        for sample, log in enumerate(of_task):
            for where, row in _rows(log):
                if str(row.get("filter", "none")) == grading[task].filter:
                    yield _answer(row, task, sample, grading[task].metric, where)


def _answer(row: Mapping[str, Any], task: str, sample: int, metric: str, where: str) -> Answer:
    if metric not in row:
        raise KvatlasError(f"{where} has no {metric!r}, which other rows have.")
    text = _text(row)
    filtered = row.get("filtered_resps")
    has_no_answer = filtered == [_INVALID] or (text == "" and "resps" in row and _is_generation(row))
    return Answer(
        task,
        str(row["doc_id"]),
        sample,
        score_of(row[metric], f"{where}: {metric!r}"),
        _content(row),
        _prompt(row),
        fingerprint_of(text),
        "no answer" if has_no_answer else "",
        float(len(text)) if _is_generation(row) else float("nan"),
    )


def _content(row: Mapping[str, Any]) -> str:
    """Return the digest of document and target, from their texts or as the log has them."""
    if "doc" in row:
        return digest_of(row["doc"], row.get("target"))
    if "doc_hash" in row:
        return digest_of(row["doc_hash"], row.get("target_hash"))
    return ""


def _prompt(row: Mapping[str, Any]) -> str:
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


def _text(row: Mapping[str, Any]) -> str:
    """Return the text of the first response; of log-likelihoods their numbers, which tell logs apart."""
    response = _first_response(row)
    return response if isinstance(response, str) else json.dumps(row.get("resps"))


def _texts(
    logs: Mapping[str, Sequence[Log]], grading: Mapping[str, Grading], names: Collection[AnswerName]
) -> dict[AnswerName, Texts]:
    wanted = set(names)
    texts: dict[AnswerName, Texts] = {}
    for task, of_task in logs.items():
        for sample, log in enumerate(of_task):
            for _, row in _rows(log):
                name = (task, str(row["doc_id"]), sample)
                is_counted = str(row.get("filter", "none")) == grading[task].filter
                if name in wanted and is_counted and _is_generation(row):
                    texts[name] = (_question(row), _text(row))
    return texts


def _question(row: Mapping[str, Any]) -> str:
    arguments = row.get("arguments")
    first = arguments.get("gen_args_0") if isinstance(arguments, dict) else None
    prompt = first.get("arg_0") if isinstance(first, dict) else None
    return prompt if isinstance(prompt, str) else ""

"""Samples of lm-eval (`--log_samples`): one file for each task, and the results file of its date beside it.

A row has a document, the prompts, the responses and the values of the metrics under one filter. Several logs of one
task under equal conditions at a temperature above 0 are its samples: lm-eval repeats a task by another seed. With
`repeats` a row has several responses, which are samples where the log has a grade of each.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.problem_files import open_text
from kvatlas.core import KvatlasError, Status, reason, refusal
from kvatlas.gates.cards import MOST_NEW_TOKENS, NONE, UNKNOWN, Card, card_entries, check_direction, entry_text
from kvatlas.gates.outcomes import GradedAnswer, Side, SideOptions, TaskLog, digest_of, reference_digest, side_of_logs
from kvatlas.integrations.answer_rows import number_of, score_of

#: The name of a file of samples: its task and its date.
NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl(\.gz)?")
#: Errors of a file that is no log.
_DAMAGE = (ValueError, RecursionError, OSError, EOFError, zlib.error)
#: What lm-eval's own filters return where they find nothing.
_INVALID = "[invalid]"
#: The address of a function in a task that is written out.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

#: Fields of a task that say how it grades, and those that rows and the call name.
_GRADING = ("filter_list", "metric_list", "process_results")
_OF_ROWS = ("generation_kwargs", "metadata")
#: What fields of a call are called here, and those that change no answer or stand elsewhere, as examples in prompts.
_CALLED = {"model": "model type", "limit": "problems at most", "torch_seed": "seed"}
_LEFT_OUT = (
    *("model_args", "gen_kwargs", "batch_sizes", "bootstrap_iters", "use_cache", "device", "model_num_parameters"),
    *("random_seed", "numpy_seed", "fewshot_seed"),
)

#: Arguments of a model whose values are not shown.
_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


@dataclass(frozen=True)
class SampleLog:
    """A file of samples with its task, its date, and the results file of that date ({} without one)."""

    path: Path
    task: str
    date: str
    results: Mapping[str, Any]

    def of_results(self, *names: str) -> Mapping[str, Any]:
        """Return an object inside the results file, {} if it is not there; KvatlasError if it is of another type."""
        value = self.results
        for name in names:
            value = value.get(name, {})
            if not isinstance(value, dict):
                raise KvatlasError(
                    f"The results file of {self.path.name} has {name} = {str(value)[:60]!r}; expected an object, as "
                    "lm-eval writes it."
                )
        return value


def is_row(row: Any) -> bool:
    """Return whether this is a row of lm-eval's samples."""
    return isinstance(row, dict) and "doc_id" in row and ("resps" in row or "doc" in row)


def side_of_samples(files: Sequence[Path], name: str, options: SideOptions) -> Side:
    """Return the side of files of samples."""
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        named = ", ".join(folders)
        raise KvatlasError(f"{name!r} holds lm-eval's samples in {len(folders)} folders ({named}); name one.")

    logs = [_sample_log(file) for file in files]
    options.check_tasks(name, [log.task for log in logs])
    task_logs = []
    for log in logs:
        if options.has_task(log.task):
            grading = _scan_log(log, options)
            card = _card_of_log(log, grading)
            read = partial(_sample_answers, log, grading)
            notes = list(_grading_notes(grading))
            task_logs.append(TaskLog(log.path, log.task, log.date, log.date, card, grading.samples, read, notes))
    return side_of_logs(task_logs, name, "lm-eval", "characters")


def _grading_notes(grading: SampleGrading) -> Iterator[str]:
    """Yield what a log could be compared by, too, and that it has responses without a grade."""
    others = [f"metric {metric}" for metric in grading.metrics if metric != grading.metric]
    others += [f"filter {name}" for name in grading.filters if name != grading.filter]
    if others:
        yield f"compared by {grading.metric}, filter {grading.filter}; the log also has {', '.join(others)}"
    if grading.is_mean:
        yield f"each score is the mean of {grading.responses} responses, as the log has no other"
    elif grading.responses > 1 and grading.samples == 1:
        yield f"each score is of one answer, made of {grading.responses} responses: do the others count nowhere?"


def _sample_log(file: Path) -> SampleLog:
    """Return the log of a file of samples, with the results file of its date: results_DATE.json or STEM_DATE.json."""
    match = NAME.fullmatch(file.name)
    if match is None:
        stem = file.name.removesuffix(".gz").removesuffix(".jsonl")
        return SampleLog(file, stem.removeprefix("samples_"), "", {})

    found = {}
    for path in sorted(file.parent.glob(f"*_{match['date']}.json*")):
        if path.name.startswith("samples_"):
            continue
        with refusal(f"{str(path)!r} is no results file of lm-eval", *_DAMAGE), open_text(path) as opened:
            results = json.load(opened)
        if isinstance(results, dict) and results:
            found[path.name] = results
    if len(found) > 1:
        raise KvatlasError(f"{file.name} has several results files beside it ({', '.join(found)}); keep its own.")
    return SampleLog(file, match["task"], match["date"], next(iter(found.values()), {}))


def _log_rows(log: SampleLog) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a log with the name of each for a sentence."""
    with open_text(log.path) as file:
        row_number = 0
        try:
            for row_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not is_row(row):
                    raise KvatlasError(
                        f"Line {row_number} of {log.path.name} is no sample of lm-eval: it has no doc_id, or neither "
                        "resps nor doc."
                    )
                yield f"Line {row_number} of {log.path.name}", row
        except _DAMAGE as error:
            raise KvatlasError(
                f"Line {row_number} of {log.path.name} is no JSON ({reason(error)}): the log is cut off or damaged."
            ) from error


# -- metric, filter, and what rows say ---------------------------------------------------------------------------------


@dataclass
class SampleGrading:
    """The metric and the filter that count, all that the log has, and what its rows say in common.

    `responses` is the largest number of responses in a row. Of several, each has a grade of its own if the metric is a
    list of them, or if filtered responses that are the target give the score of every row; else a score is their mean.
    """

    metric: str
    filter: str
    metrics: tuple[str, ...]
    filters: tuple[str, ...] = ()
    responses: int = 1
    is_listed: bool = True
    is_by_target: bool = True
    is_over_all: bool = False
    #: The values of each argument of a generation over all rows; None where a row lacks its arguments.
    generation: dict[str, set[str]] | None = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of samples in a row."""
        return self.responses if self.is_listed or self.is_by_target else 1

    @property
    def is_mean(self) -> bool:
        """True if each score is the mean of several responses without a grade of each."""
        return self.responses > 1 and self.samples == 1 and self.is_over_all

    def add(self, row: Mapping[str, Any]) -> None:
        """Take what a row says into account."""
        count = len(_responses(row))
        if count > 1:
            self.responses = max(self.responses, count)
            score = row.get(self.metric)
            filtered = _filtered(row)
            by_target = _grades_by_target(row)
            self.is_listed &= isinstance(score, list) and len(score) == count
            mean = sum(by_target) / len(by_target) if by_target else -1.0
            self.is_by_target &= not isinstance(score, list) and abs(number_of(score) - mean) < 1e-6
            self.is_over_all |= len(filtered) > 1 or isinstance(score, list) or 0 < number_of(score) < 1

        requests = _requests(row)
        if not requests:
            self.generation = None
        elif self.generation is not None:
            for name, value in _generation(requests[0]).items():
                self.generation.setdefault(name, set()).add(value)

    def grades(self, row: Mapping[str, Any], where: str) -> list[float]:
        """Return the grade of each sample in a row."""
        score = row[self.metric]
        scores = score if self.samples > 1 and self.is_listed and isinstance(score, list) else [score]
        if self.samples > 1 and not self.is_listed and len(_responses(row)) > 1:
            scores = _grades_by_target(row)
        return [score_of(each, f"{where}: {self.metric!r}") for each in scores]


def _scan_log(log: SampleLog, options: SideOptions) -> SampleGrading:
    """Return the metric and the filter of a log (those chosen, else the first), and what all its rows say."""
    filters: dict[str, tuple[str, ...]] = {}
    found = None
    for _, row in _log_rows(log):
        # Rows lie filter by filter, all documents of one before the next.
        name = str(row.get("filter", "none"))
        if name not in filters:
            # A log that does not list its metrics has the usual ones.
            names = row.get("metrics")
            if not isinstance(names, list):
                names = [usual for usual in ("acc", "acc_norm", "exact_match") if usual in row]
            filters[name] = tuple(map(str, names))
        if name == (options.filter or next(iter(filters))):
            if found is None:
                metrics = filters[name]
                found = SampleGrading(options.metric or next(iter(metrics), ""), name, metrics)
            found.add(row)

    if not filters:
        raise KvatlasError(f"{log.path.name} is empty.")
    if found is None:
        raise KvatlasError(f"{log.task} has no filter {options.filter!r}; there are: {', '.join(filters)}.")
    if found.metric not in found.metrics:
        raise KvatlasError(
            f"{log.task} has no metric {found.metric!r}; there are: {', '.join(found.metrics) or 'none'}."
        )
    found.filters = tuple(filters)
    higher = log.of_results("higher_is_better", log.task).get(found.metric)
    check_direction(found.metric, log.task, options.allow, higher)
    return found


def _requests(row: Mapping[str, Any]) -> list[list[Any]]:
    """Return the arguments of each request of a row, [] if the log does not have them; older logs have lists."""
    arguments = row.get("arguments")
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if not isinstance(arguments, list):
        return []
    requests = [list(each.values()) if isinstance(each, dict) else each for each in arguments]
    if requests and isinstance(requests[0], str):
        # The arguments of a single request.
        requests = [requests]
    return requests if all(isinstance(each, list) and each for each in requests) else []


def _generation(request: Sequence[Any]) -> dict[str, str]:
    """Return the settings of a generation; greedy ones have the temperature 0, and so have log-likelihoods."""
    settings = next((value for value in request[1:] if isinstance(value, dict)), None)
    if settings is None:
        return {"temperature": "0"}
    named = dict(settings)
    temperature = named.pop("temperature", None)
    do_sample = named.pop("do_sample", None)
    if do_sample is False or (not do_sample and not temperature):
        temperature = 0
    text = "the model's"
    if temperature is not None:
        degrees = number_of(temperature)
        text = entry_text(degrees if degrees >= 0 else temperature)
    limits = {MOST_NEW_TOKENS: named.pop("max_gen_toks", None), "stop sequences": named.pop("until", None)}
    values = {"temperature": text, **card_entries({**limits, **named})}
    return {name: value for name, value in values.items() if value != NONE}


def _responses(row: Mapping[str, Any]) -> list[str]:
    """Return the texts that answer a row, [] for log-likelihoods."""
    responses = _innermost(row.get("resps"))
    if isinstance(responses, str):
        return [responses]
    return responses if isinstance(responses, list) and all(isinstance(text, str) for text in responses) else []


def _filtered(row: Mapping[str, Any]) -> list[Any]:
    """Return the filtered responses to a row: one, or one for each response."""
    filtered = _innermost(row.get("filtered_resps"))
    return filtered if isinstance(filtered, list) else []


def _innermost(value: Any) -> Any:
    """Return the first of nested lists that holds no list."""
    while isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return value


def _grades_by_target(row: Mapping[str, Any]) -> list[float]:
    """Return 1 for each filtered response that is the target, else 0; [] without one for each response."""
    filtered = _filtered(row)
    if len(filtered) != len(_responses(row)) or "target" not in row:
        return []
    target = str(row["target"]).strip()
    return [float(str(text).strip() == target) for text in filtered]


# -- the card ----------------------------------------------------------------------------------------------------------


def _card_of_log(log: SampleLog, grading: SampleGrading) -> Card:
    """Return what a results file and the rows say about the conditions of a log."""
    values = {"metric": grading.metric, "filter": grading.filter, "solver": NONE, "task arguments": NONE}
    sampling = None
    if grading.generation is not None:
        sampling = {name: " and ".join(sorted(found)) for name, found in grading.generation.items()}
    if not log.results:
        return Card(values, sampling)

    results = log.results
    config = log.of_results("config")
    for name, key in (("task version", "versions"), ("few-shot examples", "n-shot")):
        by_task = log.of_results(key)
        values[name] = entry_text(by_task[log.task]) if log.task in by_task else UNKNOWN
    for name, key in (("system message", "system_instruction"), ("chat template", "chat_template")):
        if key in results or f"{key}_sha" in results:
            values[name] = entry_text(results.get(f"{key}_sha") or results.get(key))

    # The rules by which the task grades, and all else of it; a function's address differs from call to call.
    task_config = log.of_results("configs", log.task)
    if task_config:
        rules = {name: task_config.get(name) for name in _GRADING}
        others = {name: value for name, value in task_config.items() if name not in (*_GRADING, *_OF_ROWS)}
        for name, entries in (("grading rules", rules), ("task configuration", others)):
            values[name] = digest_of(_ADDRESS.sub("", json.dumps(entries, default=str, sort_keys=True)))[:8]

    arguments = config.get("model_args")
    if isinstance(arguments, str):
        arguments = dict(pair.partition("=")[::2] for pair in arguments.split(",") if pair)
    if not isinstance(arguments, dict | None):
        raise KvatlasError(
            f"The results file of {log.path.name} has model_args = {str(arguments)[:60]!r}; expected an object or a "
            "text, as lm-eval writes it."
        )
    for name, value in (arguments or {}).items():
        text = digest_of(value)[:8] if _SECRET.search(name) else entry_text(value)
        values["model" if name in ("pretrained", "model") else f"model argument {name}"] = text
    if "model" not in values and results.get("model_name"):
        values["model"] = entry_text(results["model_name"])
    others = {
        _CALLED.get(name, name.replace("_", " ")): value for name, value in config.items() if name not in _LEFT_OUT
    }
    others["examples as turns"] = results.get("fewshot_as_multiturn")
    others["lm-eval"] = results.get("lm_eval_version")
    others["transformers"] = results.get("transformers_version")
    return Card({**card_entries(others), **values}, sampling)


# -- answers -----------------------------------------------------------------------------------------------------------


def _sample_answers(log: SampleLog, grading: SampleGrading, begin: int) -> Iterator[GradedAnswer]:
    """Yield the answers under the filter that counts."""
    for where, row in _log_rows(log):
        if str(row.get("filter", "none")) != grading.filter:
            continue
        if grading.metric not in row:
            raise KvatlasError(f"{where} has no {grading.metric!r}, which other rows have.")
        # Document and target by their texts, or as the log has them.
        question = str(row.get("doc_hash") or "")
        reference = str(row.get("target_hash") or "")
        if "doc" in row:
            question = digest_of(row["doc"])
            reference = reference_digest(row.get("target"))
        # All that the model read, but not the settings of the generation.
        requests = _requests(row)
        read = [value for value in chain.from_iterable(requests) if not isinstance(value, dict)]
        prompt = digest_of(read) if read else ""
        asked = str(requests[0][0]) if requests else ""

        texts = _responses(row)
        grades = grading.grades(row, where)
        for sample, score in enumerate(grades):
            # The responses and the filtered ones of this sample.
            written = texts if grading.is_mean else texts[:1]
            filtered = _filtered(row)
            if len(grades) > 1:
                written = texts[sample : sample + 1]
                filtered = filtered[sample : sample + 1]
            has_no_answer = bool(filtered) and all(each == _INVALID for each in filtered)
            # Of log-likelihoods their numbers tell logs apart, of a mean all its texts.
            every_text = "\0".join(written) if texts else json.dumps(row.get("resps"))
            fingerprint = hash(every_text) if every_text else 0
            text = written[0] if written else ""
            length = sum(map(len, written)) / len(written) if written else math.nan
            status = Status.NO_ANSWER if has_no_answer or (texts and not any(written)) else Status.OK
            yield GradedAnswer(
                log.task,
                str(row["doc_id"]),
                begin + sample,
                score,
                question=question,
                reference=reference,
                prompt=prompt,
                status=status,
                length=length,
                asked=asked,
                text=text,
                fingerprint=fingerprint,
            )

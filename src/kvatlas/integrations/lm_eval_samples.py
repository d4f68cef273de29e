"""lm-eval's sample files (`--log_samples`) brought into a run, with the scores that the harness gave.

A file says nothing of tokens, so costs stay unknown. The model's name and arguments are in the results beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.tables import json_lines
from kvatlas.core import SERVED, KvatlasError, Setting, Status, digest, reason
from kvatlas.integrations.scored_logs import MOST_BYTES, ScoredAnswer, as_setting, score_of, store_answers
from kvatlas.results import Expected

#: samples_TASK_2026-01-31T12-00-00.000000.jsonl, as the harness names them.
_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)")
#: Arguments of our model class that are no parameters of its policy.
_NO_PARAMETERS = (
    *("pretrained", "policy", "batch_size", "max_batch_size", "device", "seed", "max_gen_toks", "add_bos_token"),
    *("dtype", "revision", "cache", "think_close", "think_open", "date", "tokenizer"),
)


def is_sample_file(path: Path) -> bool:
    """Whether this is named as lm-eval names its sample files."""
    return path.suffix == ".jsonl" and path.name.startswith("samples_")


def import_samples(path: Path, run: Path, scorer: str = "") -> tuple[Expected, int]:
    """Bring the answers of a sample file into the run, graded by its first metric and filter, or by `scorer`.

    Returns the cell that the run is now to hold and the traces added. KvatlasError for a file that is none, and for
    scores that are no shares.
    """
    rows = _rows(path)
    named = _NAME.fullmatch(path.stem)
    results = _results(path, named["date"]) if named else {}
    task = named["task"] if named else path.stem.removeprefix("samples_")
    scores = {name: value for row in rows for name, value in _scores(row).items() if value is not None}
    if not scores:
        raise KvatlasError(f"The sample file {str(path)!r} has no metric; lm-eval names them in `metrics`.")
    if scorer and scorer not in scores:
        raise KvatlasError(f"The sample file {str(path)!r} has no metric {scorer!r}; valid are: {', '.join(scores)}.")
    model, setting = _model(results, path)
    by_problem: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_problem.setdefault(str(row.get("doc_id")), []).append(row)
    identity = ["lm-eval", model, task, setting.id, [row.get("prompt_hash") for row in rows]]
    cell = Expected(model, task, setting, digest(identity)[:32], tuple(by_problem), samples=1, baseline=True)
    chosen = scorer or next(iter(scores))
    answers = (_answer(problem, group, chosen) for problem, group in by_problem.items())
    return store_answers(run, path, cell, answers, chosen)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise KvatlasError(f"The file {str(path)!r} holds {size:,} bytes; valid are up to {MOST_BYTES:,}.")
        rows = json_lines(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KvatlasError(f"{str(path)!r} is no sample file of lm-eval ({reason(error)}).") from error
    if not rows or not all(isinstance(row, dict) and "doc_id" in row and "resps" in row for row in rows):
        raise KvatlasError(f"{str(path)!r} is no sample file of lm-eval; its lines have doc_id, resps and metrics.")
    return rows


def _scores(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics of a line that are shares, each with its filter where it has one."""
    filter_ = row.get("filter", "none")
    tail = "" if filter_ == "none" else f",{filter_}"
    scores = {}
    for name in row.get("metrics") or []:
        if isinstance(row.get(name), bool | int | float):
            scores[f"{name}{tail}"] = score_of(row[name], f"The document {row.get('doc_id')} of the sample file")
    return scores


def _results(path: Path, date: str) -> Mapping[str, Any]:
    """What the harness wrote of the whole; empty where it is not beside the file."""
    try:
        results = json.loads((path.parent / f"results_{date}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def _model(results: Mapping[str, Any], path: Path) -> tuple[str, Setting]:
    """The model's name (else the folder's, which the harness calls after it) and setting."""
    config = results.get("config") or {}
    arguments = config.get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(pair.partition("=")[::2] for pair in arguments.split(",") if pair)
    name = arguments.get("pretrained") or results.get("model_name") or path.resolve().parent.name
    if config.get("model") != "kvatlas":
        return str(name), SERVED
    values = {key: _plain(value) for key, value in arguments.items() if key not in _NO_PARAMETERS}
    return str(name), as_setting(arguments.get("policy", "full"), values)


def _plain(value: Any) -> Any:
    """An argument of a command line as the value that it spells."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _answer(problem: str, rows: Sequence[Mapping[str, Any]], chosen: str) -> ScoredAnswer:
    """The answer to a document, which has a line for each filter."""
    scores = {name: value for row in rows for name, value in _scores(row).items() if value is not None}
    judged = next((row for row in rows if chosen in _scores(row)), rows[0])
    said, text = _first(judged.get("filtered_resps")), _first(judged["resps"])
    return ScoredAnswer(
        problem,
        text if isinstance(text, str) else json.dumps(judged["resps"]),
        scores,
        said if isinstance(said, str) else None,
        Status.NO_ANSWER if said == "[invalid]" else Status.OK,
    )


def _first(value: Any) -> Any:
    """The innermost first item of nested lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return value

"""lighteval's details files (`--save-details`) brought into a run, with the scores that the harness gave.

Columns as lighteval 0.13.0 writes them: `doc` (id, query), `model_response` (text and tokens) and `metric`, one row for
each document. Its metrics are of a document's samples together, so each document is one trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import SERVED, KvatlasError, digest, reason
from kvatlas.integrations.scored_logs import MOST_BYTES, UNKNOWN, ScoredAnswer, score_of, store_answers
from kvatlas.results import Expected

#: details_TASK_2026-01-31T12-00-00.000000.parquet, as the harness names them.
_NAME = re.compile(r"details_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+")
_COLUMNS = ["doc", "model_response", "metric"]


def is_details_file(path: Path) -> bool:
    """Whether this is named as lighteval names its details files."""
    return path.suffix == ".parquet" and path.name.startswith("details_")


def import_details(path: Path, run: Path, scorer: str = "") -> tuple[Expected, int]:
    """Bring the answers of a details file into the run, graded by its first metric or by `scorer`.

    Returns the cell that the run is now to hold and the traces added. KvatlasError for a file that is none, and for
    scores that are no shares.
    """
    rows = _rows(path)
    named = _NAME.fullmatch(path.stem)
    task = named["task"] if named else path.stem.removeprefix("details_")
    names = list(dict.fromkeys(name for row in rows for name in _numbers(row)))
    if not names:
        raise KvatlasError(f"The details file {str(path)!r} has no metric in its column metric.")
    if scorer and scorer not in names:
        raise KvatlasError(f"The details file {str(path)!r} has no metric {scorer!r}; valid are: {', '.join(names)}.")
    chosen = scorer or names[0]
    problems = tuple(str(row["doc"].get("id")) for row in rows)
    if len(set(problems)) < len(problems):
        raise KvatlasError(f"The details file {str(path)!r} has several rows of one document (doc.id).")
    model = _model(path)
    run_key = digest(["lighteval", model, task, [str(row["doc"].get("query")) for row in rows]])[:32]
    cell = Expected(model, task, SERVED, run_key, problems, samples=1, baseline=True)
    answers = (_answer(problem, row, chosen) for problem, row in zip(problems, rows, strict=True))
    return store_answers(run, path, cell, answers, chosen)


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise KvatlasError("Reading lighteval's details needs the extra: pip install 'kvatlas[parquet]'.") from error
    try:
        with ParquetFile(path) as file:
            size = sum(file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups))
            if size > MOST_BYTES:
                raise KvatlasError(f"The file {str(path)!r} holds {size:,} bytes; valid are up to {MOST_BYTES:,}.")
            rows: list[Mapping[str, Any]] = file.read(_COLUMNS).to_pylist()
    except (OSError, ValueError, ArrowException) as error:
        raise KvatlasError(f"{str(path)!r} is no details file of lighteval ({reason(error)}).") from error
    if not rows or not all(isinstance(row.get(name), dict) for row in rows for name in _COLUMNS):
        columns = f"its columns are {', '.join(_COLUMNS)}, each with fields"
        raise KvatlasError(f"{str(path)!r} is no details file as lighteval 0.13 writes it: {columns}.")
    return rows


def _model(path: Path) -> str:
    """The model's name, which the harness makes the folders between `details` and that of the date."""
    parts = path.resolve().parts[:-2]
    last = max((n for n, part in enumerate(parts) if part == "details"), default=len(parts) - 2)
    return "/".join(parts[last + 1 :]) or path.resolve().parent.name


def _answer(problem: str, row: Mapping[str, Any], chosen: str) -> ScoredAnswer:
    """The answer to a document, with the scores that are shares."""
    scores = {}
    for name, value in _numbers(row).items():
        if name == chosen or 0 <= value <= 1:
            score = score_of(value, f"The document {problem} of the details file")
            scores.update({} if score is None else {name: score})
    response = row["model_response"]
    texts, asked, tokens = (_listed(response.get(name)) for name in ("text", "input_tokens", "output_tokens"))
    text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(texts, default=str)
    written = len(tokens[0]) if len(tokens) == 1 and isinstance(tokens[0], list) else None
    return ScoredAnswer(
        problem, text, scores, costs=replace(UNKNOWN, prompt_tokens=len(asked) or None, output_tokens=written)
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a document that are numbers."""
    return {name: value for name, value in row["metric"].items() if isinstance(value, bool | int | float)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""The reader of each kind of side, found by what a path holds."""

from __future__ import annotations

import json
from pathlib import Path

from kvatlas.core import KvatlasError
from kvatlas.gates import answer_files, lm_eval_logs, runs
from kvatlas.gates.outcomes import Choice, Side
from kvatlas.results.store import FILE

_EXPECTED = (
    "expected a folder or file of lm-eval's samples (--log_samples), a log of Inspect, a run (RUN@CELL), a file of "
    "answers with the columns problem and correct, or the address of an endpoint"
)


def is_address(name: str) -> bool:
    """Return whether a side is named by the address of an endpoint."""
    return name.startswith(("http://", "https://"))


def open_side(name: str, choice: Choice) -> Side:
    """Return the side at a path. Raises KvatlasError if nothing there can be compared."""
    path = Path(name)
    folder, _, cell = name.partition("@")
    if not path.exists() and cell and (Path(folder) / FILE).is_file():
        return runs.side_of(Path(folder), cell, name, choice)
    if not path.exists():
        raise KvatlasError(f"{name!r} is not there; {_EXPECTED}.")
    return _side_of_folder(path, name, choice) if path.is_dir() else _side_of_file(path, name, choice)


def _side_of_folder(path: Path, name: str, choice: Choice) -> Side:
    if (path / FILE).is_file():
        return runs.side_of(path, "", name, choice)
    samples = lm_eval_logs.files_in(path)
    inspect_logs = sorted(path.rglob("*.eval"))
    if samples and inspect_logs:
        raise KvatlasError(f"{name!r} holds logs of lm-eval and of Inspect; name one of them.")
    if samples:
        return lm_eval_logs.side_of(path, name, choice)
    if inspect_logs:
        return runs.side_of_inspect_logs(inspect_logs, name, choice)
    if any(path.rglob("results_*.json")):
        raise KvatlasError(f"{name!r} holds results of lm-eval without samples; run it with --log_samples.")
    raise KvatlasError(f"{name!r} is a folder without answers; {_EXPECTED}.")


def _side_of_file(path: Path, name: str, choice: Choice) -> Side:
    if path.suffix == ".eval":
        return runs.side_of_inspect_logs([path], name, choice)
    if path.name == FILE:
        return runs.side_of(path.parent, "", name, choice)
    if not answer_files.is_table(path):
        raise KvatlasError(f"{name!r} has a suffix that no log and no file of answers has; {_EXPECTED}.")
    head = _first_bytes(path)
    if path.suffix == ".jsonl" and lm_eval_logs.is_row(_first_row(head)):
        return lm_eval_logs.side_of(path, name, choice)
    if path.suffix == ".json" and head.startswith("{"):
        if '"eval"' not in head and path.name.startswith("results"):
            raise KvatlasError(f"{name!r} holds results, not samples; run lm-eval with --log_samples.")
        return runs.side_of_inspect_logs([path], name, choice)
    return answer_files.side_of(path, name, choice)


def _first_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(2**20).decode("utf-8-sig", "replace").lstrip()


def _first_row(head: str) -> object:
    line = head.partition("\n")[0]
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        # A first row of over a million bytes, as of prompts of many examples.
        return {"doc_id": 0, "resps": []} if line.startswith('{"doc_id"') else None

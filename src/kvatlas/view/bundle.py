"""The app as files that any static host serves: the page, and the data of every cell and every trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.report.escaping import embedded
from kvatlas.report.page_json import MISSING
from kvatlas.results.store import Store
from kvatlas.view.app import page
from kvatlas.view.run_view import RunView


def write_bundle(views: Sequence[RunView], folder: Path) -> int:
    """Write all that the app shows of the runs into a new or empty folder; returns the number of files.

    KvatlasError for a folder that holds anything.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KvatlasError(f"A bundle needs a new or empty folder; {str(folder)!r} is none.")
    for view in views:
        with Store.open(view.folder) as store:
            view.refresh(store)
    count = 1
    for path, text in _files(views):
        target = folder / "data" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8", newline="")
        count += 1
    (folder / "index.html").write_text(page(static=True), "utf-8", newline="")
    return count


def _files(views: Sequence[RunView]) -> Iterator[tuple[str, str]]:
    yield "runs.json", embedded([view.summary() | {"failure": None} for view in views])
    for view in views:
        yield f"{view.name}/run.json", view.document
        for path, document in _documents(view):
            yield f"{view.name}/{path}", embedded(document)


def _documents(view: RunView) -> Iterator[tuple[str, dict[str, Any]]]:
    for table in range(len(view.tables)):
        yield f"outcomes/{table}.json", view.outcomes(table)
    for number, marks in enumerate(view.marks):
        yield f"cell/{number}.json", view.cell(number)
        for at, mark in enumerate(marks):
            if mark != MISSING:
                problem, sample = view.split(number, at)
                yield f"trace/{number}/{problem}/{sample}.json", view.trace(number, problem, sample)

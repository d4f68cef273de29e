"""One run as the app shows it: what each trace came to, kept in memory and followed while a sweep writes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.report.escaping import embedded
from kvatlas.report.page_json import MISSING, RIGHT, in_order, marks
from kvatlas.report.sources import Sources
from kvatlas.report.traces import trace_document
from kvatlas.results import Key, Manifest, Store
from kvatlas.stats.metrics import usual_metric
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces, TraceTable
from kvatlas.view.run_json import Table, analysed, counts, quick

#: Rows that are read at once, so that what was asked for meanwhile is answered in between.
ROWS = 20_000


class RunView:
    """A run that one thread refreshes and any thread reads.

    Cells are numbered in the manifest's order, problems within their benchmark. `marks[cell]` has a letter for each
    problem and sample, samples side by side. `version` rises with every change of what is shown. KvatlasError for a
    folder that holds no run.
    """

    def __init__(self, folder: Path, name: str, fix: Mapping[str, str] | None = None) -> None:
        self.folder, self.name, self.fix = folder, name, dict(fix or {})
        self.version = 0
        with Store.open(folder) as store:
            self._begin(store.manifest())

    def _begin(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.sources = Sources.of(manifest)
        self.metric = usual_metric(manifest)
        self.table = TraceTable(manifest)
        self.cells = self.table.cells(self.metric)
        by_size = sorted(manifest.expected, key=lambda cell: len(cell.problems))
        self.problems = {cell.benchmark: cell.problems for cell in by_size}
        self.marks = [self._marks(cell) for cell in self.cells]
        self.tables = _tables(manifest, self.problems)
        self.table_of = {n: t for t, table in enumerate(self.tables) for n in table.rows}
        self.base = _bases(manifest)
        self.done, self._row, self._seen = 0, 0, -1
        self.promised = sum(len(cell.problems) * cell.samples for cell in manifest.expected)
        self.finished = False
        self._measuring = threading.Lock()
        self._publish(quick(self._run, self.tables))

    # -- following the store, by one thread ------------------------------------------------------------------------

    def refresh(self, store: Store) -> bool:
        """Bring what is shown to the state of the store, and say whether anything changed."""
        version = store.version()
        if version == self._seen:
            return False
        if self._seen >= 0 and (manifest := store.manifest()) != self.manifest:
            self._begin(manifest)
        before, added = self._row, ROWS
        while added == ROWS:
            self._row, columns = store.added(self._row, ROWS)
            self.table.append(columns)
            added, self.done = len(columns), sum(cell.stored for cell in self.cells)
        changed = self._row != before or self._seen < 0
        self._seen = version
        if changed:
            self.marks = [self._marks(cell) for cell in self.cells]
            self._publish(quick(self._run, self.tables))
            self.finished = self.done == self.promised
            if self.finished:
                self._publish(analysed(self._run, self.tables))
        return changed

    @property
    def _run(self) -> RunData:
        return RunData(self.manifest, self.table, self.metric, True, self.fix, self.cells, self.folder)

    def _marks(self, cell: CellTraces) -> str:
        return marks(cell, self.problems[cell.expected.benchmark])

    def _lengths(self, cell: CellTraces) -> list[int]:
        tokens = np.nan_to_num(cell.traces["output_tokens"]).astype(int)
        return in_order(cell, tokens, self.problems[cell.expected.benchmark], 0)

    def _publish(self, document: dict[str, Any]) -> None:
        self.version += 1
        self.document = embedded({**document, **self.summary()})

    # -- what the page asks for ------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """A line of the list of runs."""
        state = {"version": self.version, "done": self.done, "promised": self.promised, "finished": self.finished}
        return {"name": self.name, **state, **counts(self.manifest)}

    def outcomes(self, table: int) -> dict[str, Any]:
        """The marks of all cells of a table; IndexError where there is none."""
        return {"marks": [self.marks[cell] for cell in self.tables[table].rows]}

    def cell(self, number: int) -> dict[str, Any]:
        """The traces of a cell: marks, those of the full cache, lengths."""
        base = self.base.get(number)
        return {
            "cell": number,
            "table": self.table_of[number],
            "samples": self.cells[number].expected.samples,
            "base": base,
            "marks": self.marks[number],
            "full": None if base is None else self.marks[base],
            "lengths": self._lengths(self.cells[number]),
        }

    def split(self, number: int, at: int) -> tuple[int, int]:
        """The problem and the sample at a place of a cell."""
        problem, sample = divmod(at, self.cells[number].expected.samples)
        return problem, sample

    def key(self, number: int, problem: int, sample: int) -> Key:
        """Where the store has a trace; IndexError where the run has no such place."""
        expected = self.cells[number].expected
        if min(number, problem, sample) < 0 or sample >= expected.samples:
            raise IndexError(sample)
        ids = self.problems[expected.benchmark]
        return expected.run_key, expected.setting.id, expected.benchmark, ids[problem], sample

    def trace(self, number: int, problem: int, sample: int) -> dict[str, Any]:
        """A trace, whole, and which other cells have the same sample; KeyError where it is not there."""
        with Store.open(self.folder) as store:
            trace = store.trace(self.key(number, problem, sample))
        table = self.tables[self.table_of[number]]
        at = problem * self.cells[number].expected.samples + sample
        others = [[n, self.marks[n][at]] for n in table.rows if n != number and at < len(self.marks[n])]
        document = trace_document(trace, number, self.sources, whole=True)
        return {
            **document,
            "index": problem,
            "base": self.base.get(number),
            "others": [other for other in others if other[1] != MISSING],
        }

    def attention(self, number: int, problem: int, sample: int) -> dict[str, Any]:
        """Predicted importance, attention of the answer, and what the departing step missed, measured now."""
        from kvatlas.report.attention import LoadedModels, departures, measured

        base = self.base.get(number)
        with self._measuring, Store.open(self.folder) as store:
            trace = store.trace(self.key(number, problem, sample))
            full = None if base is None else store.trace(self.key(base, problem, sample))
            loaded_models = LoadedModels(self.sources)
            return {
                "measured": measured([trace], loaded_models, 1)[0],
                "departs": departures([(trace, full)], loaded_models, 1)[0],
            }

    def lost(self, number: int, at: int) -> bool:
        """Whether a trace is wrong where the full cache is right."""
        base, mark = self.base.get(number), self.marks[number][at]
        return base is not None and mark not in (RIGHT, MISSING) and self.marks[base][at] == RIGHT


def _tables(manifest: Manifest, problems: Mapping[str, tuple[str, ...]]) -> list[Table]:
    rows: dict[tuple[str, str, int], list[int]] = {}
    for number, cell in enumerate(manifest.expected):
        rows.setdefault((cell.model, cell.benchmark, cell.samples), []).append(number)
    return [
        Table(model, benchmark, problems[benchmark], samples, tuple(numbers))
        for (model, benchmark, samples), numbers in rows.items()
    ]


def _bases(manifest: Manifest) -> dict[int, int]:
    """For each cell the full cache's of the same model, benchmark and number of samples."""
    full = {
        (cell.model, cell.benchmark, cell.samples): number
        for number, cell in enumerate(manifest.expected)
        if cell.setting.policy == "full"
    }
    homes = enumerate((cell.model, cell.benchmark, cell.samples) for cell in manifest.expected)
    return {number: full[home] for number, home in homes if full.get(home, number) != number}

"""A run as the app shows it: it answers addresses, and follows its store while a sweep writes."""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.core import AGAIN, SERVED, KvatlasError, Map, NoteKind, Trace, grouped, is_reference
from kvatlas.registry import features
from kvatlas.report.app.documents import (
    MISSING,
    RIGHT,
    TRUNCATED,
    Json,
    PageCells,
    decision_document,
    maps_of,
    outcome_letters,
    run_document,
)
from kvatlas.report.app.traces import question_documents, trace_document
from kvatlas.report.description import say
from kvatlas.report.materials import RunMaterials
from kvatlas.report.result import Result
from kvatlas.results import Key, Manifest, Store
from kvatlas.stats.estimates import usual_metric
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import TraceTable
from kvatlas.text import model_name

#: Cell, problem within its benchmark, and sample of a trace.
Place = tuple[int, int, int]
#: Rows that are read at once; requests are answered in between.
ROWS = 20_000
#: Seconds and hits after which a search answers; the next request goes on from there.
SEARCH_SECONDS = 0.4
SEARCH_HITS = 50
#: Lost answers that are read in search of one that needed an evicted value.
TRIED = 48
#: Characters of a trace that are shown on either side of a found text.
AROUND = 60
FILTERS = ("", "lost", "right", "wrong", "truncated")
_NUMBER = "[0-9]{1,9}"
_ADDRESS = re.compile(f"run|about|(outcomes|questions|cell)/{_NUMBER}|trace/{_NUMBER}/{_NUMBER}/{_NUMBER}")
_READING = (
    "The run is not complete, or still being read: maps have no frames, and nothing is chosen, until it is. Intervals "
    "are those of a single look at the end."
)


@dataclass(frozen=True)
class OutcomeTable:
    """The numbers of the cells of a model and a benchmark; `full` is the full cache's."""

    model: str
    short: str
    benchmark: str
    problems: tuple[str, ...]
    samples: int
    rows: tuple[int, ...]
    full: int | None


class AppRun:
    """A run under a name. One thread refreshes it and any thread asks it.

    Cells are numbered in the manifest's order, problems within their benchmark. `marks[cell]` has a letter for each
    problem and sample, samples side by side. `version` rises with every change. All documents read `result`. With a
    result that is given the run is shown as that has it and never refreshed.
    """

    def __init__(self, data: RunData, name: str, result: Result | None = None) -> None:
        self.name = name
        self.version = 0
        self.finished = False
        self.folder = data.folder or Path()
        self._given = result
        self._describing = threading.Lock()
        self._begin(data)
        self._publish(result is not None)

    def _begin(self, data: RunData) -> None:
        self.data = data
        self.manifest = data.manifest
        by_size = sorted(self.manifest.expected, key=lambda cell: len(cell.problems))
        self.problems = {cell.benchmark: cell.problems for cell in by_size}
        self.tables = _outcome_tables(self.manifest, self.problems)
        self.table_of: dict[int, OutcomeTable] = {}
        for table in self.tables:
            self.table_of |= dict.fromkeys(table.rows, table)

        self.promised = sum(len(cell.problems) * cell.samples for cell in self.manifest.expected)
        self._row = 0
        self._seen = -1
        self.__dict__.pop("materials", None)

    @cached_property
    def materials(self) -> RunMaterials:
        """The tokenizers, questions and answers of the run."""
        return RunMaterials.from_manifest(self.manifest)

    def refresh(self, store: Store) -> bool:
        """Bring the run to the state of its store; return whether anything changed."""
        version = store.version()
        if version == self._seen:
            return False
        if self._seen >= 0 and (manifest := store.manifest()) != self.manifest:
            self._begin(replace(self.data, manifest=manifest, table=TraceTable(manifest)))

        before = self._row
        added = ROWS
        while added == ROWS:
            self._row, columns = store.added(self._row, ROWS)
            self.data.table.add(columns)
            added = len(columns)
            self.done = sum(cell.stored for cell in self.data.cells)

        changed = self._row != before or self._seen < 0
        self._seen = version
        if changed:
            # Cells have the grades of the traces that they were made of.
            self.data = replace(self.data)
            self._publish(False)
            if self.done == self.promised:
                self._publish(True)
        return changed

    def _publish(self, tested: bool) -> None:
        """Make the run's document anew; `tested` with the tests of a complete run."""
        # At once: other threads read them.
        self.marks = [
            outcome_letters(cell, self.problems[cell.benchmark], self.table_of[index].samples)
            for index, cell in enumerate(self.data.cells)
        ]
        self.done = sum(cell.stored for cell in self.data.cells)
        # As they are now; None without the feature.
        autopsies = features.find("autopsy.page")
        self.autopsies = None if autopsies is None else autopsies(self.folder, self.manifest)

        result = self._given or Result((self.data,))
        warnings = [] if tested else [_READING]
        maps: list[Map] = []
        try:
            maps = maps_of(result, tested)
        except KvatlasError as error:
            if self._given is not None:
                raise
            warnings.append(str(error))
        if tested:
            notes = chain.from_iterable(map_.notes for map_ in maps)
            warnings += dict.fromkeys(note.text for note in notes if note.kind is NoteKind.PARTIAL)

        is_judged = tested and bool(maps)
        cells = PageCells(self.manifest.expected)
        document = run_document(result, maps, is_judged, cells)
        decision = None
        if is_judged:
            weights = {name: model.weight_bytes for name, model in self.materials.models.items()}
            decision = decision_document(result, cells.numbers, weights)
        self.result = result
        version = self.version + 1
        self.document: Json = {
            **document,
            **self.summary(),
            "version": version,
            "finished": tested,
            "claim": result.claim.words,
            "warnings": warnings,
            "autopsies": [] if self.autopsies is None else self.autopsies.sentences(),
            "lost": self.first_lost() if is_judged else None,
            "decision": decision,
            "outcomes": [vars(table) for table in self.tables],
        }
        self.finished = tested
        # Last: a page that sees a new version asks for its document, and not again.
        self.version = version

    def summary(self) -> Json:
        """Return the run's line in the list of runs."""
        expected = self.manifest.expected
        return {
            "name": self.name,
            "folder": self.folder.name,
            "version": self.version,
            "done": self.done,
            "promised": self.promised,
            "finished": self.finished,
            "loading": self._seen < 0 and self._given is None,
            "models": list(dict.fromkeys(model_name(cell.model) for cell in expected)),
            "benchmarks": list(dict.fromkeys(cell.benchmark for cell in expected)),
            "settings": len({cell.setting.id for cell in expected}),
        }

    # -- addresses ----------------------------------------------------------------------------------------------------

    def answer(self, address: str) -> Json:
        """Return the document at `run`, `about`, `outcomes/TABLE`, `questions/TABLE`, `cell/CELL` or
        `trace/CELL/PROBLEM/SAMPLE`.

        Raises LookupError for an address without a document.
        """
        if _ADDRESS.fullmatch(address) is None:
            raise LookupError(address)
        kind, *numbers = address.split("/")
        document: Json = getattr(self, kind)(*map(int, numbers))
        return document

    def addresses(self) -> Iterator[str]:
        """Yield the addresses of outcomes, questions and cells."""
        for table in range(len(self.tables)):
            yield f"outcomes/{table}"
            yield f"questions/{table}"
        for cell in range(len(self.marks)):
            yield f"cell/{cell}"

    def run(self) -> Json:
        """Return maps, cells, cards and tables."""
        return self.document

    def outcomes(self, table: int) -> Json:
        """Return the marks of the cells of a table."""
        return {"marks": [self.marks[cell] for cell in self.tables[table].rows]}

    def questions(self, table: int) -> Json:
        """Return the question and the reference answer of each problem of a table; None where they are gone."""
        one = self.tables[table]
        found = self.materials.problems.get(one.benchmark, {})
        return {"problems": question_documents([found.get(problem) for problem in one.problems])}

    def cell(self, cell_index: int) -> Json:
        """Return the number of new tokens of each trace of a cell, 0 where it is missing or unknown."""
        cell = self.data.cells[cell_index]
        tokens = np.nan_to_num(cell.numbers("output_tokens")).astype(int)
        return {"lengths": cell.in_order(tokens, self.problems[cell.benchmark], 0).ravel().tolist()}

    def trace(self, number: int, problem: int, sample: int, *, whole: bool = True) -> Json:
        """Return a trace. Raises LookupError where it is not there."""
        with self.data.store() as store:
            return self.trace_in(store, (number, problem, sample), whole=whole)

    def trace_in(self, store: Store, place: Place, *, whole: bool = True) -> Json:
        """Return a trace of an opened store; else as `trace`."""
        key = self.key(place)
        trace = store.trace(key)
        death = self._death(store, place, trace)
        document = {"cell": place[0], "index": place[1], **trace_document(trace, self.materials, whole)}
        if self.autopsies is not None:
            document |= self.autopsies.trace(key, trace.usage.prompt_tokens or 0)
        return document if death is None else {**document, "death": death}

    def _death(self, store: Store, place: Place, trace: Trace) -> Json | None:
        """Return how a lost answer died; None for another trace, and without the feature that reads it."""
        full = self.full(place)
        if full is None or self.autopsies is None or not self.is_lost(place):
            return None
        death: Json = self.autopsies.death(trace, store.trace(self.key(full)), self.materials.pieces)
        return death

    def _lost(self, store: Store, place: Place) -> Json:
        """Return what a list tells of a lost answer: what was expected and written, and how it died."""
        trace = store.trace(self.key(place))
        problem = self.materials.problem(trace)
        return {
            "expected": None if problem is None else self.materials.reference(trace.benchmark, problem),
            "written": trace.grade.answer,
            "death": self._death(store, place, trace),
        }

    def about(self) -> Json:
        """Return the run's sentences, comparisons and provenance; without tests while it is not complete."""
        provenance = []
        for name, value in self.manifest.provenance.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            provenance.append([name, text])

        keys = []
        for run_key, cells in grouped(self.manifest.expected, lambda cell: cell.run_key).items():
            keys.append([run_key, [" | ".join(map(str, cell.name)) for cell in cells]])
        document: Json = {
            **dict.fromkeys(("interpretation", "observations", "sentences", "comparisons"), ()),
            "provenance": provenance,
            "spec": json.dumps(dict(self.manifest.spec), indent=2, ensure_ascii=False, default=str),
            "keys": keys,
        }

        if not self.finished:
            return document
        with self._describing:
            result = self.result
            return {
                **document,
                "interpretation": [*say("recommendations", result), *say("effects", result)],
                "observations": [*say("observations", result), *say("notes", result)],
                "sentences": [[one.title, say("analysis", one)] for one in (*result.maps, *result.means)],
                "comparisons": result.comparison_documents(),
            }

    # -- traces -------------------------------------------------------------------------------------------------------

    def mark(self, place: Place) -> str:
        """Return the outcome of a trace."""
        cell, problem, sample = place
        return self.marks[cell][problem * self.table_of[cell].samples + sample]

    def places(self, cells: Iterable[int] | None = None) -> Iterator[Place]:
        """Yield the places of stored traces."""
        for cell in range(len(self.marks)) if cells is None else cells:
            samples = self.table_of[cell].samples
            for index, mark in enumerate(self.marks[cell]):
                if mark != MISSING:
                    yield (cell, *divmod(index, samples))

    def is_recommended(self, cell: int) -> bool:
        """Return whether the setting of a cell is recommended for its model."""
        expected = self.data.cells[cell].expected
        recommended = [(choice.model, choice.recommended) for choice in self.result.choices]
        return (expected.model, expected.setting) in recommended

    def is_lost(self, place: Place) -> bool:
        """Return whether a trace is not right where the full cache's is."""
        full = self.full(place)
        return full is not None and self.mark(place) != RIGHT and self.mark(full) == RIGHT

    def first_lost(self) -> Place | None:
        """Return a place that is not right where the full cache's is, of recommended settings if possible.

        Of the first `TRIED` the first one that needed an evicted value, so that it can be read what was lost; without
        such a one the first.
        """
        cells = sorted(range(len(self.marks)), key=lambda cell: not self.is_recommended(cell))
        lost = list(islice(filter(self.is_lost, self.places(cells)), TRIED))
        for place in lost:
            death = self.trace(*place).get("death")
            if death is not None and death["evicted"] and death["missed"]:
                return place
        return lost[0] if lost else None

    def key(self, place: Place) -> Key:
        """Return a trace's key in the store. Raises IndexError where the run has no such place."""
        cell_index, problem, sample = place
        cell = self.data.cells[cell_index]
        if sample >= cell.expected.samples:
            raise IndexError(sample)
        return cell.key(self.problems[cell.benchmark][problem], sample)

    def full(self, place: Place) -> Place | None:
        """Return the place of the full cache's trace of the same sample, None where there is no other."""
        full = self.table_of[place[0]].full
        if full is None or full == place[0] or self.mark((full, *place[1:])) == MISSING:
            return None
        return (full, *place[1:])

    def find(self, text: str = "", what: str = "", table: int | None = None, start: int = 0) -> Json:
        """Search stored traces from the `start`-th on: by text, case ignored, and by outcome, in one table or in all.

        `lost` is wrong where the full cache is right. `hits` are [cell, problem, sample, mark, text around it, and of a
        lost answer what was expected and how it died]; `next` is the place to go on from, None at the end; `seen` of
        `total` traces were looked at.
        """
        if what not in FILTERS:
            raise KvatlasError(f"Unknown filter {what!r}; expected one of {', '.join(FILTERS[1:])}.")
        tables = self.tables if table is None else [self.tables[table]]
        places = list(self.places(chain.from_iterable(one.rows for one in tables)))

        until = time.monotonic() + SEARCH_SECONDS
        hits: list[list[Any]] = []
        with self.data.store() as store:
            for index in range(start, len(places)):
                if time.monotonic() > until or len(hits) >= SEARCH_HITS:
                    return {"hits": hits, "next": index, "seen": index, "total": len(places)}
                place = places[index]
                mark = self.mark(place)
                is_lost = self.is_lost(place)
                fits = {"lost": is_lost, "right": mark == RIGHT, "wrong": mark != RIGHT, "truncated": mark == TRUNCATED}
                if not fits.get(what, True):
                    continue
                around = _text_around(store.text(self.key(place)), text.lower()) if text else ""
                if around is not None:
                    lost = self._lost(store, place) if is_lost else None
                    hits.append([*place, mark, around, lost])
        return {"hits": hits, "next": None, "seen": len(places), "total": len(places)}


def _text_around(whole: str, text: str) -> str | None:
    """Return what stands around the first place where a trace has `text`, in lower case; None if it does not."""
    position = whole.lower().find(text)
    if position < 0:
        return None
    return whole[max(0, position - AROUND) : position + len(text) + AROUND]


def open_runs(
    folders: Sequence[Path], fix: Mapping[str, str], metric: str | None = None, lose_at_most: float | None = None
) -> list[AppRun]:
    """Open runs without their traces yet, under the names of their folders in an address, no two alike.

    Without a metric each has its usual one. Raises KvatlasError for a folder without a run.
    """
    runs: list[AppRun] = []
    for folder in folders:
        name = base = address_name(folder)
        count = 1
        while name in {run.name for run in runs}:
            count += 1
            name = f"{base}-{count}"
        with Store.open(folder) as store:
            manifest = store.manifest()
        usual = metric or usual_metric(manifest)
        data = RunData(manifest, TraceTable(manifest), usual, True, fix, folder=folder, lose_at_most=lose_at_most)
        runs.append(AppRun(data, name))
    return runs


def address_name(folder: Path) -> str:
    """Return the name of a folder in characters that an address can have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", folder.absolute().name).strip(".") or "run"


def trace_address(place: Place) -> str:
    """Return the address of a trace within its run."""
    return "/".join(("trace", *map(str, place)))


def _outcome_tables(manifest: Manifest, problems: Mapping[str, tuple[str, ...]]) -> list[OutcomeTable]:
    """Return a table for each model, benchmark and number of samples.

    The reference stands beside the settings, with as many samples as they have.
    """
    expected = manifest.expected
    of_settings: dict[tuple[str, str], int] = {}
    for cell in expected:
        if not is_reference(cell.setting) and cell.setting != AGAIN:
            name = (cell.model, cell.benchmark)
            of_settings[name] = max(cell.samples, of_settings.get(name, 0))

    def table(cell: int) -> tuple[str, str, int]:
        """Return the model, the benchmark and the number of samples of a cell's table."""
        one = expected[cell]
        samples = one.samples
        if is_reference(one.setting):
            samples = min(samples, of_settings.get((one.model, one.benchmark), samples))
        return one.model, one.benchmark, samples

    def order(cell: int) -> tuple[bool, list[str | float]]:
        """Return a key that puts the full cache first and orders settings by name, numbers within it by value.

        Commands of servers stay in the order of the spec.
        """
        if expected[cell].setting.policy == SERVED.policy:
            return True, [SERVED.policy, cell]
        pieces = re.split(r"(\d+(?:\.\d+)?)", str(expected[cell].setting))
        numbers = [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
        return not is_reference(expected[cell].setting), numbers

    rows = sorted(range(len(expected)), key=order)
    groups = grouped(rows, table)
    tables = []
    for (model, benchmark, samples), cells in groups.items():
        full = next((cell for cell in reversed(cells) if is_reference(expected[cell].setting)), None)
        tables.append(
            OutcomeTable(model, model_name(model), benchmark, problems[benchmark], samples, tuple(cells), full)
        )
    return tables

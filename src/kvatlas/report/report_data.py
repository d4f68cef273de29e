"""All that a report shows, read from a run: maps, sentences, outcomes, chosen traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvatlas.core import KvatlasError, Map, Setting, Trace
from kvatlas.report.attention import DEPARTURES, LoadedModels, departures, measured
from kvatlas.report.escaping import embedded
from kvatlas.report.page_json import Cells, outcomes, page_json
from kvatlas.report.pictures import Picture, pictures
from kvatlas.report.result import Result, analyse
from kvatlas.report.sources import Sources
from kvatlas.report.text import say
from kvatlas.report.traces import choose, trace_document
from kvatlas.report.verdicts import cards
from kvatlas.results import Store
from kvatlas.stats.maps import curves_of_run, flat_maps, mean_maps
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData, short_names
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.validity import Limit

FULL = Setting.of("full")


@dataclass(frozen=True)
class Summary:
    """The sentences of a page; its tables have places of their own in it."""

    interpretation: Sequence[str]
    observations: Sequence[str]
    analysis: Sequence[str]


@dataclass(frozen=True)
class ReportData:
    """A report before it is written: `data` goes into the page's scripts, the rest into its text.

    `places` numbers the cells by (run key, setting id, benchmark), `homes` gives a cell's model and benchmark;
    `complete` tells whether all traces are in `data`, `findings` what limits what the run can show.
    """

    run: RunData
    maps: Sequence[Map]
    summary: Summary | None
    comparisons: Sequence[Comparison]
    data: dict[str, Any]
    places: Mapping[tuple[str, str, str], int]
    homes: Mapping[int, tuple[str, str]]
    sources: Sources
    complete: bool
    findings: Sequence[Limit]
    figures: Sequence[Picture]

    def shards(self, pages: Mapping[str, int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """For each further page its path, its cell and its data: all traces of the cell."""
        if not pages:
            return
        numbers = {number: path for path, number in pages.items()}
        by_cell: dict[int, list[Trace]] = {}
        with self.run.store() as store:
            for run_key, trace in store.traces():
                number = self.places.get((run_key, trace.setting.id, trace.benchmark))
                if number is not None:
                    by_cell.setdefault(number, []).append(trace)
        for number, traces in by_cell.items():
            data = {
                "cells": {str(number): self.data["cells"][number]},
                "traces": [trace_document(trace, number, self.sources) for trace in traces],
            }
            yield numbers[number], number, data


def report_data(analysis: RunAnalysis, per_cell: int, measure: int, limit: int) -> ReportData:
    """Read a run for its report; the parameters as in `page.write_report`."""
    run, limits = analysis.run, analysis.findings
    summary: Summary | None = None
    comparisons: Sequence[Comparison] = ()
    if run.is_line:
        maps = flat_maps(curves_of_run(run))
        if not maps:
            raise KvatlasError("The run has no settings that a report could show.")
    else:
        maps, comparisons, summary = analysis.maps, analysis.comparisons, _summary(analyse([analysis]))
    numbered = Cells(short_names(expected.setting for expected in run.manifest.expected))
    if run.is_line:
        data = page_json(maps, mean_maps(maps), {}, {}, numbered)
    else:
        data = page_json(maps, analysis.means, analysis.verdicts, analysis.differences, numbered)
        data["cards"] = cards(analysis, numbered)
    data["outcomes"] = outcomes(run, maps, numbered)
    places, homes = _places(run.cells, numbered)
    sources = Sources.of(run.manifest)
    with run.store() as store:
        data["traces"], complete = _traces(store, run, places, sources, per_cell, measure, limit)
    return ReportData(
        run=run,
        maps=maps,
        summary=summary,
        comparisons=comparisons,
        data=data,
        places=places,
        homes=homes,
        sources=sources,
        complete=complete,
        findings=limits,
        figures=pictures(run, maps),
    )


def _summary(result: Result) -> Summary:
    return Summary(
        [*say("recommendations", result), *say("effects", result)],
        [*say("observations", result), *say("scales", result), *say("notes", result)],
        [sentence for one in result.every for sentence in say("analysis", one)],
    )


def _places(
    cells: Sequence[CellTraces], numbered: Cells
) -> tuple[dict[tuple[str, str, str], int], dict[int, tuple[str, str]]]:
    places, homes = {}, {}
    for expected in [cell.expected for cell in cells]:
        number = numbered.numbers.get((expected.model, expected.benchmark, expected.setting.id))
        if number is not None:
            places[expected.run_key, expected.setting.id, expected.benchmark] = number
            homes[number] = (expected.model, expected.benchmark)
    return places, homes


def _traces(
    store: Store,
    run: RunData,
    places: Mapping[tuple[str, str, str], int],
    sources: Sources,
    per_cell: int,
    measure: int,
    limit: int,
) -> tuple[list[dict[str, Any]], bool]:
    """The page's traces, at most `limit` bytes of them, and whether they are all of the run."""
    cells = {
        number: cell
        for cell in run.cells
        if (number := places.get((cell.expected.run_key, cell.expected.setting.id, cell.expected.benchmark)))
        is not None
    }
    # A token takes about seven bytes of the page; only where all may fit are all tried.
    tokens = np.nansum(run.table.records["output_tokens"])
    chosen = choose(cells, len(run.table.records) if per_cell and 7 * tokens < limit else per_cell)
    shown, documents, size = [], [], 0
    # In turns over the cells, so that a limit takes from all of them alike.
    order = sorted(range(len(chosen)), key=lambda index: _turn(chosen, index))
    for index in order:
        trace = store.trace(chosen[index].key)
        made = trace_document(trace, chosen[index].cell, sources)
        size += len(embedded(made).encode("utf-8", "surrogatepass"))
        if size > limit:
            break
        shown.append(trace)
        documents.append(made)
    loaded_models = LoadedModels(sources)
    pairs = _with_full(store, run, shown) if measure else []
    by_name = {
        "measured": measured(shown, loaded_models, measure),
        "departs": departures(pairs, loaded_models, DEPARTURES * measure),
    }
    for name, results in by_name.items():
        for made, result in zip(documents, results, strict=False):
            if result is not None:
                made[name] = result
    return documents, len(documents) == sum(cell.stored for cell in cells.values())


def _with_full(store: Store, run: RunData, shown: Sequence[Trace]) -> list[tuple[Trace, Trace | None]]:
    """Each trace with the full cache's of the same sample, where the run has one."""
    full = select(run.cells, setting=FULL)
    keys = {(cell.expected.model, *key[2:]): key for cell in full for key in cell.stored_keys()}
    pairs = []
    for trace in shown:
        key = keys.get((trace.model, trace.benchmark, trace.problem, trace.sample))
        pairs.append((trace, None if key is None or trace.setting == FULL else store.trace(key)))
    return pairs


def _turn(chosen: Sequence[Any], index: int) -> tuple[int, int]:
    earlier = sum(1 for other in chosen[max(0, index - 1) : index] if other.cell == chosen[index].cell)
    return (earlier, index)

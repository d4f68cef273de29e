"""All that a report shows, read from a run: maps, words, outcomes, chosen traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, Setting, Trace
from kvatlas.figures import style
from kvatlas.report import markdown
from kvatlas.report.attention import DEPARTURES, Networks, departures, measured
from kvatlas.report.description import describe
from kvatlas.report.escaping import embedded
from kvatlas.report.page_json import Cells, document, letter
from kvatlas.report.pictures import Picture, pictures
from kvatlas.report.sources import Sources
from kvatlas.report.traces import choose, trace_document
from kvatlas.results.manifest import Manifest
from kvatlas.results.store import Store
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.curves import POLICY, Curve, curves_of_run, one_axis
from kvatlas.stats.estimates.grid import map_axes, short_names
from kvatlas.stats.estimates.maps import maps_of_cells
from kvatlas.stats.estimates.validity import Finding, findings
from kvatlas.stats.inference.map_tests import Name, Verdict
from kvatlas.stats.pairs.comparisons import Comparison
from kvatlas.stats.pairs.differences import differences_of_run
from kvatlas.stats.run_analysis import judge

Traces = list[tuple[str, Trace]]
FULL = Setting.of("full")


@dataclass
class Gathering:
    """A report before it is written: `data` goes into the page's scripts, the rest into its text.

    `places` numbers the cells by (run key, setting id, benchmark), `homes` gives a cell's model and benchmark;
    `complete` tells whether all traces are in `data`, `findings` what limits what the run can show.
    """

    manifest: Manifest
    maps: Sequence[Map]
    words: Mapping[str, Sequence[str]]
    comparisons: Sequence[Comparison]
    data: dict[str, Any]
    places: Mapping[tuple[str, str, str], int]
    homes: Mapping[int, tuple[str, str]]
    sources: Sources
    complete: bool
    findings: Sequence[Finding] = ()
    figures: Sequence[Picture] = field(default_factory=list)

    def shards(self, folder: Path, pages: Mapping[str, int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """For each page beside the report its path, its cell and its data: all traces of the cell."""
        if not pages:
            return
        numbers = {number: path for path, number in pages.items()}
        together: dict[int, list[Trace]] = {}
        with Store.open(folder) as store:
            for run_key, trace in store.traces():
                number = self.places.get((run_key, trace.setting.id, trace.benchmark))
                if number is not None:
                    together.setdefault(number, []).append(trace)
        for number, traces in together.items():
            data = {
                "cells": {str(number): self.data["cells"][number]},
                "traces": [trace_document(trace, number, self.sources) for trace in traces],
            }
            yield numbers[number], number, data


def gathered(
    folder: Path,
    metric: str,
    partial: bool,
    fix: Mapping[str, Any] | None,
    per_cell: int,
    measure: int,
    limit: int,
) -> Gathering:
    """Read a run for its report; the parameters as in `page.write_report`."""
    with Store.open(folder) as store:
        manifest = store.manifest()
        traces = list(store.traces(texts=False))
        cells = gather(manifest, traces, metric)
        settings = [expected.setting for expected in manifest.expected]
        short = short_names(settings)
        numbered = Cells(short)
        if one_axis(manifest, fix):
            maps = _flat_maps(curves_of_run(manifest, traces, metric, partial, fix))
            found: dict[Name, Verdict] = {}
            words: dict[str, list[str]] = {}
            compared: list[Comparison] = []
            differences: Any = {}
        else:
            axes = map_axes(manifest, fix)
            maps = maps_of_cells(cells, axes, metric, partial, fix)
            judged = judge(manifest, cells, maps, axes, metric, fix)
            found, compared = dict(judged.verdicts), list(judged.comparisons)
            words = _words(describe(maps, compared, notes=judged.notes, verdicts=found, choices=judged.choices))
            words = _shortened(words, {str(setting): short[setting.id] for setting in settings}, maps)
            against = next((name for one in maps for name in one.baselines), None)
            differences = differences_of_run(manifest, traces, against, metric, fix) if against else {}
        statuses: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
        for run_key, trace in traces:
            place = (run_key, trace.setting.id, trace.benchmark)
            statuses.setdefault(place, {})[trace.problem, trace.sample] = letter(trace)
        data = document(manifest, maps, cells, statuses, found, differences, numbered)
        places, homes = _places(cells, numbered)
        sources = Sources.of(manifest)
        data["traces"], complete = _traces(store, traces, places, sources, per_cell, measure, limit)
    shown = pictures(manifest, traces, maps, metric, partial, fix)
    limits = findings(cells)
    return Gathering(manifest, maps, words, compared, data, places, homes, sources, complete, limits, shown)


def _places(
    cells: Sequence[CellTraces], numbered: Cells
) -> tuple[dict[tuple[str, str, str], int], dict[int, tuple[str, str]]]:
    places, homes = {}, {}
    for cell in cells:
        e = cell.expected
        number = numbered.numbers.get((e.model, e.benchmark, e.setting.id))
        if number is not None:
            places[e.run_key, e.setting.id, e.benchmark] = number
            homes[number] = (e.model, e.benchmark)
    return places, homes


def _traces(
    store: Store,
    traces: Traces,
    places: Mapping[tuple[str, str, str], int],
    sources: Sources,
    per_cell: int,
    measure: int,
    limit: int,
) -> tuple[list[dict[str, Any]], bool]:
    """The page's traces, at most `limit` bytes of them, and whether they are all of the run."""
    promised = sum((run_key, trace.setting.id, trace.benchmark) in places for run_key, trace in traces)
    # A token takes about seven bytes of the page; only where all may fit are all tried.
    tokens = sum(trace.usage.output_tokens for _, trace in traces)
    wanted = len(traces) if per_cell and 7 * tokens < limit else per_cell
    chosen = choose(places, traces, wanted)
    held, documents, size = [], [], 0
    # In turns over the cells, so that a limit takes from all of them alike.
    order = sorted(range(len(chosen)), key=lambda index: _turn(chosen, index))
    for index in order:
        trace = store.trace(chosen[index].key)
        made = trace_document(trace, chosen[index].cell, sources)
        size += len(embedded(made).encode("utf-8", "surrogatepass"))
        if size > limit:
            break
        held.append(trace)
        documents.append(made)
    networks = Networks(sources)
    pairs = _with_full(store, traces, held) if measure else []
    found = {
        "measured": measured(held, networks, measure),
        "departs": departures(pairs, networks, DEPARTURES * measure),
    }
    for name, results in found.items():
        for made, result in zip(documents, results, strict=False):
            if result is not None:
                made[name] = result
    return documents, len(documents) == promised


def _with_full(store: Store, traces: Traces, held: Sequence[Trace]) -> list[tuple[Trace, Trace | None]]:
    """Each trace with the full cache's of the same sample, where the run has one."""
    keys = {
        (trace.model, trace.benchmark, trace.problem, trace.sample): (
            run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
        )
        for run_key, trace in traces
        if trace.setting == FULL
    }  # fmt: skip
    found = []
    for trace in held:
        key = keys.get((trace.model, trace.benchmark, trace.problem, trace.sample))
        found.append((trace, None if key is None or trace.setting == FULL else store.trace(key)))
    return found


def _turn(chosen: Sequence[Any], index: int) -> tuple[int, int]:
    earlier = sum(1 for other in chosen[max(0, index - 1) : index] if other.cell == chosen[index].cell)
    return (earlier, index)


def _words(description: Mapping[str, Any]) -> dict[str, list[str]]:
    """The sentences of two sections of the description; its tables have places of their own in the page."""
    text = markdown.as_text(dict(description))
    sections: dict[str, list[str]] = {}
    for part in text.split("\n# "):
        title, _, body = part.lstrip("# ").partition("\n")
        sections[title] = [line[2:] for line in body.splitlines() if line.startswith("- ")]
    return {title: sections.get(title, []) for title in ("Interpretation", "Key Observations", "Detailed Analysis")}


def _shortened(
    words: Mapping[str, Sequence[str]], settings: Mapping[str, str], maps: Sequence[Map]
) -> dict[str, list[str]]:
    """The sentences with settings and models as the page calls them."""
    called = sorted(settings.items(), key=lambda pair: -len(pair[0])) + [(m.model, style.model(m.model)) for m in maps]

    def say(line: str) -> str:
        for long, brief in called:
            line = line.replace(long, brief)
        return line.replace("`", "")

    return {title: [say(line) for line in lines] for title, lines in words.items()}


def _flat_maps(curves: Sequence[Curve]) -> list[Map]:
    """Runs with one axis as maps: policies by its values, or settings in one column."""
    if not curves:
        raise KvatlasError("The run has no settings that a report could show.")
    groups: dict[tuple[str, str], list[Curve]] = {}
    for one in curves:
        groups.setdefault((one.model, one.benchmark), []).append(one)
    maps = []
    for (model, benchmark), group in groups.items():
        first = group[0]
        if first.axis == POLICY:
            cells = {(value, first.metric): cell for value, cell in first.points}
            axes = ((POLICY, tuple(value for value, _ in first.points)), ("", (first.metric,)))
        else:
            cells = {(one.policy, value): cell for one in group for value, cell in one.points}
            values = dict.fromkeys(value for one in group for value, _ in one.points)
            axes = ((POLICY, tuple(one.policy for one in group)), (first.axis, tuple(values)))
        maps.append(Map(model, benchmark, first.metric, "", axes, cells, first.baselines, first.notes))
    return maps

"""The report: one self-contained HTML page of a run, without a network; more traces in a folder next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, NoteKind
from kvatlas.figures import style
from kvatlas.report.pictures import Picture
from kvatlas.report.rendering import rendered
from kvatlas.report.report_data import ReportData, report_data
from kvatlas.results.export import check_target, replacing
from kvatlas.results.manifest import Manifest
from kvatlas.stats.run_analysis import RunAnalysis

#: Bytes of traces that stand in the page itself.
TRACES_LIMIT = 4_000_000
_SCRIPTS = ("report.js",)


def write_report(
    analysis: RunAnalysis,
    out: Path,
    *,
    per_cell: int = 2,
    measure: int = 4,
    limit: int | None = None,
    trace_pages: bool = False,
    figures: Sequence[Picture] = (),
) -> list[Path]:
    """Write the report of a stored run to the HTML file `out`, whole or not at all; returns what was written.

    All traces stand in the page if they fit into `limit` bytes (else `TRACES_LIMIT`); if not, `per_cell` of each cell
    do and, with `trace_pages`, all are in a folder NAME.traces, a page for each cell. `measure` traces get their
    predicted importance and the answer's attention (0: none). `figures` are shown besides the run's own pictures.
    Raises KvatlasError as `maps_of_run` does, for a file that cannot be written, and for a name without .html.
    """
    check_page(out)
    report = report_data(analysis, per_cell, measure, TRACES_LIMIT if limit is None else limit)
    pages = {}
    if trace_pages and not report.complete:
        name = f"{out.stem}.traces"
        pages = {f"{name}/{number}.html": number for number in report.places.values()}
        report.data["folder"] = name
    html = page(report, [*report.figures, *figures])
    with replacing(out) as part:
        part.write_text(html, "utf-8", newline="")
    written = [out]
    for path, cell, data in report.shards(pages):
        with replacing(out.parent / path) as part:
            part.write_text(_shard(report, cell, data, out.name), "utf-8", newline="")
        written.append(out.parent / path)
    return written


def check_page(out: Path) -> None:
    """Raise KvatlasError for a name that no page has and a path that cannot be written to."""
    check_target(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise KvatlasError(f"A report is a page and cannot be written as {out.name!r}; the name must end in .html.")


def page(report: ReportData, figures: Sequence[Picture] = ()) -> str:
    """The HTML of a report."""
    manifest, maps = report.run.manifest, report.maps
    partial = [note.text for map_ in maps for note in map_.notes if note.kind is NoteKind.PARTIAL]
    return rendered(
        "page.html.j2",
        _SCRIPTS,
        report.data,
        title=_title(maps),
        main=True,
        metric=style.label(maps[0].metric),
        counts=_counts(manifest),
        partial=list(dict.fromkeys(partial)),
        findings=[finding.text for finding in report.findings],
        summary=report.summary,
        several=len({map_.model for map_ in maps}) > 1,
        comparisons=report.comparisons,
        figures=figures,
        provenance={name: _plain(value) for name, value in manifest.provenance.items()},
        spec=json.dumps(dict(manifest.spec), indent=2, ensure_ascii=False, default=str),
        keys=_keys(manifest),
    )


def _shard(report: ReportData, cell: int, data: Mapping[str, Any], home: str) -> str:
    name = report.data["cells"][cell]["name"]
    model, benchmark = report.homes[cell]
    title = f"{style.model(model)} | {benchmark} | {name}"
    return rendered("page.html.j2", _SCRIPTS, data, title=title, main=False, home=home)


def _title(maps: Sequence[Map]) -> str:
    models = list(dict.fromkeys(style.model(map_.model) for map_ in maps))
    benchmarks = list(dict.fromkeys(map_.benchmark for map_ in maps))
    on = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
    return f"{', '.join(models)} on {on}"


def _counts(manifest: Manifest) -> list[tuple[str, str]]:
    cells = manifest.expected
    samples = sorted({cell.samples for cell in cells})
    problems = {cell.benchmark: len(cell.problems) for cell in cells}
    return [
        ("models", str(len({cell.model for cell in cells}))),
        ("benchmarks", str(len(problems))),
        ("problems", f"{sum(problems.values()):,}"),
        ("samples each", "–".join(str(count) for count in dict.fromkeys((samples[0], samples[-1])))),
        ("settings", str(len({cell.setting.id for cell in cells}))),
        ("traces", f"{sum(len(cell.problems) * cell.samples for cell in cells):,}"),
    ]


def _keys(manifest: Manifest) -> list[tuple[str, list[str]]]:
    """Run keys with the settings that they stand for, shared keys once."""
    keys: dict[str, list[str]] = {}
    for cell in manifest.expected:
        keys.setdefault(cell.run_key, []).append(f"{cell.model} | {cell.benchmark} | {cell.setting}")
    return list(keys.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

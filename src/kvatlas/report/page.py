"""The report: one self-contained HTML page of a run, without scripts and without a network."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from kvatlas.core import Cell, Map, Status, Trace
from kvatlas.figures import style
from kvatlas.report.words import cost, p_text
from kvatlas.results.export import replacing
from kvatlas.results.manifest import Manifest
from kvatlas.results.store import Key, Store
from kvatlas.stats.comparisons import Comparison, comparisons_of_run
from kvatlas.stats.maps import maps_of_run, mean_maps

#: Characters of one trace, and traces of one page, at most.
TEXT_LIMIT = 8_000
TRACE_LIMIT = 120


def write_report(
    folder: Path,
    out: Path,
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of the run in `folder` to the HTML file `out`, whole or not at all.

    `metric`, `partial` and `fix` as in `stats.maps.maps_of_run`, whose KvatlasErrors this raises, besides those of a
    folder that holds no run and of a file that cannot be written.
    """
    with Store.open(folder) as store:
        manifest = store.manifest()
        traces = list(store.traces(texts=False))
        maps = maps_of_run(manifest, traces, metric, partial, fix)
        comparisons = comparisons_of_run(manifest, traces, metric, fix)
        examples = [(name, store.trace(key)) for name, key in _examples(manifest, maps, traces)]
    html = page(manifest, maps, comparisons, examples)
    with replacing(out) as part:
        part.write_text(html, "utf-8", newline="")


def page(
    manifest: Manifest,
    maps: Sequence[Map],
    comparisons: Sequence[Comparison] = (),
    examples: Sequence[tuple[str, Trace]] = (),
) -> str:
    """The HTML of a report. `examples` are traces, each with the words for its setting (`best dynts cell`)."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    environment.globals.update(label=style.label, p_text=p_text)
    environment.filters.update(points=lambda value: f"{100 * value:+.1f}")
    template = environment.from_string((resources.files("kvatlas.report") / "page.html.j2").read_text("utf-8"))
    return template.render(
        title=_title(maps),
        metric=style.label(maps[0].metric),
        counts=_counts(manifest),
        overview=[_overview(one) for one in (*mean_maps(maps), *maps)],
        partial=list(dict.fromkeys(note for one in maps for note in one.notes if note.startswith("PARTIAL"))),
        models=_models(maps),
        several=len({one.model for one in maps}) > 1,
        comparisons=comparisons,
        examples=_grouped(examples),
        provenance={name: _plain(value) for name, value in manifest.provenance.items()},
        spec=json.dumps(dict(manifest.spec), indent=2, ensure_ascii=False, default=str),
        keys=_keys(manifest),
    )


def visible(value: Any) -> Any:
    """Text with control, format (right-to-left marks too), private and unpaired characters written as `⟨U+202E⟩`."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    if value.isascii() and value.isprintable():
        return value
    return "".join(f"⟨U+{ord(mark):04X}⟩" if _hidden(mark) else mark for mark in value)


def _hidden(mark: str) -> bool:
    return mark not in "\n\t" and unicodedata.category(mark) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def _title(maps: Sequence[Map]) -> str:
    models = list(dict.fromkeys(one.model for one in maps))
    benchmarks = list(dict.fromkeys(one.benchmark for one in maps))
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


def _overview(one: Map) -> dict[str, Any]:
    values = [cell.estimate.value for cell in one.cells.values()]
    names = [name for name, _ in one.axes]
    return {
        "model": one.model,
        "benchmark": one.benchmark,
        "policy": one.policy,
        "mean": style.percent(sum(values) / len(values)),
        "worst": style.percent(min(values)),
        "peaks": [
            f"{_value(cell)} at " + ", ".join(f"{style.label(n)} {v}" for n, v in zip(names, place, strict=True))
            for place, cell in one.cells.items()
            if cell.estimate.value >= max(values) - 1e-9
        ],
        "baselines": style.beside(one.baselines),
    }


def _models(maps: Sequence[Map]) -> dict[str, list[dict[str, Any]]]:
    """By model its benchmarks (the mean first), each with one heat table per policy, all on one colour scale."""
    models: dict[str, list[dict[str, Any]]] = {}
    for model in dict.fromkeys(one.model for one in maps):
        own = [one for one in maps if one.model == model]
        shown = [*mean_maps(own), *own]
        for benchmark in dict.fromkeys(one.benchmark for one in shown):
            row = [one for one in shown if one.benchmark == benchmark]
            low, high = style.scale(row)
            models.setdefault(model, []).append(
                {
                    "benchmark": benchmark,
                    "baselines": [(name, _value(cell), cost(cell)) for name, cell in row[0].baselines.items()],
                    "panels": [_panel(one, low, high) for one in row],
                    "low": f"{low:.1f}",
                    "high": f"{high:.1f}",
                }
            )
    return models


def _panel(one: Map, low: float, high: float) -> dict[str, Any]:
    (vertical, rows), (horizontal, columns) = one.axes
    return {
        "policy": one.policy or one.benchmark,
        "vertical": style.label(vertical),
        "horizontal": style.label(horizontal),
        "columns": columns,
        "rows": [
            (row, [_cell(one.cells.get((row, column)), low, high) for column in columns]) for row in reversed(rows)
        ],
        "notes": one.notes,
    }


def _cell(cell: Cell | None, low: float, high: float) -> dict[str, Any] | None:
    if cell is None:
        return None
    background = style.colour(100 * cell.estimate.value, low, high)
    return {
        "value": style.percent(cell.estimate.value),
        "interval": style.interval(cell.estimate),
        "background": background,
        "ink": style.text_on(background),
        "setting": str(cell.setting),
        "cost": cost(cell),
    }


def _value(cell: Cell) -> str:
    between = style.interval(cell.estimate)
    return style.percent(cell.estimate.value) + (f" ({between})" if between else "")


def _examples(manifest: Manifest, maps: Sequence[Map], traces: Iterable[tuple[str, Trace]]) -> list[tuple[str, Key]]:
    """One right and one wrong trace of the baselines and of the best and worst cell of each map, with their keys."""
    keys = {(cell.model, cell.benchmark, cell.setting.id): cell.run_key for cell in manifest.expected}
    names: dict[tuple[str, str, str], str] = {}
    for one in maps:
        ordered = sorted(one.cells.values(), key=lambda cell: cell.estimate.value)
        named = [("baseline", cell) for cell in one.baselines.values()]
        named += [(f"best {one.policy} cell", ordered[-1]), (f"worst {one.policy} cell", ordered[0])]
        for name, cell in named:
            run_key = keys[one.model, one.benchmark, cell.setting.id]
            names.setdefault((run_key, cell.setting.id, one.benchmark), name)
    found: dict[tuple[str, str, str], dict[bool, Key]] = {place: {} for place in names}
    for run_key, trace in traces:
        place = (run_key, trace.setting.id, trace.benchmark)
        if place in found:
            found[place].setdefault(trace.grade.correct, (*place, trace.problem, trace.sample))
    return [
        (names[place], kept[correct]) for place, kept in found.items() for correct in (True, False) if correct in kept
    ][:TRACE_LIMIT]


def _grouped(examples: Sequence[tuple[str, Trace]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, trace in examples:
        groups.setdefault(f"{trace.model} | {trace.benchmark}", []).append(
            {
                "name": name,
                "setting": str(trace.setting),
                "trace": trace,
                "verdict": _verdict(trace),
                "text": trace.text[:TEXT_LIMIT],
                "more": max(0, len(trace.text) - TEXT_LIMIT),
            }
        )
    return groups


def _verdict(trace: Trace) -> str:
    if trace.grade.status is Status.OK:
        return "right" if trace.grade.correct else "wrong"
    return f"wrong ({trace.grade.status.value.replace('_', ' ')})"


def _keys(manifest: Manifest) -> list[tuple[str, list[str]]]:
    """Run keys with the settings that they stand for, shared keys once."""
    keys: dict[str, list[str]] = {}
    for cell in manifest.expected:
        keys.setdefault(cell.run_key, []).append(f"{cell.model} | {cell.benchmark} | {cell.setting}")
    return list(keys.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

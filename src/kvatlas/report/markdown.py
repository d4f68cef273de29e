"""A description as text: sentences, each with its number, and Markdown in five sections made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvatlas.core import Estimate, NoteKind
from kvatlas.figures import style
from kvatlas.report.description import AdjustedComparison, Description, MapDescription, p_text
from kvatlas.report.summary import effect_lines, recommendations
from kvatlas.stats.inference import Contrast
from kvatlas.stats.intervals import LEVEL
from kvatlas.stats.verdicts import Basis, Verdict

T = TypeVar("T")
#: Cells that a sentence names before it only counts them.
_NAMED = 6


@dataclass(frozen=True)
class Names:
    """What sentences call models; others by their full names."""

    models: Mapping[str, str] = field(default_factory=dict)

    def model(self, name: str) -> str:
        """A model."""
        return self.models.get(name, name)

    def map(self, described: MapDescription) -> str:
        """A map."""
        return _joined(self.model(described.map.model), described.map.benchmark, described.map.policy)


FULL_NAMES = Names()


def as_text(description: Description) -> str:
    """A description as Markdown: Overview, Components/Axes, Detailed Analysis, Key Observations, Interpretation."""
    findings = [finding.text for finding in description.findings]
    sections = {
        "Overview": [
            *_bullets(findings), *([""] if findings else []), _overview(description), "", *_table_of(description.shown),
        ],
        "Components/Axes": _bullets(_components(description)),
        "Detailed Analysis": [
            line
            for described in description.shown
            for line in (f"## {FULL_NAMES.map(described)}", "", *_bullets(analysis(described)), "")
        ],
        "Key Observations": [
            *_bullets(observations(description)), *_comparisons(description.comparisons), *_notes(description),
        ],
        "Interpretation": _bullets(interpretation(description)),
    }  # fmt: skip
    return "\n\n".join("\n".join((f"# {title}", "", *lines)).strip() for title, lines in sections.items()) + "\n"


def _bullets(sentences: Sequence[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def _notes(description: Description) -> list[str]:
    return ["", *_bullets(remarks(description))] if description.notes else []


def remarks(description: Description) -> list[str]:
    """The notes of a description as sentences."""
    return [f"{note.text}." for note in description.notes]


def _overview(description: Description) -> str:
    maps = [described.map for described in description.maps]
    models = list(dict.fromkeys(map_.model for map_ in maps))
    benchmarks = list(dict.fromkeys(map_.benchmark for map_ in maps))
    policies = [policy for policy in dict.fromkeys(map_.policy for map_ in maps) if policy]
    values = [value for described in description.maps for value in described.values]
    return (
        f"{_count(len(maps), 'map')} of {style.label(maps[0].metric)} in percent: {_count(len(models), 'model')} "
        f"({', '.join(models)}), {_count(len(benchmarks), 'benchmark')} ({', '.join(benchmarks)})"
        + (f", {_count(len(policies), 'policy')} ({', '.join(policies)})" if policies else "")
        + f". Values run from {_percent(min(values))} to {_percent(max(values))}. Intervals are 95 % and speak of "
        "problems like these."
    )


def _table_of(maps: Sequence[MapDescription]) -> list[str]:
    header = ["Model", "Benchmark", "Policy", "Problems", "Samples", "Cells", "Mean", "Min", "Max", "Highest cells"]
    rows = [
        [
            described.map.model, described.map.benchmark, described.map.policy or "–", _or_dash(described.problems),
            _or_dash(described.samples), str(len(described.map.cells)), _percent(described.mean),
            _percent(min(described.values)), _percent(max(described.values)),
            "; ".join(_peak(described, coord) for coord in described.peaks), _evidence_cell(described.verdict),
            "; ".join(f"{name} {_with_interval(cell.estimate)}" for name, cell in described.map.baselines.items())
            or "–",
        ]
        for described in maps
    ]  # fmt: skip
    return _table([*header, "Difference shown?", "Baselines"], rows)


def _evidence_cell(verdict: Verdict | None) -> str:
    tested = verdict is not None and verdict.basis is not Basis.GROUP_SEQUENTIAL
    return f"{'yes' if verdict.evidence else 'no'}, p {p_text(verdict.omnibus.p)}" if verdict and tested else "unknown"


def _components(description: Description) -> list[str]:
    maps = description.shown
    grids: dict[str, int] = {}
    for described in maps:
        text = "; ".join(
            f"{name} ({style.label(name)}): {', '.join(map(str, values))}, {_count(len(values), 'value')}"
            for name, values in described.map.axes
        )
        grids[text] = grids.get(text, 0) + 1
    bases = [described.verdict.basis for described in maps if described.verdict]
    return [
        *(f"{text} (in {_count(number, 'map')})" for text, number in grids.items()),
        *(f"Comparisons within {_count(bases.count(basis), 'map')}: {basis}." for basis in dict.fromkeys(bases)),
        *_map_notes(maps),
    ]


def _map_notes(maps: Sequence[MapDescription]) -> list[str]:
    """The notes of all maps, each once, with the maps that have it where not all do."""
    named: dict[str, list[str]] = {}
    for described in maps:
        for note in described.notes:
            named.setdefault(note.text, []).append(FULL_NAMES.map(described))
    return [note if len(names) == len(maps) else f"{note} ({'; '.join(names)})" for note, names in named.items()]


def analysis(described: MapDescription) -> list[str]:
    """What one map says."""
    cells = len(described.map.cells)
    low, high = _percent(min(described.values)), _percent(max(described.values))
    lines = [
        f"Range {low} to {high}, mean {_percent(described.mean)}, {_count(cells, 'cell')}.",
        f"Highest: {_listed(described.peaks, lambda coord: _peak(described, coord))}. "
        f"Lowest: {_listed(described.lowest, lambda coord: _peak(described, coord))}.",
    ]
    if described.verdict is None:
        return [*lines, f"Whether the {cells} cells differ cannot be said: {_why_not(described)}."]
    verdict = described.verdict
    if verdict.basis is Basis.GROUP_SEQUENTIAL:
        return lines
    return [*lines, _evidence(verdict), _plateau(described, verdict), *_trends(described, verdict),
            *_stability(described, verdict), *_decide(described, verdict)]  # fmt: skip


def _why_not(described: MapDescription) -> str:
    if described.map.is_mean:
        return "a mean tells only together with the maps of its benchmarks"
    if described.problems is None and any(note.kind is NoteKind.ADAPTIVE for note in described.notes):
        return "an adaptive sweep decides on the mean over benchmarks"
    return "the number of problems is not known, give it with --problems"


def _evidence(verdict: Verdict) -> str:
    spread = f"the standard deviation over cells is {100 * verdict.spread:.2f} points"
    if verdict.noise is not None:
        spread += f" and chance alone gives {100 * verdict.noise:.2f}"
    claim = "The cells differ" if verdict.evidence else "No difference between the cells is shown"
    return f"{claim}: {spread} (p {p_text(verdict.omnibus.p)})."


def _plateau(described: MapDescription, verdict: Verdict) -> str:
    plateau, cells = verdict.plateau, len(described.map.cells)
    lost = f"; each may still be up to {_percent(verdict.most_lost)} points below the best" if verdict.most_lost else ""
    if len(plateau) == cells:
        return f"All {cells} cells are on the plateau of the best{lost}."
    named = f": {_listed(plateau, lambda coord: _where(described, coord))}" if plateau else ""
    return f"{len(plateau)} of {cells} cells are statistically tied with the best{named}{lost}."


def _trends(described: MapDescription, verdict: Verdict) -> list[str]:
    lines = []
    for effect in verdict.effects:
        if effect.trend is None:
            continue
        between = f"from {effect.levels[0][0]} to {effect.levels[-1][0]}"
        size = f"{style.difference(effect.trend.value)} points, p {p_text(described.holm[effect.axis])} (Holm)"
        if described.supports(effect):
            way = "rises" if effect.trend.value > 0 else "falls"
            lines.append(f"{style.label(described.map.metric)} {way} along {effect.axis} {between}: {size}.")
        else:
            lines.append(f"No trend along {effect.axis} {between} is supported: {size}.")
    return lines


def _stability(described: MapDescription, verdict: Verdict) -> list[str]:
    if verdict.peak_share is None:
        return []
    other = "samples of the same problems" if verdict.basis is Basis.BOUND else "problems of the same kind"
    peaks = "this cell" if len(described.peaks) == 1 else f"one of these {len(described.peaks)} cells"
    share = f"{100 * round(verdict.peak_share, 4):.0f} %"
    return [f"Were these values true, with other {other} {peaks} would be the peak in {share} of cases."]


def _decide(described: MapDescription, verdict: Verdict) -> list[str]:
    gap, need = max(described.values) - min(described.values), verdict.need
    if gap < 1e-8 or (need.samples is None and need.problems is None):
        return []
    ways = [] if need.samples is None else [f"{_count(need.samples, 'sample')} a problem"]
    ways += [] if need.problems is None else [f"{need.problems:,} problems"]
    have = f"there are {described.problems} problems" if described.problems else "the numbers of problems differ"
    have += f" and {_count(described.samples, 'sample')} each" if described.samples else ""
    return [
        f"To tell the highest from the lowest cell ({_percent(gap)} points, if true) takes {' or '.join(ways)}; {have}."
    ]


def observations(description: Description, names: Names = FULL_NAMES) -> list[str]:
    """What the maps say together."""
    tested = [(described, described.verdict) for described in description.single if described.verdict]
    lines = [] if tested else [f"0 of {_count(len(description.maps), 'map')} can be tested for a difference."]
    if tested:
        shown = [described for described, verdict in tested if verdict.evidence]
        p = [verdict.omnibus.p for _, verdict in tested]
        span = p_text(min(p)) if min(p) == max(p) else f"{p_text(min(p))} to {p_text(max(p))}"
        which = f" ({_listed(shown, names.map)})" if 0 < len(shown) < len(tested) else ""
        lines.append(
            f"{len(shown)} of {_count(len(tested), 'map')} show a difference between their cells{which}; p {span}."
        )
    for across in description.across:
        good = across.good_for_all
        said = f": {_listed(good, lambda coord: _at(across.axes, coord))}" if 0 < len(good) < across.cells else ""  # noqa: B023
        lines.append(
            f"{_joined(names.model(across.model), across.policy)}: {len(good)} of {across.cells} settings are on the "
            f"plateau of all {len(across.benchmarks)} benchmarks{said}."
        )
    trends = [
        (described, effect, effect.trend) for described, verdict in tested for effect in verdict.effects if effect.trend
    ]
    if trends:
        supported = [trend for described, effect, trend in trends if described.supports(effect)]
        up = sum(trend.value > 0 for trend in supported)
        lines.append(
            f"{len(supported)} of {_count(len(trends), 'trend')} along an axis are supported after Holm's adjustment"
            + (f", {up} rising and {len(supported) - up} falling." if supported else ".")
        )
    return lines


def _comparisons(comparisons: Sequence[AdjustedComparison]) -> list[str]:
    if not comparisons:
        return []
    header = ["Model", "Benchmark", "First", "Second", "Cells", "Problems", "First - second (points)", "95 % interval"]
    rows = [
        [
            comparison.model, comparison.benchmark, comparison.first, comparison.second, str(comparison.cells),
            str(comparison.difference.problems), style.difference(comparison.difference.value),
            _between(comparison.difference), p_text(comparison.difference.p), p_text(adjusted.p_holm),
            p_text(adjusted.p_bh), comparison.note,
        ]
        for adjusted in comparisons
        for comparison in [adjusted.comparison]
    ]  # fmt: skip
    shown = sum(adjusted.p_holm < LEVEL for adjusted in comparisons)
    said = f"Paired comparisons: {shown} of {len(comparisons)} are shown after Holm's adjustment."
    return ["", said, "", *_table([*header, "p", "p (Holm)", "p (BH)", "Note"], rows)]


def interpretation(description: Description) -> list[str]:
    """What to choose, and what the axes do."""
    return [*recommendations(description), *effect_lines(description.effects)]


def _joined(*parts: str) -> str:
    return " | ".join(filter(None, parts))


def _listed(items: Sequence[T], say: Callable[[T], str]) -> str:
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return "; ".join(map(say, items[:_NAMED])) + more


def _at(axes: Sequence[str], coord: Sequence[object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(axes, coord, strict=True))


def _where(described: MapDescription, coord: tuple[object, object]) -> str:
    return _at([name for name, _ in described.map.axes], coord)


def _peak(described: MapDescription, coord: tuple[object, object]) -> str:
    return f"{_with_interval(described.map.cells[coord].estimate)} at {_where(described, coord)}"


def _percent(share: float | None) -> str:
    return style.percent(share or 0.0)


def _between(contrast: Contrast) -> str:
    return f"{style.difference(contrast.low)} to {style.difference(contrast.high)}"


def _with_interval(estimate: Estimate) -> str:
    interval = style.interval(estimate)
    return _percent(estimate.value) + (f" ({interval})" if interval else "")


def _count(number: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", r"\|").replace("\n", " ") for field in fields) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]

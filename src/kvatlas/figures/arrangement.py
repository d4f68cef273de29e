"""The arrangement of heatmaps: what differs between panels names rows and columns once, what they share the figure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import NamedTuple

from kvatlas.core import Note, NoteKind
from kvatlas.figures.panels import BEST, LOSES, Baseline, Panel
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.estimates import common
from kvatlas.text import counted, fixed, model_name

#: Points by which the intervals of panels may differ and still be told together.
_LIKE_INTERVALS = 2.0
#: Letters of a baseline's name beside a colour bar, and baselines there, at most.
_SHORT = 12
_MOST_ON_BAR = 3


class Names(NamedTuple):
    """The fields of a panel's name."""

    model: str
    benchmark: str
    policy: str
    measure: str


#: The fields by which columns may be named: by the first that differs.
_COLUMNS = ("benchmark", "policy", "measure")


class Arrangement(NamedTuple):
    """Panels in their order on the figure, with the words around them.

    `rows` are the names of rows, empty where each panel has its whole name in `names`; in a grid each of `names` is
    that of a column, and stands above the first row. `subject` and `about` are for all panels.
    """

    panels: Sequence[Panel]
    names: Sequence[str]
    rows: Sequence[str]
    subject: str
    about: Sequence[str]

    @property
    def is_grid(self) -> bool:
        """Return whether rows and columns are named once."""
        return bool(self.rows)

    @property
    def columns(self) -> int:
        """The number of panels in a row of a grid."""
        return len(self.panels) // len(self.rows)

    def without_grid(self, options: FigureOptions) -> Arrangement:
        """Return the same panels each under its whole name."""
        return self._replace(names=_whole_names(self.panels, options), rows=())


def arranged(panels: Sequence[Panel], options: FigureOptions) -> Arrangement:
    """Return panels in rows and columns where they fill these, else in their own order."""
    by_panel = [names_of(panel) for panel in panels]
    subject = _subject(by_panel, options)
    about = _about(panels, by_panel, options)
    names = _plain_names(panels, options) if options.plain else _whole_names(panels, options)
    series = Arrangement(panels, names, (), subject, about)
    return series if options.plain else _grid(series, by_panel, options)


def _grid(series: Arrangement, by_panel: Sequence[Names], options: FigureOptions) -> Arrangement:
    """Return the panels of a series in rows and columns; the series where they do not fill these."""
    differing = [field for field in Names._fields if _differ(by_panel, field)]
    # All but the models may be columns.
    column_fields = [field for field in _COLUMNS if field in differing][:1]
    row_fields = [field for field in differing if field not in column_fields]
    if not column_fields or not row_fields:
        return series
    places = {}
    for panel, names in zip(series.panels, by_panel, strict=True):
        places[_named(names, row_fields, options), _named(names, column_fields, options)] = panel
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    in_rows = [places.get(place) for place in product(rows, columns)]
    panels = [panel for panel in in_rows if panel is not None]
    if not len(panels) == len(in_rows) == len(series.panels):
        return series
    return series._replace(panels=panels, names=columns * len(rows), rows=rows)


def _plain_names(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return the names of panels as papers have them, `R1-Llama | AIME24`, with the policy where that differs."""
    fields = ["model", "benchmark"]
    by_panel = [names_of(panel) for panel in panels]
    fields += [field for field in ("policy", "measure") if _differ(by_panel, field)]
    return [_named(names, fields, options, " | ") for names in by_panel]


def names_of(panel: Panel) -> Names:
    """Return model, benchmark, policy and measure of a panel."""
    benchmark = f"{panel.map.benchmark} benchmarks" if panel.map.is_mean else panel.map.benchmark
    return Names(model_name(panel.map.model), benchmark, panel.map.policy, panel.label)


def _differ(by_panel: Sequence[Names], field: str) -> bool:
    return len({getattr(names, field) for names in by_panel}) > 1


def _named(names: Names, fields: Sequence[str], options: FigureOptions, between: str = ", ") -> str:
    return between.join(options.named(getattr(names, field)) for field in fields if getattr(names, field))


def _whole_names(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return the name of each panel: what differs, and of one panel the benchmark."""
    by_panel = [names_of(panel) for panel in panels]
    fields = [field for field in Names._fields if _differ(by_panel, field)] or ["benchmark"]
    return [_named(names, fields, options) for names in by_panel]


def _subject(by_panel: Sequence[Names], options: FigureOptions) -> str:
    """Return the model and the policy that all panels have, for the title."""
    first = by_panel[0]
    fields = [field for field in ("model", "policy") if getattr(first, field) and not _differ(by_panel, field)]
    return " under ".join(options.named(getattr(first, field)) for field in fields)


def _about(panels: Sequence[Panel], by_panel: Sequence[Names], options: FigureOptions) -> list[str]:
    """Return the clauses about all panels: the measure, the benchmark, the problems and the intervals."""
    first = by_panel[0]
    about = ["units as named"]
    if not _differ(by_panel, "measure"):
        about = [f"{options.named(first.measure)} {panels[0].unit}"]
    is_named_above = not any(_differ(by_panel, field) for field in Names._fields)
    if not _differ(by_panel, "benchmark") and not is_named_above:
        about.append(options.named(first.benchmark))
    problems = common([_problems(panel) for panel in panels])
    if problems is not None:
        about.append(counted(problems, "problem"))
    return about


def _problems(panel: Panel) -> int | None:
    return common([cell.estimate.problems for cell in panel.map.cells.values()])


def facts_of(panel: Panel, panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return what stands over a panel: n and ±, where panels do not share them."""
    facts = []
    problems = _problems(panel)
    if problems and common([_problems(other) for other in panels]) is None:
        facts.append(f"n {problems}")
    if panel.half_interval and options.intervals is None and not _shared_interval(panels):
        facts.append(f"± {fixed(panel.half_interval, 0)}")
    return facts


def baselines_of(panel: Panel, on_bar: Sequence[Baseline], options: FigureOptions) -> list[str]:
    """Return the baselines of a panel that are not on a bar; policies with the same parameters stand together."""
    by_parameters: dict[str, list[Baseline]] = {}
    for baseline in panel.baselines:
        if baseline not in on_bar:
            by_parameters.setdefault(_parameters(baseline, options), []).append(baseline)
    texts = []
    for parameters, baselines in by_parameters.items():
        if parameters and len(baselines) > 1:
            policies = [f"{item.name.partition('(')[0]} {_value(item, options)}" for item in baselines]
            texts.append(f"{parameters}: {', '.join(policies)}")
        else:
            texts += [f"{options.named(item.name)} {_value(item, options)}" for item in baselines]
    return texts


def _parameters(baseline: Baseline, options: FigureOptions) -> str:
    """Return the parameters in the name of a setting, `ratio=0.3` in `random(ratio=0.3)`; none in a label."""
    if options.named(baseline.name) != baseline.name:
        return ""
    return baseline.name.partition("(")[2].removesuffix(")")


def _value(baseline: Baseline, options: FigureOptions) -> str:
    return f"{baseline.text} ({baseline.interval})" if baseline.interval and options.intervals else baseline.text


def _shared_interval(panels: Sequence[Panel]) -> str:
    """Return half the interval of the panels' median cells in points, empty where it is unlike or unknown."""
    halves = [panel.half_interval for panel in panels if panel.half_interval]
    if len(halves) < len(panels) or max(halves) - min(halves) > _LIKE_INTERVALS:
        return ""
    ends = dict.fromkeys((fixed(min(halves), 0), fixed(max(halves), 0)))
    return " to ".join(ends)


def marks(panels: Sequence[Panel], has_values: bool, has_intervals: bool, options: FigureOptions) -> list[str]:
    """Return what the marks and the small type of panels stand for."""
    found: list[str] = list(chain.from_iterable(panel.about for panel in panels))
    if not has_values:
        found = [mark for mark in found if mark != BEST and not mark.startswith(LOSES)]
    if has_intervals and options.kept:
        found.append("small type: tokens after a compression")
    if any(panel.map.recommended in panel.cells for panel in panels):
        found.append("ringed: recommended")
    found.append(_interval_mark(panels, has_intervals, options))
    if any(panel.memory for panel in panels):
        found.append("dotted: equal mean KV memory")
    return found


def _interval_mark(panels: Sequence[Panel], has_intervals: bool, options: FigureOptions) -> str:
    """Return how the panels tell their intervals, empty where they do not."""
    if has_intervals and not options.kept:
        return "small type: 95 % intervals"
    if options.intervals is not None:
        return ""
    shared = _shared_interval(panels)
    if shared:
        return f"half the 95 % interval of the median cell: {shared} points"
    return "±: half the 95 % interval of the median cell" if any(panel.half_interval for panel in panels) else ""


def notes_of(panels: Sequence[Panel], has_values: bool) -> list[Note]:
    """Return the notes of panels; a warning that not all of them have names its panel."""
    notes: list[Note] = []
    for panel in panels:
        for note in panel.notes:
            if note.is_warning and not all(note in other.notes for other in panels):
                name = " ".join(filter(None, names_of(panel)[:3]))
                note = Note(note.kind, f"{note.text} ({name})")
            notes.append(note)
    if not has_values:
        notes.append(Note(NoteKind.GRANULARITY, "The numbers are in the data next to the figure"))
    return notes


def on_bar(panels: Sequence[Panel], scale: tuple[float, float]) -> list[Baseline]:
    """Return the baselines that are ticks on the bar of these panels: those on its scale that all of them share."""
    found = []
    for baseline in panels[0].baselines:
        is_shared = all(baseline in panel.baselines for panel in panels)
        if baseline.value is None or len(baseline.name) > _SHORT or not is_shared:
            continue
        if scale[0] - 1e-9 <= baseline.value <= scale[1] + 1e-9:
            found.append(baseline)
    return found[:_MOST_ON_BAR]

"""The arrangement of heatmaps: what differs between panels names rows and columns once, what they share the figure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import NamedTuple

from kvatlas.core import Note, NoteKind
from kvatlas.figures.marks import BOX, KeyEntry
from kvatlas.figures.panels import BEST, Baseline, Panel, problem_count
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.estimates import common
from kvatlas.text import counted, fixed, in_words, model_name

#: Points by which the intervals of panels may differ and still be told together.
_LIKE_INTERVALS = 2.0
#: Letters of a baseline's name beside a colour bar, and baselines there, at most.
_SHORT = 12
_MOST_ON_BAR = 3


class PanelName(NamedTuple):
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
        return self._replace(names=_names_that_differ(self.panels, options), rows=())


def arranged(panels: Sequence[Panel], options: FigureOptions) -> Arrangement:
    """Return panels in rows and columns where they fill these, else in their own order."""
    by_panel = [name_of(panel) for panel in panels]
    differing = _differing_fields(by_panel)
    first = by_panel[0]

    # The model, the policy and the KV budget that all panels have, for the title.
    shared = [field for field in ("model", "policy") if getattr(first, field) and field not in differing]
    subject = " under ".join(options.named(getattr(first, field)) for field in shared)
    cells = chain.from_iterable(panel.map.cells.values() for panel in panels)
    budgets = {cell.setting.values.get("kv_budget") for cell in cells} - {None}
    if len(budgets) == 1 and "KV budget" not in subject:
        subject = ", ".join(filter(None, [subject, f"KV budget {budgets.pop()}"]))

    # The clauses about all panels: the measure, the benchmark, the problems.
    about = ["units as named"]
    if "measure" not in differing:
        about = [f"{options.named(first.measure)} {panels[0].unit}"]
    if differing and "benchmark" not in differing:
        about.append(options.named(first.benchmark))
    problems = common([problem_count(panel.map) for panel in panels])
    if problems is not None:
        about.append(counted(problems, "problem"))

    if options.plain:
        # As papers have them, `R1-Llama | AIME24`, with the policy where that differs.
        fields = ["model", "benchmark", *(field for field in ("policy", "measure") if field in differing)]
        names = [_joined_name(name, fields, options, " | ") for name in by_panel]
        return Arrangement(panels, names, (), subject, about)
    series = Arrangement(panels, _names_that_differ(panels, options), (), subject, about)

    # A grid, where panels fill its rows and columns. All but the models may be columns.
    column_fields = [field for field in _COLUMNS if field in differing][:1]
    row_fields = [field for field in differing if field not in column_fields]
    if not column_fields or not row_fields:
        return series
    places = {}
    for panel, name in zip(panels, by_panel, strict=True):
        places[_joined_name(name, row_fields, options), _joined_name(name, column_fields, options)] = panel
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    in_rows = [places.get(place) for place in product(rows, columns)]
    panels_in_rows = [panel for panel in in_rows if panel is not None]
    if not len(panels_in_rows) == len(in_rows) == len(panels):
        return series
    return series._replace(panels=panels_in_rows, names=columns * len(rows), rows=rows)


def name_of(panel: Panel) -> PanelName:
    """Return model, benchmark, policy and measure of a panel."""
    benchmark = f"{panel.map.benchmark} benchmarks" if panel.map.is_mean else panel.map.benchmark
    return PanelName(model_name(panel.map.model), benchmark, panel.map.policy_words, panel.label)


def _differing_fields(names: Sequence[PanelName]) -> list[str]:
    """Return the fields in which names differ."""
    by_field = zip(PanelName._fields, zip(*names, strict=True), strict=True)
    return [field for field, values in by_field if len(set(values)) > 1]


def _joined_name(name: PanelName, fields: Sequence[str], options: FigureOptions, between: str = ", ") -> str:
    return between.join(options.named(getattr(name, field)) for field in fields if getattr(name, field))


def _names_that_differ(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return the name of each panel: what differs, and of one panel the benchmark."""
    by_panel = [name_of(panel) for panel in panels]
    differing = _differing_fields(by_panel)
    return [_joined_name(name, differing or ["benchmark"], options) for name in by_panel]


def facts_of(panel: Panel, panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return what stands over a panel: n and ±, where panels do not share them."""
    facts = []
    problems = problem_count(panel.map)
    if problems and common([problem_count(other.map) for other in panels]) is None:
        facts.append(f"n {problems}")
    if panel.half_interval and options.intervals is None and not _shared_interval(panels):
        facts.append(f"± {fixed(panel.half_interval, panel.digits)}")
    return facts


def baseline_lines(panel: Panel, on_bar: Sequence[Baseline], options: FigureOptions) -> list[str]:
    """Return the baselines of a panel that are not on a bar; policies with the same parameters stand together."""
    # By the parameters in the name of a setting, `ratio=0.3` in `random(ratio=0.3)`; a label has none.
    by_parameters: dict[str, list[Baseline]] = {}
    for baseline in panel.baselines:
        if baseline not in on_bar:
            is_label = options.named(baseline.name) != in_words(baseline.name)
            parameters = "" if is_label else in_words(baseline.name.partition("(")[2].removesuffix(")"))
            by_parameters.setdefault(parameters, []).append(baseline)

    lines = []
    for parameters, baselines in by_parameters.items():
        if parameters and len(baselines) > 1:
            policies = [f"{item.name.partition('(')[0]} {_baseline_value(item, options)}" for item in baselines]
            lines.append(f"{parameters}: {', '.join(policies)}")
        else:
            for item in baselines:
                name = options.named(item.name)
                # A value is told apart from those of parameters.
                between = ": " if ", " in name else " "
                lines.append(f"{name}{between}{_baseline_value(item, options)}")
    return lines


def _baseline_value(baseline: Baseline, options: FigureOptions) -> str:
    return f"{baseline.text} ({baseline.interval})" if baseline.interval and options.intervals else baseline.text


def _shared_interval(panels: Sequence[Panel]) -> str:
    """Return half the interval of the panels' median cells in points, empty where it is unlike or unknown."""
    halves = [panel.half_interval for panel in panels if panel.half_interval]
    if len(halves) < len(panels) or max(halves) - min(halves) > _LIKE_INTERVALS:
        return ""
    digits = max(panel.digits for panel in panels)
    ends = dict.fromkeys((fixed(min(halves), digits), fixed(max(halves), digits)))
    return " to ".join(ends)


def marks_in_words(panels: Sequence[Panel], has_values: bool, has_intervals: bool, options: FigureOptions) -> list[str]:
    """Return what the marks and the small type of panels stand for, and how they tell their intervals."""
    words: list[str] = list(chain.from_iterable(panel.about for panel in panels))
    if not has_values:
        words = [mark for mark in words if mark != BEST]
    shared_interval = _shared_interval(panels)
    if has_intervals:
        words.append("small type: 95 % intervals")
    elif options.intervals is None and shared_interval:
        words.append(f"half the 95 % interval of the median cell: {shared_interval} points")
    elif options.intervals is None and any(panel.half_interval for panel in panels):
        words.append("±: half the 95 % interval of the median cell")
    return words


def key_of_panels(panels: Sequence[Panel]) -> list[KeyEntry]:
    """Return the key of the marks of panels, of which the ring comes first."""
    ringed = [panel.map for panel in panels if panel.map.recommended in panel.cells]
    key = []
    if ringed:
        # Without a full cache nothing says what a setting loses.
        words = "cheapest not found worse" if ringed[0].keeps is None else "recommended"
        # Marks are of a panel's own benchmark, the ring may be of the mean.
        others = {map_.recommended_for for map_ in ringed if map_.recommended_for != map_.benchmark}
        key.append(KeyEntry(BOX, words + "".join(f" for the {name} benchmarks" for name in sorted(others))))
    return [*key, *dict.fromkeys(chain.from_iterable(panel.key for panel in panels))]


def notes_of(panels: Sequence[Panel], has_values: bool) -> list[Note]:
    """Return the notes of panels; warnings that not all of them have name their panels, one of each kind in all."""
    notes: list[Note] = []
    warnings: dict[tuple[NoteKind, str], list[str]] = {}
    for panel in panels:
        for note in panel.notes:
            if not note.is_warning or all(note in other.notes for other in panels):
                notes.append(note)
                continue
            # The first word names the kind: `PARTIAL: 3 of 20 cells are missing`.
            kind, _, text = note.text.partition(": ")
            name = " ".join(filter(None, name_of(panel)[:3]))
            warnings.setdefault((note.kind, kind), []).append(f"{text} ({name})")
    notes += [Note(kind, f"{word}: {'; '.join(texts)}") for (kind, word), texts in warnings.items()]
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

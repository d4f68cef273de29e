"""Settings as rows of a forest: recommendations, and differences to one policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Claim, Note, Setting, differing, grouped, mean_of, telling_parameters
from kvatlas.figures import style
from kvatlas.figures.forest import LossSpan, Row, RowPanel, forest_figure
from kvatlas.figures.marks import BOX, CONTROL, KeyEntry, State, key_of, state_of
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.choice import Choice
from kvatlas.stats.maps import POLICY
from kvatlas.stats.numerics.planning import MOST_PROBLEMS
from kvatlas.stats.pairs import AgainstTable
from kvatlas.stats.run_data import short_names, shown_policies
from kvatlas.text import axis_label, counted, fixed, guarded, in_words, margin_text, model_name, percent_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvatlas.stats.numerics.arrays import Difference


# -- recommendations ---------------------------------------------------------------------------------------------------

#: The settings of a forest at most; a larger grid is a map.
MOST_ROWS = 20


def states_of_choice(choice: Choice) -> dict[str, State]:
    """Return the states of the settings of a choice by id, without controls where there are others.

    Nothing is proven by traces that can show no loss, and in a run of which nothing is recommended.
    """
    untested = choice.untested
    losses = choice.losses
    has_others = not all(loss.is_control for loss in losses.values())
    states = {}
    for id_, loss in losses.items():
        if not (loss.is_control and has_others):
            state = state_of(loss, choice.margin, id_ in untested)
            is_refused = state is State.WITHIN and not choice.is_judged
            states[id_] = State.OPEN if is_refused else state
    return states


def key_of_choices(choices: Sequence[Choice], recommended: str) -> list[KeyEntry]:
    """Return the key of the marks of choices; `recommended` is the kind of mark of what is recommended."""
    states = set(chain.from_iterable(states_of_choice(choice).values() for choice in choices))
    claims = {choice.family.claim for choice in choices if not choice.is_single}
    claim = "on these problems" if claims == {Claim.THESE} else ""
    key = []
    if any(choice.recommended is not None and choice.is_judged for choice in choices):
        key.append(KeyEntry(recommended, "recommended"))
    key += key_of(states, margin_text(choices[0].margin), claim)
    return key


def about_choices(choices: Sequence[Choice]) -> list[str]:
    """Return the clauses about all settings: benchmarks, problems, what they share, the intervals, the reference."""
    first = choices[0]
    about = [f"{first.benchmark} benchmarks" if first.benchmark.startswith("mean of") else first.benchmark]
    problems = {choice.family.problem_count for choice in choices}
    if len(problems) == 1:
        about.append(counted(problems.pop(), "problem"))
    settings = chain.from_iterable(choice.settings.values() for choice in choices)
    budgets = {setting.values.get("kv_budget") for setting in settings}
    if len(budgets) == 1 and None not in budgets:
        about.append(f"KV budget {budgets.pop()}")
    about.append("lines: 95 % intervals, paired")
    solved = [percent_text(choice.family.full.value, 0) for choice in choices if choice.family.full]
    about.append(f"{first.family.reference} solves {' and '.join(dict.fromkeys(solved))} %")
    return about


def nearest_words(choice: Choice) -> str:
    """Return, where nothing is proven, the setting that is nearest to it, and what would decide it; else ""."""
    required = choice.required
    if choice.shown or required is None or choice.vacuous is not None:
        return ""
    name = short_names(choice.settings.values())[required.setting.id]
    count = required.count_of(choice.family.claim)
    if count is None and required.loss.value >= choice.margin:
        return f"nearest: {name}; at its loss more problems prove nothing"
    unit = "samples of each problem" if choice.family.claim is Claim.THESE else f"{choice.family.unit}s"
    effort = f"more than {MOST_PROBLEMS:,}" if count is None else f"about {count:,}"
    return f"nearest: {name}; {effort} {unit} would decide it"


class ChoiceRow(NamedTuple):
    """A setting of a choice with its loss and state, and the losses of controls with the same parameters by id.

    `saved` is the percent of the full cache's memory that it saves, None where that is not known.
    """

    setting: Setting
    loss: Difference
    state: State
    saved: float | None
    controls: Mapping[str, Difference]
    is_picked: bool

    @property
    def points(self) -> LossSpan:
        """The loss in points."""
        return LossSpan(100 * self.loss.value, 100 * self.loss.low, 100 * self.loss.high)

    @property
    def control(self) -> float | None:
        """The points that the first control with the same parameters loses."""
        return next((100 * loss.value for loss in self.controls.values()), None)


def rows_of_choice(choice: Choice) -> list[ChoiceRow]:
    """Return the settings that are no controls, what saves most first; in their own order where that is not known."""
    states = states_of_choice(choice)
    parameters = differing(choice.settings[id_].values for id_ in states)

    def values(id_: str) -> list[Any]:
        return [choice.settings[id_].values.get(name) for name in parameters]

    controls = [id_ for id_ in choice.losses if id_ not in states]
    rows = []
    for id_, state in states.items():
        setting = choice.settings[id_]
        saved = 100 * (1 - choice.savings[id_].memory) if id_ in choice.savings else None
        alike = {control: choice.losses[control] for control in controls if values(control) == values(id_)}
        is_picked = choice.is_judged and choice.recommended == setting
        rows.append(ChoiceRow(setting, choice.losses[id_], state, saved, alike, is_picked))
    if not choice.savings.keys() >= states.keys():
        return rows
    return sorted(rows, key=lambda row: choice.savings[row.setting.id].memory)


def answer_panel(choice: Choice) -> RowPanel:
    """Return the rows of the settings of a choice, beside the controls of like parameters."""
    settings = rows_of_choice(choice)
    policies = shown_policies(one.setting.policy for one in settings)
    parameters = telling_parameters(one.setting for one in settings)
    has_savings = all(one.saved is not None for one in settings)
    has_policies = len(policies) > 1 or not parameters
    columns = [*(["policy"] if has_policies else []), *map(axis_label, parameters), *(["saves"] if has_savings else [])]
    needed = choice.required.setting if choice.required is not None and not choice.shown else None

    rows = []
    for one in settings:
        names = [policies[one.setting.policy]] if has_policies else []
        names += [style.tick_text(one.setting.values.get(name, "")) for name in parameters]
        if has_savings and one.saved is not None:
            names.append(f"{fixed(one.saved, 0)} %".replace("-", "−"))
        note = "fits, not tested" if one.state is State.UNTESTED else ""
        is_nearest = one.setting == needed
        row = Row(
            tuple(names),
            one.points,
            one.state,
            one.control,
            note,
            is_picked=one.is_picked,
            is_nearest=is_nearest,
        )
        rows.append(row)
    return RowPanel(model_name(choice.model), tuple(columns), rows, 100 * choice.margin, nearest_words(choice))


def answer_figure(
    choices: Sequence[Choice],
    metric: str,
    *,
    title: str = "",
    options: FigureOptions | None = None,
) -> Figure:
    """Return the forest of recommendations with a full cache: a panel for each model."""
    panels = list(map(answer_panel, choices))
    controls = list(dict.fromkeys(chain.from_iterable(choice.controls for choice in choices)))
    rows = chain.from_iterable(panel.rows for panel in panels)
    has_ticks = any(row.control is not None for row in rows)
    key = key_of_choices(choices, BOX)
    if has_ticks:
        key.append(KeyEntry(CONTROL, f"{' and '.join(controls)} with the same parameters"))
    return forest_figure(
        panels,
        f"points of {axis_label(metric)} lost",
        reference="reference" if "reference" in choices[0].family.reference else "full",
        control=controls[0] if has_ticks else "",
        key=key,
        # Of controls alone nothing is claimed.
        title=title or f"Points of {axis_label(metric)} lost against {choices[0].family.reference}",
        about=about_choices(choices),
        options=options,
    )


def answer_csv(choices: Sequence[Choice]) -> str:
    """Return what each setting saves and loses, in percent and points, with its state and whether it is recommended."""
    rows: list[list[Any]] = [
        ["model", "benchmark", "setting", "saves", "loses", "low", "high", "control_loses", "state", "recommended"]
    ]
    for choice in choices:
        for row in rows_of_choice(choice):
            values = [row.saved, *row.points, row.control]
            texts = ["" if value is None else round(value, 4) for value in values]
            names = map(guarded, (choice.model, choice.benchmark, str(row.setting)))
            rows.append([*names, *texts, str(row.state), int(row.is_picked)])
    return style.rows_csv(rows)


# -- differences to one policy -----------------------------------------------------------------------------------------


def against_figure(
    tables: Sequence[AgainstTable],
    *,
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each model: the differences to the policy in points, the highest mean of a policy on top.

    Filled marks differ from the policy: their limits exclude 0.
    """
    options = options or FigureOptions()
    first = tables[0]
    every_row = list(chain.from_iterable(table.rows for table in tables))
    parameters = dict(chain.from_iterable(row.group for row in every_row))
    by_name = grouped(every_row, lambda row: row.name)
    means = {}
    for name, of_name in by_name.items():
        means[name] = fmean(row.contrast.value for row in of_name)

    panels = []
    for table in tables:
        rows = []
        for row in sorted(table.rows, key=lambda row: -means[row.name]):
            values = dict(row.group)
            names = [style.tick_text(values.get(name, "")).lower() for name in parameters]
            span = LossSpan(100 * row.contrast.value, 100 * row.contrast.low, 100 * row.contrast.high)
            names = [options.named(row.name), *names]
            rows.append(Row(tuple(names), span, is_proven=row.contrast.excludes_zero))
        panels.append(RowPanel(model_name(table.model), (POLICY, *map(axis_label, parameters)), rows))
    return forest_figure(
        panels,
        f"{axis_label(first.metric)}, points above {in_words(first.policy)}",
        title=against_title(tables),
        about=list(_about_differences(tables, options)),
        notes=notes,
        options=options,
    )


def against_title(tables: Sequence[AgainstTable]) -> str:
    """Return how many settings are proven above the policy, and how many below it."""
    rows = list(chain.from_iterable(table.rows for table in tables))
    above = sum(row.contrast.low > 0 for row in rows)
    below = sum(row.contrast.high < 0 for row in rows)
    policy = tables[0].policy
    if not above and not below:
        return f"None of {len(rows)} settings is proven to differ from {policy}"
    return f"Of {len(rows)} settings {above} are proven above {policy} and {below} below it"


def _about_differences(tables: Sequence[AgainstTable], options: FigureOptions) -> Iterator[str]:
    """Yield the clauses about all panels."""
    first = tables[0]
    yield f"each setting minus {options.named(first.policy)} with the same values, on the same problems"
    benchmarks = {table.benchmarks for table in tables}
    if len(benchmarks) == 1:
        names = first.benchmarks
        yield options.named(names[0]) if len(names) == 1 else f"{mean_of(len(names))} benchmarks"

    problems = sorted({table.problems for table in tables})
    yield " and ".join(f"{count:,}" for count in problems) + " problems"
    if options.intervals is not False:
        yield "lines: 95 % limits that hold for all settings of a model at once; filled: they exclude 0"
    reach = " and ".join(fixed(100 * table.detectable) for table in tables)
    yield f"differences of about {reach} points would have been shown"


def against_csv(tables: Sequence[AgainstTable]) -> str:
    """Return the differences as CSV, in points with their limits, and whether they are proven."""
    rows: list[list[Any]] = [["model", "setting", "against", "difference", "low", "high", "proven"]]
    every_row = chain.from_iterable(table.rows for table in tables)
    settings = chain.from_iterable((row.setting, row.partner) for row in every_row)
    shown = shown_policies(setting.policy for setting in settings)

    for table in tables:
        for row in table.rows:
            contrast = row.contrast
            setting = row.setting.shown_as(shown[row.setting.policy])
            partner = row.partner.shown_as(shown[row.partner.policy])
            names = map(guarded, (table.model, setting, partner))
            rows.append([*names, *contrast.in_percent().values(), int(contrast.excludes_zero)])
    return style.rows_csv(rows)

"""A description on one page: values, what is lost against the full cache, effects, what was missed, what to choose."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.core import Map, NoteKind, Setting
from kvatlas.figures import style
from kvatlas.report.description import Description, MapDescription, p_text
from kvatlas.stats.bare_maps import PooledEffect
from kvatlas.stats.choice import Choice, kv_tokens_of
from kvatlas.stats.losses import Loss
from kvatlas.stats.verdicts import Basis

#: Models and policies whose values are printed cell by cell; of more only the ends.
_GRIDS = 6


def one_page(description: Description) -> str:
    """The description as Markdown of about a page; `markdown.as_text` has all of it."""
    sections = {
        "Values": [*_findings(description), *_values(description)],
        "Against the full cache": _losses(description),
        "What the axes do": _effects(description),
        "What could have been missed": _missed(description),
        "What to choose": [f"- {line}" for line in recommendations(description)],
        "Notes": _notes(description),
    }
    said = {title: lines for title, lines in sections.items() if lines}
    return "\n\n".join("\n".join((f"# {title}", "", *lines)).strip() for title, lines in said.items()) + "\n"


def exact(map_: Map, value: float) -> str:
    """A value in percent: to a tenth of a point, and of maps without traces to a hundredth where it was given so."""
    finer = f"{round(100 * value, 4):.2f}"
    return finer if map_.validity is None and finer[-1] != "0" else style.percent(value)


def points(share: float) -> str:
    """A share as points without more places than needed: 0.03 is `3`."""
    return f"{round(100 * share, 4):g}"


def _findings(description: Description) -> list[str]:
    lines = [f"- {finding.text}" for finding in description.findings]
    return [*lines, ""] if lines else []


def _grids(description: Description) -> list[MapDescription]:
    """One map for each model and policy: the mean over benchmarks, else the only one."""
    means = {(described.map.model, described.map.policy): described for described in description.single}
    means |= {
        (described.map.model, described.map.policy): described
        for described in description.shown
        if described.map.is_mean
    }
    return list(means.values())


def _values(description: Description) -> list[str]:
    grids = _grids(description)
    metric = style.label(description.maps[0].map.metric)
    lines = [
        f"{metric} in percent, {_over(grids)}. `*`: shown to lose at most the margin against the full cache; `!`: more."
        if any(grid.verdict and grid.verdict.losses for grid in grids)
        else f"{metric} in percent, {_over(grids)}.",
        "",
    ]
    for grid in grids[:_GRIDS]:
        lines += [*_grid(grid), ""]
    lines += _by_benchmark(description)
    return lines


def _over(grids: Sequence[MapDescription]) -> str:
    counts = dict.fromkeys(grid.map.benchmark for grid in grids)
    return ", ".join(counts) + (" benchmarks" if all(grid.map.is_mean for grid in grids) else "")


def _grid(described: MapDescription) -> list[str]:
    (down, rows), (across, columns) = described.map.axes
    losses = (described.verdict.losses if described.verdict else None) or {}
    header = [f"{_title(described.map)}: {down} \\ {across}", *map(str, columns)]
    body = [
        [str(row), *(_value(described.map, (row, column), losses.get((row, column))) for column in columns)]
        for row in rows
    ]
    return _table(header, body)


def _value(map_: Map, coord: tuple[object, object], loss: Loss | None) -> str:
    if coord not in map_.cells:
        return "–"
    mark = "" if loss is None else "*" if loss.shown else "!" if loss.broken else ""
    return exact(map_, map_.cells[coord].estimate.value) + mark


def _by_benchmark(description: Description) -> list[str]:
    """Where benchmarks differ in difficulty and agree: one row for each model and benchmark."""
    parts = description.single
    names = dict.fromkeys((part.map.model, part.map.benchmark) for part in parts)
    policies = list(dict.fromkeys(part.map.policy for part in parts))
    rows = []
    for model, benchmark in names:
        maps = {part.map.policy: part for part in parts if (part.map.model, part.map.benchmark) == (model, benchmark)}
        first = next(iter(maps.values()))
        problems = "–" if first.problems is None else str(first.problems)
        full = [cell.estimate for name, cell in first.map.baselines.items() if cell.setting.policy == "full"]
        rows.append(
            [
                style.model(model), benchmark, problems, *(style.percent(estimate.value) for estimate in full[:1]),
                *("–" if policy not in maps else _span(maps[policy]) for policy in policies),
            ]
        )  # fmt: skip
    with_full = any(len(row) > 3 + len(policies) for row in rows)
    header = ["Model", "Benchmark", "Problems", *(["full"] if with_full else [])]
    return _table([*header, *(f"{policy or 'cells'}, lowest to highest" for policy in policies)], rows)


def _span(described: MapDescription) -> str:
    return f"{exact(described.map, min(described.values))} to {exact(described.map, max(described.values))}"


def _losses(description: Description) -> list[str]:
    lines = []
    for choice in description.choices:
        if choice.losses is None:
            continue
        kept, lost = (sum(getattr(loss, name) for loss in choice.losses.values()) for name in ("shown", "broken"))
        open_ = [loss.high for loss in choice.losses.values() if not loss.shown and not loss.broken]
        most = f" and may lose up to {100 * max(open_):.1f}" if open_ else ""
        least = min(choice.losses.items(), key=lambda item: item[1].value)
        lines.append(
            f"- {style.model(choice.model)}, {choice.benchmark}: of {len(choice.losses)} settings {kept} "
            f"{_are(kept)} shown to lose at most {points(choice.margin)} points, {lost} to lose more; {len(open_)} "
            f"{_are(len(open_))} open{most}; least loss {_loss(least[1])} "
            f"({_setting(choice, choice.settings.get(least[0]))})."
        )
    return lines


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _loss(loss: Loss) -> str:
    return f"{style.difference(loss.value)} ({style.difference(loss.low)} to {style.difference(loss.high)})"


def _setting(choice: Choice, setting: Setting | None) -> str:
    """A setting by what tells it from the other candidates."""
    if setting is None:
        return "–"
    others = list(choice.settings.values()) or [setting]
    told = [
        name
        for name, value in setting.values.items()
        if value != "" and len({repr(other.values.get(name)) for other in others}) > 1
    ]
    return f"{setting.policy} " + ", ".join(f"{name} {setting.values[name]}" for name in told)


def _effects(description: Description) -> list[str]:
    lines = [f"- {line}" for line in effect_lines(description.effects)]
    if description.peak_p is not None:
        shown = "is shown" if description.peak_p < 0.05 else "is not shown"
        lines.append(f"- That a single cell stands out {shown} (p {p_text(description.peak_p)}).")
    return lines


def effect_lines(effects: Sequence[PooledEffect]) -> list[str]:
    """Joint tests of axes as sentences, one for each model and policy, what is shown first."""
    by_place: dict[str, list[PooledEffect]] = {}
    for effect in effects:
        by_place.setdefault(effect.over.replace("embedded:", ""), []).append(effect)
    return [
        f"{where}: {'; '.join(_effect(effect) for effect in sorted(own, key=lambda effect: not effect.supported))}."
        for where, own in by_place.items()
    ]


def _effect(effect: PooledEffect) -> str:
    if not effect.supported:
        largest = max(max(abs(level.low), abs(level.high)) for _, level in effect.levels)
        could = f", up to {100 * largest:.1f} points could have been missed" if largest <= 1 else ""
        return f"no effect of {effect.axis} is shown (p {p_text(effect.adjusted_p)}){could}"
    level, most = max(effect.levels, key=lambda item: abs(item[1].value))
    way = "below" if most.value < 0 else "above"
    count = ""
    if effect.maps > 1 and most.value < 0:
        rank = [name for name, _ in effect.levels].index(level)
        count = f", in {effect.below[rank]} of {effect.maps} maps"
    return (
        f"{effect.axis} {level} lies {100 * abs(most.value):.1f} points {way} the rest{count} "
        f"({style.difference(most.low)} to {style.difference(most.high)}, p {p_text(effect.adjusted_p)})"
    )


def _missed(description: Description) -> list[str]:
    """What size of difference between two cells could be there, though it is not shown."""
    lines = []
    bare = [
        described for described in description.single if described.verdict and described.verdict.basis is Basis.BOUND
    ]
    if bare:
        lost = [
            described.verdict.most_lost
            for described in bare
            if described.verdict and described.verdict.most_lost is not None
        ]
        lines.append(
            f"- Maps of bare Pass@1: by the binomial bound a cell may lie {100 * min(lost):.1f} to "
            f"{100 * max(lost):.1f} points below its map's highest and not be shown to."
            if lost
            else "- Maps of bare Pass@1 allow no bound."
        )
    weak = [described for described in description.single if described.verdict and not described.verdict.evidence]
    if weak:
        lines.append(f"- In {len(weak)} of {len(description.single)} maps no difference between cells is shown.")
    return lines


def _notes(description: Description) -> list[str]:
    """Notes of the description, and once each those of its maps that are no mere method of an interval."""
    lines = [f"- {note.text}." for note in description.notes[:3] if note.kind is not NoteKind.SCALES]
    said = [
        (note, _title(described.map) + (f" on {described.map.benchmark}" if note.kind is NoteKind.GRANULARITY else ""))
        for described in description.shown
        for note in described.map.notes
        if note.kind is not NoteKind.INTERVAL
    ]
    for text in dict.fromkeys(note.text for note, _ in said):
        named = dict.fromkeys(name for note, name in said if note.text == text)
        lines.append(f"- {', '.join(named)}: {text}.")
    return lines


def recommendations(description: Description) -> list[str]:
    """What to choose, one sentence for each model."""
    lines = [recommendation(choice) for choice in description.choices]
    return lines or ["No setting is recommended: no map tells what its settings cost and what they rest on."]


def recommendation(choice: Choice) -> str:
    """What to choose of one model: a sentence with what it loses and what it saves."""
    whose = f"{style.model(choice.model)}, {choice.benchmark}"
    cell = choice.by_memory
    if choice.vacuous is not None:
        return f"{whose}: no setting is recommended, because {choice.vacuous}."
    if choice.losses is not None and not choice.shown:
        said = f"{whose}: no setting is shown to lose at most {points(choice.margin)} points."
        if choice.nearest is None:
            return f"{said} None would be with more problems, if what was seen is true."
        setting, more = choice.nearest
        return f"{said} {more:,} more problems would show {_setting(choice, setting)}, if what was seen is true."
    if cell is None:
        return f"{whose}: no setting can be chosen without costs."
    kept = f"{kv_tokens_of(cell) or 0:,.0f} KV tokens kept"
    if choice.tied:
        kept += f", a tie with {choice.tied} {'other' if choice.tied == 1 else 'others'}"
    named = _setting(choice, cell.setting) if choice.settings else str(cell.setting)
    value = f"{style.percent(cell.estimate.value)}"
    if choice.loss is None:
        return (
            f"{whose}: {named} ({value}, {kept}) is the cheapest that is not shown to be worse than others. Without "
            "traces of the full cache nothing says what it loses."
        )
    return (
        f"{whose}: {named} ({value}, {kept}) is the cheapest shown to lose at most {points(choice.margin)} points; it "
        f"loses {_loss(choice.loss)}."
    )


def _title(map_: Map) -> str:
    return " ".join(filter(None, (style.model(map_.model), map_.policy)))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", r"\|") for field in fields) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]

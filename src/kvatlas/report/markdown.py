"""A description in words: Markdown in five sections, every sentence with its number, made of the document alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvatlas.figures.style import label
from kvatlas.report.description import p_text
from kvatlas.stats.estimates.maps import MEAN_OF

#: Cells that a sentence names before it only counts them.
_NAMED = 6
_NO_AXIS = frozenset(("value", "low", "high"))
Document = dict[str, Any]


def as_text(description: Document) -> str:
    """A description as Markdown: Overview, Components/Axes, Detailed Analysis, Key Observations, Interpretation."""
    maps = _shown(description)
    sections = {
        "Overview": [*_findings(description), *_overview_words(description), "", *_table_of(maps)],
        "Components/Axes": _components(description),
        "Detailed Analysis": [line for one in maps for line in _analysis(one)],
        "Key Observations": _observations(description),
        "Interpretation": _interpretation(description),
    }
    return "\n\n".join("\n".join((f"# {title}", "", *lines)).strip() for title, lines in sections.items()) + "\n"


def _shown(description: Document) -> list[Document]:
    """Maps, then the means that are not among them."""
    given = {_title(one) for one in description["maps"]}
    return [*description["maps"], *(one for one in description["means"] if _title(one) not in given)]


def _findings(description: Document) -> list[str]:
    """What limits the runs, before all else."""
    lines = [f"- {finding['text']}" for finding in description["findings"]]
    return [*lines, ""] if lines else []


def _overview_words(description: Document) -> list[str]:
    maps = description["maps"]
    models = list(dict.fromkeys(one["model"] for one in maps))
    benchmarks = list(dict.fromkeys(one["benchmark"] for one in maps))
    policies = [policy for policy in dict.fromkeys(one["policy"] for one in maps) if policy]
    lows, highs = [one["min"] for one in maps], [one["max"] for one in maps]
    return [
        f"{_count(len(maps), 'map')} of {label(maps[0]['metric'])} in percent: {_count(len(models), 'model')} "
        f"({', '.join(models)}), {_count(len(benchmarks), 'benchmark')} ({', '.join(benchmarks)})"
        + (f", {_count(len(policies), 'policy')} ({', '.join(policies)})" if policies else "")
        + f". Values run from {min(lows):.1f} to {max(highs):.1f}. Intervals are 95 % and speak of "
        + ("these very problems." if maps[0]["metric"] == "bayes" else "problems like these.")
    ]


def _table_of(maps: Sequence[Document]) -> list[str]:
    rows = [
        [
            one["model"], one["benchmark"], one["policy"] or "–", _or_dash(one["problems"]), _or_dash(one["samples"]),
            str(one["cells"]), f"{one['mean']:.1f}", f"{one['min']:.1f}", f"{one['max']:.1f}",
            "; ".join(_peak(peak) for peak in one["peaks"]), _verdict_word(one),
            "; ".join(f"{base['setting']} {_with_interval(base)}" for base in one["baselines"]) or "–",
        ]
        for one in maps
    ]  # fmt: skip
    header = ["Model", "Benchmark", "Policy", "Problems", "Samples", "Cells", "Mean", "Min", "Max", "Highest cells"]
    return _table([*header, "More than noise?", "Baselines"], rows)


def _verdict_word(one: Document) -> str:
    if one["evidence_of_difference"] is None:
        return "unknown"
    return f"{'yes' if one['evidence_of_difference'] else 'no'}, p {p_text(one['omnibus']['p'])}"


def _components(description: Document) -> list[str]:
    maps = _shown(description)
    grids: dict[str, int] = {}
    for one in maps:
        text = "; ".join(
            f"{name} ({label(name)}): {', '.join(map(str, held))}, {_count(len(held), 'value')}"
            for name, held in one["axes"].items()
        )
        grids[text] = grids.get(text, 0) + 1
    lines = [f"- {text} (in {_count(number, 'map')})" for text, number in grids.items()]
    methods = dict.fromkeys(one["method"] for one in maps if one["method"])
    lines += [f"- Comparisons within {_count(_with_method(maps, method), 'map')}: {method}." for method in methods]
    lines += [f"- {note}" for note in _map_notes(maps)]
    return lines


def _with_method(maps: Sequence[Document], method: str) -> int:
    return sum(one["method"] == method for one in maps)


def _map_notes(maps: Sequence[Document]) -> list[str]:
    """The notes of all maps, each once, with the maps that have it where not all do."""
    named: dict[str, list[str]] = {}
    for one in maps:
        for note in one["notes"]:
            named.setdefault(note, []).append(_title(one))
    return [note if len(names) == len(maps) else f"{note} ({'; '.join(names)})" for note, names in named.items()]


def _analysis(one: Document) -> list[str]:
    lines = [f"## {_title(one)}", ""]
    lines.append(
        f"- Range {one['min']:.1f} to {one['max']:.1f}, mean {one['mean']:.1f}, {_count(one['cells'], 'cell')}."
    )
    lines.append(f"- Highest: {_cells(one['peaks'], _peak)}. Lowest: {_cells(one['lowest'], _peak)}.")
    if one["evidence_of_difference"] is None:
        why = "the number of problems is not known, give it with --problems"
        if one["problems"] is None and any("adaptive" in note for note in one["notes"]):
            why = "an adaptive sweep decides on the mean over benchmarks"
        if one["benchmark"].startswith(MEAN_OF):
            why = "a mean tells only together with the maps of its benchmarks"
        return [*lines, f"- Whether the {one['cells']} cells differ by more than noise cannot be said: {why}.", ""]
    return [*lines, _evidence(one), _plateau(one), *_trends(one), *_stability(one), *_decide(one), ""]


def _evidence(one: Document) -> str:
    held = one["stability"]
    spread = f"the standard deviation over cells is {held['spread']:.2f} points"
    if held["noise"] is not None:
        spread += f" and chance alone gives {held['noise']:.2f}"
    if one["evidence_of_difference"]:
        return f"- The cells differ by more than noise: {spread} (p {p_text(one['omnibus']['p'])})."
    return f"- The peak is no more than noise: {spread} (p {p_text(one['omnibus']['p'])})."


def _plateau(one: Document) -> str:
    plateau, cells = one["plateau"], one["cells"]
    lost = f"; each may still be up to {one['may_lose']:.1f} points below the best" if one["may_lose"] else ""
    if len(plateau) == cells:
        return f"- All {cells} cells are on the plateau of the best{lost}."
    named = f": {_cells(plateau, _where)}" if plateau else ""
    return f"- {len(plateau)} of {cells} cells are not shown worse than the best{named}{lost}."


def _trends(one: Document) -> list[str]:
    lines = []
    for effect in one["effects"]:
        trend, levels = effect["trend"], [level["level"] for level in effect["levels"]]
        if trend is None:
            continue
        between = f"from {levels[0]} to {levels[-1]}"
        size = f"{trend['value']:+.1f} points ({trend['low']:+.1f} to {trend['high']:+.1f})"
        size += f", p {p_text(trend['p_holm'])} (Holm)"
        if trend["supported"]:
            way = "rises" if trend["value"] > 0 else "falls"
            lines.append(f"- {label(one['metric'])} {way} along {effect['axis']} {between}: {size}.")
        else:
            lines.append(f"- No trend along {effect['axis']} {between} is supported: {size}.")
    return lines


def _stability(one: Document) -> list[str]:
    if one["stability"]["peak_share"] is None:
        return []
    share = 100 * one["stability"]["peak_share"]
    other = "samples of the same problems" if "bound" in one["method"] else "problems of the same kind"
    peaks = "this cell" if len(one["peaks"]) == 1 else f"one of these {len(one['peaks'])} cells"
    return [f"- Were these values true, with other {other} {peaks} would be the peak in {share:.0f} % of cases."]


def _decide(one: Document) -> list[str]:
    gap = one["max"] - one["min"]
    samples, problems = one["samples_to_decide"], one["problems_to_decide"]
    if gap < 1e-6 or (samples is None and problems is None):
        return []
    ways = []
    if samples is not None:
        ways.append(f"{_count(samples, 'sample')} a problem")
    if problems is not None:
        ways.append(f"{problems:,} problems")
    have = f"there are {one['problems']} problems" if one["problems"] else "the numbers of problems differ"
    have += f" and {_count(one['samples'], 'sample')} each" if one["samples"] else ""
    return [
        f"- To tell the highest from the lowest cell ({gap:.1f} points, if true) takes {' or '.join(ways)}; {have}."
    ]


def _observations(description: Document) -> list[str]:
    tested = [one for one in _single(description) if one["evidence_of_difference"] is not None]
    lines = [] if tested else [f"- 0 of {_count(len(description['maps']), 'map')} can be tested for noise."]
    if tested:
        shown = [one for one in tested if one["evidence_of_difference"]]
        low, high = min(one["omnibus"]["p"] for one in tested), max(one["omnibus"]["p"] for one in tested)
        span = p_text(low) if low == high else f"{p_text(low)} to {p_text(high)}"
        which = f" ({_cells(shown, _title)})" if 0 < len(shown) < len(tested) else ""
        lines.append(f"- {len(shown)} of {_count(len(tested), 'map')} show more than noise{which}; p {span}.")
    for across in description["across"]:
        good, cells = across["good_for_all"], across["cells"]
        whose = " | ".join(filter(None, (across["model"], across["policy"])))
        named = f": {_cells(good, _where)}" if 0 < len(good) < cells else ""
        text = (
            f"{len(good)} of {cells} settings are on the plateau of all {len(across['benchmarks'])} benchmarks{named}."
        )
        lines.append(f"- {whose}: {text}")
    trends = [(one, effect) for one in tested for effect in one["effects"] if effect["trend"]]
    if trends:
        supported = [(one, effect) for one, effect in trends if effect["trend"]["supported"]]
        up = sum(effect["trend"]["value"] > 0 for _, effect in supported)
        lines.append(
            f"- {len(supported)} of {_count(len(trends), 'trend')} along an axis are supported after Holm's adjustment"
            + (f", {up} rising and {len(supported) - up} falling." if supported else ".")
        )
    if description["comparisons"]:
        lines += ["", *_comparisons(description["comparisons"])]
    if description["notes"]:
        lines += ["", *(f"- {note}." for note in description["notes"])]
    return lines


def _single(description: Document) -> list[Document]:
    return [one for one in description["maps"] if not one["benchmark"].startswith(MEAN_OF)]


def _comparisons(comparisons: Sequence[Document]) -> list[str]:
    shown = sum(one["p_holm"] < 0.05 for one in comparisons)
    rows = [
        [
            one["model"], one["benchmark"], one["first"], one["second"], str(one["cells"]), str(one["problems"]),
            f"{one['difference']:+.1f}", f"{one['low']:+.1f} to {one['high']:+.1f}", p_text(one["p"]),
            p_text(one["p_holm"]), p_text(one["p_bh"]), one["note"] or "",
        ]
        for one in comparisons
    ]  # fmt: skip
    header = ["Model", "Benchmark", "First", "Second", "Cells", "Problems", "First - second (points)", "95 % interval"]
    return [
        f"Paired comparisons: {shown} of {len(comparisons)} are shown after Holm's adjustment.",
        "",
        *_table([*header, "p", "p (Holm)", "p (BH)", "Note"], rows),
    ]


def _interpretation(description: Document) -> list[str]:
    lines = [line for choice in description["recommendation"]["all"] for line in _choice_words(choice)]
    if not lines:
        lines.append("- No setting is recommended: 0 maps tell what their settings cost and what they rest on.")
    weak = [one for one in _single(description) if one["evidence_of_difference"] is False]
    if weak:
        lines.append(
            f"- {_count(len(weak), 'map')} without evidence of a difference: reading a best setting off "
            f"{'its peak' if len(weak) == 1 else 'their peaks'} is reading noise."
        )
    return lines


def _choice_words(choice: Document) -> list[str]:
    whose = f"{choice['model']} on {choice['benchmark']}"
    counted = f"{choice['plateau']} of {choice['candidates']} settings"
    if choice["vacuous"] is not None:
        return [f"- {whose}: no setting is recommended, because {choice['vacuous']}."]
    if choice["setting"] is None:
        return [
            f"- {whose}: {counted} are not shown worse than the best; which is cheapest is not known without costs."
        ]
    kept = f"{choice['kept_tokens_mean']:,.0f} KV tokens kept "
    kept += "on average" if choice["kept_tokens_measured"] else "after a compression"
    lines = [
        f"- {whose}: the cheapest by KV memory of the {counted} that are not shown worse than the best is "
        f"{choice['setting']}: {_with_interval(choice)}, {kept}{_lost(choice)}."
    ]
    lines += [f"- {whose}: beside {base['setting']} it is {_ahead(base)}." for base in choice["beside"]]
    fastest = choice["by_time"]
    if fastest is not None:
        same = " (the same)" if fastest["setting"] == choice["setting"] else ""
        lines.append(
            f"- {whose}: the cheapest by measured time is {fastest['setting']}{same}: {_with_interval(fastest)}, "
            f"{fastest['seconds_mean']:.2g} s a trace{_lost(fastest)}."
        )
    return lines


def _ahead(base: Document) -> str:
    way = "ahead" if base["value"] >= 0 else "behind"
    shown = "shown" if base["p"] < 0.05 else "not shown"
    between = f"{base['low']:+.1f} to {base['high']:+.1f}"
    return f"{abs(base['value']):.1f} points {way} ({between}, p {p_text(base['p'])}), a difference that is {shown}"


def _lost(chosen: Document) -> str:
    return "" if chosen["may_lose"] is None else f", at most {chosen['may_lose']:.1f} points below the best"


def _title(one: Document) -> str:
    return " | ".join(filter(None, (one["model"], one["benchmark"], one["policy"])))


def _cells(cells: Sequence[Document], say: Any) -> str:
    more = f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else ""
    return "; ".join(say(cell) for cell in cells[:_NAMED]) + more


def _where(cell: Document) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items() if name not in _NO_AXIS)


def _peak(cell: Document) -> str:
    return f"{_with_interval(cell)} at {_where(cell)}"


def _with_interval(estimate: Document) -> str:
    text = f"{estimate['value']:.1f}"
    return text if estimate["low"] is None else f"{text} ({estimate['low']:.1f}–{estimate['high']:.1f})"


def _count(number: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", r"\|").replace("\n", " ") for field in fields) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]

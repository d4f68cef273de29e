"""Limits of what traces can show: whether anything was compressed, answered and different."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvatlas.core import Outcome, Validity, grouped
from kvatlas.policies.audit import AuditedCell, no_choice_sentence
from kvatlas.stats.table import CellTraces


class Kind(StrEnum):
    """Kinds of findings, the gravest first."""

    UNANSWERED = "unanswered"
    UNCOMPRESSED = "uncompressed"
    IDENTICAL = "identical"
    NO_CHOICE = "no_choice"


@dataclass(frozen=True)
class Limit:
    """Something that limits what a run can show; model and benchmark are empty where it is about several."""

    kind: Kind
    model: str
    benchmark: str
    text: str


def validity(cells: Iterable[CellTraces]) -> Validity | None:
    """The conclusions that the traces of these cells allow, over all benchmarks; None without traces, and for a screen.

    Settings are identical if they are so on all benchmarks.
    """
    kept = [cell for cell in cells if cell.stored and not cell.screened]
    if not kept:
        return None
    bounded = [cell for cell in kept if "kv_budget" in cell.setting.values]
    groups, compressing = _identical(kept), {cell.setting.id for cell in bounded}
    return Validity(
        traces=sum(cell.stored for cell in kept),
        bounded=sum(int((cell.traces["compressions"] >= 0).sum()) for cell in bounded),
        compressed=sum(int((cell.traces["compressions"] > 0).sum()) for cell in bounded),
        no_answer=sum(cell.verdicts[Outcome.NO_ANSWER] for cell in kept),
        truncated=sum(cell.verdicts[Outcome.TRUNCATED] for cell in kept),
        settings=len(compressing),
        identical=groups,
        same=len(compressing) > 1 and any(compressing <= set(group) for group in groups),
    )


def _identical(cells: Sequence[CellTraces]) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more settings whose traces are all there, known, and the same."""
    written: dict[str, Hashable] = {}
    for setting, own in grouped(cells, lambda cell: cell.setting.id).items():
        texts = [(cell, cell.traces["written"]) for cell in own]
        if all(cell.stored == cell.promised and (row != np.zeros(1, row.dtype)).all() for cell, row in texts):
            written[setting] = frozenset(
                (cell.model, cell.benchmark, problem, row.tobytes())
                for cell, rows in texts
                for problem, row in zip(cell.problems, rows, strict=True)
            )
    return tuple(tuple(group) for group in grouped(written, written.__getitem__).values() if len(group) > 1)


def validities(cells: Iterable[CellTraces]) -> dict[tuple[str, str], Validity]:
    """By model and benchmark, over all their settings, baselines included."""
    groups = grouped(cells, lambda cell: (cell.model, cell.benchmark))
    return {name: known for name, group in groups.items() if (known := validity(group)) is not None}


def together(parts: Sequence[Validity | None]) -> Validity | None:
    """The validity of the same settings on several benchmarks, from that on each; None where one is not known."""
    checked = [part for part in parts if part is not None]
    if not checked or len(checked) < len(parts):
        return None
    # Settings are identical on all benchmarks if they share a group on each.
    places = [{setting: n for n, group in enumerate(part.identical) for setting in group} for part in checked]
    shared = [setting for setting in places[0] if all(setting in own for own in places)]
    groups = grouped(shared, lambda setting: tuple(own[setting] for own in places))
    counts = ("traces", "bounded", "compressed", "no_answer", "truncated")
    return Validity(
        **{name: sum(getattr(part, name) for part in checked) for name in counts},
        settings=max(part.settings for part in checked),
        identical=tuple(tuple(group) for group in groups.values() if len(group) > 1),
        same=all(part.same for part in checked),
    )


def findings(cells: Sequence[CellTraces]) -> list[Limit]:
    """The limits of the gathered traces of a run, the gravest first."""
    checked = validities(cells)
    several = len({model for model, _ in checked}) > 1
    made = [
        Limit(kind, model, benchmark, f"{f'{model} on {benchmark}' if several else benchmark}: {text}")
        for (model, benchmark), validity in checked.items()
        for kind, text in _limits(validity)
    ]
    audits = [(cell, cell.audit) for cell in cells]
    sentence = no_choice_sentence([AuditedCell(c.model, c.benchmark, c.setting, audit) for c, audit in audits if audit])
    if sentence:
        made.append(Limit(Kind.NO_CHOICE, "", "", sentence))
    return sorted(made, key=lambda finding: list(Kind).index(finding.kind))


def _limits(checked: Validity) -> Iterator[tuple[Kind, str]]:
    if 2 * checked.unanswered > checked.traces:
        yield (
            Kind.UNANSWERED,
            f"{checked.unanswered:,} of {checked.traces:,} traces are without an answer ({checked.no_answer:,}) or "
            f"truncated ({checked.truncated:,}); they count as wrong.",
        )
    if checked.bounded and 2 * checked.compressed < checked.bounded:
        yield (
            Kind.UNCOMPRESSED,
            f"{checked.compressed:,} of {checked.bounded:,} traces under a KV budget were compressed; "
            f"{'the others' if checked.compressed else 'all'} equal the full cache's.",
        )
    elif checked.same:
        yield Kind.IDENTICAL, f"all {checked.settings} settings with a KV budget wrote identical texts."

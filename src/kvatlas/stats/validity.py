"""Limits of what traces can show: whether anything was compressed, answered and different."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvatlas.core import NO_ANSWERS, NOT_ENDED, Outcome, Validity, grouped, is_reference
from kvatlas.core.settings import CAP, AuditedCell, no_choice_sentence
from kvatlas.stats.numerics.arrays import Flags
from kvatlas.stats.table import CellTraces

#: Advice where texts end and no answer is read.
_FORMS = (
    r" Read are \boxed{...} and 'the answer is ...': ask for one in the prompt, or write a benchmark with a grader."
)


class Kind(StrEnum):
    """Kinds of findings, the gravest first."""

    DRIFT = "drift"
    FLOOR = "floor"
    UNANSWERED = "unanswered"
    UNCOMPRESSED = "uncompressed"
    IDENTICAL = "identical"
    NO_CHOICE = "no_choice"


@dataclass(frozen=True)
class Limitation:
    """A limitation of what a run can show; model and benchmark are empty if it concerns several."""

    kind: Kind
    model: str
    benchmark: str
    text: str


def validity_of(cells: Iterable[CellTraces]) -> Validity | None:
    """Return the conclusions that the traces of these cells allow, over all benchmarks.

    Settings are identical if they are so on all benchmarks. None without traces.
    """
    stored = [cell for cell in cells if cell.stored]
    if not stored:
        return None
    settings = {cell.setting.id for cell in stored if has_budget(cell)}

    # Groups of two or more settings with the same tokens in every trace. Settings that lack a trace, or the digest of
    # one, are in no group.
    texts: dict[str, Hashable] = {}
    for setting, of_setting in grouped(stored, lambda cell: cell.setting.id).items():
        digests: set[tuple[str, str, str, bytes]] = set()
        for cell in of_setting:
            unknown = np.zeros(1, cell.token_digest.dtype)
            if cell.stored != cell.promised or bool((cell.token_digest == unknown).any()):
                break
            for problem, of_samples in zip(cell.problems, cell.token_digest, strict=True):
                digests.add((cell.model, cell.benchmark, problem, of_samples.tobytes()))
        else:
            texts[setting] = frozenset(digests)
    identical = _shared_by_several(grouped(texts, texts.__getitem__).values())

    bounded, compressed = count_compressed(stored)
    return Validity(
        traces=sum(cell.stored for cell in stored),
        bounded=bounded,
        compressed=compressed,
        no_answer=sum(count_outcomes(cell, NO_ANSWERS) for cell in stored),
        truncated=sum(count_outcomes(cell, NOT_ENDED) for cell in stored),
        settings=len(settings),
        identical=identical,
        same=len(settings) > 1 and any(settings <= set(group) for group in identical),
    )


def count_outcomes(cell: CellTraces, outcomes: Iterable[Outcome]) -> int:
    """Return the number of a cell's traces with one of these outcomes."""
    return sum(cell.outcomes[outcome] for outcome in outcomes)


def has_budget(cell: CellTraces) -> bool:
    """Return whether the setting of a cell bounds the cache, or the thinking."""
    return "kv_budget" in cell.setting.values or CAP in cell.setting.values


def is_compressed(cell: CellTraces) -> Flags:
    """Return the traces of a cell that were compressed, or whose thinking a cap ended: the others lose nothing."""
    found = cell.numbers("compressions") > 0
    cap = cell.setting.values.get(CAP)
    if cap is not None:
        found = found | (cell.numbers("thinking_tokens") >= cap)
    return np.asarray(found)


def count_compressed(cells: Iterable[CellTraces]) -> tuple[int, int]:
    """Return the number of traces under a KV budget or a cap on thinking, and of the compressed ones among them."""
    traces = 0
    compressed = 0
    for cell in filter(has_budget, cells):
        # Unknown numbers of compressions are NaN and count in neither.
        is_known = cell.numbers("compressions") >= 0
        traces += int(is_known.sum())
        compressed += int((is_known & is_compressed(cell)).sum())
    return traces, compressed


def _shared_by_several(groups: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group) for group in groups if len(group) > 1)


def merge_validity(benchmarks: Sequence[Validity | None]) -> Validity | None:
    """Return the validity of the same settings on several benchmarks, from that on each; None if one is unknown."""
    checked = [validity for validity in benchmarks if validity is not None]
    if not checked or len(checked) < len(benchmarks):
        return None
    counts = {}
    for name in ("traces", "bounded", "compressed", "no_answer", "truncated"):
        counts[name] = sum(getattr(validity, name) for validity in checked)

    # Settings that share a group on each benchmark. A setting without a group on some benchmark is like no other.
    groups_of_setting: dict[str, list[int]] = {}
    for validity in checked:
        for index, group in enumerate(validity.identical):
            for setting in group:
                groups_of_setting.setdefault(setting, []).append(index)
    shared = {setting: tuple(groups) for setting, groups in groups_of_setting.items() if len(groups) == len(checked)}
    return Validity(
        **counts,
        settings=max(validity.settings for validity in checked),
        identical=_shared_by_several(grouped(shared, shared.__getitem__).values()),
        same=all(validity.same for validity in checked),
    )


def findings(cells: Sequence[CellTraces]) -> list[Limitation]:
    """Return the limitations of the gathered traces of a run, the gravest first."""
    by_name = grouped(cells, lambda cell: (cell.model, cell.benchmark))
    has_models = len({model for model, _ in by_name}) > 1
    found = []
    for (model, benchmark), group in by_name.items():
        checked = validity_of(group)
        if checked is None:
            continue
        subject = f"{model} on {benchmark}" if has_models else benchmark
        if 2 * checked.unanswered > checked.traces:
            text = (
                f"{subject}: {checked.unanswered:,} of {checked.traces:,} traces are without an answer "
                f"({checked.no_answer:,}) or truncated ({checked.truncated:,}); they count as wrong."
            )
            if checked.no_answer > checked.truncated:
                text += _FORMS
            reference = [cell for cell in group if is_reference(cell.setting)]
            thinking = [
                bool((cell.numbers("thinking_tokens") >= cell.numbers("output_tokens")).all()) for cell in reference
            ]
            # Those that were cut off may have had an end later.
            if reference and all(thinking) and any(count_outcomes(cell, NO_ANSWERS) for cell in reference):
                text += " None of the full cache ends its thinking: does think_close name what the model writes there?"
            found.append(Limitation(Kind.UNANSWERED, model, benchmark, text))
        if checked.bounded and 2 * checked.compressed < checked.bounded:
            under = "a KV budget were compressed"
            if any(CAP in cell.setting.values for cell in cells):
                under = "a KV budget or a cap on thinking were compressed or cut"
            text = (
                f"{subject}: {checked.compressed:,} of {checked.bounded:,} traces under {under}; "
                f"{'the others' if checked.compressed else 'all'} equal the full cache's."
            )
            found.append(Limitation(Kind.UNCOMPRESSED, model, benchmark, text))
        elif checked.same:
            is_of_full = any(is_reference(cell.setting) and cell.setting.id in checked.identical[0] for cell in group)
            whose = ", those of the full cache; harsher settings show where answers are lost" if is_of_full else ""
            text = f"{subject}: all {checked.settings} settings with a KV budget wrote identical texts{whose}."
            found.append(Limitation(Kind.IDENTICAL, model, benchmark, text))

    audits = [(cell, cell.audit) for cell in cells]
    sentence = no_choice_sentence(
        [AuditedCell(cell.model, cell.benchmark, cell.setting, audit) for cell, audit in audits if audit is not None]
    )
    if sentence:
        found.append(Limitation(Kind.NO_CHOICE, "", "", sentence))
    return sorted(found, key=lambda finding: list(Kind).index(finding.kind))

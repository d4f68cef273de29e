"""What a verification says: against the cell, against the full cache, between two endpoints, and of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.core import Setting, Trace
from kvatlas.integrations.verify import Reference, allowed
from kvatlas.results import Store
from kvatlas.stats.pairs.departures import NEAR, Departures, departure_p, most_unseen
from kvatlas.stats.pairs.systems import ProblemKey
from kvatlas.stats.pairs.verification import Standing, Verification, length_shift, verified

#: Below this a shift of lengths is told as one: with the two sides of Pass@1 a sound endpoint is blamed in under 5 %.
LENGTH_P = 0.005
#: Below this texts are told to depart at the first compression.
TEXT_P = 0.01
#: The share of tokens far from the likeliest that numerics do not reach: it is another model, or does not take it.
MANY = 0.01
Traces = Mapping[tuple[str, str, int], Trace]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at besides the grades: whether it is as in the run, and a sentence."""

    name: str
    good: bool
    sentence: str


@dataclass(frozen=True)
class Knob:
    """Two endpoints on the same problems: how many answers are the same text, and how their grades stand."""

    identical: int
    answers: int
    difference: Verification
    lengths: float

    @property
    def works(self) -> bool | None:
        """Whether it does anything: some answers differ beyond chance; None where that cannot be told."""
        if self.identical == self.answers:
            return False
        return True if self.lengths < LENGTH_P or self.difference.standing in _APART else None


_APART = (Standing.WORSE, Standing.BETTER)


@dataclass(frozen=True)
class Report:
    """What one verification found. `full` is None where the run has no full cache."""

    reference: Reference
    margin: float
    cell: Verification
    full: Verification | None
    checks: tuple[Check, ...]
    knob: Knob | None = None
    texts: Sequence[Departures] | None = None

    @property
    def alarmed(self) -> bool:
        """Whether the endpoint is not what the map says."""
        return self.cell.standing in _APART or not all(check.good for check in self.checks)


def report(
    reference: Reference,
    folder: Path,
    setting: Setting,
    margin: float,
    other: Setting | None = None,
    texts: Sequence[Departures] | None = None,
) -> Report:
    """Hold the stored answers against the run; `other` is a second endpoint's setting in the same folder.

    `texts` say how answers at temperature 0 depart from the cell (`served_texts.compare`), if they were asked for.
    """
    served = answers(folder, setting)
    cell = reference.traces(reference.setting)
    full = reference.full
    knob = None if other is None else _knob(served, answers(folder, other), reference, margin)
    return Report(
        reference,
        margin,
        verified(grades(cell), grades(served), margin),
        None if full is None else verified(grades(reference.traces(full)), grades(served), margin),
        (*checks(cell, served, reference), *(() if texts is None else text_checks(texts))),
        knob,
        texts,
    )


def answers(folder: Path, setting: Setting) -> Traces:
    """The stored answers of an endpoint that its manifest names."""
    with Store.open(folder) as store:
        keys = {cell.run_key for cell in store.manifest().expected if cell.setting == setting}
        return {(t.benchmark, t.problem, t.sample): t for key, t in store.traces() if key in keys}


def grades(traces: Traces) -> dict[ProblemKey, dict[int, float]]:
    """1 for right, 0 for wrong, by problem and sample."""
    return _by_problem(traces, lambda trace: float(trace.grade.correct))


def checks(cell: Traces, served: Traces, reference: Reference) -> tuple[Check, ...]:
    """Prompts, finish reasons, usage, lengths, and where it is told the cache."""
    most = int(reference.run.manifest.spec["sampling"]["max_new_tokens"])
    return tuple(
        check
        for check in (
            _prompts(cell, served),
            _finishes(served, most),
            _lengths(cell, served, most),
            _compressions(served, reference.setting),
        )
        if check is not None
    )


def text_checks(texts: Sequence[Departures]) -> tuple[Check, ...]:
    """Answers at temperature 0, token by token: the same model before the first compression, the same cache after."""
    if not texts:
        return (Check("texts", True, "No text reaches a second token behind a first compression: texts say nothing."),)
    tokens, other, far = ([sum(getattr(text, name)[side] for text in texts) for side in (0, 1)] for name in _COUNTED)
    parted = sum(text.other[1] > 0 for text in texts)
    gaps = [max(text.gap[side] for text in texts) for side in (0, 1)]
    same = far[0] <= MANY * tokens[0]
    p = departure_p(texts)
    said = [f"{other[side]:,} of {tokens[side]:,} tokens are not the likeliest of the cell" for side in (0, 1)]
    model = f"Of {len(texts):,} texts at temperature 0, before the first compression {said[0]}"
    cache = f"After it {said[1]}, in {parted:,} texts, by up to {gaps[1]:.2g} nats (before by {gaps[0]:.2g}; p {p:.2g})"
    rest = f": most likely fewer than {100 * most_unseen(len(texts)):.2g} % of problems depart" if not parted else ""
    return (
        Check(
            "texts before",
            same,
            f"{model}." if same else f"{model}, {far[0]:,} by more than {NEAR:g} nats: other weights, or not greedy.",
        ),
        Check(
            "texts after",
            p >= TEXT_P,
            f"{cache}{rest}." if p >= TEXT_P else f"{cache}: from the first compression on its cache is another.",
        ),
    )


_COUNTED = ("tokens", "other", "far")


def _prompts(cell: Traces, served: Traces) -> Check | None:
    """A prompt that is shorter or longer than the run's went through another template or tokenizer."""
    pairs = [(cell[key].usage.prompt_tokens, trace.usage.prompt_tokens) for key, trace in served.items() if key in cell]
    told = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    if not told:
        return Check("usage", False, "The endpoint does not say how long its prompts are (usage.prompt_tokens).")
    shifts = Counter(theirs - mine for mine, theirs in told if theirs != mine)
    if not shifts:
        return Check("prompts", True, f"All {len(told):,} prompts are as long as in the run.")
    shift, count = shifts.most_common(1)[0]
    return Check(
        "prompts",
        False,
        f"{shifts.total():,} of {len(told):,} prompts are not as long as in the run, {count:,} of them by {shift:+d} "
        "tokens: another chat template, system prompt or tokenizer.",
    )


def _finishes(served: Traces, most: int) -> Check:
    finishes = Counter(str(trace.grade.metrics.get("finish")) for trace in served.values())
    strange = sum(count for name, count in finishes.items() if name not in ("stop", "length"))
    early = [t for t in served.values() if t.grade.metrics.get("finish") == "length"]
    cut = sum(t.usage.output_tokens is not None and t.usage.output_tokens < most for t in early)
    over = sum((t.usage.output_tokens or 0) > most for t in served.values())
    unknown = sum(t.usage.output_tokens is None for t in served.values())
    faults = [
        (strange, "have a finish reason other than stop and length"),
        (cut, f"were cut (finish reason length) before {most:,} tokens"),
        (over, f"are longer than the {most:,} tokens that were asked for"),
        (unknown, "come without usage.completion_tokens"),
    ]
    bad = "; ".join(f"{count:,} {text}" for count, text in faults if count)
    listed = ", ".join(f"{name} {count:,}" for name, count in sorted(finishes.items()))
    return Check("finish", not bad, f"Of {len(served):,} answers {bad}." if bad else f"Finish reasons: {listed}.")


def _lengths(cell: Traces, served: Traces, most: int) -> Check | None:
    mine, theirs = (
        _by_problem(traces, lambda trace: min(1.0, (trace.usage.output_tokens or 0) / most))
        for traces in (cell, served)
    )
    if any(trace.usage.output_tokens is None for trace in served.values()):
        return None
    shift = length_shift(mine, theirs)
    text = f"Answers are {most * shift.value:+,.0f} tokens longer on average than in the run (p {shift.p:.2g})"
    if shift.p < LENGTH_P:
        return Check("lengths", False, f"{text}: it writes otherwise than that cell.")
    return Check("lengths", True, f"{text}, as chance has it.")


def _compressions(served: Traces, setting: Setting) -> Check | None:
    """Only `kvatlas serve` tells its compressions: answers that grew past the budget without one."""
    told = [trace for trace in served.values() if trace.usage.compressions is not None]
    grown = ignored = 0
    for trace in told:
        used = trace.usage
        limit = allowed(setting, used.prompt_tokens or 0)
        if limit is not None and (used.prompt_tokens or 0) + (used.output_tokens or 0) - 1 > limit:
            grown += 1
            ignored += not used.compressions
    if not grown:
        return None
    if ignored:
        text = f"{ignored:,} of {grown:,} answers that outgrow the budget were never compressed: it is ignored."
        return Check("compressions", False, text)
    return Check("compressions", True, f"All {grown:,} answers that outgrow the budget were compressed.")


def _knob(first: Traces, second: Traces, reference: Reference, margin: float) -> Knob:
    most = int(reference.run.manifest.spec["sampling"]["max_new_tokens"])
    common = [key for key in first if key in second]
    lengths = [
        _by_problem(traces, lambda trace: min(1.0, (trace.usage.output_tokens or 0) / most))
        for traces in (first, second)
    ]
    return Knob(
        sum(first[key].text == second[key].text for key in common),
        len(common),
        verified(grades(first), grades(second), margin),
        length_shift(lengths[0], lengths[1]).p,
    )


def _by_problem(traces: Traces, value: Any) -> dict[ProblemKey, dict[int, float]]:
    values: dict[ProblemKey, dict[int, float]] = {}
    for (benchmark, problem, sample), trace in traces.items():
        values.setdefault((benchmark, problem), {})[sample] = value(trace)
    return values


def as_text(report: Report, name: str) -> str:
    """The report as sentences; `name` is the endpoint's."""
    lines = [_sentence(f"{name} against {report.reference.setting}", report.cell, report.margin)]
    if report.full is not None:
        lines.append(_sentence(f"{name} against the full cache", report.full, report.margin))
    lines += [f"{'ok' if check.good else 'NOT AS IN THE RUN'}: {check.sentence}" for check in report.checks]
    if report.knob is not None:
        knob = report.knob
        said = {
            True: "the knob does something",
            False: "the knob does nothing",
            None: "nothing beyond chance is seen of the knob",
        }[knob.works]
        lines.append(
            f"Between the two endpoints: {said}; {knob.identical:,} of {knob.answers:,} answers are the same text, "
            f"lengths differ with p {knob.lengths:.2g}. " + _sentence("The second", knob.difference, report.margin)
        )
    return "\n".join(lines)


def _sentence(what: str, verification: Verification, margin: float) -> str:
    loss = verification.loss
    points = f"{100 * margin:g} points"
    said = {
        Standing.EQUIVALENT: f"equivalent within {points}",
        Standing.WORSE: f"worse by more than {points}",
        Standing.BETTER: f"better by more than {points}, so not that setting",
        Standing.UNDECIDED: "not decided",
    }[verification.standing]
    more = f"; about {verification.needed:,} problems would decide it" if verification.needed else ""
    return (
        f"{what}: {said}; it scores {-100 * loss.value:+.1f} points (95 % CI {-100 * loss.high:+.1f} to "
        f"{-100 * loss.low:+.1f}) on {verification.problems:,} problems{more}."
    )


def to_json(report: Report) -> dict[str, Any]:
    """The report as data; percent scale."""
    return {
        "model": report.reference.model,
        "against": str(report.reference.setting),
        "margin": 100 * report.margin,
        "alarmed": report.alarmed,
        "cell": _numbers(report.cell),
        "full": None if report.full is None else _numbers(report.full),
        "checks": [vars(check) for check in report.checks],
        "texts": None if report.texts is None else [vars(text) for text in report.texts],
        "knob": None
        if report.knob is None
        else {
            "works": report.knob.works,
            "identical": report.knob.identical,
            "answers": report.knob.answers,
            "lengths_p": report.knob.lengths,
            **_numbers(report.knob.difference),
        },
    }


def _numbers(verification: Verification) -> dict[str, Any]:
    loss = verification.loss
    return {
        "verdict": verification.standing.value,
        "loses": round(100 * loss.value, 4),
        "loses_low": round(100 * loss.low, 4),
        "loses_high": round(100 * loss.high, 4),
        "problems": verification.problems,
        "needed": verification.needed,
    }

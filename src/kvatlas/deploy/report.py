"""An endpoint's answers against a cell and the full cache: one report, as data and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvatlas.core import Setting, Trace
from kvatlas.deploy.answers import Traces
from kvatlas.deploy.reference import Reference
from kvatlas.stats.losses import NEAR, Departures, Standing, departure_p, length_shift, most_unseen, verified
from kvatlas.stats.table import ProblemKey

#: Below this p-value lengths differ: with the two sides of Pass@1 a sound endpoint is blamed in under 5 %.
LENGTH_P = 0.005
#: Below this p-value texts depart at the first compression.
TEXT_P = 0.01
#: The share of tokens far from the likeliest that numerics do not reach.
MANY = 0.01


#: A comparison with the run besides the grades: its `name`, `good` if it agrees, and a `sentence`.
Check = dict[str, Any]


def report(
    reference: Reference, served: Traces, margin: float, texts: Sequence[Departures] | None = None
) -> dict[str, Any]:
    """Compare an endpoint's answers with the run; losses in percent. `texts` come from `texts.compare`.

    `alarmed`: the endpoint is not that cell.
    """
    cell = reference.traces(reference.setting)
    full = {} if reference.setting.policy == "full" else reference.traces(Setting.of("full"))
    most = int(reference.sampling["max_new_tokens"])
    checks = [_prompts(cell, served), _finishes(served, most), *_lengths(cell, served, most)]
    checks += [] if texts is None else text_checks(texts)
    against = _against(cell, served, margin)
    return {
        "model": reference.model,
        "against": str(reference.setting),
        "margin": 100 * margin,
        "alarmed": against["verdict"] in (Standing.WORSE, Standing.BETTER) or not all(item["good"] for item in checks),
        "cell": against,
        "full": _against(full, served, margin) if full else None,
        "checks": checks,
        "texts": None if texts is None else [vars(text) for text in texts],
    }


def as_text(report: dict[str, Any], name: str) -> str:
    """The report as sentences; `name` is the endpoint's."""
    points = f"{report['margin']:g} points"
    said = {
        Standing.EQUIVALENT: f"equivalent within {points}",
        Standing.WORSE: f"worse by more than {points}",
        Standing.BETTER: f"better by more than {points}, so not that setting",
        Standing.UNDECIDED: "not decided",
    }
    lines = []
    for other, part in ((report["against"], report["cell"]), ("the full cache", report["full"])):
        if part is not None:
            more = f"; about {part['needed']:,} problems would decide it" if part["needed"] else ""
            lines.append(
                f"{name} against {other}: {said[part['verdict']]}; it scores {-part['loses']:+.1f} points (95 % CI "
                f"{-part['loses_high']:+.1f} to {-part['loses_low']:+.1f}) on {part['problems']:,} problems{more}."
            )
    lines += [f"{'ok' if check['good'] else 'NOT AS IN THE RUN'}: {check['sentence']}" for check in report["checks"]]
    return "\n".join(lines)


def _against(reference: Traces, served: Traces, margin: float) -> dict[str, Any]:
    grades = [_by_problem(traces, lambda trace: float(trace.grade.correct)) for traces in (reference, served)]
    result = verified(grades[0], grades[1], margin)
    return {
        "verdict": result.standing.value,
        "loses": round(100 * result.loss.value, 4),
        "loses_low": round(100 * result.loss.low, 4),
        "loses_high": round(100 * result.loss.high, 4),
        "problems": result.problems,
        "needed": result.needed,
    }


def _by_problem(traces: Traces, value: Callable[[Trace], float]) -> dict[ProblemKey, dict[int, float]]:
    values: dict[ProblemKey, dict[int, float]] = {}
    for (benchmark, problem, sample), trace in traces.items():
        values.setdefault((benchmark, problem), {})[sample] = value(trace)
    return values


def _check(name: str, good: bool, sentence: str) -> Check:
    return {"name": name, "good": good, "sentence": sentence}


def text_checks(texts: Sequence[Departures]) -> list[Check]:
    """Answers at temperature 0, token by token: the same model before the first compression, the same cache after."""
    if not texts:
        return [_check("texts", True, "No text reaches a second token behind a first compression: texts say nothing.")]
    tokens, other, far = (
        [sum(getattr(text, name)[side] for text in texts) for side in (0, 1)] for name in ("tokens", "other", "far")
    )
    parted = sum(text.other[1] > 0 for text in texts)
    gaps = [max(text.gap[side] for text in texts) for side in (0, 1)]
    p = departure_p(texts)
    said = [f"{other[side]:,} of {tokens[side]:,} tokens are not the likeliest of the cell" for side in (0, 1)]
    before = f"Of {len(texts):,} texts at temperature 0, before the first compression {said[0]}"
    if far[0] > MANY * tokens[0]:
        before += f", {far[0]:,} by more than {NEAR:g} nats: other weights, or not greedy"
    after = f"After it {said[1]}, in {parted:,} texts, by up to {gaps[1]:.2g} nats (before by {gaps[0]:.2g}; p {p:.2g})"
    if p < TEXT_P:
        after += ": from the first compression on its cache is another"
    elif not parted:
        after += f": most likely fewer than {100 * most_unseen(len(texts)):.2g} % of problems depart"
    return [
        _check("texts before", far[0] <= MANY * tokens[0], f"{before}."),
        _check("texts after", p >= TEXT_P, f"{after}."),
    ]


def _prompts(cell: Traces, served: Traces) -> Check:
    """A prompt that is shorter or longer than the run's went through another template or tokenizer."""
    pairs = [(cell[key].usage.prompt_tokens, trace.usage.prompt_tokens) for key, trace in served.items() if key in cell]
    known = [theirs - mine for mine, theirs in pairs if mine is not None and theirs is not None]
    if not known:
        return _check("usage", False, "The endpoint does not say how long its prompts are (usage.prompt_tokens).")
    shifts = Counter(shift for shift in known if shift)
    if not shifts:
        return _check("prompts", True, f"All {len(known):,} prompts are as long as in the run.")
    shift, count = shifts.most_common(1)[0]
    return _check(
        "prompts",
        False,
        f"{shifts.total():,} of {len(known):,} prompts are not as long as in the run, {count:,} of them by {shift:+d} "
        "tokens: another chat template, system prompt or tokenizer.",
    )


def _finishes(served: Traces, most: int) -> Check:
    answers = [(str(trace.grade.metrics.get("finish")), trace.usage.output_tokens) for trace in served.values()]
    finishes = Counter(name for name, _ in answers)
    faults = {
        "have a finish reason other than stop and length": sum(name not in ("stop", "length") for name, _ in answers),
        f"were cut (finish reason length) before {most:,} tokens": sum(
            name == "length" and count is not None and count < most for name, count in answers
        ),
        f"are longer than the {most:,} tokens that were asked for": sum((count or 0) > most for _, count in answers),
        "come without usage.completion_tokens": sum(count is None for _, count in answers),
    }
    bad = "; ".join(f"{count:,} {text}" for text, count in faults.items() if count)
    listed = ", ".join(f"{name} {count:,}" for name, count in sorted(finishes.items()))
    return _check("finish", not bad, f"Of {len(served):,} answers {bad}." if bad else f"Finish reasons: {listed}.")


def _lengths(cell: Traces, served: Traces, most: int) -> list[Check]:
    if any(trace.usage.output_tokens is None for trace in served.values()):
        return []
    lengths = [
        _by_problem(traces, lambda trace: min(1.0, (trace.usage.output_tokens or 0) / most))
        for traces in (cell, served)
    ]
    shift = length_shift(lengths[0], lengths[1])
    good = shift.p >= LENGTH_P
    end = ", as chance has it" if good else ": it writes otherwise than that cell"
    text = f"Answers are {most * shift.value:+,.0f} tokens longer on average than in the run (p {shift.p:.2g}){end}."
    return [_check("lengths", good, text)]

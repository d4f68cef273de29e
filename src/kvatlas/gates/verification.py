"""`kvatlas deploy verify`: does an endpoint serve the cell of a run? The gate's judgement on both sides, and checks.

The two should be one setting, so a gain above the margin tells another setting as a loss does. The loss and its limits
are those of `judgement.py`, each at half of the 5 %. The checks look at prompts, ends and lengths of answers, and at
greedy texts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.core import Claim, Trace, is_reference, reference_words
from kvatlas.deploy.engine_config import MeasuredCell
from kvatlas.engines.asking import finish_faults, other_models
from kvatlas.engines.client import Endpoint
from kvatlas.gates.endpoints import measured_sides
from kvatlas.gates.gate_result import JudgedChange, gate_text
from kvatlas.gates.judgement import Verdict, judge_pairs
from kvatlas.gates.pairing import pair_answers
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.numerics.texts import NEAR, Departures, departure_p, most_unseen
from kvatlas.text import counted, model_name

#: Below this p-value lengths differ.
LENGTH_P = 0.005
#: Below this p-value texts depart at the first compression.
TEXT_P = 0.01
#: A share of tokens far from the likeliest that is larger than numerical noise.
MANY = 0.01
EQUIVALENT = "equivalent"
WORSE = "worse"
BETTER = "better"
UNDECIDED = "not decided"


def verification(
    reference: MeasuredCell,
    endpoint: Endpoint,
    folder: Path,
    traces: Sequence[Trace],
    margin: float,
    texts: Sequence[Departures] | None = None,
) -> dict[str, Any]:
    """Compare an endpoint with the cell that it should serve, and with the full cache of that run.

    `traces` are its answers, which are stored in `folder`; `texts` are the result of `read_texts`. `cell` and
    `full` are what `kvatlas gate --json` gives, with a verdict of `equivalent`, `worse`, `better` or `not decided`,
    and the sentence. Each of the `checks` has a `name`, `good` and a `sentence`. If `alarmed`, the endpoint does
    not serve that cell.
    """
    references = [cell.setting for cell in reference.run.manifest.expected if is_reference(cell.setting)]
    settings = {"cell": reference.setting}
    if references and not is_reference(reference.setting):
        settings["full"] = references[0]
    names = {"cell": str(reference.setting), "full": reference_words(references)}
    comparisons: dict[str, dict[str, Any] | None] = {"full": None}
    lengths: list[Difference | None] = []
    for which, setting in settings.items():
        sides = measured_sides(reference, setting, endpoint, folder, traces, names[which])
        # The checks tell of other prompts, and no card of an endpoint tells anything.
        pairs = replace(pair_answers(*sides, allow=("prompts", "missing")), differences=())
        claim = None if reference.run.claim is Claim.THESE else Claim.LIKE
        judgement = judge_pairs(pairs, margin, claim, both_ways=True)
        change = JudgedChange(pairs, judgement)
        verdict, words = _verdict_in_words(change, f"{100 * margin:g} points")
        sentence = f"{endpoint.url} against {names[which]}: {words}. {gate_text(change)}"
        comparisons[which] = {**change.to_dict(), "verdict": verdict, "sentence": sentence}
        lengths.append(judgement.length)

    cell = comparisons["cell"] or {}
    checks = answer_checks(reference, traces, lengths[0])
    if texts is not None:
        checks += text_checks(texts)
    return {
        "model": reference.model,
        "served": endpoint.model,
        "against": names["cell"],
        "margin": 100 * margin,
        "alarmed": cell["verdict"] in (WORSE, BETTER) or not all(check["good"] for check in checks),
        **comparisons,
        "reference": names["full"],
        "checks": checks,
        "texts": None if texts is None else [vars(text) for text in texts],
    }


def _verdict_in_words(change: JudgedChange, points: str) -> tuple[str, str]:
    """Return the verdict on two sides that should be one setting, and the same in words."""
    judgement = change.judgement
    if judgement.verdict is Verdict.KEEPS:
        return EQUIVALENT, f"{EQUIVALENT} within {points}"
    if judgement.verdict is Verdict.CANNOT_TELL:
        return UNDECIDED, UNDECIDED
    if judgement.losses[judgement.claim].high < -judgement.margin:
        return BETTER, f"{BETTER} by more than {points}, so not that setting"
    return WORSE, f"{WORSE} by more than {points}"


def verification_text(document: dict[str, Any]) -> str:
    """Return the result of `verification` as sentences."""
    comparisons = [document[which] for which in ("cell", "full") if document[which] is not None]
    lines = [comparison["sentence"] for comparison in comparisons]
    if model_name(document["model"]).casefold() not in document["served"].casefold():
        names = f"{document['served']!r}, and the run is of {document['model']!r}"
        lines.insert(0, f"The endpoint serves {names}: are they one model?")
    lines += [f"{'ok' if check['good'] else 'NOT AS IN THE RUN'}: {check['sentence']}" for check in document["checks"]]
    return "\n".join(lines)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(name: str, good: bool, sentence: str) -> dict[str, Any]:
    return {"name": name, "good": good, "sentence": sentence}


def answer_checks(reference: MeasuredCell, served: Sequence[Trace], length: Difference | None) -> list[dict[str, Any]]:
    """Check prompts, finish reasons, models and lengths; `length` is the change of lengths against the cell."""
    cell = reference.traces(reference.setting)

    # The lengths of prompts, which differ with another template or tokenizer.
    shifts: Counter[int] = Counter()
    for trace in served:
        measured = cell.get((trace.benchmark, trace.problem, trace.sample))
        if measured is not None and None not in (measured.usage.prompt_tokens, trace.usage.prompt_tokens):
            shifts[(trace.usage.prompt_tokens or 0) - (measured.usage.prompt_tokens or 0)] += 1
    total = shifts.total()
    other = total - shifts.pop(0, 0)
    if not total:
        sentence = "The endpoint does not report the lengths of its prompts (usage.prompt_tokens)."
        checks = [_check("usage", False, sentence)]
    elif other:
        ((shift, count),) = shifts.most_common(1)
        sentence = f"{other:,} of {total:,} prompts are not as long as in the run, {count:,} of them by {shift:+d} "
        checks = [_check("prompts", False, f"{sentence}tokens: another chat template, system prompt or tokenizer.")]
    else:
        checks = [_check("prompts", True, f"All {total:,} prompts are as long as in the run.")]

    faults = finish_faults(served, int(reference.sampling["max_new_tokens"]))
    finishes = sorted(Counter(str(trace.grade.metrics.get("finish")) for trace in served).items())
    counts = ", ".join(f"{name} {count:,}" for name, count in finishes)
    checks.append(_check("finish", not faults, faults or f"Finish reasons: {counts}."))
    sentence = other_models(served)
    if sentence:
        checks.append(_check("model", False, sentence))

    if length is not None and not any(trace.usage.output_tokens is None for trace in served):
        good = length.p >= LENGTH_P
        end = ", which chance explains" if good else ": it does not write as that cell does"
        tokens = f"{counted(round(abs(length.value)), 'token')} {'longer' if length.value >= 0 else 'shorter'}"
        sentence = f"Answers are {tokens} on average than in the run (p {length.p:.2g}){end}."
        checks.append(_check("lengths", good, sentence))
    return checks


def text_checks(texts: Sequence[Departures]) -> list[dict[str, Any]]:
    """Check answers at temperature 0: the same model before the first compression, the same cache after it."""
    if not texts:
        return [_check("texts", True, "No text has two tokens after a first compression, so texts prove nothing.")]

    # Other weights show before the first compression.
    tokens, other, far = np.sum([(text.tokens, text.other, text.far) for text in texts], axis=0).tolist()
    good = far[0] <= MANY * tokens[0]
    departed = _departed(other[0], tokens[0])
    sentence = f"Of {len(texts):,} texts at temperature 0, before the first compression {departed}"
    if not good:
        sentence += f", {far[0]:,} by more than {NEAR:g} nats: other weights, or not greedy"
    before = _check("texts before", good, f"{sentence}.")

    # Another cache shows after it.
    parted = sum(text.other[1] > 0 for text in texts)
    gap_before = max(text.gap[0] for text in texts)
    gap_after = max(text.gap[1] for text in texts)
    p = departure_p(texts)
    sentence = f"After it {_departed(other[1], tokens[1])}, in {parted:,} texts, by up to {gap_after:.2g} nats"
    sentence += f" (before by {gap_before:.2g}; p {p:.2g})"
    if p < TEXT_P:
        sentence += ": its cache differs from the first compression on"
    elif not parted:
        sentence += f": most likely fewer than {100 * most_unseen(len(texts)):.2g} % of problems depart"
    return [before, _check("texts after", p >= TEXT_P, f"{sentence}.")]


def _departed(other: int, tokens: int) -> str:
    return f"{other:,} of {tokens:,} tokens are not the likeliest of the cell"

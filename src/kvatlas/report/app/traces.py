"""One trace as the app shows it: its tokens, and when each left the cache."""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from kvatlas.core import EvictionTrace, Problem, Status, Trace
from kvatlas.policies.budget_rule import local_window_of
from kvatlas.report.materials import RunMaterials
from kvatlas.text import visible

#: Tokens of one trace that a page holds at most.
TOKEN_LIMIT = 8_000
#: Characters of one trace that a page holds at most.
TEXT_LIMIT = 48_000
#: Characters of a question, of a reference answer, and of all questions of a benchmark that a page holds at most.
QUESTION_LIMIT = 6_000
ANSWER_LIMIT = 2_000
QUESTIONS_LIMIT = 500_000
#: A word of an answer, the space between two, or a sign.
_WORD = r"\s+|\w+|[^\w\s]"


def trace_document(trace: Trace, materials: RunMaterials, whole: bool = False) -> dict[str, Any]:
    """Return a trace, cut into tokens with the time of each one's eviction (see `evictions_in_steps`).

    As much of it as a page holds, or the `whole` of it.
    """
    problem = materials.problem(trace)
    # The texts of the tokens to show; None without the tokenizer, and for a text too long for a page.
    pieces = materials.pieces(trace.model, trace.tokens if whole else trace.tokens[:TOKEN_LIMIT])
    if pieces is not None and not whole and sum(map(len, pieces)) > TEXT_LIMIT:
        pieces = None
    if pieces is not None:
        text = "".join(pieces)
        more = len(trace.tokens) - len(pieces)
    else:
        text = trace.text if whole else trace.text[:TEXT_LIMIT]
        more = len(trace.text) - len(text)

    outcome = "right" if trace.grade.correct else "wrong"
    if trace.grade.status is not Status.OK:
        outcome = f"wrong ({trace.grade.outcome})"
    answer = trace.grade.answer
    document: dict[str, Any] = {
        "problem": trace.problem,
        "sample": trace.sample,
        "verdict": outcome,
        "right": trace.grade.status is Status.OK and trace.grade.correct,
        "answer": None if answer is None else answer[:ANSWER_LIMIT],
        "progress": round(trace.grade.progress, 4),
        "reference": None if problem is None else materials.reference(trace.benchmark, problem)[:ANSWER_LIMIT],
        "question": None if problem is None else problem.question[:QUESTION_LIMIT],
        "tokens": trace.usage.output_tokens,
        "thinking": trace.usage.thinking_tokens,
        "prompt": trace.usage.prompt_tokens,
        "peak": trace.usage.peak_kv_tokens,
        "compressions": trace.usage.compressions,
        "text": text,
        "more": more,
    }
    if not document["right"] and document["answer"] and document["reference"]:
        document["wrong_parts"] = differing_parts(document["answer"], document["reference"])
    if pieces is None:
        return document

    # Scripts count UTF-16 units, in text whose hidden characters were made visible.
    document["lengths"] = [len(visible(piece).encode("utf-16-le", "surrogatepass")) // 2 for piece in pieces]
    if trace.eviction_trace is not None and trace.usage.prompt_tokens is not None:
        window = local_window_of(trace.setting)
        document |= evictions_in_steps(trace.eviction_trace, trace.usage.prompt_tokens, len(pieces), window)
    return document


def differing_parts(answer: str, reference: str) -> dict[str, list[list[Any]]]:
    """Return answer and reference in pieces of whole words, each with True where the other one has other words."""
    answer_words = re.findall(_WORD, answer)
    reference_words = re.findall(_WORD, reference)
    pieces: dict[str, list[list[Any]]] = {"answer": [], "reference": []}
    blocks = SequenceMatcher(None, answer_words, reference_words, autojunk=False).get_opcodes()
    for kind, start, end, other_start, other_end in blocks:
        pieces["answer"].append(["".join(answer_words[start:end]), kind != "equal"])
        pieces["reference"].append(["".join(reference_words[other_start:other_end]), kind != "equal"])
    return pieces


def question_documents(problems: Sequence[Problem | None]) -> list[dict[str, Any] | None]:
    """Return questions with their reference answers, as long as they fit into a page; None for the others."""
    documents: list[dict[str, Any] | None] = []
    characters = 0
    for problem in problems:
        document = None
        if problem is not None:
            question = problem.question[:QUESTION_LIMIT]
            characters += len(question)
            if characters <= QUESTIONS_LIMIT:
                document = {"question": question, "reference": problem.answer[:ANSWER_LIMIT]}
        documents.append(document)
    return documents


def evictions_in_steps(eviction_trace: EvictionTrace, prompt: int, new: int, window: int | None) -> dict[str, Any]:
    """Return when tokens were evicted: of the prompt (counts), and of the first `new` new tokens.

    `steps` are the steps at which tokens left; `left` has for each token the number of its step from 1, 0 for never;
    `held` the percent of the holders that had it at the end, where a policy chooses more than once; `prompt_left`
    has for each step the number of prompt tokens that left; `judged` is the number of new tokens that a compression has
    seen outside its window.
    """
    new_left = eviction_trace.evicted_at[prompt : prompt + new]
    steps = sorted(set(eviction_trace.evicted_at) - {0})
    step_index = {step: index for index, step in enumerate([0, *steps])}
    prompt_left = Counter(eviction_trace.evicted_at[:prompt])

    document: dict[str, Any] = {
        "steps": steps,
        "left": [step_index[step] for step in new_left],
        "judged": max(0, steps[-1] - 1 - (window or 0)) if steps else 0,
        "prompt_left": [prompt_left[step] for step in steps],
    }

    if eviction_trace.holders > 1:
        kept = eviction_trace.kept_by[prompt : prompt + new]
        document["holders"] = eviction_trace.holders
        document["held"] = [round(100 * count / eviction_trace.holders) for count in kept]
    return document

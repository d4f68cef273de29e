"""The traces of a report page: which ones, and when each of their tokens was evicted; in the page or next to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import EvictionTrace, Status, Trace
from kvatlas.report.sources import Sources
from kvatlas.results import Key
from kvatlas.stats.table import CellTraces

#: Tokens and characters of one trace that a page holds at most.
TOKEN_LIMIT, TEXT_LIMIT = 8_000, 48_000
#: One letter a number: token lengths and evictions are long lists of small numbers.
_LETTERS = "".join(chr(code) for code in range(35, 127) if chr(code) not in '"&<>\\')


@dataclass(frozen=True)
class Chosen:
    """A trace for the page: its place in the store and the number of its cell."""

    key: Key
    cell: int


def choose(cells: Mapping[int, CellTraces], per_cell: int) -> list[Chosen]:
    """At most `per_cell` traces of each cell: one problem that all cells of a benchmark have, then others' verdicts.

    `cells` are by number. The common problem is the one on which the settings of its model and benchmark disagree
    most: there the cells can be compared trace by trace.
    """
    votes: dict[tuple[str, str], dict[tuple[str, int], list[bool]]] = {}
    for cell in cells.values():
        at = votes.setdefault((cell.expected.model, cell.expected.benchmark), {})
        for place, correct in _verdicts(cell).items():
            at.setdefault(place, []).append(correct)
    common = {home: max(sorted(at), key=lambda key: _disagreement(at[key])) for home, at in votes.items() if at}
    chosen = []
    for number, cell in sorted(cells.items(), key=lambda item: _cell_key(item[1])):
        there = _verdicts(cell)
        first = common.get((cell.expected.model, cell.expected.benchmark), ("", 0))
        order = sorted(there, key=lambda at: (at != first, there[at] == there.get(first, True), at))
        chosen += [Chosen((*_cell_key(cell), *at), number) for at in order[:per_cell]]
    return chosen


def _cell_key(cell: CellTraces) -> tuple[str, str, str]:
    return cell.expected.run_key, cell.expected.setting.id, cell.expected.benchmark


def _verdicts(cell: CellTraces) -> dict[tuple[str, int], bool]:
    """Whether each trace that is there is correct, by problem and sample."""
    rows = zip(cell.problems, cell.there.tolist(), cell.traces["correct"].tolist(), strict=True)
    return {
        (problem, sample): bool(correct)
        for problem, there, right in rows
        for sample, correct in enumerate(right)
        if there[sample]
    }


def _disagreement(verdicts: Sequence[bool]) -> tuple[int, int]:
    right = sum(verdicts)
    return min(right, len(verdicts) - right), len(verdicts)


def trace_document(trace: Trace, cell: int, sources: Sources, whole: bool = False) -> dict[str, Any]:
    """One trace: text cut into tokens, and for each token when it left the cache (see `coded_evictions`).

    As much of it as a page holds, or the `whole` of it.
    """
    problem = sources.problem(trace)
    most, characters = (None, None) if whole else (TOKEN_LIMIT, TEXT_LIMIT)
    shown = trace.tokens[:most]
    pieces = sources.pieces(trace.model, shown)
    if pieces is None or (characters is not None and len("".join(pieces)) > characters):
        pieces = None
    text = "".join(pieces) if pieces is not None else trace.text[:characters]
    window = dict(trace.setting.parameters).get("local_window")
    document = {
        "cell": cell,
        "problem": trace.problem,
        "sample": trace.sample,
        "verdict": verdict(trace),
        "right": trace.grade.correct and trace.grade.status is Status.OK,
        "answer": trace.grade.answer if trace.grade.answer is None else trace.grade.answer[:2_000],
        "progress": round(trace.grade.progress, 4),
        "reference": None if problem is None else problem.answer[:2_000],
        "question": None if problem is None else problem.question[:6_000],
        "tokens": trace.usage.output_tokens,
        "thinking": trace.usage.thinking_tokens,
        "prompt": trace.usage.prompt_tokens,
        "peak": trace.usage.peak_kv_tokens,
        "compressions": trace.usage.compressions,
        "text": text,
        "more": max(0, len(trace.tokens) - len(shown)) if pieces is not None else max(0, len(trace.text) - len(text)),
    }
    if pieces is not None:
        document["lengths"] = _lengths(pieces)
        if trace.eviction_trace is not None and trace.usage.prompt_tokens is not None:
            document |= coded_evictions(trace.eviction_trace, trace.usage.prompt_tokens, len(shown), window)
    return document


def verdict(trace: Trace) -> str:
    """The grade as text."""
    if trace.grade.status is Status.OK:
        return "right" if trace.grade.correct else "wrong"
    return f"wrong ({trace.grade.status.value.replace('_', ' ')})"


def coded_evictions(eviction_trace: EvictionTrace, prompt: int, shown: int, window: int | None) -> dict[str, Any]:
    """When tokens were evicted: of the prompt (counts) and of the first `shown` new tokens, for the page.

    `steps` are the steps at which tokens left; `left` has for each token the number of its step, one letter each, from
    1, 0 for never; `held` the percent of the holders that had it at the end, where a policy chooses more than once;
    `prompt_left` has for each step how many prompt tokens left; `judged` is the number of new tokens that a compression
    has looked at: those after it are still in the window.
    """
    left = eviction_trace.left[prompt : prompt + shown]
    steps = sorted(set(eviction_trace.left) - {0})
    number = {step: index for index, step in enumerate([0, *steps])}
    judged = max(0, steps[-1] - 1 - (window or 0)) if steps else 0
    prompt_left = Counter(eviction_trace.left[:prompt])
    document: dict[str, Any] = {
        "steps": steps,
        "left": _coded([number[step] for step in left]),
        "judged": judged,
        "prompt_left": [prompt_left[step] for step in steps],
    }
    if eviction_trace.holders > 1:
        document["holders"] = eviction_trace.holders
        kept = eviction_trace.held[prompt : prompt + shown]
        document["held"] = _coded([round(50 * count / eviction_trace.holders) for count in kept])
    return document


def _lengths(pieces: Sequence[str]) -> str | list[int]:
    # The page counts UTF-16 units, as scripts do, in text whose hidden characters were made visible.
    from kvatlas.text import visible

    return _coded([len(visible(piece).encode("utf-16-le", "surrogatepass")) // 2 for piece in pieces])


def _coded(numbers: Sequence[int]) -> str | list[int]:
    """One letter for each number if all are small, else the numbers."""
    if max(numbers, default=0) < len(_LETTERS):
        return "".join(_LETTERS[number] for number in numbers)
    return list(numbers)


LETTERS = _LETTERS

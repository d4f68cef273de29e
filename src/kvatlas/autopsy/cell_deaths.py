"""The kinds of death of the answers that settings lose, by cell, with their shares of all lost answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvatlas.answers.reading import Tags, read_text
from kvatlas.autopsy.kinds_of_death import Death, Finding, TraceText, find_death, lost_at, read_statements
from kvatlas.core import Estimate, Setting, Trace
from kvatlas.policies.memory import local_window_of
from kvatlas.results import Manifest, Store
from kvatlas.results.records import Key
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.losses import FULL

#: Returns the text of each token of a model by its name; None without its tokenizer.
Pieces = Callable[[str, tuple[int, ...]], Sequence[str] | None]


@dataclass(frozen=True)
class Lost:
    """A trace that is wrong where that of the full cache, `full`, is right, and how its answer died."""

    key: Key
    trace: Trace
    full: Trace
    finding: Finding


@dataclass(frozen=True)
class CellDeaths:
    """The lost answers of a cell: their number, and the share of each kind with its interval, clustered by problem."""

    model: str
    benchmark: str
    setting: Setting
    lost: int
    counts: Mapping[Death, int]
    shares: Mapping[Death, Estimate]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the shares in percent, by the names of the kinds."""
        kinds = {death.value: {"count": self.counts[death], **share.to_dict()} for death, share in self.shares.items()}
        return {
            "model": self.model,
            "benchmark": self.benchmark,
            "policy": self.setting.policy,
            "parameters": self.setting.values,
            "lost": self.lost,
            "kinds": kinds,
        }


def trace_text(trace: Trace, tags: Tags | None, pieces: Pieces) -> TraceText:
    """Return a trace as the rules read it; without the tokenizer the place of its tokens is unknown."""
    answer = read_text(trace.text, tags).answer
    answer_start = len(trace.text) if answer is None else len(trace.text) - len(answer)
    token_ends, lost = _token_places(trace, pieces)
    statements = read_statements(trace.benchmark, trace.text, answer_start)
    return TraceText(trace.text, answer_start, trace.grade.status, statements, token_ends, lost)


def _token_places(trace: Trace, pieces: Pieces) -> tuple[list[int], list[int]]:
    """Return where each token ends in the text, and when it was lost; both empty if that is unknown."""
    texts = pieces(trace.model, trace.tokens)
    prompt = trace.usage.prompt_tokens
    if texts is None or prompt is None or trace.eviction_trace is None:
        return [], []
    # The text of a trace leaves out the end token.
    if not "".join(texts).startswith(trace.text):
        return [], []
    local_window = local_window_of(trace.setting) or 0
    return list(accumulate(map(len, texts))), lost_at(trace.eviction_trace, prompt, local_window)


def lost_traces(store: Store, pieces: Pieces, setting: Setting | None = None) -> Iterator[Lost]:
    """Yield the lost answers of a run, of one `setting` or of all, in the order of their keys."""
    manifest = store.manifest()
    right: dict[tuple[str, str, str, int], Key] = {}
    wrong: list[tuple[Key, str]] = []
    for run_key, trace in store.traces(texts=False):
        key = run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
        if trace.setting == FULL and trace.grade.correct:
            right[trace.model, trace.benchmark, trace.problem, trace.sample] = key
        elif trace.setting != FULL and not trace.grade.correct and setting in (None, trace.setting):
            wrong.append((key, trace.model))
    for key, model in wrong:
        full_key = right.get((model, *key[2:]))
        if full_key is not None:
            yield _examined(store, key, full_key, pieces, _tags(manifest, model))


def _tags(manifest: Manifest, model: str) -> Tags | None:
    """Return the think tags of a model of the run; None if they are unknown."""
    values = manifest.provenance.get("tags", {}).get(model)
    return None if values is None else Tags(**values)


def _examined(store: Store, key: Key, full_key: Key, pieces: Pieces, tags: Tags | None) -> Lost:
    trace = store.trace(key)
    full = store.trace(full_key)
    finding = find_death(trace_text(trace, tags, pieces), trace_text(full, tags, pieces))
    return Lost(key, trace, full, finding)


def count_deaths(lost: Iterator[Lost]) -> list[CellDeaths]:
    """Return the deaths of each cell that lost an answer."""
    by_cell: dict[tuple[str, str, Setting], list[tuple[str, Death]]] = {}
    for one in lost:
        cell = one.trace.model, one.trace.benchmark, one.trace.setting
        by_cell.setdefault(cell, []).append((one.trace.problem, one.finding.death))
    return [_cell_deaths(cell, deaths) for cell, deaths in by_cell.items()]


def _cell_deaths(cell: tuple[str, str, Setting], deaths: Sequence[tuple[str, Death]]) -> CellDeaths:
    counts = Counter(death for _, death in deaths)
    shares = {}
    for kind in Death:
        if not counts[kind]:
            continue
        by_problem: dict[str, list[float]] = {}
        for problem, death in deaths:
            by_problem.setdefault(problem, []).append(float(death is kind))
        shares[kind] = pass_at_1(by_problem)
    return CellDeaths(*cell, len(deaths), counts, shares)

"""The answers of the full cache that settings lose, and how they died: by cell, as data and as a table."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from kvatlas.answers.reading import Tags, read_text
from kvatlas.autopsy.kinds_of_death import Death, LocatedDeath, TraceText, find_death, lost_at, read_statements
from kvatlas.core import Estimate, Setting, Trace, is_reference
from kvatlas.policies.budget_rule import local_window_of
from kvatlas.report.description import markdown_table
from kvatlas.report.materials import RunMaterials
from kvatlas.report.result import Result
from kvatlas.results import Store
from kvatlas.results.records import Key
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.run_data import short_names
from kvatlas.text import interval_text, model_name, percent_text

#: Returns the text of each token of a model by its name; None without its tokenizer.
Pieces = Callable[[str, tuple[int, ...]], Sequence[str] | None]


@dataclass(frozen=True)
class LostAnswer:
    """A trace that is wrong where that of the full cache is right, and how its answer died."""

    key: Key
    trace: Trace
    death: LocatedDeath


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


def deaths_of(result: Result) -> list[CellDeaths]:
    """Return the deaths of the cells of all runs; the texts of all lost answers are read."""
    cells: list[CellDeaths] = []
    for run in result.runs:
        with run.store() as store:
            materials = RunMaterials.from_manifest(run.manifest)
            cells += count_deaths(lost_answers(store, materials.pieces))

    policy = result.options.policy
    return [cell for cell in cells if policy is None or cell.setting.is_of(policy)]


def deaths_table(cells: Sequence[CellDeaths]) -> str:
    """Return a Markdown section: for each cell its lost answers, and the share of each kind with its interval."""
    if not cells:
        return "# Lost answers\n\nNo setting lost an answer that the full cache has.\n"

    present = set(chain.from_iterable(cell.shares for cell in cells))
    kinds = [kind for kind in Death if kind in present]
    names = short_names(cell.setting for cell in cells)
    rows = []
    for cell in cells:
        row = [model_name(cell.model), cell.benchmark, names[cell.setting.id], str(cell.lost)]
        for kind in kinds:
            share = cell.shares.get(kind)
            row.append("–" if share is None else f"{percent_text(share.value)} ({interval_text(share)})")
        rows.append(row)

    header = ["Model", "Benchmark", "Setting", "Lost", *(kind.value for kind in kinds)]
    return f"# Lost answers\n\nHow they died, % of the lost (95 % interval):\n\n{markdown_table(header, rows)}\n"


def lost_answers(store: Store, pieces: Pieces, setting: Setting | None = None) -> Iterator[LostAnswer]:
    """Yield the lost answers of a run, of one `setting` or of all, in the order of their keys."""
    # From grades alone; texts are read of lost answers.
    right: dict[tuple[str, str, str, int], Key] = {}
    wrong: list[tuple[str, Key]] = []
    for run_key, trace in store.traces(texts=False):
        key = run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
        if is_reference(trace.setting) and trace.grade.correct:
            right[trace.model, trace.benchmark, trace.problem, trace.sample] = key
        elif not (is_reference(trace.setting) or trace.grade.correct) and setting in (None, trace.setting):
            wrong.append((trace.model, key))

    tags_by_model = store.manifest().provenance.get("tags", {})
    for model, key in wrong:
        full_key = right.get((model, *key[2:]))
        if full_key is not None:
            trace = store.trace(key)
            text = trace_text(trace, tags_by_model, pieces)
            full = trace_text(store.trace(full_key), tags_by_model, pieces)
            yield LostAnswer(key, trace, find_death(text, full))


def trace_text(trace: Trace, tags_by_model: Mapping[str, Any], pieces: Pieces) -> TraceText:
    """Return a trace as the rules read it; without the tokenizer the place of its tokens is unknown.

    `tags_by_model` are the fields of the think tags of models, which are not known of all.
    """
    fields = tags_by_model.get(trace.model)
    tags = None if fields is None else Tags(**fields)
    answer = read_text(trace.text, tags).answer
    answer_start = len(trace.text) if answer is None else len(trace.text) - len(answer)
    statements = read_statements(trace.benchmark, trace.text, answer_start)

    token_ends: list[int] = []
    lost: list[int] = []
    texts = pieces(trace.model, trace.tokens)
    prompt = trace.usage.prompt_tokens
    evictions = trace.eviction_trace
    # The text of a trace leaves out the end token.
    if texts is not None and prompt is not None and evictions and "".join(texts).startswith(trace.text):
        token_ends = list(accumulate(map(len, texts)))
        lost = lost_at(evictions, prompt, local_window_of(trace.setting) or 0)
    return TraceText(trace.text, answer_start, trace.grade.status, statements, token_ends, lost)


def count_deaths(lost: Iterable[LostAnswer]) -> list[CellDeaths]:
    """Return the deaths of each cell that lost an answer."""
    # An answer has two whole traces, so that none is kept.
    deaths: dict[tuple[str, str, Setting], list[tuple[str, Death]]] = {}
    for answer in lost:
        trace = answer.trace
        cell = (trace.model, trace.benchmark, trace.setting)
        deaths.setdefault(cell, []).append((trace.problem, answer.death.kind))

    cells = []
    for cell, of_cell in deaths.items():
        counts = Counter(death for _, death in of_cell)
        shares = {}
        for kind in Death:
            if counts[kind]:
                by_problem: dict[str, list[float]] = {}
                for problem, death in of_cell:
                    by_problem.setdefault(problem, []).append(float(death is kind))
                shares[kind] = pass_at_1(by_problem)
        cells.append(CellDeaths(*cell, len(of_cell), counts, shares))
    return cells

"""What other programs' logs hold, brought into a run: one model under one setting on one task, its traces graded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvatlas import __version__
from kvatlas.core import Costs, Grade, KvatlasError, Setting, Status, Trace
from kvatlas.results import Expected, Manifest, Store

#: Bytes of a log.
MOST_BYTES = 2**29
#: What graders of Inspect say in letters: correct, incorrect, partially correct, no answer.
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
#: Costs of which a log says nothing.
UNKNOWN = Costs(None, None, None, None, None, None, None)


@dataclass(frozen=True)
class ScoredLog:
    """The cell that a log is to fill, its traces, what is known of its problems by their ids, and where it is from."""

    cell: Expected
    traces: Sequence[Trace]
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    def store(self, run: Path) -> tuple[Expected, int]:
        """Put it into the run, new or not, in place of an earlier one; returns the cell and the number of traces."""
        with Store.create(run, {"kvatlas": __version__}) as store:
            store.put_manifest(self._joined(store))
            for trace in self.traces:
                store.add(self.cell.run_key, trace)
        return self.cell, len(self.traces)

    def _joined(self, store: Store) -> Manifest:
        """What the run is to hold with this cell, in place of an earlier one of the same name."""
        try:
            manifest = store.manifest()
        except KvatlasError:
            manifest = Manifest((), (), {}, {"kvatlas": __version__})
        cell = self.cell
        others = tuple(other for other in manifest.expected if other.name != cell.name)
        if any(other.benchmark == cell.benchmark and set(other.problems) != set(cell.problems) for other in others):
            raise KvatlasError(
                f"The run holds other problems of {cell.benchmark} than the log; import it into a run of its own."
            )
        about = {id_: dict(known) for id_, known in self.about.items() if known}
        imported = {**manifest.provenance.get("imported", {}), f"{cell.model} {cell.benchmark}": dict(self.source)}
        return replace(
            manifest,
            expected=(*others, cell),
            provenance={**manifest.provenance, "imported": imported},
            about={**manifest.about, cell.benchmark: about} if about else manifest.about,
        )


@dataclass(frozen=True)
class ScoredAnswer:
    """A harness's answer to one problem: its text, its scores by metric, what was read out of it, what it cost."""

    problem: str
    text: str
    scores: Mapping[str, float]
    answer: str | None = None
    status: Status = Status.OK
    costs: Costs = UNKNOWN

    def trace(self, cell: Expected, metric: str) -> Trace:
        """It as the one trace of its problem, graded by the metric."""
        share = self.scores[metric]
        return Trace(
            model=cell.model,
            benchmark=cell.benchmark,
            problem=self.problem,
            sample=0,
            setting=cell.setting,
            tokens=(),
            text=self.text,
            grade=Grade(share >= 1, share, self.answer, self.status, self.scores if len(self.scores) > 1 else {}),
            usage=self.costs,
        )


def store_answers(
    run: Path, log: Path, cell: Expected, answers: Iterable[ScoredAnswer], metric: str
) -> tuple[Expected, int]:
    """Put a harness's answers into the run, those that the metric judges; returns as `ScoredLog.store`."""
    traces = [answer.trace(cell, metric) for answer in answers if metric in answer.scores]
    return ScoredLog(cell, traces, source={"log": log.name, "metric": metric}).store(run)


def as_setting(policy: object, values: Mapping[str, Any]) -> Setting:
    """The setting that our own model noted in a log; KvatlasError for what is none."""
    if not isinstance(policy, str) or not all(isinstance(value, str | int | float) for value in values.values()):
        raise KvatlasError(
            f"The log names the policy {policy!r} with {dict(values)}; valid are a name and plain values."
        )
    return Setting.of(policy, **values)


def score_of(value: Any, where: str) -> float | None:
    """A score as a share: letters, truth values, numbers from 0 to 1; None for what was not scored (NaN).

    Raises KvatlasError for other scores, which cannot be Pass@1.
    """
    if isinstance(value, str) and value in _LETTERS:
        return _LETTERS[value]
    if isinstance(value, bool | int | float):
        if math.isnan(value):
            return None
        if 0 <= value <= 1:
            return float(value)
    raise KvatlasError(f"{where} has the score {value!r}; valid are numbers from 0 to 1 and the letters C, I, P and N.")

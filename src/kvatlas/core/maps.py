"""The terms of a map: estimate, cell, map, notes, and the claim that a number makes.

Shares are in [0, 1]. Only figures, texts and CSV maps are in percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from kvatlas.core.basics import grouped, percent
from kvatlas.core.traces import Measure, Setting, is_reference, reference_words

_T = TypeVar("_T")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval and standard error, both clustered by problem; unknown values are None."""

    value: float
    low: float | None
    high: float | None
    problems: int | None
    samples: int | None
    se_clustered: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """Return value and interval in percent."""
        return {"value": percent(self.value), "low": percent(self.low), "high": percent(self.high)}


class Vacuous(StrEnum):
    """A reason why traces cannot show a loss."""

    UNCOMPRESSED = "uncompressed"
    UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Validity:
    """Counts of traces from which follows if they can show a loss.

    `bounded` traces belong to `settings` with a KV budget; `compressed` of these were compressed at least once.
    `no_answer` and `truncated` (traces that did not end) count over all traces. `identical` lists groups of setting
    ids whose tokens are equal for every problem and sample; `same` is True if this holds for all settings
    with a KV budget.
    """

    traces: int
    bounded: int
    compressed: int
    no_answer: int
    truncated: int
    settings: int
    identical: tuple[tuple[str, ...], ...] = ()
    same: bool = False

    @property
    def unanswered(self) -> int:
        """The number of traces without an answer (see `Status.answered`)."""
        return self.no_answer + self.truncated

    @property
    def vacuous(self) -> Vacuous | None:
        """The reason why these traces cannot support a recommendation, or None."""
        if self.bounded and not self.compressed:
            return Vacuous.UNCOMPRESSED
        if self.traces and self.unanswered == self.traces:
            return Vacuous.UNANSWERED
        return None

    @property
    def reason(self) -> str | None:
        """The reason of `vacuous` as a clause, or None."""
        return {
            None: None,
            Vacuous.UNCOMPRESSED: f"none of the {self.bounded:,} traces under a KV budget was compressed",
            Vacuous.UNANSWERED: f"none of the {self.traces:,} traces has an answer",
        }[self.vacuous]

    @property
    def warnings(self) -> tuple[Note, ...]:
        """The note that these traces can show no loss, if so."""
        return (Note(NoteKind.VACUOUS, f"Can show no loss: {self.reason}"),) if self.vacuous else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the counts with `vacuous` as data."""
        return {**asdict(self), "identical": [list(group) for group in self.identical], "vacuous": self.vacuous}


@dataclass(frozen=True)
class Cell:
    """One setting on a map: the estimate and the numbers of the setting, by the keys of `kvatlas.columns`.

    Numbers of the traces are means, `truncated` and other counts are sums, `peak_kv_tokens` is the largest.
    `seconds` is a trace's share of the wall time of its batches. `stays_tokens` are the tokens after a compression
    by the setting's rule, the mean over problems, and `stays_share` is their share of the tokens before it. An
    unknown number is None or missing, as on CSV maps. `measures` declares the numbers that its run or its CSV map
    has beside the usual ones.
    """

    setting: Setting
    estimate: Estimate
    numbers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    measures: tuple[Measure, ...] = ()

    def number(self, key: str) -> Any:
        """Return a number of the setting; None if it is unknown."""
        return self.numbers.get(key)


class NoteKind(StrEnum):
    """The subject of a note on a map; notes of the kinds in `WARNINGS` are drawn as warnings."""

    VACUOUS = "vacuous"
    PARTIAL = "partial"
    MIXED = "mixed"
    FIXED = "fixed"
    LEFT_OUT = "left_out"
    INTERVAL = "interval"
    GRANULARITY = "granularity"
    RECOMMENDED = "recommended"


WARNINGS = (NoteKind.VACUOUS, NoteKind.PARTIAL, NoteKind.MIXED)


@dataclass(frozen=True)
class Note:
    """A sentence about a map or a description, with its subject."""

    kind: NoteKind
    text: str

    @property
    def is_warning(self) -> bool:
        """True if a reader must see the note before the map."""
        return self.kind in WARNINGS

    def __str__(self) -> str:
        return self.text


#: Points that a setting may lose against the full cache by default.
LOSE_AT_MOST = 3.0


#: Looks at the samples of a run that a spec declares, at most.
MOST_LOOKS = 5


#: The values of a cell on the vertical and the horizontal axis of its map.
CellCoord = tuple[Any, Any]


class MapName(NamedTuple):
    """The name of a map. The benchmark of a mean map is `mean of N`."""

    model: str
    benchmark: str
    policy: str


def mean_of(benchmarks: int) -> str:
    """Return the benchmark of a mean map, as files have it too."""
    return f"mean of {benchmarks}"


def with_means(maps: Mapping[MapName, _T]) -> dict[MapName, list[_T]]:
    """Return each map with its own value alone, then each mean over benchmarks with the values of its maps."""
    by_policy = grouped(maps, lambda name: (name.model, name.policy))
    found = {name: [value] for name, value in maps.items()}
    for (model, policy), names in by_policy.items():
        if len(names) > 1:
            found[MapName(model, mean_of(len(names)), policy)] = [maps[name] for name in names]
    return found


class Claim(StrEnum):
    """The problems that a number of a run speaks of: those that were run, sampled anew, or the population.

    The units are traces for these problems, and problems for problems like these.
    """

    THESE = "these_problems"
    LIKE = "problems_like_these"

    @property
    def unit(self) -> str:
        """The independent unit: a trace or a problem."""
        return "trace" if self is Claim.THESE else "problem"

    @property
    def words(self) -> str:
        """The claim as words in a sentence."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Map:
    """A metric over two axes of the grid, for one model and one benchmark (or the mean over several).

    `axes` holds the two parameters in the order (vertical, horizontal) with ascending values; `cells` is keyed by the
    pair of values in that order. `baselines` are settings outside the grid, by their text. `validity` is None if there
    are no traces. `averaged` counts the benchmarks of a mean map and is 0 for a map of one benchmark. `plateau` holds
    the cells that are statistically tied with the best, `keeps` those proven to lose at most the `margin` against the
    full cache, `breaks` those proven to lose more; they are None if they were not tested. `keeps_like` and
    `breaks_like` are those of them that are proven for problems like these, too. `fits` holds cells whose own limit is
    within the margin, and before which the tests ended. `claim` is that of the intervals. `recommended` is the cell of
    the setting that is recommended for the model, if it is here; `recommended_for` is the benchmark or mean for which
    it is. Of a control nothing is proven but that it loses more.
    """

    model: str
    benchmark: str
    metric: str
    policy: str
    axes: tuple[tuple[str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]]
    cells: Mapping[CellCoord, Cell]
    baselines: Mapping[str, Cell] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    validity: Validity | None = None
    averaged: int = 0
    plateau: frozenset[CellCoord] | None = None
    keeps: frozenset[CellCoord] | None = None
    breaks: frozenset[CellCoord] | None = None
    keeps_like: frozenset[CellCoord] = frozenset()
    breaks_like: frozenset[CellCoord] = frozenset()
    fits: frozenset[CellCoord] = frozenset()
    margin: float | None = None
    claim: Claim | None = None
    recommended: CellCoord | None = None
    recommended_for: str = ""
    is_control: bool = False

    @property
    def name(self) -> MapName:
        """Model, benchmark and policy."""
        return MapName(self.model, self.benchmark, self.policy)

    @property
    def axis_names(self) -> tuple[str, str]:
        """The names of the vertical and the horizontal axis."""
        return self.axes[0][0], self.axes[1][0]

    @property
    def policy_words(self) -> str:
        """The policy, named as a control if it is one."""
        return f"{self.policy} (control)" if self.is_control else self.policy

    @property
    def is_mean(self) -> bool:
        """True for a mean over benchmarks."""
        return self.averaged > 0

    @property
    def full(self) -> Cell | None:
        """The cell of the full cache, or of the reference of servers, if it is a baseline."""
        return next((cell for cell in self.baselines.values() if is_reference(cell.setting)), None)

    @property
    def reference(self) -> str:
        """The name that words about the map give to the full cache, or to the reference of servers."""
        return reference_words(cell.setting for cell in self.baselines.values())

    @property
    def remarks(self) -> tuple[Note, ...]:
        """The notes, preceded by the reason why the traces can show no loss, if any."""
        return (*self.validity.warnings, *self.notes) if self.validity else self.notes

    @property
    def best(self) -> CellCoord:
        """The coordinates of the highest cell; the first of equal ones."""
        return max(self.cells, key=lambda coord: self.cells[coord].estimate.value)


class Check(StrEnum):
    """The outcome of a check; `failed` means that a sweep cannot start."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class CheckResult:
    """One result of a check before a sweep, with advice if there is something to do."""

    name: str
    status: Check
    message: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.advice}" if self.advice else self.message

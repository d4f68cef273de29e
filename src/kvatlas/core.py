"""The words of kvatlas as frozen data, shared by every room; imports no other module of kvatlas.

Lengths are in tokens, shares and grades in [0, 1]. Only figures, texts and CSV maps are in percent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple


class KvatlasError(Exception):
    """A wrong spec, file, model or setting, in one sentence: the field, the expected value, the given one."""


def reason(error: BaseException) -> str:
    """The message of an error of Python, the system or a library, short enough for a sentence."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    line = (str(error).splitlines() or [""])[0].strip() or type(error).__name__
    return line if len(line) <= 300 else f"{line[:300]} ..."


@contextmanager
def refusal(sentence: str) -> Iterator[None]:
    """Turn all that foreign code raises into `sentence` with the reason.

    That includes the panics of libraries written in Rust, which are no `Exception`.
    """
    try:
        yield
    except (KvatlasError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise KvatlasError(f"{sentence} ({reason(error)}).") from error


class Status(StrEnum):
    """The status of a grade. All but `ok` count as wrong."""

    OK = "ok"
    TRUNCATED = "truncated"
    NO_ANSWER = "no_answer"
    GRADER_TIMEOUT = "grader_timeout"

    @property
    def answered(self) -> bool:
        """Return whether the trace came to an answer: it was not truncated, and an answer was found."""
        return self not in (Status.TRUNCATED, Status.NO_ANSWER)


class Outcome(StrEnum):
    """The outcome of a trace, as text for people."""

    CORRECT = "correct"
    WRONG = "wrong"
    TRUNCATED = "truncated"
    NO_ANSWER = "no answer"
    GRADER_TIMEOUT = "grader timeout"


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer. `id` is unique within its benchmark and stable across versions."""

    id: str
    question: str
    answer: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """The verdict on a trace: `correct`, `progress` in [0, 1], the extracted answer, and how it came about.

    `metrics` holds what else a benchmark measures: numbers (those in [0, 1] can be mapped and compared) and texts,
    by name.
    """

    correct: bool
    progress: float
    answer: str | None
    status: Status
    metrics: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def verdict(self) -> Outcome:
        """The outcome of the trace, for people."""
        if self.status is Status.OK:
            return Outcome.CORRECT if self.correct else Outcome.WRONG
        return Outcome[self.status.name]


@dataclass(frozen=True)
class Sampling:
    """The rule of the next token: temperature, then top-k, then top-p (the published order).

    Temperature 0 is greedy. `top_k` 0 and `top_p` 1.0 switch that step off.
    """

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
    max_new_tokens: int = 16_384


@dataclass(frozen=True)
class Setting:
    """One policy with one value of each of its parameters: a cell of the grid."""

    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, policy: str, **parameters: Any) -> Setting:
        """The setting with its parameters in canonical (sorted) order."""
        return cls(policy, tuple(sorted(parameters.items())))

    @property
    def values(self) -> dict[str, Any]:
        """The parameters as a dictionary."""
        return dict(self.parameters)

    @cached_property
    def id(self) -> str:
        """Canonical text of the setting: equal settings have equal ids."""
        return canonical({"policy": self.policy, **self.values})

    def __str__(self) -> str:
        inner = ", ".join(f"{name}={value}" for name, value in self.parameters)
        return f"{self.policy}({inner})" if inner else self.policy


SERVED = Setting("served")  # a model behind an API, of whose cache nothing is known


@dataclass(frozen=True)
class Costs:
    """The cost of a trace; None where it is not known, as of traces that another program decoded.

    `peak_kv_tokens` and `mean_kv_tokens` count cached tokens per sequence, prompt included, after each step, before it
    is compressed. `thinking_tokens` are 0 where nothing opens thinking; `seconds` is its share of its batches' time.
    """

    prompt_tokens: int | None
    output_tokens: int | None
    thinking_tokens: int | None
    peak_kv_tokens: int | None
    mean_kv_tokens: float | None
    compressions: int | None
    seconds: float | None


@dataclass(frozen=True)
class Usage(Costs):
    """The cost of a generation of our engine: all of it is known."""

    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int
    peak_kv_tokens: int
    mean_kv_tokens: float
    compressions: int


@dataclass(frozen=True)
class EvictionTrace:
    """The fate of each cached token: the prompt's, then the new ones without the last, which is never cached.

    A policy chooses `holders` times over: for the whole model, each layer or each KV head. `left[i]` is the number of
    new tokens written when the last holder dropped token i, 0 if one held it to the end; `held[i]` is how many did.
    """

    holders: int
    left: tuple[int, ...]
    held: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """One generation: the new tokens (prompt excluded, end token included), its text, its grade, its cost.

    `eviction_trace` is None where nobody saw the cache: a remote model's trace, or one read without its tokens.
    `written` is a digest of the tokens, which traces from a store have even without them: equal digests, equal texts.
    `made_with` names the versions that decoded it, as JSON; it is empty where nobody noted them.
    """

    model: str
    benchmark: str
    problem: str
    sample: int
    setting: Setting
    tokens: tuple[int, ...]
    text: str
    grade: Grade
    usage: Costs
    eviction_trace: EvictionTrace | None = None
    written: str = field(default="", compare=False)
    made_with: str = field(default="", compare=False)


def percent(share: float | None) -> float | None:
    """A share in percent, to four places, as JSON and CSV files have it."""
    return None if share is None else round(100 * share, 4)


def rounded(value: float | None, places: int) -> float | None:
    """A number to so many places."""
    return None if value is None else round(value, places)


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval and standard error, both clustered by problem; None where nothing is known."""

    value: float
    low: float | None
    high: float | None
    problems: int | None
    samples: int | None
    se_clustered: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """Value and interval in percent."""
        return {"value": percent(self.value), "low": percent(self.low), "high": percent(self.high)}


@dataclass(frozen=True)
class BudgetAudit:
    """The choice that the first compression of a setting leaves to its policy, over so many `problems`.

    `median` and `worst` (the smallest) count the places for older tokens that compete, which are thinking tokens alone
    while the prompt is kept. In the share `none` of the problems there is no place; in the share `no_choice`, which
    includes these, all competing tokens go or all stay, so that every policy keeps the same tokens.
    """

    problems: int
    median: float
    worst: int
    none: float
    no_choice: float

    def to_dict(self) -> dict[str, float | None]:
        """The same with shares in percent."""
        return {**asdict(self), "none": percent(self.none), "no_choice": percent(self.no_choice)}


class Vacuous(StrEnum):
    """Reasons why traces cannot tell settings apart."""

    UNCOMPRESSED = "uncompressed"
    IDENTICAL = "identical"
    UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Validity:
    """Counts that say whether the traces of some settings can show a difference at all.

    `bounded` of the `traces` belong to `settings` with a KV budget, and `compressed` of these were compressed at least
    once. `no_answer` and `truncated` count over all traces. `identical` are groups of settings, by their ids, that
    wrote the same tokens for every problem and sample; `same` tells that all settings with a KV budget did.
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
        """The reason why no setting can be recommended from these traces; None where one can."""
        if self.bounded and not self.compressed:
            return Vacuous.UNCOMPRESSED
        if self.traces and self.unanswered == self.traces:
            return Vacuous.UNANSWERED
        return Vacuous.IDENTICAL if self.same else None

    @property
    def reason(self) -> str | None:
        """The same reason as a clause; None where a setting can be recommended."""
        return {
            None: None,
            Vacuous.UNCOMPRESSED: f"none of the {self.bounded:,} traces under a KV budget was compressed",
            Vacuous.UNANSWERED: f"none of the {self.traces:,} traces has an answer",
            Vacuous.IDENTICAL: f"all {self.settings} settings with a KV budget wrote identical texts",
        }[self.vacuous]

    def to_dict(self) -> dict[str, Any]:
        """The same as data, with the reason why nothing can be recommended."""
        return {**asdict(self), "identical": [list(group) for group in self.identical], "vacuous": self.vacuous}


@dataclass(frozen=True)
class Cell:
    """One setting on a map: the estimate, and what the setting costs (means over traces; None on a CSV map).

    `seconds_mean` is measured: a trace's share of the wall time of the batches that it was part of. `unmeasured` counts
    traces of which the metric is unknown: they are no part of the estimate. `audit` says what its budget leaves to the
    policy.
    """

    setting: Setting
    estimate: Estimate
    mean_kv_tokens: float | None = None
    peak_kv_tokens: int | None = None
    output_tokens_mean: float | None = None
    truncated: int | None = None
    seconds_mean: float | None = None
    unmeasured: int | None = None
    audit: BudgetAudit | None = None

    def to_dict(self) -> dict[str, Any]:
        """The cell as JSON, CSV files and pages have it: values in percent, unknown ones None."""
        estimate = self.estimate
        return {
            "setting": str(self.setting),
            "policy": self.setting.policy,
            **estimate.to_dict(),
            "se_clustered": percent(estimate.se_clustered),
            "problems": estimate.problems,
            "samples": estimate.samples,
            "unmeasured": self.unmeasured,
            "kept_tokens_mean": rounded(self.mean_kv_tokens, 3),
            "peak_kv_tokens": self.peak_kv_tokens,
            "output_tokens_mean": rounded(self.output_tokens_mean, 3),
            "truncated": self.truncated,
            "seconds_mean": rounded(self.seconds_mean, 4),
            "audit": None if self.audit is None else self.audit.to_dict(),
        }


class NoteKind(StrEnum):
    """The subject of a note on a map; `WARNINGS` have the colour of warnings."""

    VACUOUS = "vacuous"
    PARTIAL = "partial"
    MIXED = "mixed"
    SCREEN = "screen"
    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    UNMEASURED = "unmeasured"
    LEFT_OUT = "left_out"
    SCALES = "scales"
    INTERVAL = "interval"
    GRANULARITY = "granularity"


WARNINGS = (NoteKind.VACUOUS, NoteKind.PARTIAL, NoteKind.MIXED)


@dataclass(frozen=True)
class Note:
    """A sentence that belongs to a map or a description, and what it is about."""

    kind: NoteKind
    text: str

    @property
    def is_warning(self) -> bool:
        """True if the map cannot be read without it."""
        return self.kind in WARNINGS

    def __str__(self) -> str:
        return self.text


#: The values of a cell on the vertical and the horizontal axis of its map.
CellCoord = tuple[Any, Any]


class MapName(NamedTuple):
    """The name of a map. The mean over several benchmarks has the benchmark `mean of N`."""

    model: str
    benchmark: str
    policy: str

    @classmethod
    def of_mean(cls, model: str, benchmarks: int, policy: str) -> MapName:
        """The name of a mean over so many benchmarks."""
        return cls(model, mean_of(benchmarks), policy)


def mean_of(benchmarks: int) -> str:
    """The benchmark of a mean map, in files too."""
    return f"mean of {benchmarks}"


@dataclass(frozen=True)
class Map:
    """A metric over two axes of the grid, for one model and one benchmark (or the mean over several).

    `axes` holds the two parameters in the order (vertical, horizontal) with their values ascending; `cells` is keyed
    by the pair of values in that order. `baselines` are settings outside the grid, by their text. `validity` is that
    of the cells; None where there are no traces. `averaged` counts the benchmarks of a mean map, 0 for a single one.
    `plateau` holds the cells that are statistically tied with the best; None where no test was made. `keeps` holds
    those that are shown to lose at most the `margin` against the full cache; None where there is none.
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
    margin: float | None = None

    @property
    def name(self) -> MapName:
        """Model, benchmark and policy."""
        return MapName(self.model, self.benchmark, self.policy)

    @property
    def is_mean(self) -> bool:
        """True for a mean over benchmarks."""
        return self.averaged > 0

    @property
    def full(self) -> Cell | None:
        """The full cache, where it is a baseline."""
        return next((cell for cell in self.baselines.values() if cell.setting.policy == "full"), None)

    @property
    def remarks(self) -> tuple[Note, ...]:
        """Its notes, after the reason why its traces can show nothing, if there is one."""
        reason = self.validity.reason if self.validity else None
        return (Note(NoteKind.VACUOUS, f"VACUOUS: {reason}"), *self.notes) if reason else self.notes

    @property
    def best(self) -> CellCoord:
        """The place of the highest cell; of equal ones the first."""
        return max(self.cells, key=lambda coord: self.cells[coord].estimate.value)


class Check(StrEnum):
    """The outcome of a check: nothing to do, a warning, or a reason not to start."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One result of a check before a sweep, and what to do about it (empty if nothing)."""

    name: str
    status: Check
    message: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.advice}" if self.advice else self.message


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values have equal texts, on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """SHA-256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()

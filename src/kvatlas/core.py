"""The terms of kvatlas as frozen data, shared by every room; of these it imports only the columns of a cell.

Lengths are in tokens, shares and grades in [0, 1]. Only figures, texts and CSV maps are in percent.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from kvatlas.columns import cell_document
from kvatlas.former_names import warn_of_former_name

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class KvatlasError(Exception):
    """An error of a spec, file, model or setting in one sentence: the field, the expected value, the given one."""


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, cut to the length of a clause."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    if isinstance(error, OSError) and error.strerror:
        # Without the number of the error.
        return f"{error.strerror}: {error.filename!r}" if error.filename is not None else error.strerror
    try:
        text = str(error)
    except Exception:  # an error of foreign code may have no text
        text = ""
    line = (text.splitlines() or [""])[0].strip() or type(error).__name__
    return line if len(line) <= 300 else f"{line[:300]} ..."


def described(error: BaseException) -> str:
    """Return the type and the reason of an error of foreign code."""
    name = type(error).__name__
    sentence = reason(error)
    return name if sentence == name else f"{name}: {sentence}"


@contextmanager
def refusal(sentence: str) -> Iterator[None]:
    """Turn every error of foreign code, and its calls of sys.exit, into `sentence` with the reason.

    Panics of libraries written in Rust derive from BaseException only.
    """
    try:
        yield
    except (KvatlasError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise KvatlasError(f"{sentence} ({reason(error)}).") from error


#: The largest integer of 64 bits with a sign, as tables and files have them.
LARGEST_INTEGER = 2**63 - 1


def is_storable_number(value: object) -> bool:
    """Return whether a value is a finite number that every file format holds."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    return isinstance(value, float) and math.isfinite(value)


def is_storable_text(value: object) -> bool:
    """Return whether a value is a text without half surrogate pairs, which no file holds."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


class Status(StrEnum):
    """The status of a grade. Every status except `ok` counts as wrong.

    `unknown` is only read, never stored: a later version wrote a status that this one does not know.
    """

    OK = "ok"
    TRUNCATED = "truncated"
    NO_ANSWER = "no_answer"
    GRADER_TIMEOUT = "grader_timeout"
    UNKNOWN = "unknown_to_this_version"

    @property
    def answered(self) -> bool:
        """Return True if the trace is known to have ended by itself and to hold an answer."""
        return self not in (Status.TRUNCATED, Status.NO_ANSWER, Status.UNKNOWN)


class Outcome(StrEnum):
    """The outcome of a trace, as readers see it."""

    CORRECT = "correct"
    WRONG = "wrong"
    TRUNCATED = "truncated"
    NO_ANSWER = "no answer"
    GRADER_TIMEOUT = "grader timeout"
    UNKNOWN = "unknown to this version"


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer. `id` is unique within its benchmark and stable across versions."""

    id: str
    question: str
    answer: str
    about: Mapping[str, Any] = field(default_factory=dict)

    def content_digest(self) -> str:
        """Return a digest of question, answer and `about`: equal problems have equal ones, whatever their ids."""
        about = json.dumps(dict(self.about), sort_keys=True, default=lambda value: type(value).__qualname__)
        return digest([self.question, self.answer, about])[:16]


@dataclass(frozen=True)
class Grade:
    """The verdict on a trace: `correct`, `progress` in [0, 1], the extracted answer and the status.

    `metrics` holds further measurements of a benchmark by name: numbers (those in [0, 1] can be mapped and compared)
    and texts.
    """

    correct: bool
    progress: float
    answer: str | None
    status: Status
    metrics: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def verdict(self) -> Outcome:
        """The outcome of the trace."""
        if self.status is Status.OK:
            return Outcome.CORRECT if self.correct else Outcome.WRONG
        return Outcome[self.status.name]


#: The limit of new tokens of published experiments, and the default of models with room for it.
MAX_NEW_TOKENS = 16_384


@dataclass(frozen=True)
class Sampling:
    """The sampling of the next token: temperature, then top-k, then top-p (the published order).

    Temperature 0 is greedy. `top_k` 0 and `top_p` 1.0 switch those steps off.
    """

    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95
    max_new_tokens: int = MAX_NEW_TOKENS


def policy_name(policy: str) -> str:
    """Return a policy as readers see it: `mine.py:Sinks` is `Sinks`."""
    file, _, name = policy.rpartition(":")
    return name if file.endswith(".py") else policy


def is_of_policy(label: str, policy: str) -> bool:
    """Return whether the label of a map, a line or a setting is one of a policy: `rkv(ratio=0.3)` is one of `rkv`."""
    return policy in (label, label.partition("(")[0])


@dataclass(frozen=True)
class Setting:
    """One policy with one value of each of its parameters: a cell of the grid."""

    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_parameters(cls, policy: str, **parameters: Any) -> Setting:
        """Return the setting of a policy, with its parameters in the order of their names."""
        return cls(policy, tuple(sorted(parameters.items())))

    @classmethod
    def of(cls, policy: str, **parameters: Any) -> Setting:
        """Return the setting of a policy: the former name of `from_parameters`."""
        warn_of_former_name("Setting.of", "Setting.from_parameters")
        return cls.from_parameters(policy, **parameters)

    @property
    def values(self) -> dict[str, Any]:
        """The parameters as a dictionary."""
        return dict(self.parameters)

    @property
    def policy_name(self) -> str:
        """The policy as readers see it."""
        return policy_name(self.policy)

    def is_of(self, policy: str) -> bool:
        """Return whether the setting is one of a policy, which may be named as readers see it."""
        return policy in (self.policy, self.policy_name)

    @cached_property
    def id(self) -> str:
        """The canonical text of the setting: equal settings have equal ids."""
        return canonical({"policy": self.policy, **self.values})

    def __str__(self) -> str:
        return self.shown_as(self.policy_name)

    def shown_as(self, name: str) -> str:
        """Return the setting with a name in place of its policy."""
        inner = ", ".join(f"{parameter}={value}" for parameter, value in self.parameters)
        return f"{name}({inner})" if inner else name


#: The setting of a model behind an API, whose cache is unknown.
SERVED = Setting("served")


def _ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


#: Numbers that are packed together.
CODES = 16
#: Bytes of the position beside a packed key of a model with key biases.
POSITION_BYTES = 4


@dataclass(frozen=True)
class Storage:
    """The form of cached keys and values: their bits, 16 for the type of the model.

    Packed ones have a scale and a zero point for each `group` of channels of a token; the newest `residual` tokens of a
    sequence are read unpacked.
    """

    key_bits: int = 16
    value_bits: int = 16
    group: int = 32
    residual: int = 32

    @property
    def packed(self) -> bool:
        """True if keys or values are packed."""
        return self != Storage()

    def row_bytes(self, bits: int, size: int) -> int:
        """Return the bytes of a packed key or value of one head: words of codes, and two of fp16 for each group."""
        blocks = _ceil_div(size, CODES)
        groups = _ceil_div(size, self.group)
        # A block of 16 codes of `bits` bits takes bits / 2 words of 32 bits.
        words = _ceil_div(blocks * bits, 2)
        return 4 * (words + groups)


@dataclass(frozen=True)
class Costs:
    """The cost of a trace. A cost is None if it is unknown, as for traces that another program decoded.

    `peak_kv_tokens` and `mean_kv_tokens` count the cached tokens of a sequence after each step and before compression,
    prompt included. `thinking_tokens` is 0 if no tag opens thinking. `seconds` is the trace's share of the wall time of
    its batches.
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
    """The cost of a generation of kvatlas's engine, which knows every count."""

    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int
    peak_kv_tokens: int
    mean_kv_tokens: float
    compressions: int


@dataclass(frozen=True)
class EvictionTrace:
    """The evictions of the cached tokens: prompt first, then the new tokens except the last, which is never cached.

    A policy makes `holders` independent choices: one for the model, or one for each layer or KV head. `evicted_at[i]`
    is the number of new tokens when the last holder evicted token i, or 0 if a holder kept it to the end. `kept_by[i]`
    is the number of holders that kept it to the end.
    """

    holders: int
    evicted_at: tuple[int, ...]
    kept_by: tuple[int, ...]

    @property
    def left(self) -> tuple[int, ...]:
        """The former name of `evicted_at`."""
        warn_of_former_name("EvictionTrace.left", "EvictionTrace.evicted_at")
        return self.evicted_at

    @property
    def held(self) -> tuple[int, ...]:
        """The former name of `kept_by`."""
        warn_of_former_name("EvictionTrace.held", "EvictionTrace.kept_by")
        return self.kept_by


@dataclass(frozen=True)
class Trace:
    """One generation: its new tokens (prompt excluded, end token included), text, grade and cost.

    `eviction_trace` is None for traces of remote models and for traces that were read without their tokens.
    `token_digest` is a digest of the tokens; a store also gives it for traces without tokens. `made_with` names the
    versions that decoded the trace, as JSON; it is empty if they are unknown.
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
    token_digest: str = field(default="", compare=False)
    made_with: str = field(default="", compare=False)

    @property
    def written(self) -> str:
        """The former name of `token_digest`."""
        warn_of_former_name("Trace.written", "Trace.token_digest")
        return self.token_digest


def percent(share: float | None) -> float | None:
    """Return a share in percent with four decimals, the form of JSON and CSV files."""
    return None if share is None else round(100 * share, 4)


def rounded(value: float | None, places: int) -> float | None:
    """Return the value with so many decimals."""
    return None if value is None else round(value, places)


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


@dataclass(frozen=True)
class BudgetAudit:
    """The number of older tokens that a policy may keep at the first compression of a setting, over `problems`.

    `median` and `worst` (the minimum) count these places; only thinking tokens compete for them while the prompt is
    kept. `none` is the share of problems without any place. `no_choice`, which includes `none`, is the share in which
    all competing tokens are kept or all are evicted, so that every policy keeps the same tokens.
    """

    problems: int
    median: float
    worst: int
    none: float
    no_choice: float

    def to_dict(self) -> dict[str, float | None]:
        """Return the fields with shares in percent."""
        return {**asdict(self), "none": percent(self.none), "no_choice": percent(self.no_choice)}


class Vacuous(StrEnum):
    """A reason why traces cannot tell settings apart."""

    UNCOMPRESSED = "uncompressed"
    IDENTICAL = "identical"
    UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Validity:
    """Counts of traces from which follows if they can show a difference between settings.

    `bounded` traces belong to `settings` with a KV budget; `compressed` of these were compressed at least once.
    `no_answer` and `truncated` count over all traces. `identical` lists groups of setting ids whose tokens are equal
    for every problem and sample; `same` is True if this holds for all settings with a KV budget.
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
        return Vacuous.IDENTICAL if self.same else None

    @property
    def reason(self) -> str | None:
        """The reason of `vacuous` as a clause, or None."""
        return {
            None: None,
            Vacuous.UNCOMPRESSED: f"none of the {self.bounded:,} traces under a KV budget was compressed",
            Vacuous.UNANSWERED: f"none of the {self.traces:,} traces has an answer",
            Vacuous.IDENTICAL: f"all {self.settings} settings with a KV budget wrote identical texts",
        }[self.vacuous]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts with `vacuous` as data."""
        return {**asdict(self), "identical": [list(group) for group in self.identical], "vacuous": self.vacuous}


@dataclass(frozen=True)
class Cell:
    """One setting on a map: the estimate and the costs of the setting (means over traces; None on a CSV map).

    `seconds_mean` is a trace's share of the wall time of its batches. `unmeasured` counts traces whose metric is
    unknown; the estimate leaves them out. `stays_tokens` are the tokens after a compression by the setting's rule, the
    mean over problems, and `stays_share` is their share of the tokens before it.
    """

    setting: Setting
    estimate: Estimate
    mean_kv_tokens: float | None = None
    peak_kv_tokens: int | None = None
    mean_kv_bytes: float | None = None
    peak_kv_bytes: int | None = None
    output_tokens_mean: float | None = None
    truncated: int | None = None
    seconds_mean: float | None = None
    unmeasured: int | None = None
    audit: BudgetAudit | None = None
    stays_tokens: float | None = None
    stays_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the cell in the form of JSON, CSV files and pages: values in percent, unknown ones None."""
        return {"setting": str(self.setting), "policy": self.setting.policy, **cell_document(self)}


class NoteKind(StrEnum):
    """The subject of a note on a map; notes of the kinds in `WARNINGS` are drawn as warnings."""

    VACUOUS = "vacuous"
    PARTIAL = "partial"
    MIXED = "mixed"
    SCREEN = "screen"
    ADAPTIVE = "adaptive"
    FIXED = "fixed"
    UNMEASURED = "unmeasured"
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
    `breaks_like` are those of them that are proven for problems like these, too: their frames are thick. `claim` is
    that of the intervals. `recommended` is the cell of the setting that is recommended for the model, if it is here.
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
    margin: float | None = None
    claim: Claim | None = None
    recommended: CellCoord | None = None

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
        """The cell of the full cache, if it is a baseline."""
        return next((cell for cell in self.baselines.values() if cell.setting == Setting("full")), None)

    @property
    def remarks(self) -> tuple[Note, ...]:
        """The notes, preceded by the reason why the traces cannot show a difference, if any."""
        reason = self.validity.reason if self.validity else None
        return (Note(NoteKind.VACUOUS, f"VACUOUS: {reason}"), *self.notes) if reason else self.notes

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
class Finding:
    """One result of a check before a sweep, with advice if there is something to do."""

    name: str
    status: Check
    message: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.message}; {self.advice}" if self.advice else self.message


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values have equal texts on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical text in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their keys, groups and items in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the index of the first items that differ, or None for equal sequences.

    If one sequence begins with the whole other one, this is the length of the shorter one.
    """
    for index, (item, counterpart) in enumerate(zip(one, other, strict=False)):
        if item != counterpart:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def differing(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all of these, in their order."""
    every = list(values)
    names: dict[str, None] = {}
    for mapping in every:
        names.update(dict.fromkeys(mapping))
    found = []
    for name in names:
        # Values may be unhashable; equal ones have equal texts.
        texts = {repr(mapping.get(name)) for mapping in every}
        if len(texts) > 1:
            found.append(name)
    return found

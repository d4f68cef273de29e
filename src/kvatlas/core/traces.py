"""The terms of one generation: problem, sampling, setting, storage, trace, grade, and what they cost.

Lengths are in tokens, shares and grades in [0, 1].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from kvatlas.core.basics import KvatlasError, canonical, differing, digest, python_number


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
    def ended(self) -> bool:
        """Return True if the trace is known to have ended by itself."""
        return self in (Status.OK, Status.NO_ANSWER, Status.GRADER_TIMEOUT)

    @property
    def answered(self) -> bool:
        """Return True if the trace is known to have ended by itself and to hold an answer."""
        return self.ended and self is not Status.NO_ANSWER


class Outcome(StrEnum):
    """The outcome of a trace, as readers see it."""

    CORRECT = "correct"
    WRONG = "wrong"
    TRUNCATED = "truncated"
    NO_ANSWER = "no answer"
    GRADER_TIMEOUT = "grader timeout"
    UNKNOWN = "unknown to this version"


#: The outcomes of traces without an answer: those that ended by themselves, and those that did not.
NO_ANSWERS = tuple(Outcome[status.name] for status in Status if status.ended and not status.answered)
NOT_ENDED = tuple(Outcome[status.name] for status in Status if not status.ended)


#: Problems that a sentence names.
NAMED = 3


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer. `id` is unique within its benchmark and stable across versions.

    `cluster` names what it shares with other problems: a passage, a seed, a template. Such problems are one unit of
    claims on problems like these.
    """

    id: str
    question: str
    answer: str
    about: Mapping[str, Any] = field(default_factory=dict)
    cluster: str = ""

    def __post_init__(self) -> None:
        """Raise KvatlasError if id, question, answer or cluster is no text."""
        for name in ("id", "question", "answer", "cluster"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise KvatlasError(f"{name} of the problem {self.id!r} is {value!r}; expected a text.")

    def content_digest(self) -> str:
        """Return a digest of question, answer and `about`: equal problems have equal ones, whatever their ids."""
        about = json.dumps(dict(self.about), sort_keys=True, default=lambda value: type(value).__qualname__)
        return digest([self.question, self.answer, about])[:16]


def changed_problems(benchmark: str, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return number and names of the problems `before` that are missing or have another content `now`, or "".

    Both map the ids of problems to digests of their contents.
    """
    changed = [name for name, content in before.items() if now.get(name) != content]
    if not changed:
        return ""
    named = ", ".join(changed[:NAMED]) + (", ..." if len(changed) > NAMED else "")
    return f"{len(changed)} of {len(before)} problems of {benchmark} ({named})"


@dataclass(frozen=True)
class Grade:
    """The grade of a trace: `correct`, `progress` in [0, 1], the extracted answer and the status.

    `metrics` holds further measurements of a benchmark by name: numbers (those in [0, 1] can be mapped and compared)
    and texts.
    """

    correct: bool
    progress: float
    answer: str | None
    status: Status
    metrics: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
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


def policy_names(policy: str) -> tuple[str, ...]:
    """Return all names of a policy: `folder/mine.py:Sinks` is `Sinks`, too, and `mine.py` with or without the rest."""
    file, _, name = policy.rpartition(":")
    if not file.endswith(".py"):
        return (policy,)
    file_name = file.replace("\\", "/").rpartition("/")[2]
    return (policy, name, file, file_name, f"{file_name}:{name}")


def is_of_policy(label: str, policy: str) -> bool:
    """Return whether the label of a map, a line or a setting is one of a policy: `rkv(ratio=0.3)` is one of `rkv`."""
    return policy in (label, label.partition("(")[0])


@dataclass(frozen=True)
class Setting:
    """One policy with one value of each of its parameters: a cell of the grid."""

    policy: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def from_parameters(cls, policy: str, /, **parameters: Any) -> Setting:
        """Return the setting of a policy, with its parameters, of any name, in the order of their names."""
        return cls(policy, tuple((name, python_number(value)) for name, value in sorted(parameters.items())))

    @property
    def values(self) -> dict[str, Any]:
        """The parameters as a dictionary."""
        return dict(self.parameters)

    @property
    def policy_name(self) -> str:
        """The policy as readers see it."""
        return policy_name(self.policy)

    def is_of(self, policy: str) -> bool:
        """Return whether the setting is one of a policy, by any of its names."""
        return policy in policy_names(self.policy)

    @cached_property
    def id(self) -> str:
        """The canonical text of the setting: equal settings have equal ids."""
        return canonical({"policy": self.policy, **self.values})

    def __str__(self) -> str:
        return self.shown_as(self.policy_name)

    def shown_as(self, name: str) -> str:
        """Return the setting with a name in place of its policy, without parameters that are empty texts."""
        inner = ", ".join(f"{parameter}={value}" for parameter, value in self.parameters if value != "")
        return f"{name}({inner})" if inner else name


#: The setting of a model behind an API, whose cache is unknown.
SERVED = Setting("served")
#: The reference of a run of kvatlas's own engine, and that of a run over commands of servers.
FULL = Setting("full")
REFERENCE = Setting("reference")
#: The reference asked a second time, after a new start.
AGAIN = Setting("again")


def telling_parameters(settings: Iterable[Setting]) -> list[str]:
    """Return the parameters in which settings differ; all of a single command of a server."""
    every = list(settings)
    names = differing(setting.values for setting in every)
    is_command = {setting.policy for setting in every} == {SERVED.policy}
    return names or (list(every[0].values) if is_command else [])


def is_reference(setting: Setting) -> bool:
    """Return whether losses are counted against this setting."""
    return setting in (FULL, REFERENCE)


def reference_words(settings: Iterable[Setting]) -> str:
    """Return the name that sentences give to the reference of a run with these settings."""
    return "the reference" if REFERENCE in settings else "the full cache"


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
        blocks = -(-size // CODES)
        groups = -(-size // self.group)
        # A block of 16 codes of `bits` bits takes bits / 2 words of 32 bits.
        words = -(-blocks * bits // 2)
        return 4 * (words + groups)


class CachedLayer(NamedTuple):
    """A layer with a KV cache: its place among all layers of the model, and the sizes of a head's key and value."""

    layer_number: int
    key: int
    value: int


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the memory of a cached token.

    `layers` counts the layers with a KV cache, `head_dim` is the size of their keys: those of config.json until the
    model is loaded, then the true ones. `by_layer` are the cached layers if they are not all alike, `state_bytes` is
    the size of the states of one row. With `key_biases`, packed keys have their position beside them.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    by_layer: tuple[CachedLayer, ...] = ()
    state_bytes: int = 0
    key_biases: bool = False

    @cached_property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """The layers with a KV cache, in order."""
        return self.by_layer or tuple(CachedLayer(n, self.head_dim, self.head_dim) for n in range(self.layers))

    @cached_property
    def place(self) -> dict[int, int]:
        """The place of each cached layer in the cache, by its number in the model."""
        return {layer.layer_number: place for place, layer in enumerate(self.cached_layers)}

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        """Return the bytes of keys and values of one token over all layers and heads."""
        return self.kv_bytes(Storage(), bytes_per_value)[0]

    def kv_bytes(self, storage: Storage, bytes_per_value: int = 4) -> tuple[int, int]:
        """Return the bytes of keys and values over all layers and heads: of each token, and of each sequence besides.

        The latter are the unpacked copies of its newest tokens.
        """
        token_bytes = 0
        sequence_bytes = 0
        for layer in self.cached_layers:
            for size, bits in ((layer.key, storage.key_bits), (layer.value, storage.value_bits)):
                if bits < 16:
                    token_bytes += storage.row_bytes(bits, size)
                    sequence_bytes += storage.residual * size * bytes_per_value
                else:
                    token_bytes += size * bytes_per_value
            if self.key_biases and storage.key_bits < 16:
                token_bytes += POSITION_BYTES
        return self.kv_heads * token_bytes, self.kv_heads * sequence_bytes


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


@dataclass(frozen=True)
class Measure:
    """A declared number of a stored trace, which cells have as its mean.

    Args:
        name: its name everywhere.
        of: the function of a trace and its reading (thinking, answer, status; see `answers/reading.py`) that computes
            it; None where it is unknown. A run that is read has no function, only its numbers.
        title: its name in figures and on pages; that in words if empty.
        unit: what is counted, such as `tokens`.
        is_share: it is in [0, 1], in percent in files; maps, tests and comparisons take it as a metric.
        counts: it is 1 for traces of a kind, 0 for others, and cells have the number of these traces.
    """

    name: str
    of: Callable[[Trace, Any], float | None] | None = field(default=None, compare=False, repr=False)
    title: str = ""
    unit: str = ""
    is_share: bool = False
    counts: bool = False

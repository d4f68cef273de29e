"""The contract of a policy, and the selection of tokens at a compression.

A policy is a frozen dataclass whose fields are its parameters. A new method writes one function, `score`; it declares
the signals that it needs from the decode loop in `observes`, and its notes beside cached tokens in `columns`. Source of
the contract: Dynamic Thinking-Token Selection, arXiv 2601.18383.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from kvatlas.core import CODES, KvatlasError, Setting, Storage
from kvatlas.noise import uniform
from kvatlas.policies.from_file import code_of
from kvatlas.policies.guard import guard_methods

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvatlas.models import ModelHandle, Shape


#: Rises with every change of packed numbers: part of the run keys of such settings.
STORAGE_VERSION = 1
#: Parameters that a setting names only if they have another value.
UNNAMED: Mapping[str, Any] = {
    **{"strict_budget": False, "budget_over": "cache", "every": 0, "every_from": "budget"},
    **{"kv_bits": 16, "key_bits": 0, "value_bits": 0, "group": 32, "residual": 32},
}


#: The units of a budget in bytes, each 1024 of the one before, and such a budget.
_UNITS = "KMG"
_BYTES = rf"[0-9]{{1,12}}[{_UNITS}]iB"
#: The largest integer that a parameter can be.
MOST = 2**31 - 1


class Scope(StrEnum):
    """The unit of one choice of tokens: the whole model, each layer, or each KV head."""

    GLOBAL = "global"
    LAYER = "layer"
    HEAD = "head"

    def width(self, shape: Shape) -> tuple[int, int]:
        """Return the numbers of separate choices over (layers, KV heads)."""
        layers = 1 if self is Scope.GLOBAL else shape.layers
        return layers, shape.kv_heads if self is Scope.HEAD else 1


class Signal(StrEnum):
    """The signals of the decode loop, each collected only for policies that declare it.

    HIDDEN: the last hidden state of each token that enters the cache. ATTENTION: the attention of each new token to
    every cached one; its weights are computed at every step, for the sequences of the policy alone. QUERIES: the last
    `queries` queries when a compression fires; they are copied as they pass, without any attention. ANSWER: the
    attention of the answer in the finished full-cache trace, which comes with the request.
    """

    HIDDEN = "hidden"
    ATTENTION = "attention"
    QUERIES = "queries"
    ANSWER = "answer"


class Columns(Protocol):
    """The notes of policies beside cached tokens: tensors [rows, layers, KV heads, cached] of the policy's scope."""

    def enter(self, name: str, values: Tensor) -> None: ...

    def read(self, name: str) -> Tensor: ...

    def write(self, name: str, values: Tensor) -> None: ...


@dataclass(frozen=True)
class Step:
    """The input of `observe` after tokens entered the caches of `rows` sequences of a policy.

    `positions` [rows, entered] are true positions of these tokens: first parts of the prompt, of one row at a time,
    with `prompt_length` as its length; then new tokens, with `prompt_length` None. `hidden` [rows, entered, hidden
    size] is their last hidden state (HIDDEN). `attention` [rows, layers, KV heads, cached], reduced by the mean over
    query heads and to the policy's scope, is their attention to each cached token, themselves included, summed over
    them (ATTENTION); 0 in slots past a sequence's length.
    """

    model: ModelHandle
    positions: Tensor
    hidden: Tensor | None
    attention: Tensor | None
    columns: Columns
    prompt_length: int | None = None

    def enter(self, column: str, values: Tensor) -> None:
        """Write `values` [rows, entered] beside the tokens that entered."""
        self.columns.enter(column, values)

    def read(self, column: str) -> Tensor:
        """Return the values of all cached tokens [rows, layers, KV heads, cached]; 0 before the first write."""
        return self.columns.read(column)

    def write(self, column: str, values: Tensor) -> None:
        """Replace the values of all cached tokens by `values` [rows, layers, KV heads, cached]; 0 past each length."""
        self.columns.write(column, values)

    def add(self, column: str, values: Tensor) -> None:
        """Add `values` [rows, layers, KV heads, cached] (of the policy's scope) to those of all cached tokens."""
        self.write(column, self.read(column) + values)


@dataclass(frozen=True, eq=False)
class ReferenceTrace:
    """A finished full-cache trace: token ids with the prompt's, and the mean attention [tokens before the answer] of
    its answer to each token before it."""

    tokens: tuple[int, ...]
    attention: Tensor


@dataclass(frozen=True)
class CacheView:
    """One sequence's cache at a compression; `[...]` is the scope's (layers, KV heads).

    `positions` [..., cached] are true positions, ascending; `columns` [..., cached] the notes of `observe`;
    `key(layer)` and `value(layer)` return [KV heads, cached, head size], keys with their rotation; `query(layer)`
    returns the policy's last `queries` queries [heads, queries, head size] with their rotation, oldest first (QUERIES;
    fewer in a shorter sequence): the last one belongs to the newest cached token. `window(layer)` is the number of
    positions that a layer with a sliding window sees, None for all; `scaling(layer)` is the factor of q k before the
    layer's softmax, often but not always 1 / sqrt(head size); `softcap(layer)` c turns these scores into
    c tanh(score / c), and `sinks(layer)` [heads] are further logits without a value; None without. `tokens()` are the
    token ids [length] of the sequence.
    `stream` is the key of its random numbers, `length` the number of its tokens so far, evicted ones included;
    `reference` the finished full-cache trace of the same sample, if that has an answer (ANSWER).
    """

    model: ModelHandle
    positions: Tensor
    prompt_length: int
    thinking_end: int | None
    length: int
    stream: int
    columns: Mapping[str, Tensor]
    key: Callable[[int], Tensor]
    value: Callable[[int], Tensor]
    query: Callable[[int], Tensor]
    window: Callable[[int], int | None]
    scaling: Callable[[int], float]
    tokens: Callable[[], Tensor]
    softcap: Callable[[int], float | None] = lambda _: None
    sinks: Callable[[int], Tensor | None] = lambda _: None
    reference: ReferenceTrace | None = None

    def uniform(self) -> Tensor:
        """Return random numbers in (0, 1) [..., cached], by stream, length, position and unit of choice alone."""
        import torch

        layers, heads, _ = self.positions.shape
        unit = torch.arange(layers * heads, device=self.positions.device).view(layers, heads, 1) + 1
        return uniform(torch.full_like(self.positions, self.stream), self.length, self.positions, unit)

    def each_layer(self, score: Callable[[int], Tensor]) -> Tensor:
        """Return the scores [KV heads, cached] of every layer as [..., cached], averaged over each unit of choice."""
        import torch

        layers, heads, _ = self.positions.shape
        scores = torch.stack([score(layer) for layer in range(self.model.shape.layers)])
        scores = scores.mean(0, keepdim=True) if layers == 1 else scores
        return scores.mean(1, keepdim=True) if heads == 1 else scores


@dataclass(frozen=True)
class Budget:
    """The parameters `kv_budget`, `budget_over`, `every` and `every_from` of a policy."""

    tokens: int
    over: str
    every: int
    every_from: str

    def tokens_with(self, prompt: int) -> int:
        return self.tokens + (prompt if self.over == "thinking" else 0)

    def most(self, prompt: int) -> int:
        """Return the greatest length of the cache before a compression, for prompts below the budget."""
        return self.tokens_with(prompt) + self.every

    def first(self, prompt: int) -> int:
        """Return the cache length at the first compression."""
        if self.every_from == "budget":
            return self.most(prompt)
        return self._turn(prompt, prompt, prompt)

    def next(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the next compression, after one that left `cached` of `position` tokens.

        Tokens kept above the budget (prompt and answer) delay it.
        """
        limit = self.tokens_with(prompt)
        if not self.every:
            return limit
        if self.every_from == "budget":
            return self.every + max(limit, cached)
        return self._turn(prompt, cached, position)

    def _turn(self, prompt: int, cached: int, position: int) -> int:
        """Return the cache length at the first position with a turn and more than the budget in the cache."""
        turn = 1 if self.every_from == "start" else prompt
        earliest = position + max(1, self.tokens_with(prompt) + 1 - cached)
        return cached + earliest + (turn - earliest) % self.every - position


@lru_cache(maxsize=4096)
def share(ratio: float, tokens: int) -> int:
    """Return floor(ratio * tokens), exact for the decimal text of the ratio (0.3 of 10 is 3, never 2)."""
    return math.floor(Fraction(str(ratio)) * tokens)


def tokens_of(text: str, token: int, beside: int) -> int:
    """Return how many tokens of `token` bytes a budget such as 12MiB holds, with `beside` bytes for each sequence."""
    unit = _UNITS.index(text[-3])
    return int((int(text[:-3]) * 1024 ** (unit + 1) - beside) // token)


def in_largest_unit(text: str) -> str:
    """Return a budget in bytes in the largest unit without a fraction: equal budgets are one setting."""
    number = int(text[:-3])
    unit = _UNITS.index(text[-3])
    while number and number % 1024 == 0 and unit + 1 < len(_UNITS):
        number //= 1024
        unit += 1
    return f"{number}{_UNITS[unit]}iB"


def _shown(value: Any) -> str:
    """Return a value for an error sentence; Python does not write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} ... ({len(text):,} characters)"


def parameter(expected: str, accepts: Callable[[Any], bool], default: Any = MISSING, **options: Any) -> Any:
    """Declare a parameter by a test of its values, and their description in an error sentence."""
    return field(default=default, metadata={"expected": expected, "accepts": accepts}, **options)


def int_param(default: Any = MISSING, least: int = 0, **options: Any) -> Any:
    """Declare a parameter that is an integer >= `least`, and at most `MOST`."""

    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST

    return parameter(f"an integer >= {least}", accepts, default, **options)


def float_param(default: Any = MISSING, least: float = 0, most: float = math.inf) -> Any:
    """Declare a parameter that is a number from `least` to `most`."""

    def accepts(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return parameter(
        f"a number from {least} to {most}" if most < math.inf else f"a number >= {least}", accepts, default
    )


def flag_param(default: bool, **options: Any) -> Any:
    """Declare a parameter that is true or false."""
    return parameter("true or false", lambda value: isinstance(value, bool), default, **options)


def choice_param(default: str | int, *others: str | int, **options: Any) -> Any:
    """Declare a parameter that is one of several words or integers."""
    choices = dict.fromkeys((default, *others))

    def accepts(value: Any) -> bool:
        return isinstance(value, str | int) and not isinstance(value, bool) and value in choices

    texts = (repr(str(choice)) if isinstance(choice, str) else str(choice) for choice in choices)
    return parameter(", ".join(texts), accepts, default, **options)


def budget_param() -> Any:
    """Declare a parameter that is a number of tokens, or of bytes with their unit."""

    def accepts(value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(_BYTES, value) is not None
        return isinstance(value, int) and not isinstance(value, bool) and 2 <= value <= MOST

    return parameter("an integer >= 2, or bytes such as 12MiB (KiB, MiB or GiB)", accepts)


def scope_param(default: Scope) -> Any:
    """Declare the parameter `scope`, for policies whose scores differ between layers and heads."""
    return choice_param(default, *Scope)


@dataclass(frozen=True)
class Policy:
    """A KV-cache token-selection method. Subclasses set the class variables; see docs/architecture.md.

    kv_bits: bits of a cached number, 16 (the type of the model), 8, 4, 3 or 2.
    key_bits, value_bits: those of keys and of values alone; 0 for `kv_bits`.
    group: channels of a token that share a scale and a zero point, a multiple of 16.
    residual: newest tokens that are read in the type of the model, at most the local window.
    """

    name: ClassVar[str]
    #: Rises whenever the method's choices change: part of the run key.
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    #: The values of the parameters in the paper's experiments.
    published: ClassVar[Mapping[str, str]] = {}
    observes: ClassVar[frozenset[Signal]] = frozenset()
    columns: ClassVar[tuple[str, ...]] = ()
    #: True if its choices are random, so that another program makes others.
    random: ClassVar[bool] = False
    # Without an annotation the next two are no parameters; a policy whose user may choose them annotates them.
    #: The unit of one choice in the method's paper.
    scope = Scope.GLOBAL
    #: The number of recent queries that it needs at a compression (QUERIES).
    queries = 0
    #: The preset that set the parameters, METHOD@PAPER (presets.json), which is then the name. No parameter itself.
    preset: str = field(default="", kw_only=True, repr=False)
    kv_bits: int = choice_param(16, 8, 4, 3, 2, kw_only=True)
    key_bits: int = choice_param(0, 16, 8, 4, 3, 2, kw_only=True)
    value_bits: int = choice_param(0, 16, 8, 4, 3, 2, kw_only=True)
    group: int = int_param(32, least=CODES, kw_only=True)
    residual: int = int_param(32, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard_methods(cls)

    def __post_init__(self) -> None:
        if self.preset:
            object.__setattr__(self, "name", self.preset)
        for item in parameters(self):
            value, expected, accepts = (getattr(self, item.name), *map(item.metadata.get, ("expected", "accepts")))
            if expected is None and isinstance(item.default, str):
                expected, accepts = "a text", lambda value: isinstance(value, str)
            if accepts is not None and not accepts(value):
                raise KvatlasError(f"{item.name} is {_shown(value)}; expected {expected}.")
        if self.group % CODES:
            raise KvatlasError(f"group is {self.group}; expected a multiple of {CODES}.")
        # Equal storages have equal parameters.
        keys, values = self.key_bits or self.kv_bits, self.value_bits or self.kv_bits
        bits = {"kv_bits": keys, "key_bits": 0, "value_bits": 0}
        if keys != values:
            bits = {"kv_bits": 16, "key_bits": keys, "value_bits": values}
        if keys == values == 16:
            bits |= {"group": 32, "residual": 32}
        for name, number in bits.items():
            object.__setattr__(self, name, number)

    @property
    def storage(self) -> Storage:
        """The form of its cached keys and values."""
        return Storage(self.key_bits or self.kv_bits, self.value_bits or self.kv_bits, self.group, self.residual)

    @property
    def budget(self) -> Budget | None:
        """The rule of compressions; None for no compression."""
        return None

    @classmethod
    def of(cls, setting: Setting, preset: str = "") -> Self:
        """Return the policy with a setting's parameters. Raises KvatlasError for unknown, missing or wrong ones."""
        names = [item.name for item in parameters(cls)]
        values, name = setting.values, preset or cls.name
        unknown = next((word for word in values if word not in names), None)
        if unknown is not None:
            raise KvatlasError(
                f"The policy {name!r} has no parameter {unknown!r}; expected: {', '.join(names) or 'none'}."
            )
        if values.get("every") and "ratio" in names:
            if "ratio" in values:
                raise KvatlasError(
                    f"ratio is {values['ratio']!r} beside every {values['every']!r}; leave ratio out: with every the "
                    "kv_budget is what stays."
                )
            values["ratio"] = 1.0
        elif values.get("strict_budget") is True:
            values.setdefault("ratio_over", "older")
        missing = [word for word in ("kv_budget", "local_window", "ratio") if word in names and word not in values]
        if missing:
            raise KvatlasError(f"The policy {name!r} needs a value for {', '.join(missing)}.")
        return cls(**values, preset=preset)

    @cached_property
    def setting(self) -> Setting:
        """The setting of this policy, defaults included; scope, strict budget, contents of the budget and frequency of
        compressions are named only if they differ from the method's paper and the published rule."""
        usual = {**UNNAMED, "scope": type(self).scope}
        values = {item.name: getattr(self, item.name) for item in parameters(self)}
        values = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
        if "every" in values:
            del values["ratio"], values["ratio_over"]
        return Setting.of(self.name, **values)

    @cached_property
    def observer(self) -> tuple[Any, ...]:
        """The key of equal observations: the loop calls `observe` once for all settings with the same key."""
        shared = {item.name for item in fields(CompressingPolicy)}
        return (self.name, *(getattr(self, item.name) for item in fields(self) if item.name not in shared))

    def on(self, model: ModelHandle) -> Self:
        """Return the policy for this model, which knows how many tokens a budget in bytes holds."""
        return self

    def check(self, model: ModelHandle) -> None:
        """Raise KvatlasError if the policy cannot work on this model; called before any weight is loaded."""

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        """Return all beside the parameters that can change the policy's choices on this model: part of the run key."""
        file, colon, _ = self.preset.rpartition(":")
        code = code_of(file) if colon else {}
        stored = {"storage": STORAGE_VERSION} if self.storage.packed else {}
        return {"name": self.name, "version": self.version, **code, **stored}

    def observe(self, step: Step) -> None:
        """Note the signals of a step (and of prefill) in `columns`."""

    def score(self, cached: CacheView) -> Tensor:
        """Return the importance [cached] or [..., cached] of cached tokens: the highest stay, of equals the oldest."""
        raise KvatlasError(f"The policy {self.name!r} has no score.")


def parameters(policy: Policy | type[Policy]) -> list[Field[Any]]:
    """Return the fields of a policy that its user sets, last those of the storage of keys and values."""
    shared = [item.name for item in fields(Policy)]
    own = (item for item in fields(policy) if item.name not in ("preset", "tokens"))
    return sorted(own, key=lambda item: item.name in shared)


@dataclass(frozen=True)
class Full(Policy):
    """The full cache, the reference for every setting. It never compresses."""

    name = "full"
    summary = "keeps every token (no compression)"


@dataclass(frozen=True)
class CompressingPolicy(Policy):
    """A policy that compresses; its fields are the parameters of all methods.

    kv_budget: cache length (tokens per sequence, prompt included) at which a compression fires; with `every` the length
        after a compression. Bytes such as `12MiB` stand for the tokens that they hold, in the type in which the model
        runs and the policy's bits.
    local_window: newest tokens that always stay, at least 1.
    ratio: share in [0, 1] of the older tokens that stay.
    ratio_over: `thinking` (of the older thinking tokens alone, the prompt stays besides) or `older` (the published
        rule: of all older tokens, prompt included).
    keep_prompt: prompt tokens have an infinite score; if false they compete with the others.
    strict_budget: exactly floor(ratio * older) older tokens stay even if prompt and answer are more: the youngest of
        these are then dropped. By default they all stay, above the ratio.
    budget_over: the contents of `kv_budget`, the whole `cache` or, the prompt staying beside, the tokens after it
        (`thinking`).
    every: tokens between two compressions, as in serving engines; 0 for one whenever the budget is reached.
    every_from: the start of that count. `budget`: a compression at kv_budget + every tokens; `start`: with each first
        token after a multiple of `every` in the sequence, `prompt`: with each multiple after the prompt, once there are
        more than kv_budget.
    """

    kv_budget: int | str = budget_param()
    local_window: int = int_param(least=1)
    ratio: float = float_param(least=0, most=1)
    ratio_over: str = choice_param("thinking", "older")
    keep_prompt: bool = flag_param(True)
    strict_budget: bool = flag_param(False, kw_only=True)
    budget_over: str = choice_param("cache", "thinking", kw_only=True)
    every: int = int_param(0, kw_only=True)
    every_from: str = choice_param("budget", "start", "prompt", kw_only=True)
    #: The budget in tokens; 0 for one in bytes before `on` names the model. No parameter itself.
    tokens: int = field(default=0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.storage.packed and self.residual > self.local_window:
            raise KvatlasError(
                f"residual is {self.residual}, more than the local_window {self.local_window}; expected at most that, "
                "since a compression keeps every unpacked token."
            )
        if self.every_from != "budget" and not self.every:
            raise KvatlasError(f"every_from is {self.every_from!r} without every; give every, the tokens between two.")
        for name, expected in (("ratio_over", "older"), ("budget_over", "cache")):
            if self.strict_budget and getattr(self, name) != expected and not (self.every and name == "ratio_over"):
                raise KvatlasError(
                    f"strict_budget is true and {name} is {getattr(self, name)!r}; expected {expected!r}, the rule "
                    "that counts the prompt."
                )
        if self.every and self.ratio_over != "thinking":
            raise KvatlasError(f"ratio_over is {self.ratio_over!r} beside every {self.every}; leave it out, as ratio.")
        if self.budget_over == "thinking" and not self.keep_prompt:
            raise KvatlasError("budget_over is 'thinking' and keep_prompt is false; expected true.")
        if isinstance(self.kv_budget, int):
            object.__setattr__(self, "tokens", self.kv_budget)
        else:
            object.__setattr__(self, "kv_budget", in_largest_unit(self.kv_budget))
        if self.tokens and self.local_window >= self.tokens:
            raise KvatlasError(
                f"local_window {self.local_window} leaves nothing to select in a kv_budget of {self._budget_text}; "
                f"expected windows from 1 to {self.tokens - 1}."
            )
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "scope", Scope(self.scope))

    def on(self, model: ModelHandle) -> Self:
        if isinstance(self.kv_budget, int):
            return self
        token, beside = model.kv_bytes(self.storage)
        tokens = tokens_of(self.kv_budget, token, beside)
        if tokens < 2:
            raise KvatlasError(
                f"kv_budget {self.kv_budget} holds no two tokens of {model.name}, which take {token:,} bytes each"
                f"{f' and {beside:,} for the newest, unpacked ones' if beside else ''}."
            )
        return replace(self, tokens=tokens)

    @cached_property
    def budget(self) -> Budget:
        if not self.tokens:
            raise KvatlasError(f"kv_budget is {self.kv_budget}; expected a number of tokens where no model is known.")
        return Budget(self.tokens, self.budget_over, self.every, self.every_from)

    @property
    def _budget_text(self) -> str:
        return str(self.tokens) if self.tokens == self.kv_budget else f"{self.kv_budget} ({self.tokens} tokens)"

    def can_drop(self, older: int, protected: int, prompt: int) -> bool:
        """Return False if a compression would keep all `older` tokens; for the counts see `allotted`."""
        return sum(allotted(self, older, protected, prompt)) < older

    def filled(self, cached: CacheView, protected: Tensor, chosen: int) -> int:
        """Return how many of the `chosen` places for tokens that are not `protected` [..., older] are used: all."""
        return chosen

    def check_prompt(self, prompt_length: int, where: str) -> None:
        """Raise KvatlasError if no compression of this setting can get below the budget with such a prompt.

        A strict budget drops the excess of the prompt, so any prompt is possible.
        """
        counted = self.keep_prompt and not self.strict_budget and self.budget_over == "cache"
        least = prompt_length + self.local_window
        if counted and least >= self.tokens:
            raise KvatlasError(
                f"kv_budget {self._budget_text} is too small for {where}: prompt {prompt_length} + local_window "
                f"{self.local_window} tokens can never be compressed below it; expected budgets above {least}."
            )


def allotted(policy: CompressingPolicy, older: int, protected: int, prompt: int) -> tuple[int, int]:
    """Return how many protected tokens stay, and how many of the others.

    `protected` of the `older` tokens are protected, `prompt` of these belong to the prompt.
    """
    if policy.every:
        room = policy.tokens - policy.local_window
        counted = protected - (prompt if policy.budget_over == "thinking" else 0)
        certain = min(protected, room) if policy.strict_budget else protected
        return certain, min(older - protected, max(0, room - counted))
    if policy.ratio_over == "thinking":
        return protected, share(policy.ratio, older - protected)
    kept = share(policy.ratio, older)
    return min(protected, kept) if policy.strict_budget else protected, max(0, kept - protected)


def places(policy: CompressingPolicy, cached: CacheView) -> tuple[Tensor, int]:
    """Return a mask of the older tokens [..., older] that stay in any case, and how many of the others stay.

    Both are the same in every layer and head, because prompt and answer tokens are. If a strict budget has no room for
    all protected tokens, the older ones stay.
    """
    import torch

    older = cached.positions.shape[-1] - policy.local_window
    old = cached.positions[..., :older]
    protected = torch.zeros_like(old, dtype=torch.bool)
    if policy.keep_prompt:
        protected |= old < cached.prompt_length
    prompt = int(protected.reshape(-1, older)[0].sum())
    if cached.thinking_end is not None:
        protected |= old >= cached.thinking_end
    certain, chosen = allotted(policy, older, int(protected.reshape(-1, older)[0].sum()), prompt)
    return protected & (protected.cumsum(-1) <= certain), chosen


def select_tokens(policy: CompressingPolicy, cached: CacheView) -> Tensor:
    """Return the slots [..., kept] that stay, ascending: the local window, and older tokens with the highest scores."""
    import torch

    length = cached.positions.shape[-1]
    protected, chosen = places(policy, cached)
    filled = policy.filled(cached, protected, chosen)
    if type(filled) is not int or not 0 <= filled <= chosen:
        raise KvatlasError(
            f"The policy {policy.name!r} fills {filled!r} places; expected an integer from 0 to {chosen}."
        )
    older = protected.shape[-1]
    certain = int(protected.reshape(-1, older)[0].sum())
    scores = _scores(policy.name, policy.score(cached), cached.positions, protected)
    # Tokens that stay in any case come before other tokens with an infinite score.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, (~protected.gather(-1, order)).byte().argsort(dim=-1, stable=True))
    order = order[..., : certain + filled]
    window = torch.arange(older, length, device=order.device).expand(*order.shape[:-1], policy.local_window)
    return torch.cat([order.sort(dim=-1).values, window], dim=-1)


def _unusable(scores: object, device: torch.device) -> str:
    """Return a name for scores that are no tensor of real numbers on the device; "" for others."""
    import torch

    if not isinstance(scores, torch.Tensor):
        return f"a {type(scores).__name__}"
    if scores.is_complex() or scores.layout is not torch.strided:
        return f"a tensor of {scores.dtype} with the layout {scores.layout}"
    return "" if scores.device == device else f"a tensor on {scores.device}"


def _scores(policy: str, scores: object, positions: Tensor, protected: Tensor) -> Tensor:
    """Return scores [..., older] in float64 of the tokens older than the local window, infinite for protected ones.

    `scores` comes from the policy, `positions` [..., cached] are those of the cache, `protected` [..., older] marks the
    tokens that stay in any case, whatever their score. Raises KvatlasError unless the scores are a tensor of real
    numbers of the shape [cached] or [..., cached], infinite ones included, without NaN.
    """
    import torch

    expected = tuple(positions.shape)
    kind = _unusable(scores, positions.device)
    if not isinstance(scores, torch.Tensor) or kind:
        raise KvatlasError(
            f"The policy {policy!r} scored its tokens with {kind}; expected a tensor of real numbers of the shape "
            f"{expected} or {expected[-1:]}, strided and on {positions.device}."
        )
    shape = tuple(scores.shape)
    # One number for every choice, or the same for some of them.
    sizes = zip(reversed(shape), reversed(expected), strict=False)
    fits = len(shape) <= len(expected) and all(size in (1, there) for size, there in sizes)
    if shape[-1:] != expected[-1:] or not fits:
        raise KvatlasError(
            f"The policy {policy!r} gave scores of the shape {shape} for cached tokens of the shape {expected} "
            f"(layers, KV heads, tokens); expected {expected} and {expected[-1:]}."
        )
    older = protected.shape[-1]
    filled = scores[..., :older].double().expand(protected.shape).masked_fill(protected, math.inf)
    wrong = int(filled.isnan().sum())
    if wrong:
        raise KvatlasError(
            f"The policy {policy!r} gave {wrong} scores that are not a number (NaN) among {int((~protected).sum())} "
            f"that decide, of the shape {shape}; expected numbers, infinite ones included."
        )
    return filled

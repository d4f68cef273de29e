"""The contract of a policy: what it declares, what it sees, and what it decides.

A policy is a frozen dataclass whose fields are its parameters. A new method writes one function, `score`; it declares
the signals that it needs from the decode loop in `observes`, and its notes beside cached tokens in `columns`. Source of
the contract: Dynamic Thinking-Token Selection, arXiv 2601.18383.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvatlas.core import CODES, KvatlasError, Setting, Storage
from kvatlas.policies.cache_view import CacheView, Signal, Step
from kvatlas.policies.from_file import code_of
from kvatlas.policies.guard import guard_methods
from kvatlas.policies.parameter_types import (
    ROOM,
    UNNAMED,
    Budget,
    Scope,
    budget_in_tokens,
    budget_param,
    check_value,
    choice_param,
    flag_param,
    float_param,
    floor_ratio,
    in_largest_unit,
    int_param,
    plain_share,
    storage_parameters,
    window_in_tokens,
    window_param,
)
from kvatlas.text import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import ModelHandle

#: Rises with every change of packed numbers: part of the run keys of such settings.
STORAGE_VERSION = 2


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
    #: True if its scores leave out tokens at the position -1, so that heads may have unlike numbers of tokens.
    unequal: ClassVar[bool] = False
    #: Parameters of its own that a setting names only if they have another value: those younger than stored traces.
    unnamed: ClassVar[Mapping[str, Any]] = {}
    # Without an annotation the next two are no parameters; a policy whose user may choose them annotates them.
    #: The unit of one choice in the method's paper.
    scope = Scope.GLOBAL
    #: The number of recent queries that it needs at a compression (QUERIES).
    queries = 0
    #: The name if it is not that of the class: METHOD@PAPER of a preset (presets.json), or FILE.py:CLASS. No parameter.
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
            # The name belongs to the class, except that of a preset or of a class in a file.
            object.__setattr__(self, "name", self.preset)
        for item in parameters(self):
            check_value(item, getattr(self, item.name))
        if self.group % CODES:
            raise KvatlasError(f"group is {self.group}; expected a multiple of {CODES}.")

    @property
    def storage(self) -> Storage:
        """The form of its cached keys and values."""
        keys = self.key_bits or self.kv_bits
        values = self.value_bits or self.kv_bits
        if keys == values == 16:
            # Unpacked numbers have neither groups nor unpacked copies.
            return Storage()
        return Storage(keys, values, self.group, self.residual)

    @property
    def budget(self) -> Budget | None:
        """The rule of compressions; None for no compression."""
        return None

    @classmethod
    def from_setting(cls, setting: Setting, preset: str = "") -> Self:
        """Return the policy with a setting's parameters, in their canonical form.

        Raises KvatlasError for unknown, missing or wrong parameters.
        """
        values = setting.values
        name = preset or cls.name
        names = [item.name for item in parameters(cls)]
        unknown = next((word for word in values if word not in names), None)
        if unknown is not None:
            raise KvatlasError(
                f"The policy {name!r} has no parameter {unknown!r}; expected: {', '.join(names) or 'none'}."
                f"{did_you_mean(unknown, names)}"
            )
        values |= _implied(values, names)
        missing = [word for word in ("kv_budget", "local_window", "ratio") if word in names and word not in values]
        if missing:
            raise KvatlasError(f"The policy {name!r} needs a value for {', '.join(missing)}.")
        return cls(**values, preset=preset).canonical()

    def canonical(self) -> Self:
        """Return the policy with its parameters in their canonical form: equal settings have equal parameters."""
        changed = {}
        for name, value in self._canonical_values().items():
            given = getattr(self, name)
            # 1 equals 1.0, and a text equals the member of an enumeration, but they are written differently.
            if value != given or type(value) is not type(given):
                changed[name] = value
        return replace(self, **changed) if changed else self

    def _canonical_values(self) -> dict[str, Any]:
        """Return the canonical values of the parameters that can be written in several ways."""
        return dict(storage_parameters(self.storage))

    @cached_property
    def setting(self) -> Setting:
        """The setting of this policy in its canonical form, defaults included.

        Scope, strict budget, contents of the budget and frequency of compressions are named only if they differ from
        the method's paper and the published rule.
        """
        policy = self.canonical()
        usual = usual_values(type(self))
        values = {}
        for item in parameters(policy):
            value = getattr(policy, item.name)
            if item.name == "local_window":
                value = getattr(policy, "window_share", "") or value
            if item.name not in usual or value != usual[item.name]:
                values[item.name] = value
        if "every" in values:
            del values["ratio"], values["ratio_over"]
        return Setting.from_parameters(self.name, **values)

    @cached_property
    def observer(self) -> tuple[Any, ...]:
        """The key of equal observations: the loop calls `observe` once for all settings with the same key."""
        shared = {item.name for item in fields(CompressingPolicy)}
        return (self.name, *(getattr(self, item.name) for item in fields(self) if item.name not in shared))

    def bind(self, model: ModelHandle) -> Self:
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


def _implied(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of parameters that follow from the others. Raises KvatlasError for a ratio beside `every`."""
    if values.get("every") and "ratio" in names:
        if "ratio" in values:
            raise KvatlasError(
                f"ratio is {values['ratio']!r} beside every {values['every']!r}; leave ratio out: with every the "
                "kv_budget is what stays."
            )
        return {"ratio": 1.0}
    if values.get("strict_budget") is True and "ratio_over" not in values:
        return {"ratio_over": "older"}
    return {}


def parameters(policy: Policy | type[Policy]) -> list[Field[Any]]:
    """Return the fields of a policy that its user sets, last those of the storage of keys and values."""
    shared = [item.name for item in fields(Policy)]
    settable = (item for item in fields(policy) if item.name not in ("preset", "tokens_held", "window_share"))
    return sorted(settable, key=lambda item: item.name in shared)


def usual_values(policy: type[Policy]) -> Mapping[str, Any]:
    """Return the parameters that a setting of a policy names only if they have other values than these."""
    usual = {**UNNAMED, **policy.unnamed, "scope": str(policy.scope)}
    return {item.name: usual[item.name] for item in parameters(policy) if item.name in usual}


@dataclass(frozen=True)
class Full(Policy):
    """The full cache, the reference for every setting. It never compresses."""

    name = "full"
    summary = "keeps every token (no compression)"


#: The scopes of each word of `budgets`, none for all.
BUDGET_SCOPES: Mapping[str, tuple[Scope, ...]] = {
    "equal": (),
    "pyramid": (Scope.HEAD, Scope.LAYER),
    "ada": (Scope.HEAD,),
}


@dataclass(frozen=True)
class CompressingPolicy(Policy):
    """A policy that compresses; its fields are the parameters of all methods.

    kv_budget: cache length (tokens per sequence, prompt included) at which a compression fires; with `every` the length
        after a compression. Bytes such as `12MiB` stand for the tokens that they hold, in the type in which the model
        runs and the policy's bits.
    local_window: newest tokens that always stay, at least 1. A share such as `25%` stands for max(1, floor(share *
        kv_budget)) tokens; the policy has these tokens, its setting the share.
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
    plan_prefix: first thinking tokens (the plan) that take the places of the kept share before all others.
    refresh: tokens between two computations of the scores; at compressions in between, the tokens that entered since
        stay before others, and these in the order of their old scores.
    carry: factor of an old score: a token has the greater one of this share of its old score and its new score, which
        is divided by the greatest; 0 for new scores alone.
    budgets: tokens of layers and KV heads at the same mean: `equal`; `pyramid` (PyramidKV, fewer in later layers; with
        the scope head or layer); `ada` (AdaKV, one choice over the heads of a layer; with the scope head).
    """

    kv_budget: int | str = budget_param()
    local_window: int = window_param()
    ratio: float = float_param(least=0, most=1)
    ratio_over: str = choice_param("thinking", "older")
    keep_prompt: bool = flag_param(True)
    strict_budget: bool = flag_param(False, kw_only=True)
    budget_over: str = choice_param("cache", "thinking", kw_only=True)
    every: int = int_param(0, kw_only=True)
    every_from: str = choice_param("budget", "start", "prompt", kw_only=True)
    plan_prefix: int = int_param(0, kw_only=True)
    refresh: int = int_param(1, least=1, kw_only=True)
    carry: float = float_param(0.0, 0, 1, kw_only=True)
    budgets: str = choice_param("equal", "pyramid", "ada", kw_only=True)
    #: The tokens that a budget in bytes holds; 0 before `bind` names the model. No parameter itself.
    tokens_held: int = field(default=0, kw_only=True, repr=False)
    #: The local window as a share of the budget; empty for one in tokens. No parameter itself.
    window_share: str = field(default="", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.local_window
        if isinstance(given, str):
            object.__setattr__(self, "window_share", plain_share(given))
        if self.window_share:
            object.__setattr__(self, "local_window", window_in_tokens(self.window_share, self.tokens))
        # A share of a budget in bytes has no tokens before `bind` names the model.
        is_known = not self.window_share or bool(self.tokens)
        if self.storage.packed and is_known and self.residual > self.local_window:
            raise KvatlasError(
                f"residual is {self.residual}, more than the local_window {self.local_window}; expected at most that, "
                "since a compression keeps every unpacked token."
            )
        self._check_rule()
        if self.tokens and self.local_window >= self.tokens:
            raise KvatlasError(
                f"local_window {self.local_window} leaves nothing to select in a kv_budget of {self._budget_text}; "
                f"expected windows from 1 to {self.tokens - 1}."
            )

    def _check_rule(self) -> None:
        """Raise KvatlasError for parameters of the budget that contradict one another."""
        if self.every_from != "budget" and not self.every:
            raise KvatlasError(f"every_from is {self.every_from!r} without every; give every, the tokens between two.")
        if self.strict_budget:
            self._check_strict_budget()
        if self.every and self.ratio_over != "thinking":
            raise KvatlasError(f"ratio_over is {self.ratio_over!r} beside every {self.every}; leave it out, as ratio.")
        if self.budget_over == "thinking" and not self.keep_prompt:
            raise KvatlasError("budget_over is 'thinking' and keep_prompt is false; expected true.")
        self._check_budgets()

    def _check_budgets(self) -> None:
        """Raise KvatlasError for unequal budgets of a policy whose layers or heads choose alike."""
        scopes = BUDGET_SCOPES[self.budgets]
        if scopes and self.scope not in scopes:
            raise KvatlasError(
                f"budgets is {self.budgets!r} and scope is {str(self.scope)!r}; expected the scope "
                f"{' or '.join(map(str, scopes))}."
            )
        if self.budgets == "equal":
            return
        if not self.unequal:
            raise KvatlasError(f"budgets is {self.budgets!r}; expected 'equal', which {self.name!r} needs.")
        if self.storage.packed:
            raise KvatlasError(f"budgets is {self.budgets!r} beside few bits; expected 'equal', or 16 bits.")

    def _check_strict_budget(self) -> None:
        """Raise KvatlasError for a rule that does not count the prompt, which a strict budget counts."""
        required = {"ratio_over": "older", "budget_over": "cache"}
        if self.every:
            # The ratio does not matter then.
            del required["ratio_over"]
        for name, expected in required.items():
            if getattr(self, name) != expected:
                raise KvatlasError(
                    f"strict_budget is true and {name} is {getattr(self, name)!r}; expected {expected!r}, the rule "
                    "that counts the prompt."
                )

    def _canonical_values(self) -> dict[str, Any]:
        values = {**super()._canonical_values(), "ratio": float(self.ratio), "carry": float(self.carry)}
        if isinstance(self.kv_budget, str):
            values["kv_budget"] = in_largest_unit(self.kv_budget)
        if any(item.name == "scope" for item in fields(self)):
            values["scope"] = Scope(self.scope)
        return values

    @property
    def remembers(self) -> bool:
        """True if scores outlive a compression."""
        return self.refresh > 1 or self.carry > 0

    @property
    def tokens(self) -> int:
        """The budget in tokens; 0 for one in bytes before `bind` names the model."""
        return self.kv_budget if isinstance(self.kv_budget, int) else self.tokens_held

    def check(self, model: ModelHandle) -> None:
        if self.budgets != "equal" and model.files.has_windows:
            raise KvatlasError(
                f"budgets is {self.budgets!r}, and layers of {model.name!r} attend to a sliding window, so that they "
                "cannot lend memory to others; expected 'equal'."
            )

    def bind(self, model: ModelHandle) -> Self:
        if isinstance(self.kv_budget, int):
            return self
        token_bytes, sequence_bytes = model.kv_bytes(self.storage)
        tokens = budget_in_tokens(self.kv_budget, token_bytes, sequence_bytes)
        if tokens < 2:
            unpacked = f" and {sequence_bytes:,} for the newest, unpacked ones" if sequence_bytes else ""
            raise KvatlasError(
                f"kv_budget {self.kv_budget} holds no two tokens of {model.name}, which take {token_bytes:,} bytes "
                f"each{unpacked}."
            )
        return replace(self, tokens_held=tokens)

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

    def slots_used(self, cached: CacheView, protected: Tensor, quota: int) -> int:
        """Return how many of the `quota` slots for tokens that are not `protected` [..., older] are used: all."""
        return quota

    def check_prompt(self, prompt_length: int, where: str) -> None:
        """Raise KvatlasError if no compression of this setting can get below the budget with such a prompt.

        A strict budget drops the excess of the prompt, so any prompt is possible.
        """
        counted = self.keep_prompt and not self.strict_budget and self.budget_over == "cache"
        least = prompt_length + self.local_window
        if counted and least >= self.tokens:
            raise KvatlasError(
                f"kv_budget {self._budget_text} is too small for {where}: prompt {prompt_length} + local_window "
                f"{self.local_window} tokens can never be compressed below it; expected budgets above "
                f"{least}{self.advice(prompt_length)}."
            )

    def new_between(self, prompt: int) -> int:
        """Return the new tokens between two compressions while a sequence with such a prompt thinks."""
        if self.every:
            return self.every
        older = max(0, self.budget.first(prompt) - self.local_window)
        protected = min(prompt, older) if self.keep_prompt else 0
        return older - sum(allotted(self, older, protected, protected))

    def advice(self, prompt: int) -> str:
        """Return a clause on a budget that leaves room for new tokens between two compressions, or ""."""
        if self.every:
            return ""
        least = prompt + self.local_window
        for tokens in range(least - least % ROOM + ROOM, least + ROOM * ROOM, ROOM):
            new = replace(self, kv_budget=tokens, tokens_held=0).new_between(prompt)
            if new >= ROOM:
                return f"; a kv_budget of {tokens} leaves {new} new tokens between two compressions"
        return ""


def fit(policy: Policy, model: ModelHandle, prompt: int | None = None, where: str = "") -> Policy:
    """Return the policy for a model, which it suits. Reads no weights.

    Raises KvatlasError, with the setting and the model, if it cannot work there, or on prompts of `prompt` tokens,
    which are described by `where`.
    """
    try:
        if isinstance(policy, CompressingPolicy):
            # A policy of another author may replace its `check`.
            CompressingPolicy.check(policy, model)
        policy.check(model)
        bound = policy.bind(model)
        if prompt is not None and isinstance(bound, CompressingPolicy):
            bound.check_prompt(prompt, where)
    except KvatlasError as error:
        raise KvatlasError(f"The setting {policy.setting} does not fit the model {model.name!r}: {error}") from error
    return bound


def has_unequal_budgets(policy: Policy) -> bool:
    """Return True if layers or heads of a policy may keep unlike numbers of tokens."""
    return isinstance(policy, CompressingPolicy) and policy.budgets != "equal"


def allotted(policy: CompressingPolicy, older: int, protected: int, prompt: int) -> tuple[int, int]:
    """Return how many protected tokens stay, and how many of the others.

    `protected` of the `older` tokens are protected, `prompt` of these belong to the prompt.
    """
    if policy.every:
        room = policy.tokens - policy.local_window
        counted = protected - prompt if policy.budget_over == "thinking" else protected
        kept_protected = min(protected, room) if policy.strict_budget else protected
        return kept_protected, min(older - protected, max(0, room - counted))
    if policy.ratio_over == "thinking":
        return protected, floor_ratio(policy.ratio, older - protected)
    kept = floor_ratio(policy.ratio, older)
    kept_protected = min(protected, kept) if policy.strict_budget else protected
    return kept_protected, max(0, kept - protected)

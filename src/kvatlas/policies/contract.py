"""The contract of a policy: what it declares, what it sees, and what it decides; and the settings that it is made from.

A policy is a frozen dataclass whose fields are its own parameters. A new method writes one function, `score`; it
declares the signals that it needs from the decode loop in `observes`, and its notes beside cached tokens in `columns`.
Any policy takes a budget rule, which says how many tokens stay, and a precision of keys and values; their parameters
are named beside its own in settings. Source of the contract: Dynamic Thinking-Token Selection, arXiv 2601.18383.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields, replace
from functools import cached_property, wraps
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvatlas.class_files import code_of
from kvatlas.core import CAP, UNLIMITED, UNNAMED, KvatlasError, Setting, Storage, canonical, described, shortened
from kvatlas.machine import out_of_memory
from kvatlas.policies.budget_rule import RULE_PARAMETERS, BudgetRule, implied_values
from kvatlas.policies.cache_view import CacheView, Signal, Step, Tensor
from kvatlas.policies.parameter_types import Scope, check_parameters, tokens_param, value_fault
from kvatlas.policies.precision import PRECISION_PARAMETERS, STORAGE_VERSION, KvPrecision
from kvatlas.text import did_you_mean, read_value

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle

#: The methods that the author of a policy may write.
AUTHORED = ("__post_init__", "bind", "check", "check_prompt", "identity", "observe", "slots_used", "score")
#: What to do in place of an assignment to an attribute of a policy.
_STATELESS = "a policy keeps no state of its own: notes on tokens go in `columns`, derived values in cached properties"

#: What stands in a step for signals that a policy does not declare.
_UNOBSERVED = "step.attention is None without Signal.ATTENTION in observes, and step.hidden without Signal.HIDDEN"
#: Values of required parameters, for error sentences.
_EXAMPLES: Mapping[str, Any] = {"kv_budget": 512, "local_window": 64, "ratio": 0.3}


class Stateless:
    """The base of frozen dataclasses whose subclasses are frozen without the decorator, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


@dataclass(frozen=True)
class Policy(Stateless):
    """A KV-cache token-selection method. A subclass sets class variables, and writes some of the methods."""

    name: ClassVar[str]
    #: Rises whenever the method's choices change: part of the run key.
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    #: The method's paper, with its number on arXiv or openreview.net; a plug-in may have none.
    paper: ClassVar[str] = ""
    #: The values of the parameters in the paper's experiments.
    published: ClassVar[Mapping[str, str]] = {}
    observes: ClassVar[frozenset[Signal]] = frozenset()
    columns: ClassVar[tuple[str, ...]] = ()
    #: True if its choices are random, so that another program makes others.
    random: ClassVar[bool] = False
    #: Parameters of its own that a setting names only if they have another value: those younger than stored traces.
    unnamed: ClassVar[Mapping[str, Any]] = {}
    #: Defaults of the budget rule's parameters that the method needs.
    rule_defaults: ClassVar[Mapping[str, Any]] = {}
    #: True for policies with a budget rule.
    compresses: ClassVar[bool] = False
    # Without an annotation the next two are no parameters; a policy whose user may choose them annotates them.
    #: The unit of one choice in the method's paper.
    scope = Scope.GLOBAL
    #: The number of recent queries that it needs at a compression (QUERIES).
    queries = 0

    #: The rule of compressions; None for no compression.
    budget: BudgetRule | None = field(default=None, kw_only=True)
    #: The bits of cached keys and values.
    precision: KvPrecision = field(default=KvPrecision(), kw_only=True)
    #: The cap on thinking: after so many thinking tokens the end of thinking is written.
    thinking_tokens: int | str = tokens_param(0, UNLIMITED, UNLIMITED, UNLIMITED, kw_only=True)
    #: The name if it is not that of the class: METHOD@PAPER of a preset (presets.json), or FILE.py:CLASS. No parameter.
    preset: str = field(default="", kw_only=True, repr=False)

    def score(self, cached: CacheView) -> Tensor:
        """Return the importance [cached] or [..., cached] of cached tokens: the highest stay, of equals the oldest."""
        raise KvatlasError(f"The policy {self.setting_name!r} has no score.")

    def observe(self, step: Step) -> None:
        """Note the signals of a step (and of prefill) in `columns`."""

    def check(self, model: ModelHandle) -> None:
        """Raise KvatlasError if the policy cannot work on this model; called before any weight is loaded."""

    def bind(self, model: ModelHandle) -> Self:
        """Return the policy for this model, which knows how many tokens a budget in bytes holds."""
        return self

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        """Return all beside the parameters that can change the policy's choices on this model: part of the run key."""
        file, colon, _ = self.preset.rpartition(":")
        code = code_of(file) if colon else {}
        stored = {"storage": STORAGE_VERSION} if self.storage.packed else {}
        return {"name": self.setting_name, "version": self.version, **code, **stored}

    # Made from settings, and named as settings.

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The methods that the class defines itself.
        for name in AUTHORED:
            method = vars(cls).get(name)
            if callable(method):
                setattr(cls, name, _with_sentences(method))

    def __post_init__(self) -> None:
        self.check_values()

    @property
    def setting_name(self) -> str:
        """Its name in settings: that of the class, except for a preset and for a class in a file."""
        return self.preset or self.name

    def check_values(self) -> None:
        """Raise KvatlasError for a wrong value of a parameter, and for parts that do not fit together."""
        check_parameters(self)
        rule = self.budget
        residual = self.precision.residual
        # A share of a budget in bytes has no tokens before the model is known.
        has_window = rule is not None and (isinstance(rule.local_window, int) or rule.has_tokens)
        if rule is not None and has_window and self.storage.packed and residual > rule.window:
            raise KvatlasError(
                f"residual is {residual}, more than the local_window {rule.window}; expected at most that, since a "
                "compression keeps every unpacked token."
            )

    @cached_property
    def storage(self) -> Storage:
        """The form of its cached keys and values."""
        return self.precision.storage

    @property
    def cap(self) -> int | None:
        """The most thinking tokens; None without a cap."""
        return self.thinking_tokens if isinstance(self.thinking_tokens, int) else None

    @cached_property
    def uncapped(self) -> Self:
        """The same policy without a cap on thinking."""
        return replace(self, thinking_tokens=UNLIMITED)

    @classmethod
    def from_setting(cls, setting: Setting, preset: str = "") -> Self:
        """Return the policy with a setting's parameters, in their canonical form.

        Raises KvatlasError for unknown, missing or wrong parameters.
        """
        values = setting.values
        name = preset or cls.name
        declared = parameters(cls)
        names = [item.name for item in declared]
        unknown = next((word for word in values if word not in names), None)
        if unknown is not None and unknown in RULE_PARAMETERS and not cls.compresses:
            raise KvatlasError(
                f"The policy {name!r} never compresses, so it has no {unknown}, which is {values[unknown]!r}; name a "
                "policy that does with --policy (in Python and in specs `policy`), as --policy rkv."
            )
        if unknown is not None:
            guess = did_you_mean(unknown, names)
            if unknown == "compression_ratio" and cls.compresses:
                guess = " A compression_ratio of 0.7 in kvpress is ratio=0.3, the share that stays."
            if unknown == "policy":
                guess = " Each policy is a setting of its own, as settings: [{policy: window}, {policy: random}]."
            is_of_user = not cls.__module__.startswith("kvatlas.")
            if is_of_user and unknown in {*get_annotations(cls), *vars(cls)}:
                guess = (
                    f" {unknown} is one if it has a type, as {unknown}: int = 4, and the class {cls.__name__} the "
                    "decorator @dataclass(frozen=True)."
                )
            raise KvatlasError(
                f"The policy {name!r} has no parameter {unknown!r}; expected: {', '.join(names)}.{guess}"
            )

        for item in declared:
            value = values.get(item.name)
            # Tables have integers as 8.0.
            if isinstance(value, float) and value.is_integer() and value_fault(item, value):
                values[item.name] = int(value)
        if cls.compresses:
            values |= implied_values(values)
        missing = [item.name for item in declared if item.default is MISSING and item.default_factory is MISSING]
        missing = [word for word in missing if word not in values]
        if missing:
            example = " ".join(f"{word}={_EXAMPLES.get(word, 'VALUE')}" for word in missing)
            are_of_rule = set(missing) <= set(_EXAMPLES)
            proposal = " `kvatlas plan --suggest MODEL PROBLEMS` proposes values." if are_of_rule else ""
            raise KvatlasError(f"The policy {name!r} needs a value for {', '.join(missing)}, as {example}.{proposal}")

        # The parameters of rule and precision stand beside the policy's own.
        rule = {**cls.rule_defaults, **{word: values.pop(word) for word in RULE_PARAMETERS if word in values}}
        bits = {word: values.pop(word) for word in PRECISION_PARAMETERS if word in values}
        precision = KvPrecision(**bits)
        budget = BudgetRule(**rule) if cls.compresses else None
        policy = cls(**values, budget=budget, precision=precision, preset=preset)
        # The author of a policy may replace __post_init__.
        policy.check_values()
        return policy.canonical()

    def canonical(self) -> Self:
        """Return the policy with its parameters in their canonical form: equal settings have equal parameters."""
        changed: dict[str, Any] = {"budget": self.budget and self.budget.canonical()}
        changed["precision"] = self.precision.canonical()
        if any(item.name == "scope" for item in fields(self)):
            # A text equals the member of an enumeration, but they are written differently.
            changed["scope"] = Scope(self.scope)
        return replace(self, **changed)

    def parameter_values(self) -> dict[str, Any]:
        """Return the values of all parameters by name, those of rule and precision among them."""
        parts = {**dict.fromkeys(RULE_PARAMETERS, self.budget), **dict.fromkeys(PRECISION_PARAMETERS, self.precision)}
        return {item.name: getattr(parts.get(item.name, self), item.name) for item in parameters(type(self))}

    @cached_property
    def setting(self) -> Setting:
        """The setting of this policy in its canonical form, defaults included.

        Scope, strict budget, contents of the budget and frequency of compressions are named only if they differ from
        the method's paper and the published rule.
        """
        usual = usual_values(type(self))
        values = self.canonical().parameter_values()
        named = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
        if "every" in named:
            del named["ratio"], named["ratio_over"]
        return Setting.from_parameters(self.setting_name, **named)

    @cached_property
    def observer(self) -> tuple[Any, ...]:
        """The key of equal observations: the loop calls `observe` once for all settings with the same key."""
        return (self.setting_name, *(getattr(self, item.name) for item in own_parameters(type(self))))


def _way_out(policy: Policy, method: str, values: tuple[Any, ...], error: BaseException) -> str:
    """Return, as a clause, what to write in place of what failed in a method of a policy; empty where it is unknown."""
    if isinstance(error, FrozenInstanceError):
        return f"; {_STATELESS}"
    if isinstance(error, AttributeError) and error.obj is policy:
        for holder in ("budget", "precision"):
            kind = type(getattr(policy, holder))
            if error.name in {*dir(kind), *getattr(kind, "__dataclass_fields__", ())}:
                return f"; expected self.{holder}.{error.name}"
    if method == "score" and values and isinstance(error, IndexError):
        cached = values[0]
        layers = cached.model.shape.layers
        tokens = cached.positions.shape[-1]
        return f"; layers are 0 to {layers - 1} (cached.each_layer goes over all), cached tokens 0 to {tokens - 1}"
    if method == "observe" and "NoneType" in str(error):
        return f"; {_UNOBSERVED}"
    if "does not require grad" in described(error):
        return "; gradients are computed within torch.enable_grad() alone"
    return ""


def _with_sentences(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose errors, and results with which nothing can be done, are one KvatlasError each."""
    name = method.__name__
    is_ours = method.__module__.startswith("kvatlas.")

    @wraps(method)
    def call(policy: Any, *values: Any, **named: Any) -> Any:
        try:
            # What it prints is no output of a command.
            with nullcontext() if is_ours else redirect_stdout(sys.stderr):
                result = method(policy, *values, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # The engine halves its batch when memory runs out.
            if out_of_memory(error) or (isinstance(error, KvatlasError) and str(error)):
                raise
            sentence = f"The policy {policy.setting_name!r} failed in {name} ({described(error)})"
            raise KvatlasError(f"{sentence}{_way_out(policy, name, values, error)}.") from error

        expected = ""
        if name == "bind" and not isinstance(result, type(policy)):
            expected = f"an object of {type(policy).__name__}"
        if name in ("observe", "check", "check_prompt") and result is not None:
            expected = "nothing: notes go in columns, as by step.enter, and a fault is raised as kvatlas.KvatlasError"
        if name == "identity":
            try:
                canonical(result)
                is_whole = {"name", "version"} <= result.keys()
            except (AttributeError, TypeError, ValueError, RecursionError):
                is_whole = False
            if not is_whole:
                expected = "a dictionary of numbers and texts with the entries of super().identity(model)"
        if expected:
            given = f"returned {shortened(result)} from {name}; expected {expected}"
            raise KvatlasError(f"The policy {policy.setting_name!r} {given}.")
        return result

    return call


@dataclass(frozen=True)
class Full(Policy):
    """The full cache, the reference for every setting. It never compresses."""

    name = "full"
    summary = "keeps every token (no compression)"


@dataclass(frozen=True)
class CompressingPolicy(Policy):
    """A policy that compresses by its budget rule: the base of every method.

    Settings name the parameters of the rule (`policies/budget_rule.py`) beside the method's own.
    """

    compresses = True
    budget: BudgetRule = field(kw_only=True)

    def slots_used(self, cached: CacheView, protected: Tensor, quota: int) -> int:
        """Return how many of the `quota` slots for tokens that are not `protected` [..., older] are used: all."""
        return quota

    def can_drop(self, older: int, protected: int, prompt: int) -> bool:
        """Return False if a compression would keep all `older` tokens; for the counts see `BudgetRule.allotted`."""
        return sum(self.budget.allotted(older, protected, prompt)) < older

    def check_prompt(self, prompt_length: int, where: str) -> None:
        """Raise KvatlasError if no compression of this setting can get below the budget with such a prompt."""
        self.budget.check_prompt(prompt_length, where)

    def bind(self, model: ModelHandle) -> Self:
        budget = self.budget.in_model(model, self.storage)
        return self if budget is self.budget else replace(self, budget=budget)


def own_parameters(policy: type[Policy]) -> list[Field[Any]]:
    """Return the fields of a policy that are its own parameters."""
    shared = {item.name for item in fields(Policy)}
    return [item for item in fields(policy) if item.name not in shared]


def parameters(policy: type[Policy]) -> list[Field[Any]]:
    """Return the parameters that the user of a policy sets: of its rule, its own, of its precision, and the cap."""
    rule = [copy.copy(item) for item in fields(BudgetRule) if policy.compresses and item.name in RULE_PARAMETERS]
    for item in rule:
        item.default = policy.rule_defaults.get(item.name, item.default)
    cap = next(item for item in fields(Policy) if item.name == CAP)
    return [*rule, *own_parameters(policy), *fields(KvPrecision), cap]


def read_parameter(policy: type[Policy], name: str, text: str) -> Any:
    """Return the value that a text spells for a parameter of a policy, by its declared type."""
    if name in RULE_PARAMETERS and policy.compresses:
        return read_value(BudgetRule, name, text)
    return read_value(KvPrecision if name in PRECISION_PARAMETERS else policy, name, text)


def usual_values(policy: type[Policy]) -> Mapping[str, Any]:
    """Return the parameters that a setting of a policy names only if they have other values than these."""
    usual = {**UNNAMED, **policy.unnamed, "scope": str(policy.scope)}
    return {item.name: usual[item.name] for item in parameters(policy) if item.name in usual}

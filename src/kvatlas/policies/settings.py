"""Policies and settings: a policy is made from the parameters of a setting, and has a setting in canonical form.

The author of a policy need not read this file. In a setting the parameters of a policy's parts, its budget rule and its
precision, stand beside its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields, replace
from functools import cached_property
from inspect import get_annotations
from typing import Any, ClassVar, Self

from kvatlas.core import CAP, UNLIMITED, UNNAMED, KvatlasError, Setting, Storage
from kvatlas.policies.budget_rule import RULE_PARAMETERS, BudgetRule, implied_values
from kvatlas.policies.parameter_types import Scope, check_parameters, length_param
from kvatlas.policies.precision import PRECISION_PARAMETERS, KvPrecision
from kvatlas.text import did_you_mean, read_value

#: Values of required parameters, for error sentences.
_EXAMPLES: Mapping[str, Any] = {"kv_budget": 512, "local_window": 64, "ratio": 0.3}


class Stateless:
    """The base of frozen dataclasses whose subclasses are frozen without the decorator, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


@dataclass(frozen=True)
class Parametrized(Stateless):
    """The parts and parameters of a policy; `contract.Policy` explains the class variables."""

    name: ClassVar[str]
    unnamed: ClassVar[Mapping[str, Any]] = {}
    rule_defaults: ClassVar[Mapping[str, Any]] = {}
    #: True for policies with a budget rule.
    compresses: ClassVar[bool] = False
    scope = Scope.GLOBAL
    #: The rule of compressions; None for no compression.
    budget: BudgetRule | None = field(default=None, kw_only=True)
    #: The bits of cached keys and values.
    precision: KvPrecision = field(default=KvPrecision(), kw_only=True)
    #: The cap on thinking: after so many thinking tokens the end of thinking is written.
    thinking_tokens: int | str = length_param(UNLIMITED, kw_only=True)
    #: The name if it is not that of the class: METHOD@PAPER of a preset (presets.json), or FILE.py:CLASS. No parameter.
    preset: str = field(default="", kw_only=True, repr=False)

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
        if rule is None:
            return

        # A share of a budget in bytes has no tokens before the model is known.
        has_window = isinstance(rule.local_window, int) or rule.has_tokens
        residual = self.precision.residual
        if self.storage.packed and has_window and residual > rule.window:
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
            if unknown in {*get_annotations(cls), *vars(cls)}:
                guess = (
                    f" {unknown} is one if it has a type, as {unknown}: int = 4, and the class {cls.__name__} the "
                    "decorator @dataclass(frozen=True)."
                )
            raise KvatlasError(
                f"The policy {name!r} has no parameter {unknown!r}; expected: {', '.join(names)}.{guess}"
            )

        is_compressing = cls.compresses
        if is_compressing:
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
        parts: dict[str, Any] = {"precision": KvPrecision(**bits), "preset": preset}
        if is_compressing:
            parts["budget"] = BudgetRule(**rule)
        policy = cls(**values, **parts)
        # The author of a policy may replace __post_init__.
        policy.check_values()
        return policy.canonical()

    def canonical(self) -> Self:
        """Return the policy with its parameters in their canonical form: equal settings have equal parameters."""
        changed: dict[str, Any] = {"precision": self.precision.canonical()}
        if self.budget is not None:
            changed["budget"] = self.budget.canonical()
        if any(item.name == "scope" for item in fields(self)):
            # A text equals the member of an enumeration, but they are written differently.
            changed["scope"] = Scope(self.scope)
        return replace(self, **changed)

    def parameter_values(self) -> dict[str, Any]:
        """Return the values of all parameters by name, those of rule and precision among them."""
        values = {}
        for item in parameters(type(self)):
            owner: Any = self
            if item.name in RULE_PARAMETERS:
                owner = self.budget
            elif item.name in PRECISION_PARAMETERS:
                owner = self.precision
            values[item.name] = getattr(owner, item.name)
        return values

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


def own_parameters(policy: type[Parametrized]) -> list[Field[Any]]:
    """Return the fields of a policy that are its own parameters."""
    shared = {item.name for item in fields(Parametrized)}
    return [item for item in fields(policy) if item.name not in shared]


def parameters(policy: Parametrized | type[Parametrized]) -> list[Field[Any]]:
    """Return the parameters that the user of a policy sets: of its rule, its own, of its precision, and the cap."""
    kind = policy if isinstance(policy, type) else type(policy)
    rule = []
    if kind.compresses:
        for item in fields(BudgetRule):
            if item.name in kind.rule_defaults:
                item = copy.copy(item)
                item.default = kind.rule_defaults[item.name]
            if item.name in RULE_PARAMETERS:
                rule.append(item)
    cap = next(item for item in fields(Parametrized) if item.name == CAP)
    return [*rule, *own_parameters(kind), *fields(KvPrecision), cap]


def read_parameter(policy: type[Parametrized], name: str, text: str) -> Any:
    """Return the value that a text spells for a parameter of a policy, by its declared type."""
    if name in RULE_PARAMETERS and policy.compresses:
        return read_value(BudgetRule, name, text)
    return read_value(KvPrecision if name in PRECISION_PARAMETERS else policy, name, text)


def usual_values(policy: type[Parametrized]) -> Mapping[str, Any]:
    """Return the parameters that a setting of a policy names only if they have other values than these."""
    usual = {**UNNAMED, **policy.unnamed, "scope": str(policy.scope)}
    return {item.name: usual[item.name] for item in parameters(policy) if item.name in usual}

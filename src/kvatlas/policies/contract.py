"""The contract of a policy: what it declares, what it sees, and what it decides.

A policy is a frozen dataclass whose fields are its own parameters. A new method writes one function, `score`; it
declares the signals that it needs from the decode loop in `observes`, and its notes beside cached tokens in `columns`.
Any policy takes a budget rule, which says how many tokens stay, and a precision of keys and values; their parameters
are named beside its own in settings. Source of the contract: Dynamic Thinking-Token Selection, arXiv 2601.18383.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvatlas.class_files import code_of
from kvatlas.core import KvatlasError
from kvatlas.policies.budget_rule import BudgetRule
from kvatlas.policies.cache_view import CacheView, Signal, Step
from kvatlas.policies.guard import guard_methods
from kvatlas.policies.parameter_types import Scope
from kvatlas.policies.precision import STORAGE_VERSION
from kvatlas.policies.settings import Parametrized

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import ModelHandle


@dataclass(frozen=True)
class Policy(Parametrized):
    """A KV-cache token-selection method. A subclass sets class variables, and writes some of the methods.

    Its parts `budget` (a `BudgetRule`, None for no compression) and `precision` come from the setting.
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
    #: Parameters of its own that a setting names only if they have another value: those younger than stored traces.
    unnamed: ClassVar[Mapping[str, Any]] = {}
    #: Defaults of the budget rule's parameters that the method needs.
    rule_defaults: ClassVar[Mapping[str, Any]] = {}
    # Without an annotation the next two are no parameters; a policy whose user may choose them annotates them.
    #: The unit of one choice in the method's paper.
    scope = Scope.GLOBAL
    #: The number of recent queries that it needs at a compression (QUERIES).
    queries = 0

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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard_methods(cls)


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

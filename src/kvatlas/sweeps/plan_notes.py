"""Sentences of a plan about its models and settings."""

from __future__ import annotations

from collections.abc import Sequence

from kvatlas.models import ModelHandle
from kvatlas.native import why_not
from kvatlas.policies import CompressingPolicy, Policy, has_unequal_budgets


def device_notes(models: Sequence[ModelHandle]) -> list[str]:
    """Return a sentence on kernels that this machine lacks, if any."""
    slow = why_not() if any(model.device == "cpu" for model in models) else None
    return [f"{slow} Decoding goes on in plain torch, more slowly."] if slow else []


def unequal_notes(models: Sequence[ModelHandle], policies: Sequence[Policy]) -> list[str]:
    """Return a sentence on each model on a GPU with settings that are decoded there by themselves."""
    unequal = sum(map(has_unequal_budgets, policies))
    if not unequal:
        return []
    named = "1 setting" if unequal == 1 else f"{unequal} settings"
    return [
        f"The {named} with unequal budgets (ada, pyramid) of {len(policies)} with the model {model.name!r} on "
        f"{model.device} are decoded by themselves, after the others, in plain torch without captured steps, several "
        "times slower."
        for model in models
        if model.device != "cpu"
    ]


def byte_notes(models: Sequence[ModelHandle], policies: Sequence[Policy]) -> list[str]:
    """Return a sentence on each model in float32 whose few bits are compared with 16 at equal bytes."""
    compressing = [policy for policy in policies if isinstance(policy, CompressingPolicy)]
    storages = {policy.storage for policy in compressing if isinstance(policy.kv_budget, str)}
    if len(storages) < 2 or all(storage.packed for storage in storages):
        return []
    return [
        f"The model {model.name!r} runs in float32: a cached number takes 4 bytes at kv_bits 16, so that a kv_budget "
        "in bytes holds half as many such tokens as in bfloat16. Give kv_budget in tokens to compare bits as on a GPU."
        for model in models
        if model.dtype == "float32"
    ]

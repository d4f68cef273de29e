"""Sentences of a plan about its models and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvatlas.core import Storage, grouped
from kvatlas.models import ModelHandle
from kvatlas.native import why_not
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.policies.memory import apart_sentence, stays, windows_apart


def device_notes(models: Sequence[ModelHandle]) -> list[str]:
    """Return a sentence on kernels that this machine lacks, if any."""
    slow = why_not() if any(model.device == "cpu" for model in models) else None
    return [f"{slow} Decoding goes on in plain torch, more slowly."] if slow else []


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


def window_sentence(
    axes: Mapping[str, Sequence[Any]],
    models: Iterable[tuple[ModelHandle, Sequence[Policy]]],
    prompts: Mapping[tuple[str, str], Sequence[int]],
) -> str:
    """Return a sentence on a grid of two axes whose narrowest and widest local window have no memory in common, or "".

    `models` come with their policies off the baselines, `prompts` are lengths by model and benchmark.
    """
    varied = [name for name, values in axes.items() if len(values) > 1]
    if len(varied) != 2 or "local_window" not in varied:
        return ""
    windows = list(axes["local_window"])
    for model, policies in models:
        by_benchmark = [lengths for (name, _), lengths in prompts.items() if name == model.name]
        for settings in grouped((policy.setting for policy in policies), lambda one: one.policy).values():
            tokens: dict[Any, list[float]] = {}
            for setting in settings:
                kept = [stays(setting, lengths, model.kv_bytes(Storage())) for lengths in by_benchmark]
                if all(kept) and setting.values.get("local_window") in windows:
                    mean = fmean(one.tokens for one in kept if one is not None)
                    tokens.setdefault(setting.values["local_window"], []).append(mean)
            ordered = sorted(tokens, key=lambda window: fmean(tokens[window]))
            if len(ordered) > 1 and (ordered[0], ordered[-1]) in windows_apart({one: tokens[one] for one in ordered}):
                sentence = apart_sentence(ordered)
                return f"{sentence[0].upper()}{sentence[1:]}."
    return ""

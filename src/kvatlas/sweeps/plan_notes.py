"""Sentences of a plan about its models and settings."""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from kvatlas.core import CAP, Problem, apart_sentence, grouped, windows_apart
from kvatlas.cpu.native import why_not
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.policies.budget_rule import stays
from kvatlas.results.manifest import clusters_of
from kvatlas.text import counted


def cluster_notes(benchmark: str, problems: Sequence[Problem]) -> list[str]:
    """Return a note on problems that share something."""
    clusters = clusters_of(problems)
    if not clusters:
        return []
    alone = len(problems) - len(clusters)
    units = counted(len(set(clusters.values())), "cluster")
    if alone:
        units += f" and {counted(alone, 'problem')} alone"
    return [
        f"The {counted(len(problems), 'problem')} of {benchmark} are {units}: these are the units of claims on "
        "problems like these."
    ]


def settings_notes(models: Sequence[ModelHandle], policies: Sequence[Policy]) -> list[str]:
    """Return sentences on what is slow, or not as on a GPU, with these settings of these models on this machine."""
    notes: list[str] = []
    slow = why_not() if any(model.device == "cpu" for model in models) else None
    if slow:
        notes.append(f"{slow} Decoding goes on in plain torch, more slowly.")
    notes += [
        f"The weights of the model {model.name!r} are in float32; --model-option weights=bfloat16 or int8 takes a half "
        "or a quarter of the memory and of the time to read it, and changes texts: compare runs of both."
        for model in models
        if model.shares_weights and model.precision == model.dtype
    ]

    # A number in float32 takes as many bytes as two in the usual types.
    compressing = [policy for policy in policies if isinstance(policy, CompressingPolicy)]
    storages = {policy.storage for policy in compressing if isinstance(policy.budget.kv_budget, str)}
    if len(storages) > 1 and not all(storage.packed for storage in storages):
        notes += [
            f"The model {model.name!r} has a cache in float32: a number takes 4 bytes at kv_bits 16, so that a "
            "kv_budget in bytes holds half as many such tokens as in bfloat16. Give kv_budget in tokens to compare "
            "bits as on a GPU."
            for model in models
            if model.kv_dtype == "float32"
        ]
    return notes


def cap_notes(policies: Sequence[Policy], max_new_tokens: int) -> list[str]:
    """Return a note on caps on thinking that no trace reaches."""
    caps = sorted({policy.setting.values.get(CAP, 0) for policy in policies})
    idle = [str(cap) for cap in caps if cap >= max_new_tokens]
    if not idle:
        return []
    return [f"Nothing is cut at {CAP} {', '.join(idle)}: a trace ends at max_new_tokens, {max_new_tokens:,}."]


def window_sentence(
    axes: Mapping[str, Sequence[Any]],
    models: Sequence[ModelHandle],
    policies: Sequence[tuple[Policy, bool]],
    prompts: Mapping[tuple[str, str], Sequence[int]],
) -> str:
    """Return a sentence on a grid of two axes whose narrowest and widest local window have no memory in common, or "".

    Policies come with True for a baseline, `prompts` are lengths by model and benchmark.
    """
    varied = [name for name, values in axes.items() if len(values) > 1]
    if len(varied) != 2 or "local_window" not in varied:
        return ""

    of_grid = grouped((policy for policy, is_baseline in policies if not is_baseline), lambda one: one.setting.policy)
    for model, group in product(models, of_grid.values()):
        by_benchmark = [lengths for (name, _), lengths in prompts.items() if name == model.name]
        # What each local window keeps under its settings, the mean over benchmarks.
        tokens: dict[Any, list[float]] = {}
        for policy in group:
            found = [stays(policy.setting, lengths, model.kv_bytes(policy.storage)) for lengths in by_benchmark]
            kept_tokens = [one.tokens for one in found if one is not None]
            if kept_tokens:
                tokens.setdefault(policy.setting.values.get("local_window"), []).append(fmean(kept_tokens))

        windows = sorted(tokens, key=lambda window: fmean(tokens[window]))
        if len(windows) > 1 and windows_apart({end: tokens[end] for end in (windows[0], windows[-1])}):
            sentence = apart_sentence(windows)
            return f"{sentence[0].upper()}{sentence[1:]}."
    return ""

"""Methods as somebody ran them, where their code does something else than the method's own paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from kvatlas.core import KvatlasError, Setting
from kvatlas.policies.base import Policy

#: Repositories of the papers' code, each at the commit that was read.
DYNTS, RKV = "Robin930/DynTS at a55dc37", "Zefan-Cai/R-KV at 31cf555"


@dataclass(frozen=True)
class Preset:
    """A policy with values that its user cannot change.

    name: METHOD@WHO, as it is named wherever a policy is.
    values: parameters of `policy` that are fixed; the others are the user's.
    paper: for which it was run so.
    source: the files that were read, in which repository.
    says: what that code does.
    """

    name: str
    policy: str
    values: Mapping[str, Any]
    paper: str
    source: str
    says: str


def _dynts(method: str, policy: str, file: str, says: str, **values: Any) -> Preset:
    """As the DynTS paper ran it: all take the ratio of all older tokens, and no baseline protects the prompt."""
    fixed = {"ratio_over": "older", "keep_prompt": False, **values}
    return Preset(f"{method}@dynts-paper", policy, fixed, "arXiv 2601.18383", f"{file}, {DYNTS}", says)


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        _dynts(
            "dynts",
            "dynts",
            "inference/dynts.py (pruning2)",
            "Prompt and answer have infinite scores and take the ratio's places first: what does not fit is dropped.",
            keep_prompt=True,
            strict_budget=True,
        ),
        _dynts(
            "window",
            "window",
            "inference/window.py (sink_type none)",
            "The newest tokens alone. Its kept window is local_window plus the ratio's share.",
        ),
        _dynts(
            "streaming",
            "streaming",
            "inference/window.py (sink_type native), recipes/inference/streaming_*.sh",
            "The first 10 tokens and the newest. There the 10 come on top of the kept window, here out of the ratio. "
            "In every batch but the first they are the first cached places, padding included.",
            sinks=10,
        ),
        _dynts(
            "sepllm",
            "sepllm",
            "inference/sep.py, utils/utils.py (get_separator)",
            "The newest separators, no first tokens; what they leave of the ratio stays empty. In a batch, sequences "
            "with fewer separators are filled up with their newest tokens to the number of the one with most: this is "
            "a batch of one.",
            sinks=0,
            separators="single",
            rest="empty",
        ),
        _dynts(
            "h2o",
            "tova",
            "inference/h2o.py, utils/attention.py",
            "The sum over steps is overwritten by the newest step's attention, mean over layers and heads.",
            scope="global",
        ),
        _dynts(
            "snapkv",
            "snapkv",
            "inference/snapkv.py, recipes/inference/snapkv_*.sh",
            "Votes of the newest 33 queries (34 after the first compression), mean over layers and heads, not pooled.",
            scope="global",
            queries=33,
            kernel=1,
        ),
        _dynts(
            "dynts-random",
            "dynts-random",
            "inference/dynts.py (pruning2)",
            "A random subset of all older tokens, the prompt's among them.",
        ),
        _dynts(
            "dynts-bottom",
            "dynts-bottom",
            "inference/dynts.py (pruning2)",
            "The smallest scores, of which the prompt's are infinite: it goes first.",
        ),
        Preset(
            "rkv@r-kv-paper",
            "rkv",
            {
                "queries": 8,
                "kernel": 7,
                "mix": 0.1,
                "threshold": 0.5,
                "unlike": "first",
                "scope": "head",
                "local_window": 8,
                "ratio_over": "older",
                "keep_prompt": False,
            },
            "arXiv 2505.24133",
            f"HuggingFace/run_math.py, HuggingFace/rkv/utils.py, rkv/compression/r1_kv.py, {RKV}",
            "The prompt competes, and no token stays for being recent beside the 8 of the observation window. A budget "
            "B there is kv_budget B + 128 and ratio (B - 8) / (B + 120), rounded up.",
        ),
    )
}


class _Fixed(Policy):
    """What a preset adds to its policy: values that are given, and refused where others are asked for."""

    preset: ClassVar[Preset]

    @classmethod
    def of(cls, setting: Setting) -> Self:
        fixed = cls.preset.values
        for name, value in setting.values.items():
            if name in fixed and value != fixed[name]:
                raise KvatlasError(
                    f"The preset {cls.name!r} fixes {name} = {fixed[name]}, {value!r} was asked for; leave it out, or "
                    f"take the policy {cls.preset.policy!r}."
                )
        return super().of(Setting.of(setting.policy, **{**setting.values, **fixed}))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.setting,)


def _again(setting: Setting) -> Policy:
    from kvatlas import policies

    return policies.of(setting)


@cache
def policy_of(name: str) -> type[Policy]:
    """The policy that a preset is, under the preset's name; KvatlasError lists the presets where there is none."""
    from kvatlas.policies import policies

    preset = PRESETS.get(name)
    if preset is None:
        raise KvatlasError(f"Unknown preset {name!r}; valid are: {', '.join(PRESETS)}.")
    kind = policies.get(preset.policy)
    about = {
        "name": name,
        "preset": preset,
        "summary": f"{preset.policy} with {written(preset)}",
        "paper": f"as run for {preset.paper}",
        "published": {},
        "__doc__": f"{preset.says}\n\n    Source: {preset.source}.\n",
    }
    return type(kind.__name__, (_Fixed, kind), about)


def written(preset: Preset) -> str:
    """The fixed values of a preset as text."""
    return ", ".join(f"{name}={value}" for name, value in preset.values.items())

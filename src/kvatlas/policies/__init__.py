"""Which tokens stay: one file per method, found by name."""

from kvatlas.core import KvatlasError, Setting
from kvatlas.policies.base import (
    CacheView,
    CompressingPolicy,
    Policy,
    Reference,
    Scope,
    Signal,
    Step,
    scope_param,
    select_tokens,
)
from kvatlas.policies.budget import share
from kvatlas.policies.presets import PRESETS, policy_of
from kvatlas.policies.valid_values import choice_param, float_param, int_param
from kvatlas.registry import Registry


def _fault(name: str, value: object) -> str:
    """What keeps a plug-in's object from being a policy."""
    if not (isinstance(value, type) and issubclass(value, Policy)):
        return f"it is {value!r}; valid are subclasses of kvatlas.policies.CompressingPolicy"
    if getattr(value, "name", None) != name:
        return f"its name is {getattr(value, 'name', None)!r}; valid is that of its entry point, {name!r}"
    if not isinstance(getattr(value, "summary", None), str):
        return "it has no summary; valid is a text"
    if not isinstance(value.scope, Scope) or not all(isinstance(signal, Signal) for signal in value.observes):
        return "its scope or what it observes is none of kvatlas.policies.Scope and Signal"
    return ""


class Policies(Registry[type[Policy]]):
    """Policies by name; METHOD@WHO is a preset of one."""

    def get(self, name: str) -> type[Policy]:
        return policy_of(name) if "@" in name else super().get(name)


policies = Policies(
    "policy",
    "kvatlas.policies",
    {
        "full": "kvatlas.policies.full:Full",
        "window": "kvatlas.policies.window:Window",
        "random": "kvatlas.policies.random:Random",
        "dynts": "kvatlas.policies.dynts:DynTS",
        "dynts-random": "kvatlas.policies.dynts_random:DynTSRandom",
        "dynts-bottom": "kvatlas.policies.dynts_bottom:DynTSBottom",
        "dynts-noprompt": "kvatlas.policies.dynts_noprompt:DynTSNoPrompt",
        "streaming": "kvatlas.policies.streaming:Streaming",
        "sepllm": "kvatlas.policies.sepllm:SepLLM",
        "h2o": "kvatlas.policies.h2o:H2O",
        "snapkv": "kvatlas.policies.snapkv:SnapKV",
        "rkv": "kvatlas.policies.rkv:RKV",
        "tova": "kvatlas.policies.tova:TOVA",
        "keydiff": "kvatlas.policies.keydiff:KeyDiff",
        "lazyeviction": "kvatlas.policies.lazyeviction:LazyEviction",
        "vase": "kvatlas.policies.vase:VaSE",
        "triattention": "kvatlas.policies.triattention:TriAttention",
        "oracle": "kvatlas.policies.oracle:Oracle",
    },
    _fault,
)


def of(setting: Setting) -> Policy:
    """The policy of a setting, its parameters checked."""
    return policies.get(setting.policy).of(setting)


__all__ = [
    "PRESETS",
    "CacheView",
    "CompressingPolicy",
    "KvatlasError",
    "Policy",
    "Reference",
    "Scope",
    "Signal",
    "Step",
    "choice_param",
    "float_param",
    "int_param",
    "of",
    "policies",
    "scope_param",
    "select_tokens",
    "share",
]

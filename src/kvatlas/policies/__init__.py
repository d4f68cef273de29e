"""Which tokens stay: one file per method, found by name."""

from kvatlas.core import KvatlasError, Setting
from kvatlas.policies.base import Cached, Policy, Scope, Selection, Signal, Step, select, share
from kvatlas.registry import Registry

policies: Registry[type[Policy]] = Registry(
    "policy",
    "kvatlas.policies",
    {
        "full": "kvatlas.policies.full:Full",
        "window": "kvatlas.policies.window:Window",
        "random": "kvatlas.policies.random:Random",
        "dynts": "kvatlas.policies.dynts:DynTS",
        "streaming": "kvatlas.policies.streaming:Streaming",
        "h2o": "kvatlas.policies.h2o:H2O",
        "snapkv": "kvatlas.policies.snapkv:SnapKV",
        "rkv": "kvatlas.policies.rkv:RKV",
    },
)


def of(setting: Setting) -> Policy:
    """The policy of a setting, its parameters checked."""
    return policies.get(setting.policy).of(setting)


__all__ = [
    "Cached",
    "KvatlasError",
    "Policy",
    "Scope",
    "Selection",
    "Signal",
    "Step",
    "of",
    "policies",
    "select",
    "share",
]

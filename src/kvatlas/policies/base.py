"""Former module of the contract of a policy, whose names are in `kvatlas.policies`."""

from __future__ import annotations

from kvatlas.former_names import former_names

_NAMES = ("CacheView", "CompressingPolicy", "Policy", "ReferenceTrace", "Scope", "Signal", "Step")
__getattr__ = former_names(__name__, {name: f"kvatlas.policies:{name}" for name in _NAMES})

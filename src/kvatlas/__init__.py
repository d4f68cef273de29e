"""kvatlas: maps of what a reasoning model can forget under KV-cache token selection."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvatlas.integrations.transformers import generate

__version__ = "0.1.0"
__all__ = ["__version__", "generate"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and only who generates needs it.
    if name == "generate":
        return import_module("kvatlas.integrations.transformers").generate
    raise AttributeError(f"module 'kvatlas' has no attribute {name!r}")

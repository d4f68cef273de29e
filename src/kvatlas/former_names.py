"""Names of the last version that still work: they warn, and go with the next release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def warn_of_former_name(former: str, present: str) -> None:
    """Warn the caller of the function that calls this one."""
    warnings.warn(f"{former} is {present} since version 0.2.", DeprecationWarning, stacklevel=3)


def former_names(module: str, addresses: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module; `addresses` are the present MODULE:NAME of each of its former names."""

    def get(name: str) -> Any:
        if name not in addresses:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, present = addresses[name].partition(":")
        warn_of_former_name(f"{module}.{name}", f"{home}.{present}")
        return getattr(import_module(home), present)

    return get

"""kvatlas: maps of what a reasoning model can forget under KV-cache token selection.

    run = kvatlas.open_run("runs/demo")          # or kvatlas.sweep(spec, out), kvatlas.run(model, benchmark, ...)
    run.maps()[0].plot("map.png")                # heatmaps; a notebook shows them
    run.cells()                                  # a DataFrame: values in [0, 1], tokens, seconds
    run.compare("dynts", "random")               # in pairs, on the same problems
    run.recommend(), run.describe()              # what to choose; everything as text
    run.report("report.html")                    # one self-contained page
    kvatlas.gate("before/", "after/")            # did a change cost answers?

Lengths are in tokens, values and grades are shares in [0, 1]. Errors are `KvatlasError`, each with one sentence.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Measure

if TYPE_CHECKING:
    from kvatlas.api import Description, Heatmap, Run, add_column, open_run, register, run, sweep
    from kvatlas.gates.gate import gate
    from kvatlas.integrations.transformers import generate

__version__ = "0.2.0.dev0"
__all__ = [
    "Description",
    "Heatmap",
    "KvatlasError",
    "Measure",
    "Run",
    "__version__",
    "add_column",
    "gate",
    "generate",
    "open_run",
    "register",
    "run",
    "sweep",
]

#: Statistics and transformers take seconds to import, so both are imported at first use.
_HOMES = dict.fromkeys(__all__, "kvatlas.api")
_HOMES |= {"gate": "kvatlas.gates.gate", "generate": "kvatlas.integrations.transformers"}
#: Names of authors of policies and benchmarks, which guides import from these modules.
_POLICY = ("CacheView", "CompressingPolicy", "Scope", "Signal", "Step", "float_param", "int_param", "permit")
_HOMES |= dict.fromkeys(_POLICY, "kvatlas.policies") | dict.fromkeys(("Grade", "Problem", "Status"), "kvatlas.core")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        with suppress(ModuleNotFoundError):
            return import_module(f"kvatlas.{name}")
    raise AttributeError(f"module 'kvatlas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

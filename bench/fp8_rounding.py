"""Is it the type or the build? fp8 keys and values, rounded to the nearest number or cut off, in kvatlas's engine.

    python recipes/engines/merged.py runs/smollm2-think
    python bench/fp8_rounding.py runs/smollm2-think runs/fp8 --out bench/results/fp8_rounding.json

The same model, problems and sampling as recipes/engines/vllm.yaml, whose build of vLLM cuts numbers off. Every new key
and value is first in bfloat16, as there, and has a scale of 1. The engine's own comparison with transformers, which
refuses fp8_e5m2, is left out; everything else is as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvatlas
import kvatlas.engine.engine
from common import arguments, keep
from engine_maps import lines as lines_of_map
from engine_maps import numbers_of as numbers_of_map
from engine_maps import points
from kvatlas.core import Status, Trace
from kvatlas.engine.native_backend import CpuBackend
from outcomes import Json, from_hex, to_hex

PAGES = ("docs/findings/engines.md",)
#: Bits behind the leading one, the least exponent of a normal number, and torch's type, which rounds to the nearest.
TYPES = {"fp8_e4m3": (3, -6, torch.float8_e4m3fn), "fp8_e5m2": (2, -14, torch.float8_e5m2)}
WAYS = ("nearest", "cut")
PROBLEMS = 60


def in_fp8(numbers: Tensor, name: str, way: str) -> Tensor:
    """Return numbers as they are read from an fp8 cache with a scale of 1, in float32."""
    bits, least, dtype = TYPES[name]
    numbers = numbers.bfloat16().float()
    if way == "nearest":
        largest = torch.finfo(dtype).max
        return numbers.clamp(-largest, largest).to(dtype).float()
    _, exponents = torch.frexp(numbers)
    # A number is its part in [0.5, 1) times 2^exponent: its leading bit is worth 2^(exponent - 1).
    step = torch.ldexp(torch.ones_like(numbers), (exponents - 1).clamp(min=least) - bits)
    return (numbers / step).trunc() * step


@contextmanager
def cached_as(name: str, way: str) -> Iterator[None]:
    """Let the CPU backend write new keys and values in fp8."""
    attend = CpuBackend.attend

    def attend_in_fp8(self: CpuBackend, batch: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(self, batch, layer, query, in_fp8(key, name, way), in_fp8(value, name, way))

    # Fused layers would write what they compute.
    CpuBackend.attend, CpuBackend.computes_layers = attend_in_fp8, False  # type: ignore[method-assign]
    rehearse = kvatlas.engine.engine.rehearse
    kvatlas.engine.engine.rehearse = lambda *_: None
    try:
        yield
    finally:
        CpuBackend.attend, CpuBackend.computes_layers = attend, True  # type: ignore[method-assign]
        kvatlas.engine.engine.rehearse = rehearse


def decoded(folder: Path, run_folder: Path) -> list[Trace]:
    """Return the traces of the problems with the full cache, by problem; a run of its own is resumed."""
    run = kvatlas.run(
        f"hf:{folder}",
        "WORDS5-9",
        out=run_folder,
        problems=PROBLEMS,
        temperature=0,
        max_new_tokens=600,
        model_options={"weights": "bfloat16"},
        workers=1,
    )
    return sorted(run.traces(), key=lambda trace: trace.problem)


def entry_of(traces: list[Trace], reference: list[Trace], policy: str, **values: str) -> Json:
    """Return the outcomes of an arm in the form of `engine_maps`."""
    pairs = list(zip(traces, reference, strict=True))
    return {
        "policy": policy,
        "values": values,
        "baseline": policy == "reference",
        "kv_bytes": [23040, 0] if policy == "reference" else [11520, 0],
        "right": to_hex([trace.grade.correct for trace in traces]),
        "changed": to_hex([trace.text != other.text for trace, other in pairs]),
        "truncated": to_hex([trace.grade.status is Status.TRUNCATED for trace in traces]),
        "output_tokens": [trace.usage.output_tokens for trace in traces],
    }


def numbers_of(outcomes: Json) -> Json:
    """Return the numbers of the map, and those of rounding to the nearest minus cutting off, in points, by type."""
    right_of = {tuple(entry["values"].values()): from_hex(entry["right"]) for entry in outcomes["settings"]}
    gains = {name: points(right_of[name, "nearest"], right_of[name, "cut"]) for name in TYPES}
    return {**numbers_of_map(outcomes), "nearest_minus_cut": gains}


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    gains = []
    for name, gain in numbers["nearest_minus_cut"].items():
        gains.append(f"{name} {gain['value']:.1f} points ({gain['low']:.1f} to {gain['high']:.1f})")
    return [*lines_of_map(numbers), f"Rounding gains over cutting off: {', '.join(gains)}."]


def main() -> None:
    options = arguments(__doc__, "folder", "runs")
    reference = decoded(options.folder, options.runs / "reference")
    settings = [entry_of(reference, reference, "reference")]
    for name in TYPES:
        for way in WAYS:
            with cached_as(name, way):
                traces = decoded(options.folder, options.runs / f"{name}-{way}")
            settings.append(entry_of(traces, reference, "served", cache=name, rounding=way))
    outcomes = {
        "model": "SmolLM2-think",
        "benchmark": "WORDS5-9",
        "problems": [trace.problem for trace in reference],
        "spec": {
            "models": [{"model": "", "name": "SmolLM2-think"}],
            "axes": {"cache": list(TYPES), "rounding": list(WAYS)},
            "lose_at_most": 7,
        },
        "settings": settings,
    }
    keep(options, outcomes=outcomes, numbers=numbers_of(outcomes))


if __name__ == "__main__":
    main()

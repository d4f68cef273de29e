"""Outcomes by problem of a run, as compact data from which the run's statistics can be computed again.

`write_run` writes a store with these outcomes, costs and settings and no tokens or texts, which `kvatlas describe`
reads like the original. Right answers, compressed traces and missing traces are bits, the first problem first, as
hexadecimal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.results import Manifest, Store
from kvatlas.results.manifest import Expected

Json = dict[str, Any]


def to_hex(bits: Sequence[bool]) -> str:
    return f"{int('1' + ''.join('01'[bit] for bit in bits), 2):x}"


def from_hex(text: str) -> list[bool]:
    # The leading 1 keeps the zeros of the first problems.
    return [digit == "1" for digit in f"{int(text, 16):b}"[1:]]


def write_run(outcomes: Json, folder: Path) -> None:
    """Write a run with these outcomes, of one sample of each problem, into a new folder."""
    model = outcomes["model"]
    benchmark = outcomes["benchmark"]
    problems = tuple(f"{benchmark}-{number:03d}" for number in outcomes["problems"])
    kv_bytes = tuple(outcomes["kv_bytes"])
    key = f"outcomes {model}"
    cells = []
    traces = []
    for entry in outcomes["settings"]:
        setting = Setting.from_parameters(entry["policy"], **entry["values"])
        cells.append(Expected(model, benchmark, setting, key, problems, 1, entry["baseline"], kv_bytes))
        # One token for each setting: texts that are all the same would say that nothing was compressed.
        empty = Trace(model, benchmark, "", 0, setting, (len(cells),), "", WRONG, NO_COSTS)
        traces += [(key, trace) for trace in traces_of(entry, empty, outcomes, problems)]
    axes = tuple((name, tuple(values)) for name, values in outcomes["axes"])
    manifest = Manifest(axes, tuple(cells), spec={}, provenance={})
    with Store.create(folder) as store:
        store.put_manifest(manifest)
        store.add_all(traces)


WRONG = Grade(False, 0.0, "", Status.OK)
NO_COSTS = Usage(
    prompt_tokens=0,
    output_tokens=0,
    thinking_tokens=0,
    peak_kv_tokens=0,
    mean_kv_tokens=0.0,
    compressions=0,
    seconds=None,
)


def traces_of(entry: Json, empty: Trace, outcomes: Json, problems: Sequence[str]) -> list[Trace]:
    """Return the traces of one setting: `empty` with the outcome and the costs of each problem that is not missing."""
    missing = from_hex(entry["missing"])
    right = from_hex(entry["right"])
    truncated = from_hex(entry["truncated"])
    compressed = from_hex(entry["compressed"])
    traces = []
    for index, problem in enumerate(problems):
        if missing[index]:
            continue
        status = Status.TRUNCATED if truncated[index] else Status.OK
        grade = Grade(right[index], float(right[index]), "", status)
        usage = replace(
            NO_COSTS,
            prompt_tokens=outcomes["prompt_tokens"][index],
            output_tokens=entry["output_tokens"][index],
            mean_kv_tokens=float(entry["mean_kv_tokens"][index]),
            compressions=int(compressed[index]),
        )
        traces.append(replace(empty, problem=problem, grade=grade, usage=usage))
    return traces

"""Outcomes by problem of a run, as compact data from which the run's statistics can be computed again.

`write_run` writes a store with these outcomes, costs and settings, which `kvatlas describe` reads like the original.
Right answers, changed texts, compressed traces and missing traces are bits, the first problem first, as hexadecimal
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    place = (outcomes["model"], outcomes["benchmark"])
    problems = tuple(f"{place[1]}-{name:03d}" if isinstance(name, int) else name for name in outcomes["problems"])
    spec = outcomes.get("spec", {})
    cells = []
    traces = []
    for entry in outcomes["settings"]:
        setting = Setting.from_parameters(entry["policy"], **entry["values"])
        kv_bytes = entry.get("kv_bytes", outcomes.get("kv_bytes"))
        key = str(setting)
        cells.append(Expected(*place, setting, key, problems, 1, entry["baseline"], kv_bytes and tuple(kv_bytes)))
        traces += [(key, trace) for trace in traces_of(entry, cells[-1], outcomes)]
    axes = tuple((name, tuple(values)) for name, values in outcomes.get("axes", spec.get("axes", {}).items()))
    with Store.create(folder) as store:
        store.put_manifest(Manifest(axes, tuple(cells), spec, provenance={}))
        store.add_all(traces)


def traces_of(entry: Json, cell: Expected, outcomes: Json) -> Iterator[Trace]:
    """Yield the traces of one setting. A text that may have changed names the setting, another its problem alone."""
    count = len(cell.problems)
    bits = {name: from_hex(entry[name]) for name in ("right", "truncated")}
    for name, otherwise in (("missing", False), ("changed", True), ("compressed", False)):
        bits[name] = from_hex(entry[name]) if name in entry else [otherwise] * count
    prompt_tokens = outcomes.get("prompt_tokens", [0] * count)
    mean_kv_tokens = entry.get("mean_kv_tokens", [0] * count)
    for i, problem in enumerate(cell.problems):
        if bits["missing"][i]:
            continue
        text = f"{cell.setting} {problem}" if bits["changed"][i] else problem
        status = Status.TRUNCATED if bits["truncated"][i] else Status.OK
        grade = Grade(bits["right"][i], float(bits["right"][i]), "", status)
        usage = Usage(
            prompt_tokens=prompt_tokens[i],
            output_tokens=entry["output_tokens"][i],
            thinking_tokens=0,
            peak_kv_tokens=0,
            mean_kv_tokens=float(mean_kv_tokens[i]),
            compressions=int(bits["compressed"][i]),
            seconds=None,
        )
        yield Trace(cell.model, cell.benchmark, problem, 0, cell.setting, (), text, grade, usage)

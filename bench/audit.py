"""Recompute from outcomes by problem the intervals and tests that documents quote: `make audit`.

For each document in bench/results that holds outcomes by problem, its numbers are computed again by the statistics of
this version and compared with the stored ones, and each line that holds such numbers must be in one of its pages.

    python bench/audit.py                        # all documents
    python bench/audit.py --renew equal_arms     # write the numbers of one anew, after a change of its program
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import autopsies
import engine_maps
import engines
import error_rates
import fp8_rounding
import real_gpu
import vllm_equality
import vllm_plugin
from common import arguments

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
#: Programs whose document holds outcomes by problem, by the document's name.
AUDITABLE = {
    "real_gpu": real_gpu,
    "equal_arms": autopsies,
    "engine_maps": engine_maps,
    "key_biases": engine_maps,
    "vllm_types": engine_maps,
    "fp8_rounding": fp8_rounding,
    "vllm_equality": vllm_equality,
    "vllm_plugin": vllm_plugin,
}


def differences(stored: Any, computed: Any, place: str = "") -> Iterator[str]:
    """Yield the places where two documents differ by more than rounding."""
    if isinstance(stored, dict) and isinstance(computed, dict):
        for name in dict.fromkeys([*stored, *computed]):
            yield from differences(stored.get(name), computed.get(name), f"{place}/{name}")
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        for index, pair in enumerate(zip(stored, computed, strict=True)):
            yield from differences(*pair, f"{place}/{index}")
    elif isinstance(stored, float) and isinstance(computed, float | int):
        if not math.isclose(stored, computed, rel_tol=1e-3, abs_tol=1e-3):
            yield f"{place}: stored {stored}, computed {computed}"
    elif stored != computed:
        yield f"{place}: stored {stored}, computed {computed}"


def count_numbers(document: Any) -> int:
    if isinstance(document, dict):
        return sum(map(count_numbers, document.values()))
    if isinstance(document, list):
        return sum(map(count_numbers, document))
    return isinstance(document, int | float) and not isinstance(document, bool)


def audit(name: str) -> list[str]:
    """Return what is wrong with a document and its page."""
    program = AUDITABLE[name]
    document = json.loads((RESULTS / f"{name}.json").read_text())
    # Through JSON, as the stored numbers went.
    computed = json.loads(json.dumps(program.numbers_of(document["outcomes"])))
    faults = list(differences(document["numbers"], computed))
    faults += missing_lines(program.lines(computed), program.PAGES)
    print(f"{name}.json, {', '.join(program.PAGES)}: {count_numbers(computed):,} numbers, {len(faults)} faults")
    return faults


def missing_lines(lines: Sequence[str], pages: Sequence[str]) -> list[str]:
    """Return a fault for each line that is in none of the pages."""
    found = {line for page in pages for line in (ROOT / page).read_text().splitlines()}
    return [f"{', '.join(pages)}: there is no line {line}" for line in lines if line not in found]


def renew(name: str) -> None:
    """Write the numbers of a document anew, as they follow from its outcomes."""
    path = RESULTS / f"{name}.json"
    document = json.loads(path.read_text())
    document["numbers"] = AUDITABLE[name].numbers_of(document["outcomes"])
    path.write_text(json.dumps(document) + "\n")


def main() -> None:
    options = arguments(__doc__, renew="")
    if options.renew:
        renew(options.renew)
        return
    faults = [fault for name in AUDITABLE for fault in audit(name)]
    rates = error_rates.every_line()
    print(f"documents of error rates, {', '.join(error_rates.PAGES)}: {len(rates)} rows")
    faults += missing_lines(rates, error_rates.PAGES)
    speeds = engines.lines()
    print(f"{', '.join(engines.DOCUMENTS)}, bench/README.md: {len(speeds)} rows")
    faults += missing_lines(speeds, ("bench/README.md",))
    print("\n".join(faults))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

"""Split a run into the first problems of each benchmark and the others, for a second look at what the first suggest.

    python bench/split_run.py --run runs/real/maps --first 38 --into runs/split
    kvatlas describe runs/split/first
    kvatlas map runs/split/later --shared --out later.png

Both runs have all settings, and traces of their own problems alone. Prints one JSON document: `settings` has Pass@1 of
each setting in percent in both, `correlation` that of these numbers without the baselines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvatlas
from common import arguments, keep, part_of
from kvatlas.results import Store


def values_of(folder: Path) -> dict[str, tuple[float, bool]]:
    """Return Pass@1 of each setting in percent, and whether it is a baseline."""
    cells = kvatlas.open_run(folder).data.cells
    return {
        f"{cell.model} {cell.benchmark} {cell.setting}": (100 * float(np.nanmean(cell.values())), cell.baseline)
        for cell in cells
    }


def main() -> None:
    options = arguments(__doc__, run=str, first=int, into=str)
    folders = {"first": Path(options.into) / "first", "later": Path(options.into) / "later"}
    problems = {"first": slice(options.first), "later": slice(options.first, None)}
    with Store.open(Path(options.run)) as whole:
        for name, folder in folders.items():
            whole.copy(folder)
            with Store.open(folder) as store:
                store.put_manifest(part_of(whole.manifest(), problems[name]))
    first, later = (values_of(folder) for folder in folders.values())
    pairs = [(first[name][0], later[name][0]) for name in first if not first[name][1]]
    correlation = float(np.corrcoef(np.array(pairs).T)[0, 1])
    settings: list[dict[str, Any]] = [
        {"setting": name, "first": round(first[name][0], 2), "later": round(later[name][0], 2)} for name in first
    ]
    keep(options, correlation=round(correlation, 3), settings=settings)


if __name__ == "__main__":
    main()

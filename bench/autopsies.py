"""The findings of the autopsies of runs, cell by cell: `kvatlas autopsy` made them.

For each cell its summary with intervals, and a row for each lost answer: the problem, the kind of death, the number of
tokens of the cause, the spans tried, the replays of the search and of the tests, and how many of the held-out answers
are right in each arm.

    kvatlas sweep recipes/embedded/autopsy.yaml --out runs/autopsy
    kvatlas autopsy runs/autopsy --policy dynts --most 120
    python bench/autopsies.py --runs runs/autopsy --out bench/results/autopsies.json
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas.autopsy.autopsies import Autopsy, key_of, read_autopsies
from kvatlas.autopsy.driver import find_lost
from kvatlas.autopsy.summary import ARMS, summarise
from kvatlas.results import Store


def row(autopsy: Autopsy) -> list[Any]:
    replays = [autopsy.replays, autopsy.control_replays]
    right = [sum(autopsy.held_out.get(arm, ())) for arm in ARMS] if autopsy.held_out else None
    return [autopsy.problem, autopsy.death, len(autopsy.tokens), autopsy.spans, *replays, right]


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """Return the document of each cell of a run that has autopsies, in the order in which they were asked for."""
    found = read_autopsies(folder)
    with Store.open(folder) as store:
        manifest = store.manifest()
    examined = {(key[0], key[1]) for key in found}
    settings = {cell.setting for cell in manifest.expected if (cell.run_key, cell.setting.id) in examined}
    documents = []
    for cell in chain.from_iterable(find_lost(folder, setting) for setting in settings):
        keys = list(map(key_of, cell.lost))
        autopsies = [found[key] for key in keys if key in found]
        documents.append(
            {
                "model": cell.model,
                "benchmark": cell.benchmark,
                "setting": str(cell.setting),
                "seed": manifest.spec["seed"],
                "answers": cell.answers,
                "lost": len(cell.lost),
                "summary": summarise(autopsies, len(cell.lost) / cell.answers),
                "rows": list(map(row, autopsies)),
            }
        )
    return documents


def main() -> None:
    args = arguments(__doc__, runs=["runs/autopsy"])
    cells = list(chain.from_iterable(cells_of(Path(name)) for name in args.runs))
    keep(args, bench="autopsies", arms=list(ARMS), cells=cells)


if __name__ == "__main__":
    main()

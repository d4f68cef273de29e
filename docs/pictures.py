"""Redraw the pictures of README and docs from a run of `kvatlas demo`: `python docs/pictures.py runs/demo`.

`make example` runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trace_picture import draw, find_lost

from kvatlas.cli import command

IMAGES = Path(__file__).parent / "images"


def commands(run: str) -> dict[str, list[str]]:
    """Return the commands of docs/figures.md by the names of their pictures."""
    llama, qwen = "published:dynts_r1_llama", "published:dynts_r1_qwen"
    kept = "dynts local_window=64 ratio=0.1"
    systems = ["tiny-llama full", f"tiny-llama {kept}", "tiny-qwen full", f"tiny-qwen {kept}"]
    pairs = [word for system in systems for word in ("--policy", system)]
    return {
        "demo-map": ["map", run, "--mean"],
        "demo-losses": ["map", run, "--loss-by-memory"],
        "gallery-plain": ["map", llama, "--look", "plain=true"],
        "gallery-llama": ["map", llama],
        "gallery-qwen": ["map", qwen, "--own"],
        "gallery-means": ["map", f"{llama}_mean", f"{qwen}_mean", "--mean", "--own"],
        "gallery-pairs": ["compare", run, *pairs, "--metric", "progress"],
        "gallery-density": ["compare", run, *pairs, "--metric", "progress", "--look", "kind=density"],
        "gallery-decay": ["draw", "curves", run, "--policy", systems[0], "--policy", systems[2]],
    }


def main(folder: str) -> None:
    """Redraw all pictures."""
    for name, words in commands(folder).items():
        command()([*words, "--look", "columns=2", "--out", str(IMAGES / f"{name}.png")], standalone_mode=False)
        (IMAGES / f"{name}.data.csv").unlink(missing_ok=True)
    draw(find_lost(Path(folder)), IMAGES / "trace.png")


if __name__ == "__main__":
    main(sys.argv[1])

"""Redraw the pictures of README and docs from a run of `kvatlas demo`: `python docs/pictures.py runs/demo`.

The captions of docs/figures.md become what the figures say. `make example` runs it.
"""

from __future__ import annotations

import html
import re
import sys
import tempfile
from pathlib import Path

from trace_picture import draw, find_lost

from kvatlas.cli import command

IMAGES = Path(__file__).parent / "images"
GUIDE = Path(__file__).parent / "figures.md"


def commands(run: str) -> dict[str, list[str]]:
    """Return the commands of docs/figures.md by the names of their pictures."""
    llama, qwen = "published:dynts_r1_llama", "published:dynts_r1_qwen"
    # Settings that lose answers, of which pairs have something to show.
    narrow = "dynts local_window=16 ratio=0.1"
    wide = "dynts local_window=64 ratio=0.1"
    pairs = [f"{model} {setting}" for model in ("tiny-llama", "tiny-qwen") for setting in (narrow, wide)]
    return {
        "demo-answer": ["map", run, "--forest"],
        "demo-map": ["map", run, "--mean"],
        "demo-cost": ["map", run, "--cost", "memory"],
        "gallery-plain": ["map", llama, "--look", "plain=true"],
        "gallery-llama": ["map", llama],
        "gallery-qwen": ["map", qwen, "--own"],
        "gallery-means": ["map", llama, qwen, "--mean", "--own"],
        "gallery-pairs": ["compare", run, *pairs, "--metric", "progress"],
    }


def main(folder: str) -> None:
    """Redraw all pictures, and write their captions."""
    for name, words in commands(folder).items():
        command()([*words, "--look", "columns=2", "--out", str(IMAGES / f"{name}.png")], standalone_mode=False)
        (IMAGES / f"{name}.data.csv").unlink(missing_ok=True)
        GUIDE.write_text(with_caption(GUIDE.read_text("utf-8"), name, caption(words)), "utf-8")
    draw(find_lost(Path(folder)), IMAGES / "trace.png")


def caption(words: list[str]) -> str:
    """Return what a figure says of its data: its title, else the names of its panels."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "figure.svg"
        command()([*words, "--look", "columns=2", "--out", str(path)], standalone_mode=False)
        svg = path.read_text("utf-8")
    # Bold text of the size of titles, and of the size of names.
    title, names = (re.findall(rf"font-weight: 700; font-size: {size}px[^>]*>([^<]*)", svg) for size in ("9", "7.5"))
    return html.unescape(" ".join(title) or ", ".join(dict.fromkeys(names)))


def with_caption(guide: str, name: str, text: str) -> str:
    """Return a guide in which the picture of this name has a caption."""
    image = f"](images/{name}.png)"
    return re.sub(rf"!\[[^\n]*?{re.escape(image)}", lambda _: f"![{text}{image}", guide)


if __name__ == "__main__":
    main(sys.argv[1])

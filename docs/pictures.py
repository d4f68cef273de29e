"""Redraw the pictures of README and gallery from a run of `kvatlas demo`: `python docs/pictures.py runs/demo`.

`make example` runs it. The picture of a trace needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from kvatlas.cli import app
from kvatlas.report.app.run import AppRun, Place, open_runs
from kvatlas.report.app.server import Server
from kvatlas.results import Store

#: Twelve lines around the departure.
SHORTER = """() => {
  for (const box of document.querySelectorAll('.pair pre')) {
    box.style.height = '18rem';
    centre(box, box.querySelector('.parts'));
  }
}"""
IMAGES = Path(__file__).parent / "images"
#: The setting of the trace, and the most tokens that its picture has room for.
SETTING, MOST = "dynts(local_window=16, ratio=0.1)", 330


def commands(run: str) -> dict[str, list[str]]:
    """Return the commands of docs/gallery.md by the names of their pictures."""
    llama, qwen = "published:dynts_r1_llama", "published:dynts_r1_qwen"
    kept = "dynts local_window=64 ratio=0.5"
    systems = ["tiny-llama full", f"tiny-llama {kept}", "tiny-qwen full", f"tiny-qwen {kept}"]
    pairs = [word for system in systems for word in ("--policy", system)]
    return {
        "demo-map": ["map", run, "--mean"],
        "gallery-llama": ["map", llama],
        "gallery-qwen": ["map", qwen, "--own"],
        "gallery-means": ["map", f"{llama}_mean", f"{qwen}_mean", "--mean", "--own"],
        "gallery-pairs": ["compare", run, *pairs, "--metric", "progress"],
        "gallery-decay": ["draw", "curves", run, "--policy", systems[0], "--policy", systems[2]],
    }


def lost_trace(run: AppRun) -> Place:
    """Return the trace that had lost most of its tokens where it departs from the right one of the full cache."""
    found: dict[Place, float] = {}
    numbers = [
        number for number, cell in enumerate(run.document["cells"][: len(run.marks)]) if cell["short"] == SETTING
    ]
    with run.data.store() as store:
        for place in run.places(numbers):
            full = run.full(place)
            if full is None or run.mark(full) != "r" or run.mark(place) == "r":
                continue
            trace, other = store.trace(run.key(place)), store.trace(run.key(full))
            pairs = enumerate(zip(trace.tokens, other.tokens, strict=False))
            at = next((index for index, (own, its) in pairs if own != its), 0)
            if at < 100 or max(len(trace.tokens), len(other.tokens)) > MOST or trace.eviction_trace is None:
                continue
            left = trace.eviction_trace.evicted_at[int(trace.usage.prompt_tokens or 0) :][:at]
            found[place] = sum(0 < step <= at for step in left) / at
    return max(found, key=lambda place: found[place])


def draw_trace(folder: Path, out: Path) -> None:
    """Draw a lost trace at its departure beside the full cache's."""
    from playwright.sync_api import sync_playwright

    (run,) = open_runs([folder], {})
    with Store.open(folder) as store:
        run.refresh(store)
    address = "/".join(map(str, lost_trace(run)))
    with Server([run]) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        names = ("chromium", "chromium-browser", "google-chrome")
        # Chromium refuses its own sandbox to root.
        options: dict[str, Any] = {"args": ["--no-sandbox"] if os.geteuid() == 0 else []}
        browser = playwright.chromium.launch(executable_path=next(filter(None, map(shutil.which, names))), **options)
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, device_scale_factor=2)
        page.goto(f"{server.address}#/{run.name}/trace/{address}")
        page.wait_for_selector("#trace .pair .unwritten")
        page.wait_for_timeout(1000)
        page.evaluate(SHORTER)
        page.wait_for_timeout(200)
        page.locator("#trace .pair").screenshot(path=out)
        browser.close()
        server.shutdown()


def main(folder: str) -> None:
    """Redraw all pictures."""
    for name, words in commands(folder).items():
        app([*words, "--look", "columns=2", "--out", str(IMAGES / f"{name}.png")], standalone_mode=False)
        (IMAGES / f"{name}.data.csv").unlink(missing_ok=True)
    draw_trace(Path(folder), IMAGES / "trace.png")


if __name__ == "__main__":
    main(sys.argv[1])

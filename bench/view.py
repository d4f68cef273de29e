"""Measure `kvatlas view` in a real Chromium on a large run: seconds to each page, first paint, memory.

python bench/view.py --out bench/results/view.json   # 205,000 traces of 16,000 tokens, 13.5 GB
python bench/view.py --problems 78 --samples 2 --tokens 500      # 25,584 traces
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from common import arguments, keep, processor_seconds, resident
from kvatlas.core import Setting
from kvatlas.results import Expected, Manifest, Store
from large_run import write_traces

MODELS, BENCHMARKS, PROMPT = ("embedded:tiny-llama", "embedded:tiny-qwen"), ("CHAIN5", "CHAIN9"), 60
WINDOWS, RATIOS = (500, 1000, 2000, 3000), (0.1, 0.2, 0.3, 0.4, 0.5)
SPEC = {
    "models": list(MODELS),
    "benchmarks": list(BENCHMARKS),
    "settings": {"policy": "dynts", "kv_budget": 96, "ratio_over": "thinking"},
    "axes": {"local_window": [8, 16], "ratio": [0.2, 0.5]},
}


def expected(problems: int, samples: int) -> tuple[Expected, ...]:
    """Two policies on a published grid and the full cache, on two benchmarks, for two models."""
    grid = [
        Setting.from_parameters(policy, kv_budget=5000, local_window=window, ratio=ratio)
        for policy, window, ratio in itertools.product(("dynts", "random"), WINDOWS, RATIOS)
    ]
    ids, full = tuple(f"p{number:04d}" for number in range(problems)), Setting.from_parameters("full")
    return tuple(
        Expected(model, name, setting, f"key-{model}-{name}", ids, samples, setting == full)
        for model in MODELS
        for name in BENCHMARKS
        for setting in (*grid, full)
    )


def opened(page: Page, address: str, what: str) -> dict[str, Any]:
    """Seconds until `what` is on a page that is opened anew, and milliseconds to its first paint."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(what, timeout=60_000)
    seconds = time.perf_counter() - began
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    return {"seconds": round(seconds, 2), "first_paint_ms": paint and round(paint)}


def measured(folder: Path, traces: int) -> dict[str, Any]:
    """The pages of a run, while it is still read and afterwards."""
    name, chromium = folder.name, shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "kvatlas", "view", str(folder)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        home = process.stdout.readline().split()[0]
        by_name: dict[str, Any] = {
            "address_after_s": round(time.perf_counter() - began, 2),
            "address_after_cpu_s": round(processor_seconds(process.pid), 2),
        }
        with sync_playwright() as playwright:
            page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
            by_name["while_reading"] = {"a run": opened(page, f"{home}#/{name}", "#maps-panels table.heat")}
            page.wait_for_function(f"() => state.runs[0]?.done === {traces}", timeout=300_000)
            by_name["all_read_after_s"] = round(time.perf_counter() - began, 1)
            # The tests are made once, after the last trace is read.
            page.wait_for_selector("#verdicts .card", timeout=300_000)
            by_name["headline_after_s"] = round(time.perf_counter() - began, 1)
            pages = {
                "a run, its headline": ("", "#verdicts .card"),
                "a cell": ("/cell/5", "#list-rows tbody tr"),
                "a trace with the full cache's": ("/trace/5/3/0", "#trace .token"),
                "a trace": ("/trace/5/3/0?beside=none", "#trace .token"),
                "a problem": ("/problem/0/3", "#list-rows tbody tr"),
                "what was lost": ("/find?what=lost", "#list-rows tbody tr"),
            }
            by_name["read"] = {title: opened(page, f"{home}#/{name}{at}", what) for title, (at, what) in pages.items()}
            page.context.browser.close()  # type: ignore[union-attr]
        return {**by_name, "peak_mb": resident("VmHWM", process.pid) >> 20}
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    args = arguments(__doc__, problems=125, samples=10, tokens=16_000, scratch=Path)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "large"
        cells = expected(args.problems, args.samples)
        with Store.create(folder) as store:
            store.put_manifest(Manifest((("local_window", WINDOWS), ("ratio", RATIOS)), cells, SPEC, {}))
            traces = write_traces(store, cells, args.tokens, PROMPT, 5000)
        size = (folder / "run.sqlite").stat().st_size
        about = {"traces": traces, "tokens": args.tokens, "store_gb": round(size / 1e9, 2)}
        keep(args, bench="view", **about, **measured(folder, traces))


if __name__ == "__main__":
    main()

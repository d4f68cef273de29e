"""Maps of SmolLM2 with its thinking adapter on harder panels than maps.yaml, in the same scale; a run for each panel.

    python recipes/smollm/panels.py --out runs/panels                # resumed where it was stopped
    kvatlas map runs/panels/* --out panels.svg

`rkv` over local window and ratio, and its rivals at one setting.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kvatlas

#: Thinking tokens in the cache, about three quarters of what the full cache thinks, and new tokens at most.
PANELS = {"WORDS9-11": (300, 800), "WORDS12-14": (432, 1000), "WORDS15-17": (576, 1300)}
RIVALS = ("window", "random", "dynts", "h2o", "snapkv")


def spec(panel: str, problems: int) -> dict[str, object]:
    """The sweep of a panel, its windows a twelfth, a third and seven twelfths of the budget."""
    budget, most = PANELS[panel]
    common = {"kv_budget": budget, "ratio_over": "thinking", "budget_over": "thinking"}
    rivals = [{"policy": name, "local_window": budget // 3, "ratio": 0.3, **common} for name in RIVALS]
    return {
        "models": ["smollm2-135m-think"],
        "benchmarks": [panel],
        "problems": problems,
        "samples": 1,
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": most},
        "baseline": [{"policy": "full"}, *rivals],
        "settings": [{"policy": "rkv", **common}],
        "axes": {"local_window": [budget // 12, budget // 3, 7 * budget // 12], "ratio": [0.1, 0.3, 0.5]},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--problems", type=int, default=30)
    parser.add_argument("--workers", type=int, help="processes (default: as many as pay and fit)")
    options = parser.parse_args()
    for name in PANELS:
        run = kvatlas.sweep(spec(name, options.problems), options.out / name, workers=options.workers, on_message=print)
        print(run.cells()[["benchmark", "policy", "local_window", "ratio", "value", "low", "high"]].to_string())

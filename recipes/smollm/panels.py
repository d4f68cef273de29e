"""Maps of SmolLM2 with its thinking adapter on harder panels than maps.yaml, in the same scale; a run for each panel.

    python recipes/smollm/panels.py --out runs/panels                # resumed where it was stopped
    kvatlas map runs/panels/* --out panels.svg

`rkv` over local window and ratio, and its rivals at one setting. Prints the cells, and `rkv` minus each rival at that
setting over the problems of all panels, in pairs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import kvatlas
from kvatlas.core import Trace
from kvatlas.stats.paired import paired_difference

#: Thinking tokens in the cache, four fifths and more of what the full cache thinks; new tokens at most; problems.
PANELS = {"WORDS9-11": (300, 800, 30), "WORDS12-14": (432, 1000, 20), "WORDS15-17": (576, 1300, 20)}
RIVALS = ("window", "random", "dynts", "h2o", "snapkv")


def spec(panel: str) -> dict[str, object]:
    """The sweep of a panel, its windows a twelfth, a third and seven twelfths of the budget."""
    budget, most, problems = PANELS[panel]
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


def at_one_setting(traces: Iterable[Trace]) -> dict[str, dict[tuple[str, str], dict[int, float]]]:
    """Of each policy the grades by problem and sample, at a window of a third of the budget and ratio 0.3."""
    grades: dict[str, dict[tuple[str, str], dict[int, float]]] = defaultdict(dict)
    for trace in traces:
        values = trace.setting.values
        wanted = (PANELS[trace.benchmark][0] // 3, 0.3)
        if trace.setting.policy == "full" or (values["local_window"], values["ratio"]) == wanted:
            grades[trace.setting.policy][trace.benchmark, trace.problem] = {trace.sample: float(trace.grade.correct)}
    return grades


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--workers", type=int, help="processes (default: as many as pay and fit)")
    options = parser.parse_args()
    made: list[Trace] = []
    for name in PANELS:
        run = kvatlas.sweep(spec(name), options.out / name, workers=options.workers, on_message=print)
        print(run.cells()[["benchmark", "policy", "local_window", "ratio", "value", "low", "high"]].to_string())
        made += run.traces(texts=False)
    grades = at_one_setting(made)
    for policy in ("full", *RIVALS):
        difference = paired_difference(grades["rkv"], grades[policy])
        low, value, high = (100 * number for number in (difference.low, difference.value, difference.high))
        interval = f"({low:+.1f} to {high:+.1f})"
        print(f"rkv - {policy}: {value:+.1f} {interval}, p {difference.p:.3f}, {difference.problems} problems")

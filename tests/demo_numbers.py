"""Numbers of the demo that README.md quotes: `python -m tests.demo_numbers runs/demo` writes tests/data/demo.json.

It prints the lines of README.md that have these numbers. `make example` runs it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvatlas.report.result import analyse
from kvatlas.report.text import p_text
from kvatlas.text import fixed, model_name, signed

FILE = Path(__file__).parent / "data" / "demo.json"


def numbers(run: str) -> list[dict[str, Any]]:
    """Return for each model the difference between dynts and random, and the loss of its best mean cell."""
    result = analyse([run]).to_dict()
    best = {mean["model"]: mean["peaks"][0] for mean in result["means"] if mean["policy"] == "dynts"}
    loses = {
        mean["model"]: cell["loses"]
        for mean in result["means"]
        for cell in mean["estimates"]
        if mean["policy"] == "dynts" and all(cell[name] == best[mean["model"]][name] for name in mean["axes"])
    }
    return [
        {name: one[name] for name in ("model", "difference", "low", "high", "p")} | {"loses": loses[one["model"]]}
        for one in result["comparisons"]
        if (one["first"], one["second"]) == ("dynts", "random")
    ]


def quotes(models: list[dict[str, Any]]) -> list[str]:
    """Return the lines of README.md with the numbers of the models."""
    rows = []
    for one in models:
        value, low, high = (signed(one[name], 1, "-") for name in ("difference", "low", "high"))
        rows.append(f"| {one['model']} | dynts | random | {value} | {low} to {high} | {p_text(one['p'])} |")
    gains = " and ".join(fixed(one["difference"], 0) for one in models)
    lost = " and ".join(f"{fixed(one['loses'])} points below {model_name(one['model'])}'s" for one in models)
    return [
        *rows,
        "At equal budget, window and ratio, learned importance (`dynts`) keeps "
        f"{gains} points more than random tokens.",
        f"Its best mean cell lies {lost} full cache ([docs/embedded.md](docs/embedded.md)).",
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(numbers(sys.argv[1]), indent=1) + "\n")
    print("\n".join(quotes(json.loads(FILE.read_text()))))

"""Numbers of the demo that README.md quotes: `python -m tests.demo_numbers runs/demo` writes tests/data/demo.json.

It writes and prints the lines of README.md that have these numbers. `make example` runs it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from kvatlas.report.result import analyse
from kvatlas.text import fixed, model_name, signed

FILE = Path(__file__).parent / "data" / "demo.json"
README = Path(__file__).parents[1] / "README.md"


def numbers(run: str) -> list[dict[str, Any]]:
    """Return for each model dynts minus random, the settings of dynts by what is proven of them, and the choice."""
    result = analyse([run]).to_dict()
    choices = {one["model"]: one for one in result["recommendation"]["all"]}
    found = []
    for one in result["comparisons"]:
        if (one["first"], one["second"]) != ("dynts", "random"):
            continue
        choice = choices[one["model"]]
        losses = [loss for loss in choice["losses"] if loss["setting"].startswith("dynts(")]
        found.append(
            {
                **{name: one[name] for name in ("model", "difference", "low", "high", "p")},
                "margin": choice["margin"],
                "settings": len(losses),
                "kept": sum(loss["shown"] for loss in losses),
                "broken": sum(loss["broken"] for loss in losses),
                "setting": choice["setting"],
                "loses": choice["loses"],
                "limit": choice["loses_limit"],
                "memory": choice["saving"]["memory"],
            }
        )
    return found


def quotes(models: list[dict[str, Any]]) -> list[str]:
    """Return the lines of README.md with the numbers of the models."""
    rows = []
    for one in models:
        name = model_name(one["model"])
        value, low, high = (signed(one[key], 1, "-") for key in ("difference", "low", "high"))
        chosen = "none"
        if one["setting"] is not None:
            chosen = f"{_cell(one['setting'])}: {fixed(one['memory'], 0)} % less memory, loses {fixed(one['loses'])}"
        rows.append(
            f"| {name} | {one['kept']} of {one['settings']} | {one['broken']} | {chosen} | {value} ({low} to {high}) |"
        )
    return rows


def _cell(setting: str) -> str:
    """Return window and ratio of a setting's text."""
    values = dict(re.findall(r"(\w+)=([\d.]+)", setting))
    return f"window {values['local_window']}, ratio {values['ratio']}"


def write_readme(rows: list[str]) -> None:
    """Put the rows of the models in the place of those that README.md has."""
    lines = README.read_text().splitlines()
    for row in rows:
        start = row[: row.index("|", 1) + 1]
        (place,) = [number for number, line in enumerate(lines) if line.startswith(start)]
        lines[place] = row
    README.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    FILE.write_text(json.dumps(numbers(sys.argv[1]), indent=1) + "\n")
    found = quotes(json.loads(FILE.read_text()))
    write_readme(found)
    print("\n".join(found))

"""axe-core in a page: what keeps people from using it who see, point or read otherwise."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _source() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text()


def serious(page: Any) -> list[list[str]]:
    """Faults that axe-core calls serious or critical: rule, first node, what to do."""
    page.evaluate(_source())
    result: list[list[str]] = page.evaluate(
        "axe.run({ resultTypes: ['violations'] }).then((all) => all.violations"
        ".filter((one) => ['serious', 'critical'].includes(one.impact))"
        ".map((one) => [one.id, one.nodes[0].html.slice(0, 160), one.nodes[0].failureSummary]))"
    )
    return result

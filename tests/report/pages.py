"""A page as tests read it: its documents, and what axe-core finds in it."""

import base64
import gzip
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any


def documents(path: Path) -> dict[str, Any]:
    """Return the documents of a report by their addresses within its run."""
    (page,) = re.findall(
        r'<script type="application/json" id="page">(.*?)</script>', path.read_text("utf-8"), re.DOTALL
    )
    every = json.loads(gzip.decompress(base64.b64decode(json.loads(page)["documents"])))
    return {name.partition("/")[2] or name: document for name, document in every.items()}


@cache
def _source() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text()


def serious(page: Any) -> list[list[str]]:
    """Return the faults that axe-core calls serious or critical: rule, first node, what to do."""
    page.evaluate(_source())
    result: list[list[str]] = page.evaluate(
        "axe.run({ resultTypes: ['violations'] }).then((all) => all.violations"
        ".filter((one) => ['serious', 'critical'].includes(one.impact))"
        ".map((one) => [one.id, one.nodes[0].html.slice(0, 160), one.nodes[0].failureSummary]))"
    )
    return result

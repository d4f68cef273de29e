"""The Chromium that the tests of pages run in, and what they ask it."""

import shutil
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed (apt-get install chromium)"
)
#: The widths of a phone, of a tablet and of a screen.
WIDTHS = (390, 1024, 1440)
#: All faults that axe-core finds, labels that lack the visible text included: rule, first node, what to do.
#: The contrast of a single character is judged, too: most tokens of a trace are no longer.
AXE_FAULTS = """() => axe.run({
  resultTypes: ['violations'],
  rules: { 'label-content-name-mismatch': { enabled: true } },
  checks: { 'color-contrast': { options: { ignoreLength: true } } }
}).then((all) => all.violations.map((one) => [one.id, one.nodes[0].html.slice(0, 160), one.nodes[0].failureSummary]))"""
#: Which of the page's media rules hold.
MEDIA = """() => [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])
  .filter((rule) => rule instanceof CSSMediaRule).map((rule) => matchMedia(rule.conditionText).matches).join()"""


def load_axe(page: Any) -> None:
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())


def assert_fits_without_faults(page: Any, *where: str, widths: Sequence[int] = WIDTHS) -> None:
    """Check that a page is no wider than each width, and that axe finds no fault.

    Where the same media rules hold as at a narrower width, its elements look the same: axe looks at them once.
    """
    seen = set()
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, *where)
        media = page.evaluate(MEDIA)
        if media not in seen:
            assert page.evaluate(AXE_FAULTS) == [], (width, *where)
        seen.add(media)


def heading(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.getElementById('heading').textContent.includes(text)", arg=text)

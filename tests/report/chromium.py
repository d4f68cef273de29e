"""The Chromium that the tests of pages run in, and what they ask it."""

import shutil
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed (apt-get install chromium)"
)
#: All faults that axe-core finds, labels that lack the visible text included: rule, first node, what to do.
AXE_FAULTS = """() => axe.run({
  resultTypes: ['violations'], rules: { 'label-content-name-mismatch': { enabled: true } }
}).then((all) => all.violations.map((one) => [one.id, one.nodes[0].html.slice(0, 160), one.nodes[0].failureSummary]))"""


def heading(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.getElementById('heading').textContent.includes(text)", arg=text)

"""The page of policies shows the suite's last result. `python -m tests.conformance.test_document` writes it anew."""

from __future__ import annotations

import json
import re

from tests.conformance.agreement import table
from tests.conformance.environment import ROOT

PAGE = ROOT / "docs" / "policies.md"
RESULT = ROOT / "bench" / "results" / "conformance.json"
TABLE = r"^\| policy \| against \|.*?\n(?=\n)"


def test_the_page_shows_the_last_result() -> None:
    document = json.loads(RESULT.read_text())
    assert table(document) in PAGE.read_text()
    assert document["generate"]["same"] == document["generate"]["tokens"]
    assert all(row["ties"] or row["departs"] or row["jaccard_least"] == 1 for row in document["agreements"])


if __name__ == "__main__":
    text = table(json.loads(RESULT.read_text())) + "\n"
    PAGE.write_text(re.sub(TABLE, lambda _: text, PAGE.read_text(), flags=re.S | re.M))

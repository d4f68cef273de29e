"""The suite's last result, which docs/policies.md quotes."""

from __future__ import annotations

import json

from tests.conformance.environment import ROOT

RESULT = ROOT / "bench" / "results" / "conformance.json"


def test_the_last_result_agrees_but_for_what_it_names() -> None:
    document = json.loads(RESULT.read_text())
    assert document["generate"]["same"] == document["generate"]["tokens"]
    assert all(row["ties"] or row["departs"] or row["jaccard_least"] == 1 for row in document["agreements"])

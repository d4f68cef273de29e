"""Our grader beside math-verify and the rules of DynTS, on test files of other graders.

`grader_files.jsonl` has the cases of up to 1,500 characters from

- `math-verify`: tests/test_{boxed,numina_cases,open_thoughts,strict,yujianll}.py of huggingface/Math-Verify at 5d148cf
  (Apache 2.0, Copyright 2024 The HuggingFace Team), and `math-verify/test_all`: tests/test_all.py beside them,
- `nemo-skills`: tests/test_math_equal.py of NVIDIA/NeMo-Skills at 0b012df (Apache 2.0, Copyright 2024 NVIDIA
  Corporation),
- `hendrycks-math`: modeling/math_equivalence_test.py of hendrycks/math at 5f3bf91 (MIT, Copyright 2021 Dan Hendrycks).

The verdicts are those of the files' authors, right or not: some expect what their own grader does with prose or with
another spelling. The wrong verdicts of ours on `math-verify/test_all` were read while its rules were written,
those on the other files were not.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from kvatlas.answers.grading import GRADERS, grade_text

pytestmark = [pytest.mark.slow, pytest.mark.conformance]
ROWS = [json.loads(line) for line in Path(__file__).with_name("grader_files.jsonl").read_text("utf-8").splitlines()]
SOURCES = list(dict.fromkeys(row["source"] for row in ROWS))
GUIDE = Path(__file__).parents[2] / "docs" / "api.md"


def model_text(text: str) -> str:
    """Return a case's answer as a model writes it: in a box, unless it has one or announces an answer."""
    return text if "boxed" in text or "nswer" in text else rf"\boxed{{{text}}}"


def count_verdicts(grader: str) -> dict[str, str]:
    """Return right verdicts, wrong answers accepted and right ones refused, by source, as the guide writes them."""
    counts = {source: Counter() for source in SOURCES}
    for row in ROWS:
        is_right = grade_text(grader, row["reference"], (), model_text(row["text"])).correct
        if is_right is row["correct"]:
            counts[row["source"]]["right"] += 1
        else:
            counts[row["source"]]["accepted" if is_right else "refused"] += 1
    return {source: f"{n['right']} ({n['accepted']}, {n['refused']})" for source, n in counts.items()}


def table() -> list[str]:
    """Return the lines of the guide's table."""
    lines = []
    for grader in GRADERS:
        counts = count_verdicts(grader)
        lines.append(f"| `{grader}` | " + " | ".join(counts[source] for source in SOURCES) + " |")
    return lines


def test_the_guide_has_the_counts_of_each_grader() -> None:
    """Counts that changed: the guide gets the lines that are missing here."""
    guide = GUIDE.read_text("utf-8")
    assert not [line for line in table() if line not in guide]

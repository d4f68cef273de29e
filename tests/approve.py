"""Accept what commands say now: `python -m tests.approve`, then read the difference in version control.

Tests compare whole sentences with those of FILE, so that a sentence is changed in one place and looked at once.
"""

import json
import os
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "data" / "sentences.json"
#: Files with tests that compare sentences.
TESTS = ["tests/cli/test_wrong_input.py"]
#: Is set in the environment while sentences are accepted.
ACCEPTING = "KVATLAS_TESTS_ACCEPT"


def check_sentence(case: str, sentence: str) -> None:
    """Compare what a case says with the accepted sentence; accept it while `python -m tests.approve` runs."""
    accepted = json.loads(FILE.read_text("utf-8"))
    if os.environ.get(ACCEPTING):
        accepted[case] = sentence
        FILE.write_text(json.dumps(accepted, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
        return
    assert case in accepted, "a new case: `python -m tests.approve` accepts its sentence"
    assert sentence == accepted[case], "another sentence: `python -m tests.approve` accepts it"


def main() -> int:
    """Write the file from nothing, so that no sentence of a former case stays in it."""
    FILE.write_text("{}\n", "utf-8")
    os.environ[ACCEPTING] = "1"
    return int(pytest.main(["-n", "0", "-q", *TESTS]))


if __name__ == "__main__":
    sys.exit(main())

"""Files of problems that the tests of benchmarks read."""

import os
from pathlib import Path

AIME = Path(__file__).parents[1] / "data" / "aime24.jsonl"
#: Where the whole public problem files are: beside the checkout, or where this variable says.
SHARED = Path(os.environ.get("KVATLAS_PROBLEM_FILES", Path(__file__).parents[3] / "shared" / "benchmarks"))

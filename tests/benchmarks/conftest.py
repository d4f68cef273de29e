"""Files of problems that the tests of benchmarks read."""

import os
from pathlib import Path

#: Where the whole public problem files are: beside the checkout, or where this variable says.
SHARED = Path(os.environ.get("KVATLAS_PROBLEM_FILES", Path(__file__).parents[3] / "shared" / "benchmarks"))
FILES = {name: SHARED / f"{name.lower()}.jsonl" for name in ("AIME24", "AIME25", "AMC23", "MATH500", "GAOKAO2023EN")}

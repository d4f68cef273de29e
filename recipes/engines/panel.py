"""The problems of MATH500, levels 1 and 2, that no pilot has: every fourth of a level, from its first on, is a pilot's.

python recipes/engines/panel.py math500.jsonl panel.jsonl
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
rows = [json.loads(line) for line in source.read_text("utf-8").splitlines()]
of_level = {level: [row for row in rows if str(row["level"]).endswith(level)] for level in ("1", "2")}
kept = [row for rows in of_level.values() for at, row in enumerate(rows) if at % 4]
target.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")

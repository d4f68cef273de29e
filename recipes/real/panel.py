"""Split a file of MATH500 into problems of a pilot and problems of the maps, which no choice was made on.

    python recipes/real/panel.py math500.jsonl --levels 1 2 --out panel

Every fourth problem of each level, in the order of the file, is in `pilot-level1.jsonl` to `pilot-level5.jsonl`; the
others of `--levels` are in `panel.jsonl`. Run the full cache on the pilots first and take the levels in which it
solves 40 to 90 %: below there is little to lose, above nearly every setting is right.

    kvatlas run qwen2.5-coder-1.5b.gguf MATH500@panel/pilot-level1.jsonl --max-new-tokens 900 --temperature 0
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

#: One problem in so many is the pilot's.
PILOT = 4
LEVELS = (1, 2, 3, 4, 5)


def split(rows: list[dict[str, Any]]) -> tuple[dict[int, list[dict[str, Any]]], dict[int, list[dict[str, Any]]]]:
    """Return the problems of the pilot and the others, by level."""
    pilot = defaultdict(list)
    others = defaultdict(list)
    seen = dict.fromkeys(LEVELS, 0)
    for row in rows:
        level = int(str(row["level"]).removeprefix("Level "))
        chosen = pilot if seen[level] % PILOT == 0 else others
        chosen[level].append(row)
        seen[level] += 1
    return pilot, others


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} problems")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.file.read_text("utf-8").splitlines() if line.strip()]
    pilot, others = split(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        write(options.out / f"pilot-level{level}.jsonl", pilot[level])
    write(options.out / "panel.jsonl", [row for level in options.levels for row in others[level]])


if __name__ == "__main__":
    main()

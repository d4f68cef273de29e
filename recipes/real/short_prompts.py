"""Write the problems of a benchmark's file whose prompts are at most so many tokens long, in their order.

    python recipes/real/short_prompts.py MATH500@panel/panel.jsonl --longest 94 --out short.jsonl

A budget that counts the prompt must hold all of it and the local window.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvatlas import benchmarks, models


def write_short(name: str, model: str, longest: int, out: Path) -> Path:
    """Write the problems of `name`, BENCHMARK@FILE, with short prompts to a file of lines, and return it."""
    benchmark = benchmarks.find(name)
    handle = models.find(model)
    rows = Path(name.partition("@")[2]).read_text("utf-8").rstrip("\n").split("\n")

    short = []
    for problem in benchmark.problems(len(rows)):
        if len(handle.encode(benchmark.prompt(problem))) <= longest:
            # A problem's number is that of its row, of which some are no problems.
            number = int(problem.id.rpartition("-")[2])
            short.append(rows[number - 1])

    out.write_text("".join(f"{row}\n" for row in short), encoding="utf-8")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", help="BENCHMARK@FILE")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b.gguf")
    parser.add_argument("--longest", type=int, required=True, help="tokens of the longest prompt")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out = write_short(options.benchmark, options.model, options.longest, options.out)
    print(f"{out}: {len(out.read_text('utf-8').splitlines())} problems")


if __name__ == "__main__":
    main()

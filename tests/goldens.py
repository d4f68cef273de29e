"""Record or check the numbers of the quick demo and of CSV maps: `python -m tests.goldens record|check [RUN]`.

The program drives the command line alone, so that it outlives changes of the package. Traces are bitwise reproducible
on one kind of processor; on another one, record first on the tree to compare with. `record` writes FILE, `check` prints
what differs from it and ends with exit code 1 if a number or a text of a figure does.
"""

import base64
import csv
import gzip
import hashlib
import io
import json
import math
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FILE = DATA / "goldens.json.gz"
PUBLISHED = [f"published:dynts_r1_{name}" for name in ("llama", "qwen", "llama_mean", "qwen_mean")]
CSV_MAPS = [str(DATA / "conflicting_r1_llama.csv"), *PUBLISHED[:2]]
#: Keys whose values are times, versions or addresses.
VOLATILE = re.compile(r"seconds|environment|versions|provenance|made_with|machine|folder|date")


def kvatlas(*words: object) -> str:
    """Run a command in a process of its own and return its standard output."""
    command = [sys.executable, "-m", "kvatlas", *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, scalar) of nested data; entries of lists by their number."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        # Commands name the run, which lies in another folder each time.
        yield path, re.sub(r"\S+/run\b", "RUN", value) if isinstance(value, str) else value
        return
    if isinstance(value, dict) and value.get("cost") == "seconds":
        return
    for key, child in items:
        if not VOLATILE.search(str(key)):
            yield from flatten(child, f"{path}/{key}")


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def tokens(run: Path) -> dict[str, str]:
    """The digest of the tokens of every trace, by the columns that name it."""
    names = "setting, model, benchmark, problem, sample"
    with sqlite3.connect(run / "run.sqlite") as store:
        rows = store.execute(f"SELECT {names}, tokens FROM traces ORDER BY {names}").fetchall()
    return {"|".join(map(str, row[:5])): digest(row[5]) for row in rows}


def exported(run: Path) -> dict[str, Any]:
    """Rows of the maps as CSV, and traces as JSON lines with a digest in place of each text."""
    maps = list(csv.DictReader(io.StringIO(kvatlas("export", run, "--format", "csv"))))
    traces = [json.loads(line) for line in kvatlas("export", run, "--format", "jsonl").splitlines()]
    identity = ("model", "benchmark", "problem", "sample", "policy", "local_window", "ratio")
    by_name = {"|".join(str(trace.get(name)) for name in identity): trace for trace in traces}
    for trace in by_name.values():
        trace["text"] = digest(str(trace.get("text")))
    return {"csv": {str(n): row for n, row in enumerate(maps)}, "jsonl": by_name}


def documents(page: Path) -> dict[str, Any]:
    """Return the documents of a report by their addresses within its run."""
    (found,) = re.findall(r'<script type="application/json" id="page">(.*?)</script>', page.read_text("utf-8"), re.S)
    every = json.loads(gzip.decompress(base64.b64decode(json.loads(found)["documents"])))
    return {name.partition("/")[2] or name: document for name, document in every.items()}


def report_numbers(run: Path, page: Path) -> dict[str, Any]:
    """The cells of a report and the outcomes of their traces."""
    kvatlas("view", run, "--out", page, "--traces", 0)
    found = documents(page)
    cells = {f"{cell['model']}|{cell['benchmark']}|{cell['name']}": cell for cell in found["run"]["cells"]}
    names, outcomes = list(cells), {}
    for number, table in enumerate(found["run"]["outcomes"]):
        marks = found[f"outcomes/{number}"]["marks"]
        outcomes |= {names[cell]: letters for cell, letters in zip(table["rows"], marks, strict=True)}
    return {"cells": cells, "outcomes": outcomes}


def collect(run: Path | None) -> dict[str, Any]:
    """All numbers, flat, by artifact."""
    with tempfile.TemporaryDirectory() as scratch:
        run = run or Path(scratch) / "run"
        if not (run / "report.html").exists():
            kvatlas("demo", "--quick", "--out", run)
        pictures = {path.stem: path for path in sorted(run.glob("*.svg"))}
        for name, inputs in (("published", PUBLISHED[:1]), ("published-means", PUBLISHED[2:])):
            pictures[name] = Path(scratch) / f"{name}.svg"
            kvatlas("map", *inputs, "--out", pictures[name])
        found = {
            "tokens": tokens(run),
            "export": exported(run),
            "describe": json.loads(kvatlas("describe", run, "--json")),
            "report": report_numbers(run, Path(scratch) / "report.html"),
            "published": json.loads(kvatlas("describe", *PUBLISHED[:2], "--json")),
            **{f"csv {Path(name).name}": json.loads(kvatlas("describe", name, "--json")) for name in CSV_MAPS},
            "figures": {name: re.findall(r"<text[^>]*>([^<]*)", path.read_text()) for name, path in pictures.items()},
        }
        return {name: dict(flatten(value)) for name, value in found.items()}


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) for each value that changed, went or came."""
    for artifact, before in old.items():
        after = new.get(artifact, {})
        for path, value in before.items():
            name = f"{artifact} {path}"
            if path not in after:
                yield "gone", f"{name}: {value!r}"
            elif not same(value, after[path]):
                yield "changed", f"{name}: {value!r} -> {after[path]!r}"
        for path in after.keys() - before.keys():
            yield "new", f"{artifact} {path}: {after[path]!r}"


def same(old: Any, new: Any) -> bool:
    """Compare numbers to nine digits, all else exactly."""
    numbers = isinstance(old, float) and isinstance(new, int | float)
    return math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-9) if numbers else bool(old == new)


def main() -> None:
    action, *rest = sys.argv[1:]
    found = collect(Path(rest[0]) if rest else None)
    if action == "record":
        FILE.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))
        print({name: len(values) for name, values in found.items()})
        return
    differing = list(differences(json.loads(gzip.decompress(FILE.read_bytes())), found))
    for kind, sentence in differing:
        print(kind, sentence)
    sys.exit(any(kind != "new" for kind, _ in differing))


if __name__ == "__main__":
    main()

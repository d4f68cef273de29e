"""Print every lower bound of pyproject.toml as a pip constraint: `python -m tests.lower_bounds`.

torch stays at the build of constraints.txt: older builds for CPUs alone are not on the index.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The extras that users install; the others are tools.
EXTRAS = ("gguf", "inspect", "parquet", "ray", "serve")


def lower_bounds() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    for requirement in dict.fromkeys(requirements):
        name, version = re.fullmatch(r"([\w-]+)(?:\[.*])?>=([\d.]+)(?:,.*)?", requirement).groups()
        if name != "torch":
            yield f"{name}=={version}"
    yield from (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))


if __name__ == "__main__":
    print(*lower_bounds(), sep="\n")

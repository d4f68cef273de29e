"""An environment for kvpress, which needs another transformers than kvatlas: made once, used offline from then on.

`python -m tests.conformance.environment` makes it and prints its interpreter.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "conformance"
OWN, PEER = ROOT / "constraints.txt", Path(__file__).with_name("peer.txt")


def pins() -> str:
    """Our constraints, kvpress' own versions in their place where it has some."""
    theirs = PEER.read_text()
    named = set(re.findall(r"^([\w.-]+)==", theirs, flags=re.M))
    ours = [line for line in OWN.read_text().splitlines() if line.partition("==")[0] not in named]
    return "\n".join([*ours, theirs])


def peer_python() -> str:
    """The interpreter of the environment, which is made anew where the pins changed."""
    folder = CACHE / "environment"
    python, made = str(folder / "bin" / "python"), folder / "made-from.txt"
    if not made.is_file() or made.read_text() != pins():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text(pins())
        words = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*words, "-c", str(constraints), "kvpress", "torch"], check=True)
        made.write_text(pins())
    return python


def run(*words: str) -> str:
    """Return the output of a program in that environment, which sees nothing of this one and nothing of the network."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [peer_python(), *words],
        env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    print(peer_python())

"""Empty environments with nothing but the dependencies that are here, to install built packages into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(project: Path, out: Path, *options: str) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it, by their endings."""
    words = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(project)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.rpartition(".")[2]: path for path in out.iterdir()}


#: Commands of `kvatlas` from the standard input, to what they return and print.
COMMANDS = """
import contextlib, io, json, sys
from kvatlas import cli
done = []
for words in json.load(sys.stdin):
    sys.argv = ["kvatlas", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
    done.append((code, out.getvalue(), err.getvalue()))
json.dump(done, sys.stdout)
"""


@dataclass
class Environment:
    """A virtual environment that sees this one's dependencies, and no kvatlas but what is installed into it."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Environment:
        """A new one; without pip, because this environment's pip installs into it."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        places = [position for position in sys.path if position.endswith("-packages") and Path(position).is_dir()]
        (packages / "dependencies.pth").write_text("".join(f"{position}\n" for position in places))
        return cls(folder)

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def install(self, *wheels: Path) -> None:
        """Install wheels, nothing else, from nowhere else."""
        words = ["--python", self.python, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
        subprocess.run([sys.executable, "-m", "pip", *words, *map(str, wheels)], check=True)

    def run(self, folder: Path, *words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Its interpreter with these words in a folder, without a source tree on its path."""
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.python, *words], cwd=folder, env={**clean, **environment}, input=stdin, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    def commands(self, folder: Path, *commands: Sequence[str]) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of commands of its kvatlas, one after the other in one process."""
        done = self.run(folder, "-c", COMMANDS, stdin=json.dumps(commands))
        assert done.returncode == 0, done.stderr
        return [(code, out, err) for code, out, err in json.loads(done.stdout)]

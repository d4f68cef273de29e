"""Without the extras their benchmarks and commands say which one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("hidden", "words", "sentence"),
    [
        ("reasoning_gym", ["plan", "SPEC"], "Benchmarks RG-... need the extra: pip install 'kvatlas[reasoning-gym]'."),
        (
            "inspect_ai",
            ["import", "LOG.json", "run"],
            "Reading Inspect logs needs the extra: pip install 'kvatlas[inspect]'.",
        ),
        (
            "pyarrow",
            ["benchmarks", "check", "file:x.parquet"],
            "Reading x.parquet needs the extra: pip install 'kvatlas[parquet]'.",
        ),
        ("fastapi", ["serve", "embedded:tiny-llama"], "Serving needs the extra: pip install 'kvatlas[serve]'."),
        ("lm_eval", ["lm-eval", "--help"], "Running lm-eval needs the extra: pip install 'kvatlas[lm-eval]'."),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, hidden: str, words: list[str], sentence: str) -> None:
    (tmp_path / "SPEC").write_text(
        "models: [embedded:tiny-llama]\nbenchmarks: [RG-chain_sum]\nsamples: 1\nbaseline: {policy: full}\n"
    )
    (tmp_path / "LOG.json").write_text("{}")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    code = f"import sys; sys.modules[{hidden!r}] = None; sys.argv[1:] = {words!r}; from kvatlas.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == f"kvatlas: {sentence}"

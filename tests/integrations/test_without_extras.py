"""Without an extra its commands name it."""

import sys
from pathlib import Path

import pytest

from tests.command_line import Call


@pytest.mark.parametrize(
    ("hidden", "words", "what", "extra"),
    [
        ("inspect_ai", "import LOG.json run", "Reading Inspect logs needs", "inspect"),
        ("pyarrow", "check file:x.parquet", "Reading x.parquet needs", "parquet"),
        ("fastapi", "serve embedded:tiny-llama", "Serving needs", "serve"),
        ("gguf", "check x.gguf", "Reading x.gguf needs", "gguf"),
        ("accelerate", "check x.gguf", "Reading x.gguf needs", "gguf"),
    ],
)
def test_a_missing_extra_is_named(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, words: str, what: str, extra: str
) -> None:
    (tmp_path / "LOG.json").write_text("{}")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    # As if neither it nor what imports it had been imported before.
    for name in list(sys.modules):
        if name.partition(".")[0] == hidden or name.startswith(("kvatlas.integrations.", "kvatlas.serve.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    assert kvatlas.refuse(*words.split()).strip() == f"kvatlas: {what} the extra: pip install 'kvatlas[{extra}]'."

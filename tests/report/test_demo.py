"""What the demo leaves in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.cli.show import finish_demo
from kvatlas.report.demo import FIGURES, first_look
from tests.report.test_page import build
from tests.stats.synthetic import grid, manifest


def test_a_first_look_then_figures_report_and_what_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(tmp_path, manifest(grid("dynts"), problems=4))
    picture = first_look(folder)
    assert picture == folder / "means.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    finish_demo(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "tiny, mean of 2" in said
    assert "report.html" in said
    names = {path.name for path in folder.iterdir()}
    assert {f"{name}.{kind}" for name in ("means", "tiny-dynts") for kind in FIGURES} <= names
    assert {"maps.csv", "report.html"} <= names

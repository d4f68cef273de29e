"""The output of the demo: its folder, and a map in a terminal, with and without colour, wide and narrow."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvatlas.cli.output import print_demo
from kvatlas.core import Cell, Estimate, Map, Note, NoteKind, Setting
from kvatlas.report.demo import FIGURES, first_look, print_maps
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import with_binomial_bounds
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run


def test_a_first_look_then_figures_report_and_what_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store_run(tmp_path / "run", manifest(grid("dynts"), problems=4))
    pictures = first_look(folder)
    assert pictures == [folder / "means.png", folder / "tiny-dynts.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    print_demo(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "tiny, mean of 2" in said
    assert "report.html" in said
    names = {path.name for path in folder.iterdir()}
    assert {f"{name}.{kind}" for name in ("means", "tiny-dynts") for kind in FIGURES} <= names
    assert {"maps.csv", "report.html"} <= names


def cells(folder: Path) -> list[tuple[int, str]]:
    """Of each cell how many problems it was promised, and its setting."""
    with Store.open(folder) as store:
        return [(len(cell.problems), str(cell.setting)) for cell in store.manifest().expected]


def test_each_warning_is_said_once(kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of the plan come first, limits of the finished run last."""
    spec = (
        "{models: ['embedded:tiny-llama'], benchmarks: [CHAIN3, CHAIN4], problems: 2, samples: 1,"
        " sampling: {max_new_tokens: 20}, baseline: [{policy: full}],"
        " settings: [{policy: window, kv_budget: 90, ratio_over: thinking}],"
        " axes: {local_window: [8, 16], ratio: [0.2, 0.4]}}"
    )
    monkeypatch.setattr("kvatlas.sweeps.spec.recipes", lambda: {"demo-quick": spec})
    monkeypatch.setattr("kvatlas.cli.sweeps.FIRST_PROBLEMS", 1)
    # Drawing is tested above.
    drawn: list[list[tuple[int, str]]] = []
    monkeypatch.setattr("kvatlas.cli.sweeps.print_demo", lambda _: None)
    monkeypatch.setattr("kvatlas.report.demo.first_look", lambda folder: drawn.append(cells(folder)) or [folder])
    code, _, said = kvatlas("demo", "--quick", "--workers", 1, "--out", tmp_path / "run")
    assert code == 0, said
    (coarse,), whole = drawn, cells(tmp_path / "run")
    assert {problems for problems, _ in coarse} == {1}
    assert len(coarse) == 4  # the full cache and one of four cells, on two benchmarks
    assert {problems for problems, _ in whole} == {2}
    assert {setting for _, setting in coarse} < {setting for _, setting in whole}
    before, _, after = said.partition("First maps, of every second step and 1 of 2 problems")
    assert before.count("compress nothing on CHAIN") == 2
    assert "Warning: CHAIN" not in before
    assert "compress nothing" not in after
    assert after.count("traces are without an answer (0) or truncated") == 2
    assert kvatlas("demo", "--quick", "--workers", 1, "--out", tmp_path / "run")[0] == 0
    assert len(drawn) == 1


@pytest.fixture
def heatmap() -> Map:
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))[0]


def printed(heatmap: Map, **options: Any) -> str:
    file = io.StringIO()
    print_maps([heatmap], Console(file=file, **options))
    return file.getvalue()


def test_plain_text_has_values_intervals_and_the_largest_window_first(heatmap: Map) -> None:
    text, narrow = printed(heatmap, width=90), printed(heatmap, width=62)
    assert "\x1b" not in text
    assert "R1-Llama | AIME24 | dynts: Pass@1 in percent with its 95 % interval" in text
    assert text.count("49.3") == narrow.count("49.3") == 2
    assert text.index(" 3000 ") < text.index(" 2000 ") < text.index(" 500 ")
    assert "30.8–67.9" in text
    assert "30.8" not in narrow
    assert "interval" not in narrow.splitlines()[0]
    coloured = printed(heatmap, width=90, force_terminal=True, color_system="truecolor")
    assert "\x1b[38;2;17;17;17;48;2;" in coloured


def test_holes_baselines_and_markup_in_names(heatmap: Map) -> None:
    cells = dict(heatmap.cells)
    del cells[500, 0.1]
    full = {"full": Cell(Setting.of("full"), Estimate(0.97, 0.9, 0.99, 30, 5))}
    notes = (Note(NoteKind.PARTIAL, "PARTIAL: x"),)
    text = printed(replace(heatmap, model="[red]m[/red]", cells=cells, baselines=full, notes=notes), width=100)
    assert "[red]m[/red] | AIME24" in text
    assert "baseline: full 97.0 (90.0–99.0)" in text
    assert "PARTIAL: x" in text
    assert " – " in text

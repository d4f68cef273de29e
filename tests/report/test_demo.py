"""The output of the demo: its folder and its terminal."""

from pathlib import Path

import pytest

from kvatlas.cli.output import print_demo
from kvatlas.report.demo import FIGURES, first_look
from kvatlas.results import Store
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
    assert "tiny dynts: local_window \\ ratio" in said
    assert "Found tiny, mean of 2" in said
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
    assert "First maps, of every second step and 1 of 2 problems" in said
    before, _, after = said.rpartition("traces, ")
    assert before.count("compress nothing on CHAIN") == 2
    assert "Warning: CHAIN" not in before
    assert "compress nothing" not in after
    assert after.count("traces are without an answer (0) or truncated") == 2
    assert kvatlas("demo", "--quick", "--workers", 1, "--out", tmp_path / "run")[0] == 0
    assert len(drawn) == 1

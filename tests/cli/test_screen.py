"""The command `screen` as people use it: a grid is screened, its maps are drawn, and nobody takes them for Pass@1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvatlas.results import Store
from tests.cli.test_maps import Call, kvatlas

__all__ = ["kvatlas"]


def test_a_grid_is_screened_and_drawn(kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec, out = write_spec(benchmarks=["CHAIN4"], problems=2, samples=1), tmp_path / "screened"
    code, _, said = kvatlas("screen", spec, "--out", out, "--workers", 1)
    assert code == 0
    assert "2 full-cache traces are not there yet: they are decoded first." in said
    assert (
        f"{out} is a screen: it says where settings depart from the full cache, not how often they are right." in said
    )
    code, written, _ = kvatlas("map", out, "--out", tmp_path / "map.svg", "--metric", "top1")
    assert code == 0
    assert (tmp_path / "map.svg").is_file()
    assert "map.svg" in written
    code, _, said = kvatlas("map", out, "--out", tmp_path / "no.svg")
    assert code == 2
    assert "This run is a screen" in said
    code, _, said = kvatlas("screen", spec, "--out", out, "--workers", 1, "--quiet")
    assert (code, said) == (0, "")
    few = tmp_path / "few"
    code, _, said = kvatlas("screen", spec, "--out", few, "--traces", out, "--problems", 1, "--workers", 1)
    assert code == 0, said
    assert "decoded first" not in said
    with Store.open(few) as store:
        assert {len(cell.problems) for cell in store.manifest().expected} == {1}


def test_a_spec_without_compression_is_refused(kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path) -> None:
    code, _, said = kvatlas("screen", write_spec(settings=[], axes={}), "--out", tmp_path / "s")
    assert code == 2
    assert "no setting that compresses" in said
    assert not (tmp_path / "s").exists()


def test_its_help_says_what_it_is(kvatlas: Call) -> None:
    code, text, _ = kvatlas("screen", "--help")
    assert code == 0
    assert "depart from the full" in " ".join(text.split())

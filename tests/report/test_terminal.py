"""A map in a terminal, with and without colour, wide and narrow."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvatlas.core import Cell, Estimate, Note, NoteKind, Setting
from kvatlas.report.terminal import print_map
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import with_binomial_bounds


@pytest.fixture
def heatmap():
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))[0]


def _printed(heatmap, **options):
    file = io.StringIO()
    print_map(heatmap, Console(file=file, **options))
    return file.getvalue()


def test_plain_text_has_values_intervals_and_the_largest_window_first(heatmap):
    text, narrow = _printed(heatmap, width=90), _printed(heatmap, width=62)
    assert "\x1b" not in text
    assert "R1-Llama | AIME24 | dynts: Pass@1 in percent with its 95 % interval" in text
    assert text.count("49.3") == narrow.count("49.3") == 2
    assert text.index(" 3000 ") < text.index(" 2000 ") < text.index(" 500 ")
    assert "30.8–67.9" in text
    assert "30.8" not in narrow
    assert "interval" not in narrow.splitlines()[0]
    coloured = _printed(heatmap, width=90, force_terminal=True, color_system="truecolor")
    assert "\x1b[38;2;255;255;255;48;2;8;29;88m" in coloured


def test_holes_baselines_and_markup_in_names(heatmap):
    cells = dict(heatmap.cells)
    del cells[500, 0.1]
    full = {"full": Cell(Setting.of("full"), Estimate(0.97, 0.9, 0.99, 30, 5))}
    notes = (Note(NoteKind.PARTIAL, "PARTIAL: x"),)
    text = _printed(replace(heatmap, model="[red]m[/red]", cells=cells, baselines=full, notes=notes), width=100)
    assert "[red]m[/red] | AIME24" in text
    assert "baseline: full 97.0 (90.0–99.0)" in text
    assert "PARTIAL: x" in text
    assert " – " in text

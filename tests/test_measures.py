"""Measures of traces that a user declares in one file: in old runs, in new ones, and in every form of a cell."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvatlas
from kvatlas import class_files, measures
from kvatlas.core import KvatlasError, Measure, Trace
from kvatlas.report.app.documents import PageCells, maps_of, run_document
from kvatlas.report.app.page import app_page
from kvatlas.report.result import open_result
from kvatlas.results.csv_maps import read_maps
from kvatlas.results.regrade import measure
from kvatlas.stats.run_data import RunData
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest
from tests.stored import decode_run, store_run, traces_of

LOOPS = Path(__file__).parents[1] / "examples" / "plugin" / "src" / "kvatlas_example" / "loops.py"
Succeed = Callable[..., str]
PHRASE = "one two three four five six seven eight "


def looping(trace: Trace) -> Trace:
    """The trace with a thinking of eight words, and under a ratio of 0.1 with that written twice: a loop."""
    times = 2 if trace.setting.values.get("ratio") == 0.1 else 1
    return replace(trace, text=f"<think>{times * PHRASE}</think>7")


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A finished run whose spec has no measure."""
    return store_run(tmp_path / "run", manifest(grid("dynts")), change=looping)


def test_a_measure_of_one_file_is_in_every_form_of_a_cell_of_an_old_run(
    old_run: Path, succeed: Succeed, tmp_path: Path
) -> None:
    # Sixteen words have nine runs of eight words, of which the last is the first again.
    expected = {True: 1 / 9, False: 0.0}
    succeed("grade", old_run, "--measure", f"{LOOPS}:repeated_8grams")

    # The DataFrame, by a process that knows no function any more.
    cells = kvatlas.open_run(old_run).cells()
    found = {float(row.ratio): row.repeated_8grams for row in cells.itertuples() if row.ratio == row.ratio}
    assert found == pytest.approx({ratio: expected[ratio == 0.1] for ratio in found})
    assert len(found) > 1

    # CSV, in percent, and its reader in a process without the measure; costs of a CSV map are drawn.
    path = tmp_path / "maps.csv"
    succeed("export", old_run, "--out", path)
    rows = list(csv.DictReader(path.open()))
    assert {row["repeated_8grams"] for row in rows if row["ratio"] == "0.1"} == {"11.1111"}
    read = [cell for map_ in read_maps(path) for coord, cell in map_.cells.items() if coord[1] == 0.1]
    assert {cell.number("repeated_8grams") for cell in read} == {11.1111}
    succeed("map", path, "--metric", "repeated_8grams", "--out", tmp_path / "c.svg")

    # JSON, and words.
    described = json.loads(succeed("describe", old_run, "--json"))
    in_json = {cell["ratio"]: cell["repeated_8grams"] for map_ in described["maps"] for cell in map_["estimates"]}
    assert in_json == {ratio: 11.1111 if ratio == 0.1 else 0.0 for ratio in found}
    assert "Repeated 8-grams (%): local_window \\ ratio" in succeed("describe", old_run, "--long")
    assert "11.11" in succeed("describe", old_run, "--long")

    # A share is a metric: it has intervals, is drawn and compared.
    succeed("map", old_run, "--metric", "repeated_8grams", "--out", tmp_path / "m.svg")
    (by_measure, *_) = kvatlas.open_run(old_run, metric="repeated_8grams").maps()
    at = next(coord for coord in by_measure.cells if coord[1] == 0.1)
    assert by_measure.cells[at].estimate.value == pytest.approx(1 / 9)
    assert (by_measure.cells[at].estimate.low or 0) > 0

    # The page: each cell, and the words of its measure of maps and of its hover.
    result = open_result([old_run])
    document = run_document(result, maps_of(result), True, PageCells(result.only_run.manifest.expected))
    assert {cell["repeated_8grams"] for cell in document["cells"]} == {11.1111, 0.0}
    assert '"choice":"Repeated 8-grams (%)"' in app_page("files", measures=result.only_run.manifest.measures)
    succeed("view", old_run, "--out", tmp_path / "page.html")
    assert '"repeated 8-grams: {} %"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["", ":repeated_8grams"])
def test_a_check_of_a_measure_says_how_it_is_computed(name: str, kvatlas: Call) -> None:
    said = kvatlas.refuse("check", f"{LOOPS}{name}")
    assert "It holds the measure repeated_8grams: `kvatlas grade RUN --measure FILE.py:repeated_8grams`." in said


def test_a_table_of_settings_has_the_measures(succeed: Succeed, tmp_path: Path) -> None:
    folder = store_run(tmp_path / "run", manifest(grid("dynts")[:3], axes=()), change=looping)
    assert measure(folder, [str(LOOPS)]) == len(traces_of(folder))
    assert "| Repeated 8-grams (%) |" in succeed("describe", folder)


def test_a_sweep_fills_the_measures_of_its_spec(spec_data: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """New traces have them from the start, and those of the run that it adds to get them, too."""
    lengths = tmp_path / "lengths.py"
    lengths.write_text(
        "from kvatlas import Measure\n\n"
        "characters = Measure('characters', lambda trace, reading: len(trace.text), unit='characters')\n"
        "is_long = Measure('is_long', lambda trace, reading: len(trace.tokens) > 60, counts=True)\n"
    )
    spec = spec_data(problems=1, settings=[], axes={}, benchmarks=["CHAIN4"])
    class_files.permit(str(lengths))
    with_measures = {**spec, "measures": [f"{lengths}:characters", f"{lengths}:is_long"]}
    fresh = RunData.open(decode_run(with_measures, tmp_path / "fresh"))
    decode_run(spec, tmp_path / "later")
    later = RunData.open(decode_run({**with_measures, "problems": 2}, tmp_path / "later"))
    for run, problems in ((fresh, 1), (later, 2)):
        assert [one.name for one in run.manifest.measures] == ["characters", "is_long"]
        (cell,) = run.cells
        assert len(cell.problems) == problems
        stored = traces_of(run.folder or Path())
        mean = sum(len(trace.text) for trace in stored) / len(stored)
        assert cell.cell.number("characters") == pytest.approx(mean)
        assert cell.cell.number("is_long") == sum(len(trace.tokens) > 60 for trace in stored)


def test_every_number_of_a_trace_is_read_in_one_place(old_run: Path) -> None:
    table = RunData.open(old_run).table
    counts = [table.numbers(name).sum() for name in ("correct", "wrong", "truncated", "no_answer")]
    assert sum(counts) == len(table.records)
    for name in ("seconds", "thinking_tokens", "progress"):
        assert (table.numbers(name) == table.records[name]).all()
    with pytest.raises(KeyError):
        table.numbers("watts")


def test_what_is_wrong_with_a_measure_is_told_in_a_sentence(old_run: Path, kvatlas: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from kvatlas import Measure\n\n"
        "broken = Measure('broken', lambda trace, reading: 1 / 0)\n"
        "large = Measure('large', lambda trace, reading: 7, is_share=True)\n"
        "endless = Measure('endless', lambda trace, reading: float('nan'))\n"
        "seconds = Measure('seconds', lambda trace, reading: 1)\n"
        "unknown = Measure('unknown_to_all', lambda trace, reading: None)\n"
        "alone = Measure('alone', lambda trace: 1)\n"
        "def plain(trace, reading): return 1\n"
    )
    sentences = {
        "broken": "The measure 'broken' cannot be used for sample 0 of p0 under ",
        "alone": "its function does not take (trace, reading): too many positional arguments",
        "plain": "plain is a function); write the measure below it, as share = Measure('share', plain)",
        "large": "it is 7.0, expected a number from 0 to 1 or None",
        "endless": "it is nan, expected a finite number or None",
        "seconds": "expected a name in letters, digits and _ that no column and no number of a trace has",
        "other": "the file has no measure 'other'; it has broken, large, endless, seconds, unknown, alone",
    }
    for name, sentence in sentences.items():
        code, _, said = kvatlas("grade", old_run, "--measure", f"{file}:{name}")
        assert (code, sentence in " ".join(said.split())) == (2, True), said
    assert not RunData.open(old_run).manifest.measures
    with pytest.raises(KvatlasError, match="Unknown measure 'nothing'"):
        measures.find("nothing")

    # An unknown number is no number in any cell.
    assert measure(old_run, [f"{file}:unknown"])
    assert {cell.cell.number("unknown_to_all") for cell in RunData.open(old_run).cells} == {None}


def test_a_measure_that_fails_loses_no_trace(spec_data: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from kvatlas import Measure\n\nbroken = Measure('broken', lambda trace, reading: 1 / 0)\n")
    class_files.permit(str(file))
    spec = spec_data(problems=1, settings=[], axes={}, benchmarks=["CHAIN4"], measures=[str(file)])
    with pytest.raises(KvatlasError, match=r"The measure 'broken' cannot .* stored without its measures\. 1 more were"):
        decode_run(spec, tmp_path / "run")
    assert len(traces_of(tmp_path / "run")) == 2


def test_a_measure_is_registered_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures.measures, "added", {})
    halves = kvatlas.register(Measure("halves", lambda trace, reading: 0.5))
    assert measures.find("halves") is halves
    with pytest.raises(KvatlasError, match="cannot be registered"):
        kvatlas.register(Measure("value", lambda trace, reading: 0.5))

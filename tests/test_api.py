"""The Python API on a stored run: what each call gives, and what it refuses."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.image import imread

import kvatlas
from kvatlas.columns import CELL_COLUMNS, Column, cell_document
from kvatlas.core import KvatlasError, Setting
from kvatlas.figures import colours
from kvatlas.report.app.documents import PageCells, maps_of, run_document
from kvatlas.report.app.page import app_page
from kvatlas.report.map_figure import plot_sources
from kvatlas.report.result import open_result
from kvatlas.report.sources import ReadOptions
from kvatlas.results.csv_maps import read_maps
from kvatlas.results.export import write_maps
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

Succeed = Callable[..., str]
SPEC: dict[str, Any] = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"]}
SPEC["sampling"] = {"max_new_tokens": 150}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> kvatlas.Run:
    chances = {"dynts": 0.8, "random": 0.3, "full": 0.9}
    plan = manifest(grid("dynts", "random"))
    folder = store_run(tmp_path_factory.mktemp("api") / "run", plan, lambda setting: chances[setting.policy])
    return kvatlas.open_run(str(folder))


def test_maps_are_those_of_statistics_with_the_cells_that_keep_the_margin(run: kvatlas.Run, tmp_path: Path) -> None:
    plain = maps_of_run(RunData.open(run.path or ""))
    maps = run.maps()
    assert [(map_.name, dict(map_.cells)) for map_ in maps] == [(item.name, dict(item.cells)) for item in plain]
    assert all(map_.keeps is not None and not map_.plateau for map_ in maps)
    assert [map_.benchmark for map_ in run.maps(mean=True, policy="dynts")] == ["mean of 2"]
    assert maps[0]._repr_png_().startswith(b"\x89PNG")
    maps[0].plot(tmp_path / "map.svg", columns=1, dark=True)
    assert (tmp_path / "map.svg").is_file()
    assert (tmp_path / "map.data.csv").is_file()


def test_a_notebook_shows_the_means_of_a_run(run: kvatlas.Run, tmp_path: Path) -> None:
    picture = imread(io.BytesIO(run._repr_png_() or b""))
    # Two policies side by side are wider than high.
    assert picture.shape[1] > picture.shape[0] > 100
    settings = [Setting.from_parameters("dynts", kv_budget=64), Setting.from_parameters("random", kv_budget=64)]
    line = kvatlas.open_run(store_run(tmp_path / "line", manifest(settings, axes=()), lambda setting: 0.5))
    assert line._repr_png_() is None


def test_cells_are_a_table(run: kvatlas.Run) -> None:
    cells = run.cells()
    assert len(cells) == 2 * (2 * 9 + 1)
    row = cells[(cells.benchmark == "CHAIN6") & cells.baseline].iloc[0]
    assert (row.policy, row.problems, row.samples, row.mean_kv_tokens) == ("full", 12, 2, 60.5)
    assert row.value == run.maps()[0].baselines["full"].estimate.value


def test_traces_come_whole_or_without_text(run: kvatlas.Run) -> None:
    whole, bare = next(run.traces()), next(run.traces(texts=False))
    assert (whole.problem, len(whole.tokens), whole.text[:2]) == (bare.problem, 3, "so")
    assert (bare.tokens, bare.text) == ((), "")


def test_policies_and_settings_are_compared_in_pairs(run: kvatlas.Run) -> None:
    (policies,) = run.compare("dynts", "random")
    difference = policies.difference
    assert (policies.benchmark, policies.cells) == ("2 benchmarks", 18)
    assert (difference.problems, difference.pairs) == (24, 18 * 12 * 2)
    assert 0.25 < difference.low < 0.5 < difference.high
    assert difference.p < 0.001
    (cells,) = run.compare("full", "dynts local_window=8 ratio=0.1")
    assert (cells.difference.problems, cells.difference.pairs) == (24, 48)
    assert -1 <= cells.difference.low <= cells.difference.value <= cells.difference.high <= 1
    with pytest.raises(kvatlas.KvatlasError, match="fits 18 of the systems"):
        run.compare("full", "kv_budget=96")


def test_recommendation_description_and_report(run: kvatlas.Run, tmp_path: Path) -> None:
    (strict,) = run.recommend()
    assert (strict.by_memory, strict.shown) == (None, False)
    run = kvatlas.open_run(run.path or "", lose_at_most=45)
    (choice,) = run.recommend()
    assert choice.by_memory.setting.policy == "dynts"
    assert choice.loss.high <= choice.margin == 0.45
    description = run.describe()
    assert str(description).startswith("dynts local_window 32, ratio 0.1 is proven to stay within 45 points")
    assert description.to_json()["recommendation"]["setting"] == str(choice.by_memory.setting)
    assert run.report(str(tmp_path / "page.html")) == tmp_path / "page.html"


def test_other_metrics_and_what_is_wrong_in_a_sentence(run: kvatlas.Run) -> None:
    assert run.by("progress").maps()[0].metric == "progress"
    with pytest.raises(kvatlas.KvatlasError, match="no map of the policy 'h2o'"):
        run.maps(policy="h2o")


def test_what_a_call_does_not_take_and_a_mean_over_one_benchmark_are_told(run: kvatlas.Run, tmp_path: Path) -> None:
    wrong: Any = run
    with pytest.raises(TypeError, match=r"Run\.maps\(\) got an unexpected keyword argument 'metric'"):
        wrong.maps(metric="accuracy")
    single = store_run(tmp_path / "run", manifest(grid("dynts"), benchmarks=("CHAIN6",)), lambda setting: 0.5)
    with pytest.raises(KvatlasError, match="averages two or more benchmarks"):
        kvatlas.open_run(single).maps(mean=True)


def test_one_setting_is_decoded_into_a_folder_that_goes_with_the_run() -> None:
    run = kvatlas.run("embedded:tiny-llama", "CHAIN4", problems=2, max_new_tokens=40, workers=1)
    kept = run.path
    assert [trace.setting for trace in run.traces()] == [Setting("full")] * 2
    assert list(run.cells().problems) == [2]
    del run
    assert not kept.exists()


def test_the_package_imports_at_once_and_says_what_it_has() -> None:
    code = (
        "import sys, kvatlas; heavy = {'numpy', 'scipy', 'torch', 'pandas'} & set(sys.modules); assert not heavy, heavy"
        "; kvatlas.models.find, kvatlas.policies.permit, kvatlas.benchmarks.find"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"open_run", "sweep", "run", "Run", "Heatmap"} <= set(dir(kvatlas))
    assert callable(kvatlas.sweep)


@pytest.mark.usefixtures("column_list")
def test_a_column_of_ones_own_is_in_every_form_of_a_cell(run: kvatlas.Run, tmp_path: Path) -> None:
    kvatlas.add_column("half", lambda cell: cell.estimate.value / 2, is_share=True, title="half the value")
    again = kvatlas.open_run(run.path or "")
    cells = again.cells()
    assert list(cells.half) == [value / 2 for value in cells.value]
    cell = next(iter(again.maps()[0].cells.values()))
    assert cell_document(cell)["half"] == pytest.approx(cell_document(cell)["value"] / 2, abs=1e-4)
    write_maps(again.maps(), tmp_path / "m.csv")
    assert "half" in (tmp_path / "m.csv").read_text().splitlines()[0].split(",")
    read = read_maps(tmp_path / "m.csv")
    assert [cell_document(cell)["half"] for map_ in read for cell in map_.cells.values()] == [
        cell_document(cell)["half"] for map_ in again.maps() for cell in map_.cells.values()
    ]
    plot_sources([run.path or ""], tmp_path / "m.svg", ReadOptions(metric="half"))
    assert "Half the value" in (tmp_path / "m.svg").read_text()
    with pytest.raises(kvatlas.KvatlasError, match=r"'watts'; .* the costs mean_kv_tokens, kv_memory, .* half\."):
        kvatlas.open_run(run.path or "", metric="watts").maps()
    for name in ("half", "value", "policy", "kv_memory"):
        with pytest.raises(kvatlas.KvatlasError, match=f"the name '{name}' is taken; expected another one than "):
            kvatlas.add_column(name, "kv_memory")
    with pytest.raises(kvatlas.KvatlasError, match="expected a name in letters, digits and _, got 'not a name'"):
        kvatlas.add_column("not a name", "kv_memory")
    with pytest.raises(kvatlas.KvatlasError, match=r"unknown source 'watts'; expected a function, traces\.N"):
        kvatlas.add_column("watts", "watts")
    with pytest.raises(kvatlas.KvatlasError, match=r"'output_token'; did you mean traces\.output_tokens"):
        kvatlas.add_column("written", "traces.output_token")
    kvatlas.add_column("broken", lambda cell: cell.value)
    with pytest.raises(
        kvatlas.KvatlasError, match=r"The column 'broken' cannot be computed; a cell has cell\.estimate"
    ):
        kvatlas.open_run(run.path or "").cells()
    with pytest.raises(kvatlas.KvatlasError, match="before is an object of DataFrame; expected a path, RUN@CELL or"):
        kvatlas.gate(cells, cells)  # type: ignore[arg-type]


@pytest.mark.usefixtures("column_list")
def test_one_entry_in_the_columns_reaches_every_reader(
    run: kvatlas.Run, succeed: Succeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(colours.SCALES, "lengths", colours.ColourScale("Greens", 0.0, 0.6))
    CELL_COLUMNS.append(
        Column(
            "prompt_tokens_mean",
            "traces.prompt_tokens",
            "tokens",
            digits=3,
            frame="prompt_tokens",
            page="prompt",
            in_csv=True,
            title="prompt length",
            scale="lengths",
        )
    )
    folder = run.path or ""
    again = kvatlas.open_run(folder)
    assert set(again.cells().prompt_tokens) == {20.0}
    described = json.loads(succeed("describe", folder, "--json"))
    every_map = [*described["maps"], *described["means"]]
    assert {cell["prompt_tokens_mean"] for map_ in every_map for cell in map_["estimates"]} == {20.0}

    # A CSV map is read back, and drawn without the run.
    path = tmp_path / "m.csv"
    write_maps(again.maps(), path)
    read = [cell_document(cell) for map_ in read_maps(path) for cell in map_.cells.values()]
    assert {cell["prompt_tokens_mean"] for cell in read} == {20.0}
    for source in (folder, path):
        succeed("map", source, "--metric", "prompt_tokens", "--out", tmp_path / "m.svg")
        assert "Prompt length in tokens" in (tmp_path / "m.svg").read_text()
        # Each of equal values has the middle of the scale that the column names.
        assert to_hex(colours.colour_map("lengths")(0.5)) in (tmp_path / "m.svg").read_text()

    # The page has the value in each cell, and the words of its table, its hover and its measure of maps.
    result = open_result([folder])
    cells = run_document(result, maps_of(result), True, PageCells(result.only_run.manifest.expected))["cells"]
    assert {cell["prompt"] for cell in cells} == {20.0}
    words = {"heading": "Prompt length", "choice": "Prompt length (tokens)", "hover": "prompt length: {} tokens"}
    assert json.dumps(
        {"name": "prompt", "form": "whole", **words, "scale": "lengths"}, separators=(",", ":")
    ) in app_page("files")


def test_a_misspelt_argument_of_run_is_no_parameter_of_the_policy() -> None:
    with pytest.raises(KvatlasError, match=r"run has no argument 'problem', .* Did you mean 'problems'\?"):
        kvatlas.run("embedded:tiny-llama", "CHAIN4", problem=1)
    with pytest.raises(KvatlasError, match="has no parameter 'raito'"):
        kvatlas.run("embedded:tiny-llama", "CHAIN4", policy="window", kv_budget=64, local_window=8, raito=0.3)


@pytest.mark.parametrize("value", [None, 3, -1, True, "3", b"x", [1], {"a": 1}, object()])
def test_an_argument_of_another_type_is_refused_in_a_sentence(run: kvatlas.Run, tmp_path: Path, value: object) -> None:
    """Every argument of the API either works or raises KvatlasError, with the value in quotes as Python writes it."""
    wrong: Any = value
    spec = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN400"]}
    calls: dict[str, Callable[[], object]] = {
        "path": lambda: kvatlas.open_run(wrong),
        "spec": lambda: kvatlas.sweep(wrong, tmp_path / "run"),
        "out": lambda: kvatlas.sweep(spec, wrong),
        "model": lambda: kvatlas.run(wrong, "CHAIN4"),
        "benchmark": lambda: kvatlas.run("embedded:tiny-llama", wrong),
        "metric": lambda: run.by(wrong).describe(),
        "first": lambda: run.compare(wrong, "full"),
        "name": lambda: kvatlas.add_column(wrong, "nothing"),
        "figure": lambda: run.maps()[0].plot(None if value is None else tmp_path / "x.png" if value == "3" else wrong),
        "report": lambda: run.report(tmp_path / "x.html" if value == "3" else wrong),
    }
    for argument in ("metric", "partial", "fix", "lose_at_most"):
        calls[f"open_run {argument}"] = lambda name=argument: kvatlas.open_run(
            run.path or "", **{name: wrong}
        ).describe()
    for argument in ("policy", "out", "problems", "samples", "seed", "temperature", "model_options"):
        # A benchmark that cannot be made ends each call before it decodes.
        options: dict[str, Any] = {argument: wrong}
        calls[f"run {argument}"] = lambda options=options: kvatlas.run("embedded:tiny-llama", "CHAIN400", **options)
    for call in calls.values():
        with contextlib.suppress(KvatlasError):
            call()


def test_numbers_of_an_api_are_checked_as_those_of_commands(run: kvatlas.Run, tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match=r"lose_at_most is '3'; expected a number\."):
        kvatlas.open_run(run.path or "", lose_at_most="3")  # type: ignore[arg-type]
    with pytest.raises(KvatlasError, match=r"policy is \['rkv'\]; expected a name, as 'rkv'; without it all"):
        run.maps(policy=["rkv"])
    with pytest.raises(KvatlasError, match=r"of 12 characters; expected a path; yaml\.safe_load makes a mapping"):
        kvatlas.sweep("models: [a]\n", "run")
    with pytest.raises(KvatlasError, match="is a text of 300 characters; expected a path"):
        kvatlas.open_run("x" * 300)
    with pytest.raises(KvatlasError, match=r"fix is 'ratio=0.3'; expected a mapping, as \{'ratio': 0.3\}"):
        kvatlas.open_run(run.path or "", fix="ratio=0.3")  # type: ignore[arg-type]
    with pytest.raises(KvatlasError, match=r"is a function; a measure is made of one, as register\(Measure\("):
        kvatlas.register(lambda trace, reading: 1.0)
    with pytest.raises(KvatlasError, match=r"models have generate\(custom_generate=kvatlas.generate\)"):
        kvatlas.run(run, "CHAIN4")  # type: ignore[arg-type]
    with pytest.raises(KvatlasError, match=r"dtype is torch\.bfloat16; expected a text"):
        kvatlas.run("embedded:tiny-llama", "CHAIN4", model_options={"dtype": torch.bfloat16})
    with pytest.raises(KvatlasError, match="lose_at_most is True; expected"):
        kvatlas.open_run(run.path or "", lose_at_most=True)
    for argument in ("workers", "batch_size"):
        with pytest.raises(KvatlasError, match=f"{argument} is 0; expected an integer >= 1"):
            kvatlas.run("embedded:tiny-llama", "CHAIN4", problems=1, out=tmp_path / "run", **{argument: 0})


def test_what_a_call_takes_in_another_form_is_told(run: kvatlas.Run, tmp_path: Path) -> None:
    wrong: Any = run
    with pytest.raises(TypeError, match=r"Run\.report\(\) got an unexpected keyword argument 'title'"):
        wrong.report(tmp_path / "x.html", title="x")
    with pytest.raises(KvatlasError, match=r"columns \(--look columns\): expected 1 or 2, got 3"):
        run.maps()[0].plot(columns=3)
    line = store_run(tmp_path / "line", manifest([Setting("full")], axes=()), lambda setting: 0.5)
    with pytest.raises(KvatlasError, match=r"no map: one needs two parameters that vary, .* Run\.cells\(\) and"):
        kvatlas.open_run(line).maps()
    with pytest.raises(KvatlasError, match=r"not 'digits\.py'; a file needs none: policy='FILE\.py'"):
        kvatlas.register("digits.py")
    with pytest.raises(KvatlasError, match=r"The problem file 'x\.jsonl' is not there"):
        kvatlas.run("embedded:tiny-llama", [Path("x.jsonl")])  # type: ignore[list-item]


def test_names_of_authors_come_from_the_package_too() -> None:
    from kvatlas import CompressingPolicy, Problem, core, policies

    assert (CompressingPolicy, Problem) == (policies.CompressingPolicy, core.Problem)
    assert not hasattr(kvatlas, "nothing")


def test_numbers_of_numpy_are_those_of_python() -> None:
    axes = {"ratio": [np.float32(0.3), np.float64(0.5)], "local_window": [np.int64(8)]}
    settings = {"policy": "window", "kv_budget": np.float64(160.0)}
    spec = parse_spec({**SPEC, "problems": np.int64(1), "axes": axes, "settings": settings})
    assert (spec.problems, spec.axes) == (1, {"ratio": [0.3, 0.5], "local_window": [8]})
    plan = make_plan(spec)
    assert repr([policy.setting.values["kv_budget"] for policy, _ in plan.policies[:2]]) == "[160, 160]"
    setting = Setting.from_parameters("window", kv_budget=np.int64(96), ratio=np.float32(0.3))
    assert repr(setting.parameters) == "(('kv_budget', 96), ('ratio', 0.3))"


def test_a_share_as_a_margin_is_asked_about(run: kvatlas.Run) -> None:
    with pytest.warns(UserWarning, match=r"lose_at_most counts points; was 3 meant, and not 0\.03\?"):
        kvatlas.open_run(run.path or "", lose_at_most=0.03)


def test_an_empty_folder_and_numbers_that_no_trace_has_are_refused(run: kvatlas.Run) -> None:
    for call in (kvatlas.sweep, run.report):
        with pytest.raises(KvatlasError, match="is a text of 0 characters; expected a path"):
            call(*([SPEC] if call is kvatlas.sweep else []), "")  # type: ignore[operator]
    with pytest.raises(KvatlasError, match=r"no trace has the number 'thinking'; did you mean traces\.thinking_tokens"):
        kvatlas.add_column("thought", "traces.thinking")


COSINE = """
from kvatlas import CompressingPolicy

class Cosine(CompressingPolicy):
    name = "cosine"
    summary = "keeps unlike keys"

    def score(self, cached):
        print("scored")
        return cached.each_layer(lambda layer: unlike(cached.key(layer)))

def unlike(keys):
    keys = keys / keys.norm(dim=-1, keepdim=True)
    return -(keys * keys.mean(dim=-2, keepdim=True)).sum(-1)
"""


@pytest.mark.usefixtures("forked")
def test_a_policy_of_a_file_is_planned_audited_and_found_by_each_of_its_names(tmp_path: Path, succeed: Succeed) -> None:
    file = tmp_path / "cosine.py"
    file.write_text(COSINE)
    settings = [{"policy": str(file), "local_window": 8}, {"policy": "random", "local_window": 8}]
    axes = {"kv_budget": [96, 110], "ratio": [0.3, 0.5]}
    spec = {**SPEC, "benchmarks": ["CHAIN8"], "problems": 2, "settings": settings, "axes": axes}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    # The score of zeros is no number.
    assert json.loads(succeed("plan", tmp_path / "spec.json", "--json"))["seconds"] > 0
    run = kvatlas.sweep(spec, tmp_path / "run", workers=1)
    assert None not in [cell.cell.numbers["audit"] for cell in run.data.cells if not cell.baseline]
    for name in ("Cosine", "cosine.py", str(file), "cosine.py:Cosine"):
        assert [map_.policy for map_ in run.maps(policy=name)] == ["Cosine"]
        assert [pair.cells for pair in run.compare(name, "random")] == [4]

    # What a score prints is no part of the output.
    words = ("--problems", 1, "--policy", file, "--kv-budget", 96, "--local-window", 8, "--ratio", 0.5, "--json")
    assert json.loads(succeed("run", "embedded:tiny-llama", "CHAIN8", *words, "--workers", 1, "--quiet"))["traces"]


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").touch()
    (tmp_path / "map.png").touch()
    with pytest.raises(kvatlas.KvatlasError, match=f"a run is the folder .* name its folder '{tmp_path}'"):
        kvatlas.open_run(tmp_path / "run.sqlite")
    with pytest.raises(kvatlas.KvatlasError, match="a run is the folder that --out named; name a folder"):
        kvatlas.open_run(tmp_path / "map.png")

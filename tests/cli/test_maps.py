"""The command `map` as people use it."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.columns import cost_columns
from kvatlas.core import Claim, Setting
from kvatlas.results import Manifest
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest
from tests.stored import maze_run, store_run


def store(folder: Path, plan: Manifest, factor: float = 1.0) -> Path:
    return store_run(folder, plan, lambda setting: factor * setting.values.get("ratio", 1.0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("maps") / "run", manifest(grid("dynts", "random"), problems=20))


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ([], ["CHAIN6", "dynts", "Pass@1 in %", "3 points"]),
        (["--shared", "--look", "dark=true"], ["CHAIN8", "random", "#12161b"]),
        (["--mean", "--against", "full", "--look", "intervals=true"], ["mean of 2", "to −"]),
        (["--against", "random"], ["CHAIN6", "Pass@1 minus random in points", "paired by problem", "KV budget 96: "]),
        (["--look", "intervals=false", "--look", "CHAIN6=Six"], ["Six"]),
        (["--metric", "seconds", "--look", "columns=1"], ["Time per answer in ms"]),
        (["--fix", "local_window=8"], ["Ratio", "saves", "points of Pass@1 lost"]),
    ],
)
def test_every_kind_of_map(kvatlas: Call, run: Path, tmp_path: Path, options: list[str], texts: list[str]) -> None:
    out = tmp_path / "new folder" / "map.svg"
    said = kvatlas.succeed("map", run, "--out", out, *options, err="")
    assert said.split("\n")[:2] == [str(out), str(out.with_suffix(".data.csv"))]
    svg = out.read_text().replace("&gt;", ">")
    for text in texts:
        assert text in svg
    assert out.with_suffix(".data.csv").read_text().startswith("model,benchmark,")


def test_a_value_that_no_setting_has_is_answered_with_those_that_there_are(
    kvatlas: Call, run: Path, tmp_path: Path
) -> None:
    err = kvatlas.refuse("map", run, "--fix", "ratio=0.35", "--out", tmp_path / "x.png")
    assert "ratio cannot be fixed to 0.35; the run has: local_window: " in err


def test_a_mean_of_one_benchmark_names_the_option_that_was_meant(kvatlas: Call, tmp_path: Path) -> None:
    one = store(tmp_path / "one", manifest(grid("dynts"), problems=5, benchmarks=("CHAIN6",)), 0.5)
    assert "there is one; --shared draws" in kvatlas.refuse("map", one, "--mean", "--out", tmp_path / "x.png")


def test_runs_are_compared_with_runs_and_models_with_models(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    worse = store(tmp_path / "worse", manifest(grid("dynts", "random"), problems=20), 0.1)
    out = tmp_path / "a.svg"
    kvatlas.succeed("map", run, "--against", worse, "--mean", "--out", out)
    rows = list(csv.DictReader(out.with_suffix(".data.csv").open()))
    assert len(rows) == 18
    assert {row["shows"] for row in rows} == {"Pass@1 minus worse in points"}
    shown = [row for row in rows if not row["small"].startswith("−") and " to +" in row["small"]]
    assert {row["ratio"] for row in shown} >= {"0.5"}
    assert all(float(row["value"]) > 0 for row in shown)
    sources = "published:dynts_r1_llama", "published:dynts_r1_qwen"
    kvatlas.succeed("map", *sources, "--against", "R1-Llama", "--mean", "--out", out)
    (row, *_) = csv.DictReader(out.with_suffix(".data.csv").open())
    assert (row["model"], row["shows"], row["small"]) == ("R1-Qwen", "Pass@1 minus R1-Llama in points", "")
    # Means of maps, and a mean that a file gives.
    for given, models in ((sources, {"R1-Llama", "R1-Qwen"}), (("published:dynts_r1_llama_mean",), {"R1-Llama"})):
        kvatlas.succeed("map", *given, "--mean", "--out", out)
        rows = list(csv.DictReader(out.with_suffix(".data.csv").open()))
        assert {row["model"] for row in rows} == models
        assert len(rows) == 20 * len(models)
    kvatlas.succeed("map", run, "--mean", "--out", out)
    assert "Difference dynts − random: tiny " in out.read_text()
    kvatlas.succeed("map", sources[0], "--against", sources[0], "--out", out)
    assert {row["text"] for row in csv.DictReader(out.with_suffix(".data.csv").open())} == {"0.0"}


def test_a_run_of_policies_becomes_rows(kvatlas: Call, tmp_path: Path) -> None:
    plan = manifest([Setting.from_parameters(name, kv_budget=64) for name in ("dynts", "window")], axes=(), problems=3)
    folder = store(tmp_path / "run", plan)
    kvatlas.succeed("map", folder, "--out", tmp_path / "p.pdf")
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    kvatlas.refuse("map", folder, "--policy", "none", "--out", tmp_path / "p.pdf")
    sentence = "--metric seconds is for maps, and this run has fewer than two axes"
    assert sentence in kvatlas.refuse("map", folder, "--metric", "seconds", "--out", tmp_path / "p.pdf")


def test_differences_of_a_run_of_policies_follow_the_options(kvatlas: Call, tmp_path: Path) -> None:
    settings = [Setting.from_parameters(name, kv_budget=64) for name in ("dynts", "random", "window")]
    plan = manifest(settings, axes=(), problems=3)
    folder = store(tmp_path / "run", plan)
    arguments = ("map", folder, "--against", "random", "--out", tmp_path / "p.png")
    kvatlas.succeed(*arguments, "--policy", "window")
    rows = (tmp_path / "p.data.csv").read_text().splitlines()[1:]
    assert rows
    assert all("window(" in row for row in rows)
    assert "nothing cannot be fixed to 3" in kvatlas.refuse(*arguments, "--fix", "nothing=3")
    assert "'h2o' is compared; there are: dynts, window" in kvatlas.refuse(*arguments, "--policy", "h2o")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--against", "nothing"), "there are: full, dynts, random, tiny"),
        (("--against", "tiny"), "No map has the model, benchmark, policy and axes of a map of tiny"),
        (("--look", "CHAIN6"), "--look: expected NAME=VALUE, got 'CHAIN6'"),
        (("--look", "CHAIN9=x"), "does not show the name 'CHAIN9'; it shows: tiny, Pass@1"),
        (
            ("--look", "wdith=3.3"),
            "Options are columns, dark, intervals, title, width, font, plain. Did you mean 'width'?",
        ),
        (("--metric", "seconds", "--against", "full"), "--against draws differences of a metric"),
        (("--policy", "h2o"), "There is no map of the policy 'h2o'"),
        (("--fix", "local_window=8", "--mean"), "--mean is for runs with two axes, and this figure shows the settings"),
        (
            ("--fix", "local_window=8", "--against", "h2o"),
            "No setting has one of the policy 'h2o' with the same values",
        ),
        (("--fix", "local_window=8", "--own"), "--own is for runs with two axes, and this figure shows the settings"),
        (("--fix", "local_window=8", "--against", "full", "--mean"), "this figure shows the settings of a run against"),
        (("--fix", "local_window=8", "--against", "full", "--shared"), "--shared is for runs with two axes"),
        (("--fix", "local_window=8", "--against", "full", "--metric", "seconds"), "leave out the cost seconds"),
    ],
)
def test_wrong_wishes_are_one_sentence(
    kvatlas: Call, run: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    assert sentence in kvatlas.refuse("map", run, "--out", tmp_path / "a.png", *words)
    assert not list(tmp_path.iterdir())


def test_a_report_of_the_command_line_says_what_it_wrote(
    kvatlas: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.report.app.page.TRACES_LIMIT", 20_000)
    for words, count in (([], "2 traces"), (["--traces", 1], "1 trace")):
        code, out, err = kvatlas("view", run, "--out", tmp_path / "r.html", *words)
        assert (code, out) == (0, f"{tmp_path / 'r.html'}\n")
        assert f"holds up to {count} of each cell; --out FOLDER writes all" in err


@pytest.mark.parametrize("claim", list(Claim))
def test_a_description_speaks_of_what_the_option_names(kvatlas: Call, run: Path, claim: Claim) -> None:
    document = json.loads(kvatlas.succeed("describe", run, "--claim", claim.value, "--json"))
    assert document["claim"] == claim.value


def test_traces_of_each_cell_are_for_a_page_alone(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    assert "--traces is for a page" in kvatlas.refuse("view", run, "--out", tmp_path / "site", "--traces", 1)
    assert not (tmp_path / "site").exists()


# Metrics as people name them: every command that takes `--metric` knows those of a run, also of one cell.

NAMES = "pass@1, progress, pass@K, maj@K (K up to 2)"
FILES = {"map": "a.svg", "view": "a.html", "export": "a.csv", "compare": "a.svg"}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    setting = Setting.from_parameters("window", kv_budget=96, local_window=8, ratio=0.3)
    plan = manifest([setting], models=["embedded:tiny-llama"], benchmarks=["CHAIN6"], baselines=(), problems=4, axes=())
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(1024, 0)) for cell in plan.expected))
    return store(tmp_path_factory.mktemp("cell") / "run", plan)


def metric_words(command: str, run: Path, metric: str, out: Path) -> tuple[object, ...]:
    return (command, run, "--metric", metric, *(("--out", out / FILES[command]) if command in FILES else ()))


def test_a_metric_of_one_cell_is_told_and_without_a_full_cache_no_figure(
    kvatlas: Call, cell: Path, tmp_path: Path
) -> None:
    assert "`kvatlas describe` prints the values" in kvatlas.refuse(*metric_words("map", cell, "pass@2", tmp_path))
    kvatlas.succeed(*metric_words("view", cell, "pass@2", tmp_path), err="")
    assert "Pass@2 in percent, tiny-llama on CHAIN6, 4 problems" in kvatlas.succeed(
        *metric_words("describe", cell, "pass@2", tmp_path)
    )
    assert "two or more systems" in kvatlas.refuse(*metric_words("compare", cell, "pass@2", tmp_path))


@pytest.mark.parametrize("command", ["map", "view", "describe", "export", "compare"])
def test_an_unknown_metric_is_refused_with_all_names(kvatlas: Call, cell: Path, tmp_path: Path, command: str) -> None:
    sentence = f"Unknown metric 'watts'; expected: {NAMES}, and for maps the costs {', '.join(cost_columns())}."
    assert sentence in kvatlas.refuse(*metric_words(command, cell, "watts", tmp_path))


def test_what_a_benchmark_measures_itself_is_known_to_maps_too(kvatlas: Call, tmp_path: Path) -> None:
    solvers = {("A", Setting.from_parameters("full")): 0.05, ("A", Setting.from_parameters("window", ratio=0.1)): 0.2}
    run = maze_run(tmp_path / "run", solvers, problems=6)
    kvatlas.succeed(*metric_words("map", run, "recall", tmp_path))
    own = f"expected: {NAMES}, precision, progress_valid, recall, valid, and for maps the costs"
    # The kind of the first error is a text, its place no share.
    for metric in ("watts", "first_error", "first_error_index"):
        assert f"Unknown metric '{metric}'; {own}" in kvatlas.refuse(*metric_words("map", run, metric, tmp_path))


def test_a_file_without_an_end_is_no_map(kvatlas: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvatlas.results.csv_maps.MAX_CHARACTERS", 1000, raising=False)
    sentence = kvatlas.refuse("map", "/dev/zero", "--out", tmp_path / "map.png")
    assert "'/dev/zero' is longer than 1,000 characters; expected a CSV map" in sentence

"""The command `map` as people use it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvatlas.core import Setting
from kvatlas.results import Manifest, Store
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest, traces


def store(folder: Path, plan: Manifest) -> Path:
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for key, trace in traces(plan, lambda setting: setting.values.get("ratio", 1.0)):
            store.add(key, trace)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("maps") / "run", manifest(grid("dynts", "random"), problems=20))


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ([], ["tiny | CHAIN6 | dynts", "Pass@1 in percent", "Colour scales differ"]),
        (["--shared", "--frame", "none", "--dark"], ["tiny | CHAIN8 | random", "#12161b"]),
        (["--mean", "--columns", "2"], ["tiny | mean of 2 | dynts"]),
        (["--against", "full", "--policy", "dynts"], ["Pass@1 minus full", "paired"]),
        (["--mean", "--against", "full"], ["tiny | mean of 2 | random", "to −"]),
        (
            ["--against", "random"],
            ["tiny | CHAIN6", "Pass@1 minus that of random, in points, paired by problem.", "is shown"],
        ),
        (["--metric", "mean_kv_tokens", "--against", "random"], ["Change of KV Tokens against random, in percent."]),
        (
            ["--layout", "1x4", "--no-intervals", "--label", "CHAIN6=Six", "--font", "DejaVu Serif"],
            ["tiny | Six | dynts"],
        ),
        (["--metric", "mean_kv_tokens"], ["KV Tokens", "Mean cached tokens per sequence."]),
        (
            ["--metric", "seconds", "--against", "full", "--columns", "1"],
            ["Change of Seconds against full, in percent."],
        ),
        (["--metric", "progress"], ["Progress Ratio"]),
        (["--fix", "local_window=8"], ["tiny | CHAIN6", "Ratio", "with 95 % intervals"]),
    ],
)
def test_every_kind_of_map(kvatlas: Call, run: Path, tmp_path: Path, options: list[str], texts: list[str]) -> None:
    out = tmp_path / "new folder" / "map.svg"
    code, said, err = kvatlas("map", run, "--out", out, *options)
    assert (code, err) == (0, "")
    assert said.split("\n")[:2] == [str(out), str(out.with_suffix(".data.csv"))]
    svg = out.read_text().replace("&gt;", ">")
    for text in texts:
        assert text in svg
    assert out.with_suffix(".data.csv").read_text().startswith("model,benchmark,policy,")


def test_runs_are_compared_with_runs_and_models_with_models(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse"
    with Store.create(worse) as store:
        plan = manifest(grid("dynts", "random"), problems=20)
        store.put_manifest(plan)
        for key, trace in traces(plan, lambda setting: setting.values.get("ratio", 1.0) / 10):
            store.add(key, trace)
    out = tmp_path / "a.svg"
    assert kvatlas("map", run, "--against", worse, "--mean", "--out", out)[0] == 0
    rows = list(csv.DictReader(out.with_suffix(".data.csv").open()))
    assert len(rows) == 18
    assert {row["shows"] for row in rows} == {"Pass@1 minus worse"}
    shown = [row for row in rows if row["text"].endswith("*")]
    assert {row["ratio"] for row in shown} >= {"0.5"}
    assert all(float(row["value"]) > 0 for row in shown)
    sources = "published:dynts_r1_llama", "published:dynts_r1_qwen"
    assert kvatlas("map", *sources, "--against", "R1-Llama", "--mean", "--out", out)[0] == 0
    (row, *_) = csv.DictReader(out.with_suffix(".data.csv").open())
    assert (row["model"], row["shows"], row["small"]) == ("R1-Qwen", "Pass@1 minus R1-Llama", "")
    assert kvatlas("map", sources[0], "--against", sources[0], "--out", out)[0] == 0
    assert {row["text"] for row in csv.DictReader(out.with_suffix(".data.csv").open())} == {"0.0"}


@pytest.mark.parametrize("option", [["--mean"], ["--against", "full"]])
def test_a_line_chart_refuses_what_only_maps_have(kvatlas: Call, run: Path, tmp_path: Path, option: list[str]) -> None:
    words = ("map", run, "--fix", "local_window=8", "--out", tmp_path / "a.svg")
    code, _, err = kvatlas(*words, *option)
    assert code == 2
    assert f"{' '.join(option)} draws maps, and a run with fewer than two axes is a line chart" in err


def test_a_map_without_a_metric_is_not_drawn_as_if_it_had_it(kvatlas: Call, tmp_path: Path) -> None:
    code, _, err = kvatlas("map", "published:dynts_r1_llama", "--metric", "passs", "--out", tmp_path / "a.svg")
    assert (code, err.endswith("shows pass@1 and no 'passs'.\n")) == (2, True)


def test_no_line_is_one_sentence(kvatlas: Call, tmp_path: Path) -> None:
    plan = manifest([], axes=(("ratio", (0.1, 0.3)),), problems=2)
    code, _, err = kvatlas("map", store(tmp_path / "run", plan), "--out", tmp_path / "a.svg")
    assert (code, "None" in err) == (2, False)
    assert "No setting of this run has a value on the axis that is left" in err


def test_a_run_of_policies_becomes_a_chart_alone(kvatlas: Call, tmp_path: Path) -> None:
    plan = manifest([Setting.of(name, kv_budget=64) for name in ("dynts", "window")], axes=(), problems=3)
    folder = store(tmp_path / "run", plan)
    assert kvatlas("map", folder, "--out", tmp_path / "p.pdf")[0] == 0
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    code, _, err = kvatlas("map", folder, folder, "--out", tmp_path / "p.pdf")
    assert code == 2
    assert "alone; name one run" in err
    code, _, err = kvatlas("map", folder, "--policy", "none", "--out", tmp_path / "p.pdf")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--metric", "watts"), "Unknown metric 'watts'"),
        (("--against", "nothing"), "no baseline, policy or model 'nothing' to compare with"),
        (("--against", "nothing"), "there are: full, dynts, random, tiny"),
        (("--against", "tiny"), "No map has the model, benchmark, policy and axes of a map of tiny"),
        (("--layout", "4"), "--layout: expected ROWSxPANELS, such as 1x4, got '4'"),
        (("--layout", "1x2"), "The layout 1x2 has room for 2 panels, and the figure has 4"),
        (("--label", "CHAIN6"), "--label: expected NAME=TEXT, got 'CHAIN6'"),
        (("--label", "CHAIN9=x"), "does not show the name 'CHAIN9'; it shows: tiny, CHAIN6"),
        (("--font", "Nope"), "There is no font 'Nope' here"),
        (("--no-notes",), "--no-notes leaves notes to the caption alone; name its file with --caption"),
        (("--metric", "kv_memory"), "Unknown model 'tiny'"),
        (("--policy", "h2o"), "There is no map of the policy 'h2o'"),
    ],
)
def test_wrong_wishes_are_one_sentence(
    kvatlas: Call, run: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    code, out, err = kvatlas("map", run, "--out", tmp_path / "a.png", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert not list(tmp_path.iterdir())


def test_a_report_of_the_command_line_says_what_it_wrote(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    code, out, err = kvatlas("report", run, "--out", tmp_path / "r.html", "--attention", 0)
    assert (code, out, err) == (0, f"{tmp_path / 'r.html'}\n", "")
    few = ("--attention", 0, "--traces", 1, "--megabytes", 0.02)
    code, out, _ = kvatlas("report", run, "--out", tmp_path / "r.html", *few)
    assert code == 0
    assert f"{tmp_path / 'r.traces'} (38 pages with all traces)" in out
    assert len(list((tmp_path / "r.traces").iterdir())) == 38
    text = (tmp_path / "r.html").read_text()
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["folder"] == "r.traces"

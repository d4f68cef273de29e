"""Systems, maps and runs are compared."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest, Store
from tests.command_line import Call
from tests.stored import change_store, decode_run, maze_run

FULL, WINDOW = Setting.from_parameters("full"), Setting.from_parameters("window", ratio=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    solvers = {("A", FULL): 0.01, ("A", WINDOW): 0.15, ("B", FULL): 0.04}
    return maze_run(tmp_path_factory.mktemp("compare"), solvers, problems=40)


def chains(folder: Path) -> Path:
    """A run on chains, which have no L, one sample each; half of the traces of the window are missing."""
    problems = find("CHAIN4-8").problems(6)
    about = {"CHAIN4-8": {problem.id: dict(problem.about) for problem in problems}}
    ids = tuple(about["CHAIN4-8"])
    expected = tuple(Expected("A", "CHAIN4-8", one, "chains", ids, 1, one == FULL) for one in (FULL, WINDOW))
    grade, usage = Grade(True, 1.0, "x", Status.OK), Usage(1, 1, 0, 2, 1, 0, 0)
    with Store.create(folder) as store:
        store.put_manifest(Manifest((), expected, {}, {}, about))
        for setting, names in ((FULL, ids), (WINDOW, ids[:3])):
            for name in names:
                store.add("chains", Trace("A", "CHAIN4-8", name, 0, setting, (), "", grade, usage))
    return folder


def test_compare_writes_the_figure_and_says_the_numbers(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pairs.svg"
    said = kvatlas.succeed("compare", run, "--out", out)
    assert said.splitlines()[:2] == [str(out), str(out.with_suffix(".data.csv"))]
    assert said.splitlines()[2].startswith("A full is above A window by ")
    assert len(said.splitlines()) == 6
    said = kvatlas.succeed("compare", run, "window", "A full", "--out", out, "--json")
    (pair,) = json.loads(said)["pairs"]
    assert (pair["x"], pair["y"], pair["problems"]) == ("window", "full", 40)
    assert pair["above"] + pair["on"] + pair["below"] == pytest.approx(1)
    assert pair["difference"]["value"] < 0 < pair["above"]
    said = kvatlas.succeed("compare", run, "window", "B", "--out", out, "--benchmark", "SEQBENCH-6x6-B1", "--json")
    assert json.loads(said)["pairs"][0]["problems"] == 40
    err = kvatlas.refuse("compare", run, "--out", out, "--benchmark", "AIME24")
    assert err == "kvatlas: No run has the benchmark 'AIME24'; there are: SEQBENCH-6x6-B1.\n"
    said = kvatlas.succeed("compare", run, "--out", out, "--metric", "recall", "--json")
    assert json.loads(said)["metric"] == "recall"


def test_two_systems_are_compared_in_words(kvatlas: Call, tmp_path: Path) -> None:
    """Whichever is named first, the one ahead is; what is not proven says what would prove it."""
    solvers = {("A", FULL): 0.02, ("A", WINDOW): 0.3, ("B", FULL): 0.021}
    run = maze_run(tmp_path / "run", solvers, problems=40)
    forward = kvatlas.succeed("compare", run, "A full", "A window")
    (line,) = forward.splitlines()
    assert re.match(r"full is above window by \d+\.\d points \(\+.* to \+.*\) on 40 problems, proven\. ", line)
    backward = kvatlas.succeed("compare", run, "A window", "A full")
    assert backward.partition("proven. ")[0] == forward.partition("proven. ")[0]
    close = kvatlas.succeed("compare", run, "A full", "B")
    assert re.search(r", not proven; about [\d,]+ would prove it if that is the difference\. ", close)
    assert kvatlas.succeed("compare", run, "A full", "A window", "--metric", "progress").startswith(
        "progress: full is "
    )
    everything = kvatlas.succeed("compare", run)
    assert everything.splitlines()[-1] == "Each pair is judged by itself."


def test_a_setting_that_was_chosen_has_the_name_that_figures_give_it(kvatlas: Call, tmp_path: Path) -> None:
    ratios = [Setting.from_parameters("window", kv_budget=90, ratio=ratio) for ratio in (0.1, 0.3)]
    solvers = {("A", FULL): 0.02, ("A", ratios[0]): 0.3, ("A", ratios[1]): 0.2}
    said = kvatlas.succeed("compare", maze_run(tmp_path / "run", solvers, problems=40), "full", "window")
    assert said.startswith("full is above window ratio=0.3 by ")
    assert "Note: 'window' fits 2 settings, and the highest of them is compared; name ratio to choose." in said
    assert "'full' fits" not in said


def test_options_of_another_comparison_are_refused(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    assert "--look is for a figure of systems" in kvatlas.refuse("compare", run, run, "--look=columns=2")
    maps = ("published:dynts_r1_llama", "published:dynts_r1_qwen")
    assert "Two maps are compared by map MAP --against MAP." in kvatlas.refuse("compare", *maps)


def test_missing_traces_are_refused_unless_asked_for(kvatlas: Call, tmp_path: Path) -> None:
    words = ("compare", chains(tmp_path / "chains"), "--out", tmp_path / "a.svg")
    assert "3 of 12 traces are missing, in 1 of 2 cells" in kvatlas.refuse(*words)
    kvatlas.succeed(*words, "--partial")
    assert "PARTIAL: 3 of 12 traces are missing, in 1 cell" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("compare", "RUN", "A full"), "needs two or more systems; there is 1"),
        (("compare", "RUN", "C"), "'C' fits none of the systems"),
    ],
)
def test_wrong_input_is_one_sentence(
    kvatlas: Call, run: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    error = kvatlas.refuse(*(run if word == "RUN" else word for word in words), "--out", tmp_path / "x.png")
    assert error.startswith("kvatlas: ")
    assert error.count("\n") == 1
    assert sentence in error


# Do runs hold the same tokens?


def test_runs_are_compared_token_by_token(tmp_path: Path, kvatlas: Call) -> None:
    """A run made again in another folder holds the same tokens; a changed token and a missing trace are found."""
    spec = {
        "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"], "problems": 2, "samples": 2,
        "sampling": {"temperature": 1.0, "max_new_tokens": 80},
        "settings": [{"policy": "window", "kv_budget": 64, "budget_over": "thinking"}],
        "axes": {"local_window": [4, 8], "every": [16]},
    }  # fmt: skip
    first, again = (decode_run(spec, tmp_path / name) for name in ("first", "again"))
    assert kvatlas.succeed("compare", first, again) == "All 12 common traces hold the same tokens.\n"
    with Store.open(first) as store:
        store.copy(tmp_path / "changed")
        run_key, trace = next(iter(store.traces()))
    with Store.open(tmp_path / "changed") as store:
        store.add(run_key, replace(trace, tokens=(*trace.tokens[:-1], 5)))
    change_store(tmp_path / "changed", f"DELETE FROM traces WHERE problem != '{trace.problem}' AND sample = 1")
    code, out, _ = kvatlas("compare", first, tmp_path / "changed", "--json")
    document = json.loads(out)
    assert (code, document["same"], document["common"], document["only"]) == (1, False, 9, [3, 0])
    (cell,) = document["differing"]
    assert cell["problems"] == [trace.problem]
    assert f"other tokens on 1 problem ({trace.problem})" in kvatlas("compare", first, tmp_path / "changed")[1]

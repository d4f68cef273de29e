"""After `--replace` with fewer samples and problems every reader has the traces of the new sweep alone."""

import ast
from pathlib import Path
from typing import Any

import pytest

import kvatlas as package
from kvatlas.autopsy.driver import find_lost
from kvatlas.report.agreement import compare_runs
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.command_line import Call
from tests.stored import decode_run

SETTING = {"policy": "random", "kv_budget": 224, "local_window": 32, "ratio": 0.1}
SPEC: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN10"],
    "problems": 8,
    "samples": 3,
    "sampling": {"max_new_tokens": 500},
    "settings": [SETTING],
}
SMALL = {**SPEC, "problems": 4, "samples": 1}


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 problems and 3 samples, replaced by a sweep of 4 problems and 1 sample."""
    run = decode_run(SPEC, tmp_path_factory.mktemp("replaced") / "run")
    said: list[str] = []
    sweep(make_plan(parse_spec(SMALL)), run, workers=1, replace=True, on_message=said.append)
    hidden = "40 traces of earlier sweeps are not part of the run any more; they stay stored and are not shown."
    assert [sentence for sentence in said if "earlier" in sentence] == [f"Warning: {hidden}"]
    return run


@pytest.fixture(scope="module")
def small(replaced: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same traces that never had more than these problems and samples."""
    run = tmp_path_factory.mktemp("small") / "run"
    kept = {f"CHAIN10-{number:04d}" for number in range(4)}
    with Store.open(replaced) as source, Store.create(run) as store:
        store.put_manifest(source.manifest())
        every = source.traces_of_all_sweeps()
        store.add_all((key, trace) for key, trace in every if trace.problem in kept and trace.sample == 0)
    return run


def test_the_store_still_has_the_former_traces(replaced: Path) -> None:
    with Store.open(replaced) as store:
        assert len(list(store.traces_of_all_sweeps())) == 48
        assert len(list(store.traces())) == 8


def test_what_is_chosen_after_the_data_is_said(replaced: Path, tmp_path: Path) -> None:
    """Settings that are left out once their losses were seen change which of the others are tested."""

    def notes(run: Path) -> list[str]:
        return [note.text for note in RunData.open(run).claim_notes if "(--replace)" in note.text]

    (note,) = notes(replaced)
    assert note.endswith("was chosen after the data")
    run = decode_run(SMALL, tmp_path / "run")
    for spec, is_said in ((SMALL, False), ({**SMALL, "claim": "these_problems"}, True), (SMALL, True)):
        sweep(make_plan(parse_spec(spec)), run, workers=1, replace=True)
        assert bool(notes(run)) == is_said


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "RUN", "--deaths"),
        ("describe", "RUN", "--deaths", "--json"),
        ("grade", "RUN", "--json"),
        ("export", "RUN", "--format", "jsonl"),
        ("export", "RUN", "--format", "cells"),
    ],
    ids=" ".join,
)
def test_commands_count_no_former_trace(replaced: Path, small: Path, kvatlas: Call, words: tuple[str, ...]) -> None:
    outputs = []
    for run in (replaced, small):
        text = kvatlas.succeed(*[run if word == "RUN" else word for word in words])
        outputs.append(text.replace(str(run), "RUN"))
    assert outputs[0] == outputs[1]


def test_runs_are_compared_and_lost_answers_found_in_the_traces_of_the_new_sweep(replaced: Path, small: Path) -> None:
    compared = compare_runs(replaced, small)
    assert (compared["common"], compared["only"], compared["differing"]) == (8, [0, 0], [])
    found = [find_lost(run, "random") for run in (replaced, small)]
    counts = [[(len(cell.lost), cell.answers) for cell in cells] for cells in found]
    assert counts[0] == counts[1] != []


def test_only_copies_of_stores_read_former_traces() -> None:
    """Whatever counts or shows traces reads the promised ones."""
    users = []
    for file in Path(package.__file__).parent.rglob("*.py"):
        if "traces_of_all_sweeps" not in (text := file.read_text("utf-8")):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
                users += [function.name for call in calls if call.attr == "traces_of_all_sweeps"]
    assert sorted(users) == ["copy", "traces"]

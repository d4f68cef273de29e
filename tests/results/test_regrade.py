"""Stored traces graded again: the new verdicts are a further metric."""

import json
from pathlib import Path

import pytest

from kvatlas import benchmarks
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Setting, Trace, Usage
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.regrade import regrade
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from tests.command_line import Call

ROWS = [{"question": "One and two?", "answer": "3"}, {"question": "A half?", "answer": "0.5"}]
#: By local window: the first cell boxes, the second only ends with its number, which the code of DynTS counts.
TEXTS = {
    10: ("<think>so</think>\\boxed{3}", "<think>so</think>\\boxed{0.5}"),
    20: ("<think>so</think>One and two make 3 here", "<think>so</think>It is \\boxed{50\\%}"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two windows and two ratios on two problems, as a sweep leaves it."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ROWS))
    benchmark = find(f"file:{file}")
    problems = benchmark.problems()
    spec = {"benchmarks": [{"name": "mine", "file": str(file)}], "problems": None}
    settings = [Setting.of("window", kv_budget=50, local_window=w, ratio=r) for w in TEXTS for r in (0.1, 0.2)]
    expected = tuple(Expected("m", "mine", s, "key", tuple(p.id for p in problems), 1, False) for s in settings)
    axes = (("local_window", (10, 20)), ("ratio", (0.1, 0.2)))
    with Store.create(tmp_path / "run") as store:
        asked = {"benchmarks": [benchmarks.identity(benchmark)]}
        store.put_manifest(Manifest(axes, expected, spec, json.loads(json.dumps(asked))))
        for setting in settings:
            for problem, text in zip(problems, TEXTS[setting.values["local_window"]], strict=True):
                grade = benchmark.grade(problem, text.partition("</think>")[2])
                usage = Usage(10, 20, 5, 30, 20.0, 1, 0.1)
                store.add("key", Trace("m", "mine", problem.id, 0, setting, (), text, grade, usage))
    return tmp_path / "run"


def test_regraded_verdicts_are_shown_where_they_are_asked_for_alone(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    before = kvatlas("describe", run, "--json")
    assert "\n0 verdicts changed; " in kvatlas.succeed("grade", run)
    said = kvatlas.succeed("grade", run, "--grader", "dynts")
    assert "\n2 verdicts changed; kvatlas map --metric graded:dynts draws" in said
    assert kvatlas("describe", run, "--json") == before
    cells = regrade(run, "dynts")
    changes = [(cell.before, cell.after, cell.to_right, cell.to_wrong) for cell in cells]
    assert changes == [(2, 2, 0, 0)] * 2 + [(1, 2, 1, 0)] * 2
    (own,), (other,) = (maps_of_run(RunData.open(run, metric)) for metric in ("pass@1", "graded:dynts"))
    assert {at: cell.estimate.value for at, cell in own.cells.items()} == {
        (10, 0.1): 1.0, (10, 0.2): 1.0, (20, 0.1): 0.5, (20, 0.2): 0.5
    }  # fmt: skip
    assert {cell.estimate.value for cell in other.cells.values()} == {1.0}
    figure = tmp_path / "map.svg"
    kvatlas.succeed("map", run, "--metric", "graded:dynts", "--out", figure)
    assert "Pass@1 by dynts" in figure.read_text()


def test_what_cannot_be_graded_again_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match="Unknown grader 'mine'"):
        regrade(run, "mine")
    (tmp_path / "mine.json").write_text(json.dumps([{**ROWS[0], "answer": "4"}, ROWS[1]]))
    with pytest.raises(KvatlasError, match="The problems of mine are not those that the run was made with"):
        regrade(run)

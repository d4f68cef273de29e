"""Models under settings, compared problem by problem."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, pair, pairs_of, systems_of
from kvatlas.stats.table import aligned, missing
from tests.stats.synthetic import grid, manifest, run_of, system, traces
from tests.stored import maze_run

FULL, SMALL, LARGE = (
    Setting.from_parameters("full"),
    Setting.from_parameters("dynts", ratio=0.1),
    Setting.from_parameters("dynts", ratio=0.5),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    solvers = {("hf:lab/A-7B", FULL): 0.01, ("hf:lab/A-7B", SMALL): 0.2, ("hf:lab/A-7B", LARGE): 0.05, ("B", FULL): 0.1}
    return RunData.open(maze_run(tmp_path_factory.mktemp("systems"), solvers, problems=12))


def test_every_model_under_every_setting_is_there_with_what_its_problems_are(run: RunData) -> None:
    result = systems_of([run])
    assert [(e.model, e.setting) for e in result] == [
        ("hf:lab/A-7B", FULL), ("hf:lab/A-7B", SMALL), ("hf:lab/A-7B", LARGE), ("B", FULL),
    ]  # fmt: skip
    assert all(missing(e.cells) == (0, 24, 0) and len(e.means) == 12 for e in result)
    assert all(e.about[place]["L"] > 4 for e in result for place in e.means)
    with run.store() as store:
        progress = [t.grade.progress for _, t in store.traces() if (t.model, t.setting) == ("B", FULL)]
    assert sum(result[3].means.values()) == pytest.approx(sum(progress) / 2)


def test_metrics_of_a_benchmark_are_shares_that_vary(run: RunData) -> None:
    for metric in ("progress_valid", "valid", "precision", "recall"):
        values = [value for e in systems_of([run], metric) for value in e.cells[0].values().flat]
        assert min(values) < max(values) <= 1


def test_metrics_of_several_samples_are_made_by_problem(run: RunData) -> None:
    for plain, best in zip(systems_of([run], "pass@1"), systems_of([run], "pass@2"), strict=True):
        assert list(best.means.values()) == plain.cells[0].values().max(1).tolist()
    with pytest.raises(KvatlasError, match="maj@3 needs 3 samples of every problem; the fewest that one has is 2"):
        _ = systems_of([run], "maj@3")[0].means


def run_of_model(model: str, **changes: object) -> RunData:
    """A run of one model on six problems, whose manifest has these fields."""
    plan = replace(manifest(grid("window"), models=[model], benchmarks=["CHAIN6"], problems=6), **changes)
    return run_of(plan, traces(plan, lambda _: 0.5))


def test_problems_of_two_runs_are_the_same_by_their_contents(run: RunData) -> None:
    """Not by their numbers: a pair over other problems would be an answer to no question."""
    same = {f"p{number}": f"content {number}" for number in range(6)}
    moved = {f"p{number}": f"content {number + 1}" for number in range(5)}
    first = run_of_model("a", contents={"CHAIN6": same})
    assert len(pairs_of(systems_of([first, run_of_model("b", contents={"CHAIN6": same})])[8:12])) == 6
    with pytest.raises(KvatlasError, match=r"have other contents of 5 of 5 problems of CHAIN6 \(p0, p1, p2, ...\); "):
        systems_of([first, run_of_model("b", contents={"CHAIN6": moved})])
    cells = [cell for one in ("a", "b") for cell in run_of_model(one, contents={"CHAIN6": same}).cells]
    assert aligned(cells)[1].shape == (6, 20, 2)
    other = run_of_model("b", contents={"CHAIN6": {**same, "p5": "content 9"}}).cells
    with pytest.raises(KvatlasError, match=r"1 of 6 problems of CHAIN6 \(p5\)"):
        aligned([*cells, *other])


def test_names_fit_one_system_in_the_order_given(run: RunData) -> None:
    result = systems_of([run])
    assert choose(result, []) == result
    assert choose(result, ["dynts ratio=0.5", "A-7B full", "B"]) == [result[2], result[0], result[3]]
    # As results print a setting: with parentheses and commas, or in words.
    for printed in ("dynts(ratio=0.5)", "a-7b DynTS(ratio=0.5)", "dynts ratio 0.5"):
        assert choose(result, [printed]) == [result[2]]
    for name, sentence in [
        ("full", "'full' fits 2 of the systems and must fit one: hf:lab/A-7B full; B full."),
        ("dynts", "must fit one: hf:lab/A-7B dynts ratio=0.1; hf:lab/A-7B dynts ratio=0.5."),
        ("dynts ratios=0.5", "^'ratios=0.5' of 'dynts ratios=0.5' fits none of the systems; write ratio=0.5"),
        (
            "dynts ratio=0.7",
            r"^'ratio=0.7' of 'dynts ratio=0.7' fits none of the systems; the values of ratio are 0.1, 0.5\.$",
        ),
    ]:
        with pytest.raises(KvatlasError, match=sentence):
            choose(result, [name])
        # Of two names the one that fits nothing is said.
        with pytest.raises(KvatlasError, match=r"^'sinks' fits none"):
            choose(result, [name.partition(" ")[0], "sinks"])
    with pytest.raises(KvatlasError, match="No setting has a trace yet"):
        choose([], ["full"])
    with pytest.raises(KvatlasError, match="say a system twice"):
        choose(result, ["B", "B full"])


def test_a_setting_is_chosen_by_a_value_that_it_does_not_name() -> None:
    settings = [Setting.from_parameters("snapkv", ratio=0.3, **others) for others in ({}, {"plan_prefix": 2})]
    plan = manifest(settings, benchmarks=("CHAIN6",), problems=2)
    usual, other, _ = systems_of([run_of(plan, traces(plan))])
    assert choose([usual, other], ["snapkv plan_prefix=2", "snapkv plan_prefix=0"]) == [other, usual]
    for printed in ("snapkv(plan_prefix=2, ratio=0.3)", "snapkv plan_prefix 2, ratio 0.3"):
        assert choose([usual, other], [printed]) == [other]
    with pytest.raises(KvatlasError, match=r"must fit one: snapkv plan_prefix=0; snapkv plan_prefix=2\."):
        choose([usual, other], ["snapkv"])


def test_proposed_names_fit_one_system_of_all() -> None:
    settings = [Setting.from_parameters("dynts", local_window=w, ratio=r) for r in (0.1, 0.5) for w in (16, 64)]
    plan = manifest(settings, benchmarks=("CHAIN6",), problems=2)
    systems = systems_of([run_of(plan, traces(plan))])
    with pytest.raises(KvatlasError, match=r"must fit one: ") as refused:
        choose(systems, ["dynts ratio=0.5"])
    proposed = str(refused.value).partition("must fit one: ")[2].removesuffix(".").split("; ")
    assert [str(one.setting) for one in choose(systems, proposed)] == [str(one) for one in settings[2:]]


def test_a_policy_of_a_file_is_chosen_by_its_class(run: RunData) -> None:
    (first, *others) = systems_of([run])
    of_file = replace(first, setting=Setting.from_parameters("sinks.py:Sinks", ratio=0.3))
    for name in ("sinks", "Sinks", "sinks.py:Sinks", "sinks ratio=0.3", "Sinks(ratio=0.3)", "Sinks ratio 0.3"):
        assert choose([of_file, *others], [name]) == [of_file]


def test_overlapping_runs_are_refused_and_others_add_up(run: RunData, tmp_path: Path) -> None:
    other = maze_run(tmp_path, {("B", FULL): 0.1}, benchmark="SEQBENCH-5x5", problems=5)
    assert len(systems_of([run, RunData.open(other)])[3].means) == 17
    with pytest.raises(KvatlasError, match="compare runs that do not overlap"):
        systems_of([run, run])


def test_shares_and_difference_by_hand() -> None:
    first = system("a", FULL, [0.2, 0.5, 1.0, 0.9, 1.0])
    second = system("b", FULL, [[0.0, 0.8], [0.5, 0.5], [0.0, 0.0], [0.7, 0.7]])
    result = pair(first, second)
    assert len(result.places) == 4
    assert (result.above, result.on, result.below) == (0.25, 0.25, 0.5)
    value, low, high = result.difference.value, result.difference.low, result.difference.high
    # Problems of both count, and both samples of the second.
    assert value == pytest.approx((-0.2 + 0 + 1.0 + 0.2) / 4)
    assert low < 0 < value < high
    data = result.to_json("a", "b")
    assert (data["x"], data["problems"], data["above"]) == ("a", 4, 0.25)


def test_every_pair_once_and_in_order() -> None:
    four = [system(name, FULL, [0.1, 0.6, 0.3]) for name in "abcd"]
    assert [(i, j) for i, j, _ in pairs_of(four)] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    with pytest.raises(KvatlasError, match="have 1 problems in common"):
        pair(four[0], system("e", FULL, [0.3]))

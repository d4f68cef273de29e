from __future__ import annotations

import hashlib
import random

import pytest

from kvatlas.benchmarks import find, identity
from kvatlas.benchmarks.seqbench import MazeShape, draw, format_plan, parse_plan, read_maze
from kvatlas.benchmarks.seqbench.plans import reachable, shortest
from kvatlas.core import KvatlasError, Problem, Status

FACTS = """\
Bob is in room A1.
Room A1 and A2 are connected by an open door.
Key 7 is in room A2.
Room B1 and A1 are connected by a closed and locked door.
The locked door between B1 and A1 requires key 7.
Room B1 and C1 are connected by an open door.
Room C1 and C2 are connected by a closed and locked door.
The locked door between C1 and C2 requires key 9.
Key 9 is in room A2.
Alice is in room C1."""
REFERENCE = (
    ("start", "A1"),
    ("move_to", "A2"),
    ("pick_up_key", "7"),
    ("move_to", "A1"),
    ("use_key", "7"),
    ("unlock_and_open_door_to", "B1"),
    ("move_to", "B1"),
    ("move_to", "C1"),
    ("rescue", "Alice"),
)
PROBLEM = Problem("p", FACTS, format_plan(REFERENCE))


def changed(index: int, *actions: tuple[str, str], drop: int = 1) -> list[tuple[str, str]]:
    """The reference with `drop` actions from `index` on replaced."""
    return [*REFERENCE[:index], *actions, *REFERENCE[index + drop :]]


# One wrong plan for each class: the class, the index of the first error, actions before it that equal the reference.
WRONG = [
    ("bad_start", 0, 0, changed(0, ("start", "B1"))),
    ("bad_start", 0, 0, changed(0)),
    ("bad_start", 3, 3, changed(3, ("start", "A1"))),
    ("no_such_door", 1, 1, changed(1, ("move_to", "B2"))),
    ("no_such_door", 5, 5, changed(5, ("unlock_and_open_door_to", "A2"))),
    ("door_locked", 1, 1, changed(1, ("move_to", "B1"))),
    ("key_not_here", 2, 2, changed(2, ("pick_up_key", "8"))),
    ("key_not_here", 3, 3, changed(3, ("pick_up_key", "7"), drop=0)),
    ("key_not_held", 2, 2, [*REFERENCE[:2], ("use_key", "7")]),
    ("key_not_held", 1, 1, changed(1, ("unlock_and_open_door_to", "B1"))),
    ("wrong_key", 6, 3, changed(3, ("pick_up_key", "9"), ("move_to", "A1"), ("use_key", "9"), drop=2)),
    ("use_without_unlock", 5, 5, changed(5)),
    ("use_without_unlock", 4, 4, changed(4)),
    ("misplaced_rescue", 7, 7, changed(7)),
    ("misplaced_rescue", 8, 8, changed(8, ("rescue", "Carol"))),
    ("misplaced_rescue", 8, 8, [*REFERENCE, ("move_to", "B1")]),
    ("ended_early", 5, 5, list(REFERENCE[:5])),
    ("ended_early", 0, 0, []),
    ("not_optimal", 3, 3, changed(3, ("pick_up_key", "9"), drop=0)),
    ("format", 3, 3, changed(3, ("walk_to", "A1"))),
    ("format", 3, 3, changed(3, ("move_to", ""))),
]


@pytest.mark.parametrize(("error", "index", "same", "plan"), WRONG, ids=[f"{w[0]}-{w[1]}" for w in WRONG])
def test_wrong_plans(error: str, index: int, same: int, plan: list[tuple[str, str]]) -> None:
    grade = find("SEQBENCH-5x5").grade(PROBLEM, format_plan(plan))
    assert (grade.correct, grade.status) == (False, Status.OK)
    assert (grade.metrics["first_error"], grade.metrics["first_error_index"]) == (error, index)
    assert grade.progress == same / len(REFERENCE) < 1
    assert grade.metrics["valid"] == float(error == "not_optimal")
    assert (grade.metrics["progress_valid"] == 1) == (error == "not_optimal")


def test_the_reference_is_right_and_no_plan_is_no_answer() -> None:
    bench = find("SEQBENCH-5x5")
    right = bench.grade(PROBLEM, f"I think [so].\n{PROBLEM.answer}")
    assert (right.correct, right.progress, right.answer, right.status) == (True, 1.0, PROBLEM.answer, Status.OK)
    assert right.metrics == {
        "valid": 1.0,
        "progress_valid": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "first_error": "none",
        "first_error_index": 9,
    }
    none = bench.grade(PROBLEM, "There is no way.")
    assert (none.correct, none.progress, none.answer, none.status) == (False, 0.0, None, Status.NO_ANSWER)


@pytest.mark.parametrize("name", ["SEQBENCH-5x5", "SEQBENCH-6x6-B1", "SEQBENCH-40x40-L100-B2-N0.5-S1"])
def test_references_solve_their_problems(name: str) -> None:
    bench = find(name)
    assert bench.name == name
    for problem in bench.problems(10):
        plan = parse_plan(problem.answer)
        assert bench.grade(problem, problem.answer).correct
        maze = read_maze(problem.question.splitlines())
        assert shortest(maze) == (len(plan), 1)
        assert reachable(maze)
        assert problem.about["L"] == len(plan) == problem.about["moves"] + 2 + 3 * problem.about["B"]


def test_mazes_are_the_same_everywhere() -> None:
    problems = find("SEQBENCH-40x40-L100-B2-N0.5-S1").problems(3)
    text = "\n".join(f"{problem.question}\n{problem.answer}" for problem in problems)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "34912ed3a44373733420eec60a65d3a68b43d0144379f71b0ba9507a5bde04b9"
    )


@pytest.mark.parametrize(
    "shape",
    [MazeShape(40, 40, 400), MazeShape(40, 40, 250, noise=1.0), MazeShape(13, 9, 80), MazeShape(40, 40, 400, 5, 1.0)],
)
def test_plans_as_long_as_the_published_ones(shape: MazeShape) -> None:
    for seed in range(3):
        instance = draw(shape, random.Random(seed))
        assert len(instance.plan) == shape.length
        assert shortest(read_maze(instance.facts)) == (shape.length, 1)
        rooms = [room for name, room in instance.plan if name in ("start", "move_to")]
        assert (len(set(rooms)) == len(rooms)) == (shape.doors == 0)


def test_small_grids_keep_their_mazes() -> None:
    text = "\n".join(f"{problem.question}\n{problem.answer}" for problem in find("SEQBENCH-6x6-B1").problems(3))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "624d77d9409a9da579214751ef6a8ff4f506d8b1d7632f1e3202995a1d3241e6"
    )


@pytest.mark.parametrize(
    "name",
    ["SEQBENCH-40x40-L400-B5-N1", "SEQBENCH-9x9-B3", "SEQBENCH-6x6-B1-Konway", "SEQBENCH-40x40-L100-B2-Kdetour"],
)
def test_keys_lie_on_the_way_or_in_dead_ends(name: str) -> None:
    benchmark = find(name)
    assert benchmark.name == name
    assert ("on_way" in identity(benchmark)) == (not name.endswith("Kdetour"))
    for problem in benchmark.problems(3):
        plan = parse_plan(problem.answer)
        assert plan is not None
        assert shortest(read_maze(problem.question.splitlines())) == (len(plan), 1)
        rooms = [room for action, room in plan if action in ("start", "move_to")]
        assert (len(set(rooms)) == len(rooms)) == (not name.endswith("Kdetour"))


def test_a_word_about_keys_that_says_nothing_new_is_left_out_of_the_name() -> None:
    names = ["SEQBENCH-6x6-B1-Kdetour", "SEQBENCH-40x40-B1-Konway", "SEQBENCH-40x40-Kdetour"]
    assert [find(name).name for name in names] == ["SEQBENCH-6x6-B1", "SEQBENCH-40x40-B1", "SEQBENCH-40x40"]


PLAIN = ["start A1", "move_to A2", "pick_up_key 7", "rescue Alice"]


@pytest.mark.parametrize(
    "text",
    [
        str(PLAIN),
        str([line.replace(" ", ": ") for line in PLAIN]),
        str([str(tuple(line.split())) for line in PLAIN]),
        str([f"{line.replace(' ', '(')})" for line in PLAIN]),
        str([tuple(line.split()) for line in PLAIN])[:-1],
        str([line.split() for line in PLAIN])[:-1] + "\n```",
        "[see below] " + str(PLAIN)[:-1] + ".",
    ],
)
def test_lists_of_texts_and_lists_without_their_last_bracket_are_read(text: str) -> None:
    assert parse_plan(text) == tuple(tuple(line.split()) for line in PLAIN)


@pytest.mark.parametrize("text", ["[('start', 'A1'), ('move_to', 'A", "['start'", "['walk A1', 'move_to A2']", "[1, 2"])
def test_what_is_no_plan_is_none(text: str) -> None:
    assert parse_plan(text) is None


@pytest.mark.parametrize("columns", [2, 3])
def test_a_corridor_has_no_long_way_round(columns: int) -> None:
    with pytest.raises(KvatlasError, match="take a larger grid, or smaller L, B or N"):
        draw(MazeShape(columns, 40, 2 + columns * 40 - 2), random.Random(0))


def test_all_that_is_stated_is_supporting_or_noise() -> None:
    instance = draw(MazeShape(40, 40, 100, 2, 0.5, 1.0), random.Random(1))
    assert len(instance.facts) - instance.supporting == round(0.5 * instance.supporting)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("SEQBENCH", "valid are names like SEQBENCH-5x5"),
        ("SEQBENCH-5x5-B1-B2", "then, each once, any of"),
        ("SEQBENCH-1x3", "valid are grids of 4 to 10000 rooms"),
        ("SEQBENCH-5x5-L10-B2", "L = 10 actions are too few for B = 2"),
        ("SEQBENCH-5x5-L90", "L = 90 actions are too many for 5x5 rooms"),
        ("SEQBENCH-5x5-B20", "B = 20 locked doors do not fit into 5x5 rooms"),
        ("SEQBENCH-5x5-N11", "valid are 0 to 10"),
        ("SEQBENCH-5x5-S1.5", "valid are 0 to 1"),
    ],
)
def test_impossible_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence):
        find(name)


def test_a_plan_too_long_for_any_maze_drawn_is_refused() -> None:
    with pytest.raises(KvatlasError, match="None of 400 mazes of 5x5 rooms has L = 60, B = 2 and N = 0"):
        find("SEQBENCH-5x5-L60-B2-N0").problems(1)

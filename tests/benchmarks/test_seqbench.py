"""Mazes of any shape, plans through them, names of benchmarks, and files in the layout of the published data set."""

import gzip
import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import MazeShape, draw, follow, format_plan, judge, parse_plan, read_maze
from kvatlas.benchmarks.seqbench.mazes import Instance
from kvatlas.benchmarks.seqbench.plans import ACTIONS, NO_ERROR, count_doors_and_moves, shortest
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


@pytest.mark.parametrize(
    ("name", "on_way"),
    [
        ("SEQBENCH-5x5", True),
        ("SEQBENCH-6x6-B1", False),
        ("SEQBENCH-6x6-B1-Konway", True),
        ("SEQBENCH-40x40-L100-B2-Kdetour", False),
        ("SEQBENCH-40x40-L400-B5-N1", True),
    ],
)
def test_references_solve_their_problems(name: str, on_way: bool) -> None:
    """Keys lie on the way, where no room is entered twice, or in dead ends."""
    bench = find(name)
    assert bench.name == name
    for problem in bench.problems(3):
        plan = parse_plan(problem.answer)
        assert bench.grade(problem, problem.answer).correct
        maze = read_maze(problem.question.splitlines())
        assert shortest(maze) == (len(plan), 1)
        assert problem.about["L"] == len(plan) == problem.about["moves"] + 2 + 3 * problem.about["B"]
        rooms = [room for action, room in plan if action in ("start", "move_to")]
        assert (len(set(rooms)) == len(rooms)) == on_way


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("SEQBENCH-40x40-L100-B2-N0.5-S1", "34912ed3a44373733420eec60a65d3a68b43d0144379f71b0ba9507a5bde04b9"),
        ("SEQBENCH-6x6-B1", "624d77d9409a9da579214751ef6a8ff4f506d8b1d7632f1e3202995a1d3241e6"),
    ],
)
def test_mazes_are_the_same_everywhere(name: str, digest: str) -> None:
    text = "\n".join(f"{problem.question}\n{problem.answer}" for problem in find(name).problems(3))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_a_word_about_keys_that_says_nothing_new_is_left_out_of_the_name() -> None:
    names = ["SEQBENCH-6x6-B1-Kdetour", "SEQBENCH-40x40-B1-Konway", "SEQBENCH-40x40-Kdetour"]
    assert [find(name).name for name in names] == ["SEQBENCH-6x6-B1", "SEQBENCH-40x40-B1", "SEQBENCH-40x40"]


PLAIN = ["start A1", "move_to A2", "pick_up_key 7", "rescue Alice"]


@pytest.mark.parametrize(
    "text",
    [
        str(PLAIN),
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


def test_all_that_is_stated_is_supporting_or_noise() -> None:
    instance = draw(MazeShape(40, 40, 100, 2, 0.5, 1.0), random.Random(1))
    rooms = [room for name, room in instance.plan if name in ("start", "move_to")]
    doors = {frozenset(pair) for pair in pairwise(rooms)}
    # A locked door has a fact about its key, which has one about its place; Bob and Alice have one each.
    supporting = len(doors) + 2 * 2 + 2
    assert len(instance.facts) - supporting == round(0.5 * supporting)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("SEQBENCH", "expected names like SEQBENCH-5x5"),
        ("SEQBENCH-5x5-B1-B2", "then, each once, any of"),
        ("SEQBENCH-5x5-L10-B2", "L = 10 actions do not fit 5x5 rooms and B = 2"),
        ("SEQBENCH-5x5-B20", "B = 20 locked doors do not fit into 5x5 rooms"),
        ("SEQBENCH-5x5-S1.5", "expected 0 to 1"),
    ],
)
def test_impossible_names_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence):
        find(name)


def test_a_plan_too_long_for_any_maze_drawn_is_refused() -> None:
    with pytest.raises(KvatlasError, match="None of 400 mazes of 5x5 rooms has L = 60, B = 2 and N = 0"):
        find("SEQBENCH-5x5-L60-B2-N0").problems(1)


often = settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def instances(draw_value: Any) -> Instance:
    """A maze of any small shape, with a given or a free length."""
    columns, rows = draw_value(st.integers(3, 9)), draw_value(st.integers(3, 9))
    doors = draw_value(st.integers(0, 3))
    length = draw_value(st.none() | st.integers(5 * doors + 3, 5 * doors + 3 + columns + rows))
    noise, shuffle = draw_value(st.sampled_from([0, 0.3, 1])), draw_value(st.sampled_from([0, 0.5, 1]))
    try:
        return draw(MazeShape(columns, rows, length, doors, noise, shuffle), random.Random(draw_value(st.integers(0))))
    except KvatlasError:
        assume(False)
        raise


@often
@given(instances())
def test_every_instance_is_what_its_shape_says(instance: Instance) -> None:
    doors, moves = count_doors_and_moves(instance.plan)
    assert len(instance.plan) == moves + 2 + 3 * doors
    assert instance.plan[0] == ("start", instance.maze.start)
    assert instance.plan[-1] == ("rescue", "Alice")
    stated = read_maze(instance.facts)
    assert follow(stated, instance.plan) == (len(instance.plan), NO_ERROR)
    assert shortest(stated) == (len(instance.plan), 1)
    assert len(set(instance.facts)) == len(instance.facts)
    # Without any one key there is no way.
    needed = [key for name, key in instance.plan if name == "use_key"]
    assert len(set(needed)) == doors
    assert {shortest(stated, without=key) for key in needed} <= {(0, 0)}
    spare = {key for key, _ in stated.keys} - set(needed)
    assert {shortest(stated, without=key) for key in spare} <= {shortest(stated)}
    # Bob turns round in every room with a key.
    walk = [action for action in instance.plan if action[0] in ("start", "move_to", "pick_up_key", "rescue")]
    for position, (name, _) in enumerate(walk):
        if name == "pick_up_key":
            assert walk[position + 1][1] == walk[position - 2][1]


words = st.text("ABCxyz019_' .-", min_size=1, max_size=12)
plans = st.lists(st.tuples(st.sampled_from(ACTIONS) | words, words), max_size=12).map(tuple)


@often
@given(plans, st.text(max_size=40), st.text(max_size=40))
def test_parsing_undoes_formatting(plan: Any, before: str, after: str) -> None:
    assert parse_plan(format_plan(plan)) == plan
    assume("[" not in before + after and "]" not in before + after)
    assert parse_plan(f"{before}{format_plan(plan)}{after}") == plan


@often
@given(st.text(max_size=300) | st.text("[]()',\"\\ a1", max_size=300))
def test_no_text_breaks_the_parser(text: str) -> None:
    plan = parse_plan(text)
    assert plan is None or all(isinstance(word, str) for action in plan for word in action)


@often
@given(instances(), st.data())
def test_progress_is_1_only_for_solved_plans(instance: Instance, data: st.DataObject) -> None:
    """Plans made from the reference by a few deletions, doublings and swaps, which is how models go wrong."""
    plan = list(instance.plan)
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, max(0, len(plan) - 1)))
        change = data.draw(st.sampled_from(["drop", "double", "swap", "cut", "other"]))
        if change == "drop":
            del plan[position : position + 1]
        elif change == "double":
            plan[position:position] = plan[position : position + 1]
        elif change == "swap":
            plan[position : position + 2] = plan[position : position + 2][::-1]
        elif change == "cut":
            del plan[position:]
        elif plan:
            plan[position] = data.draw(st.sampled_from(instance.plan))
    verdict = judge(instance.maze, instance.plan, tuple(plan))
    valid, progress_valid, error = (verdict.metrics[name] for name in ("valid", "progress_valid", "first_error"))
    assert verdict.correct == (tuple(plan) == instance.plan)
    assert (verdict.progress == 1) == verdict.correct
    assert (progress_valid == 1) == valid
    assert verdict.correct <= valid
    assert (error == NO_ERROR) == verdict.correct
    assert error in {NO_ERROR, *(name for name, *_ in WRONG)}
    assert 0 <= verdict.metrics["first_error_index"] <= len(plan)
    # What equals the reference can be done: legal leading actions are never fewer than those.
    assert progress_valid >= verdict.progress


def rows(count: int = 3) -> list[dict[str, Any]]:
    """Generated mazes as the published data set writes its own, with other people in them."""
    made = []
    for number, problem in enumerate(find("SEQBENCH-6x6-B1").problems(count)):
        metadata = {"maze_rows": 6, "agent_name": "Dana", "target_name": "Lee"}
        completion = problem.answer.replace("Alice", "Lee")
        context = problem.question.replace("\n", " ").replace("Bob", "Dana").replace("Alice", "Lee")
        plan = parse_plan(problem.answer)
        made.append(
            {
                "instance_id": f"maze_{number}",
                "context": f"Here are the facts. {context} What is the plan?",
                # Lists and objects may be given as such or as text.
                "completion": [list(action) for action in parse_plan(completion) or ()] if number else completion,
                "complexity_parameters": {
                    "logical_depth_L": len(plan),
                    "backtracking_count_B": 1,
                    "noise_ratio_N": 1.0,
                },
                "instance_metadata": json.dumps(metadata) if number else metadata,
                "structural_details": "{}",
            }
        )
    return made


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["mazes.jsonl", "mazes.jsonl.gz"])
def test_the_published_layout_is_read(tmp_path: Path, name: str) -> None:
    bench = find(f"SEQBENCH@{write(tmp_path / name, rows())}")
    ours = find("SEQBENCH-6x6-B1").problems(3)
    assert [p.id for p in bench.problems()] == ["maze_0", "maze_1", "maze_2"]
    assert [(p.question, p.answer) for p in bench.problems()] == [(p.question, p.answer) for p in ours]
    first = bench.problems(1)[0]
    assert (first.about["L"], first.about["B"], first.about["N"]) == (ours[0].about["L"], 1, 1.0)
    assert bench.prompt(first).startswith("# Task")
    assert bench.grade(first, first.answer).correct
    assert bench.grade(first, "none").status is Status.NO_ANSWER
    assert bench.typical_output_tokens > 0
    assert find(bench.name) == bench


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completion": "move along"}, "Line 2 .* has a completion that is no plan"),
        ({"completion": "[('start', 'A1'), ('rescue', 'Lee')]"}, "Line 2 .* fails at action"),
        ({"context": "Once upon a time."}, "Line 2 .* say once where Bob is"),
        ({"instance_id": "maze_0"}, "has an instance_id twice"),
        (None, "Line 2 .* lacks instance_id, context or completion"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, change: dict[str, Any] | None, sentence: str) -> None:
    content = rows()
    content[1] = content[1] | change if change else {"problem": "1 + 1", "answer": "2"}
    with pytest.raises(KvatlasError, match=sentence):
        find(f"SEQBENCH@{write(tmp_path / 'm.jsonl', content)}").problems()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(b"{}")[:12])
    with pytest.raises(KvatlasError, match="cannot be read"):
        find(f"SEQBENCH@{tmp_path / 'broken.jsonl.gz'}").problems()
    with pytest.raises(KvatlasError, match=r"name it as 'SEQBENCH@m\.jsonl'"):
        find("SEQBENCH-5x5@m.jsonl")

"""What holds for every maze and every plan, whatever is drawn."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvatlas.benchmarks.seqbench import Instance, MazeShape, draw, follow, format_plan, judge, parse_plan, read_maze
from kvatlas.benchmarks.seqbench.plans import ACTIONS, ERRORS, NO_ERROR, reachable, shortest
from kvatlas.core import KvatlasError

often = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])


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
    moves, doors = instance.moves, instance.doors
    assert len(instance.plan) == moves + 2 + 3 * doors
    assert instance.plan[0] == ("start", instance.maze.start)
    assert instance.plan[-1] == ("rescue", "Alice")
    stated = read_maze(instance.facts)
    assert follow(stated, instance.plan) == (len(instance.plan), NO_ERROR)
    assert shortest(stated) == (len(instance.plan), 1)
    assert len(set(instance.facts)) == len(instance.facts)


@often
@given(instances())
def test_without_any_one_key_there_is_no_way(instance: Instance) -> None:
    stated = read_maze(instance.facts)
    assert reachable(stated)
    needed = [key for name, key in instance.plan if name == "use_key"]
    assert len(set(needed)) == instance.doors
    assert not any(reachable(stated, without=key) for key in needed)
    spare = {key for key, _ in stated.keys} - set(needed)
    assert all(reachable(stated, without=key) for key in spare)


@often
@given(instances())
def test_bob_turns_round_in_every_key_room(instance: Instance) -> None:
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
    assert verdict.solved == (tuple(plan) == instance.plan)
    assert (verdict.progress == 1) == verdict.solved
    assert (verdict.progress_valid == 1) == verdict.valid
    assert verdict.solved <= verdict.valid
    assert (verdict.first_error == NO_ERROR) == verdict.solved
    assert verdict.first_error in (*ERRORS, NO_ERROR)
    assert 0 <= verdict.first_error_index <= len(plan)
    assert all(
        0 <= share <= 1 for share in (verdict.progress, verdict.progress_valid, verdict.precision, verdict.recall)
    )
    # What equals the reference can be done: legal leading actions are never fewer than those.
    assert verdict.progress_valid >= verdict.progress


@often
@given(instances())
def test_a_longer_way_to_the_goal_is_valid_and_not_solved(instance: Instance) -> None:
    first = instance.plan[1]
    assume(first[0] == "move_to")
    start = instance.plan[0][1]
    detour = (*instance.plan[:2], ("move_to", start), *instance.plan[1:])
    verdict = judge(instance.maze, instance.plan, detour)
    assert (verdict.valid, verdict.solved, verdict.first_error) == (True, False, "not_optimal")
    assert verdict.first_error_index == 2 == round(verdict.progress * len(instance.plan))
    assert verdict.recall == 1 > verdict.precision

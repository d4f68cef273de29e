"""The kinds of death in a decoded run: counted by cell, in describe, and agreeing with the truth of chains."""

import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvatlas.autopsy.kinds_of_death import Death
from kvatlas.autopsy.lost_answers import LostAnswer, count_deaths, lost_answers
from kvatlas.benchmarks import find
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec
from tests.command_line import Call
from tests.stored import decode_run

VALUES = (Death.FORGOTTEN, Death.MISREAD, Death.RECOMPUTED)
MISSING = (Death.SKIPPED, Death.EARLY_STOP)
SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN10"],
    "problems": 24,
    "sampling": {"max_new_tokens": 500},
    "settings": [{"policy": "random", "kv_budget": 288}],
    "axes": {"local_window": [16, 32], "ratio": [0.1, 0.2]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_run(SPEC, tmp_path_factory.mktemp("deaths") / "run")


def lost_of(run: Path) -> list[LostAnswer]:
    (model,) = make_plan(parse_spec(SPEC)).models
    with Store.open(run) as store:
        return list(lost_answers(store, lambda _, tokens: [model.tokenizer.decode([token]) for token in tokens]))


def truth_of(question: str) -> dict[str, int]:
    """Return the true values of a chain."""
    bodies = dict(definition.split(" = ") for definition in question.split(" ? ")[0].split(" ; "))

    @cache
    def value(name: str) -> int:
        words = bodies[name].split()
        if len(words) == 1:
            return int(words[0])
        sign = 1 if words[1] == "+" else -1
        return (value(words[0]) + sign * value(words[2])) % 10

    return {name: value(name) for name in bodies}


def a_true_value_was_lost(text: str, truth: dict[str, int]) -> bool:
    """Return whether a value stated rightly before is unknown or another one later, or a sum is wrong."""
    known = set()
    for name, digit, unknown in re.findall(r"\b([a-z])(?:(\d)\b| = (?=\d)| (unknown))", text.replace("= ", "=  ")):
        if (unknown or (digit and int(digit) != truth.get(name))) and name in known:
            return True
        if digit and int(digit) == truth.get(name):
            known.add(name)
    answer = dict(re.findall(r"([a-z]) = (\d+)", text.partition("</think>")[2]))
    return any(name in known and int(value) != truth[name] for name, value in answer.items() if name in truth)


def test_lost_values_and_missing_steps_agree_with_the_truth(run: Path) -> None:
    questions = {problem.id: problem.question for problem in find("CHAIN10").problems(24)}
    agreed = []
    for one in lost_of(run):
        truth = truth_of(questions[one.trace.problem])
        if one.death.kind in VALUES:
            agreed.append(a_true_value_was_lost(one.trace.text, truth))
        elif one.death.kind in MISSING:
            computed = set(re.findall(r"^([a-z]) = .*\b\1\d \.$", one.trace.text, re.MULTILINE))
            agreed.append(one.death.name not in computed)
    assert len(agreed) > 20
    assert sum(agreed) >= 0.95 * len(agreed)


def test_lost_answers_are_right_with_the_full_cache_and_counted_once(run: Path) -> None:
    lost = lost_of(run)
    with Store.open(run) as store:
        full = [trace for _, trace in store.traces(texts=False) if trace.setting.policy == "full"]
    right = {(one.model, one.benchmark, one.problem, one.sample) for one in full if one.grade.correct}
    assert all((one.trace.model, *one.key[2:]) in right and not one.trace.grade.correct for one in lost)
    traces = []

    def one_by_one() -> Iterator[LostAnswer]:
        for answer in lost:
            # Of those before, whose traces are large, the last one may be held still.
            assert not any(trace() for trace in traces[:-1])
            one = replace(answer, trace=replace(answer.trace))
            traces.append(weakref.ref(one.trace))
            yield one
            del one

    cells = count_deaths(one_by_one())
    assert sum(cell.lost for cell in cells) == len(lost)
    for cell in cells:
        assert sum(cell.counts.values()) == cell.lost
        for death, share in cell.shares.items():
            assert share.value == pytest.approx(cell.counts[death] / cell.lost)
            assert share.low is not None
            assert share.high is not None
            assert share.low <= share.value <= share.high


def test_describe_counts_them_as_data_and_as_a_table(run: Path, kvatlas: Call) -> None:
    document = json.loads(kvatlas.succeed("describe", run, "--deaths", "--json"))
    cells = {(cell["parameters"]["local_window"], cell["parameters"]["ratio"]): cell for cell in document["deaths"]}
    counted = {
        tuple(cell.setting.values[name] for name in ("local_window", "ratio")): cell.lost
        for cell in count_deaths(iter(lost_of(run)))
    }
    assert {place: cell["lost"] for place, cell in cells.items()} == counted
    kinds = [kind for cell in document["deaths"] for kind in cell["kinds"].values()]
    assert all(kind["low"] <= kind["value"] <= kind["high"] for kind in kinds)
    table = kvatlas.succeed("describe", run, "--deaths")
    assert len(re.findall(r"\| tiny-llama +\| CHAIN10 +\| random\(", table)) == len(counted)
    assert "deaths" not in json.loads(kvatlas.succeed("describe", run, "--json"))

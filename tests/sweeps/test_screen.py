"""A screen says where settings depart from the full cache, as decoding shows it, and how far, as a masked pass does."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting, Trace, first_difference
from kvatlas.engine import Engine, Likeness, Request
from kvatlas.models import ModelHandle
from kvatlas.results import Store
from kvatlas.screen.grid_screen import screen, screening
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from kvatlas.sweeps.worker import measures
from tests.decoding import endless, prompts
from tests.sweeps.conftest import Build, contents

FULL = policies.from_setting(Setting.from_parameters("full"))


def read(engine: Engine, request: Request[int]) -> Iterator[Likeness]:
    """The likeness of every policy of a request with a script that the full cache reads beside them."""
    for generation in engine.run([replace(request, policies=(*request.policies, FULL))]):
        assert generation.tokens == request.script
        if generation.policy != FULL:
            yield generation.likeness


def records(folder: Path) -> dict[Any, Trace]:
    """Without the run keys: those of a screen are its own."""
    return {(trace.setting.id, *key[2:]): trace for key, trace in contents(folder).items()}


@pytest.fixture(scope="module")
def data(spec_data: Build) -> dict[str, Any]:
    settings = [{"policy": name, "kv_budget": 64, "ratio_over": "thinking"} for name in ("window", "h2o", "snapkv")]
    sampling = {"temperature": 0.3, "max_new_tokens": 90}
    return spec_data(settings=settings, problems=2, samples=1, sampling=sampling)


@pytest.fixture(scope="module")
def decoded(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoded")
    sweep(make_plan(parse_spec(data)), folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def screened(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder, told = tmp_path_factory.mktemp("screened"), []
    screen(screening(make_plan(parse_spec(data))), folder, workers=1, on_message=told.append)
    return folder, told


def test_it_finds_the_first_difference_of_every_decoded_trace(decoded: Path, screened: tuple[Path, list[str]]) -> None:
    wanted, result = records(decoded), records(screened[0])
    assert wanted.keys() == result.keys()
    departed = 0
    for key, trace in wanted.items():
        full = wanted[(FULL.setting.id, *key[1:])].tokens
        if trace.setting == FULL.setting:
            assert result[key].tokens == full
            continue
        metrics = result[key].grade.metrics
        assert result[key].tokens == ()
        assert metrics.get("departs_at") == first_difference(trace.tokens, full)
        assert metrics["unchanged"] == (trace.tokens == full)
        assert all(0 <= metrics[name] <= 1 for name in ("unchanged", "agreed", "top1", "likeness"))
        departed += trace.tokens != full
    assert 0 < departed < len(wanted)


def test_it_says_that_full_cache_traces_come_first_and_goes_on_where_it_was(
    data: dict[str, Any], screened: tuple[Path, list[str]], decoded: Path, tmp_path: Path
) -> None:
    folder, told = screened
    assert told == ["4 full-cache traces are missing: they are decoded first."]
    plan = screening(make_plan(parse_spec(data)))
    again: list[str] = []
    progress: list[Any] = []
    screen(plan, folder, workers=1, on_message=again.append, on_trace=progress.append)
    assert (again, progress) == ([], [])
    few = screening(make_plan(parse_spec({**data, "problems": 1})))
    screen(few, tmp_path / "s", traces=decoded, workers=1, batch_size=3, on_message=again.append)
    assert again == []
    grades = {key: trace.grade for key, trace in contents(folder).items()}
    others = {key: trace.grade for key, trace in contents(tmp_path / "s").items()}
    assert len(others) == len(grades) / 2
    assert others.items() <= grades.items()


def test_its_maps_say_what_they_are(screened: tuple[Path, list[str]]) -> None:
    with Store.open(screened[0]) as store:
        manifest, traces = store.manifest(), list(store.traces(texts=False))
    maps = maps_of_run(RunData(manifest, traces, "top1"))
    assert {map_.policy for map_ in maps} == {"window", "h2o", "snapkv"}
    assert all("not Pass@1" in " ".join(map(str, map_.notes)) for map_ in maps)
    cell = next(iter(maps[0].cells.values()))
    assert cell.estimate.low <= cell.estimate.value <= cell.estimate.high
    with pytest.raises(KvatlasError, match=r"is a screen, which knows no 'pass@1'; expected: unchanged, agreed"):
        maps_of_run(RunData(manifest, traces))


def test_what_cannot_be_screened_is_refused_in_a_sentence(data: dict[str, Any], decoded: Path, tmp_path: Path) -> None:
    plan = screening(make_plan(parse_spec(data)))
    with pytest.raises(KvatlasError, match="holds a sweep, whose maps a screen would hide; name another folder"):
        screen(plan, decoded)
    hotter = screening(make_plan(parse_spec({**data, "sampling": {"temperature": 0.9, "max_new_tokens": 90}})))
    with pytest.raises(KvatlasError, match=r"they have sampling.temperature 0.3 \(this spec: 0.9\)\.$"):
        screen(hotter, tmp_path / "a", traces=decoded)
    other = screening(make_plan(parse_spec({**data, "benchmarks": ["CHAIN7"]})))
    with pytest.raises(KvatlasError, match=r"they have benchmarks CHAIN4, CHAIN5 \(this spec: CHAIN7\)\.$"):
        screen(other, tmp_path / "b", traces=decoded)
    sweep(make_plan(parse_spec({**data, "baseline": [], "problems": 1})), tmp_path / "run", workers=1)
    with pytest.raises(KvatlasError, match="has no setting 'full'"):
        screen(plan, tmp_path / "c", traces=tmp_path / "run")
    with pytest.raises(KvatlasError, match="no setting that compresses"):
        screening(make_plan(parse_spec({**data, "settings": [], "axes": {}})))


@pytest.mark.parametrize("thinks", [False, True])
def test_distances_equal_those_of_one_pass_under_a_mask(random_models: dict[str, ModelHandle], thinks: bool) -> None:
    """The tokens that a plain window sees at each step, as a mask over the whole trace through transformers' own
    attention."""
    handle = endless(random_models["qwen2"])
    policy = policies.from_setting(
        Setting.from_parameters("window", kv_budget=70, local_window=10, ratio=0.5, ratio_over="thinking")
    )
    (prompt,) = prompts(handle, 1)
    sampling = Sampling(0.8, 20, 0.95, 100)
    engine = Engine(handle, handle.load(), [FULL], sampling)
    tokens = next(engine.run([Request(0, prompt, 7, (FULL,))])).tokens
    split = (80, 81) if thinks else (len(tokens), len(tokens))
    if thinks:
        vars(handle)["split"] = lambda _: split
    engine = Engine(handle, handle.load(), [policy], sampling)
    tally = next(read(engine, Request(0, prompt, 7, (policy,), script=tokens)))

    whole = torch.tensor([prompt + tokens])
    hidden, first = _window_mask(len(prompt), whole.shape[1], 70, 10, 0.5)
    model = handle.load()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(input_ids=whole).logits[0].log_softmax(-1)
        masked = model(input_ids=whole, attention_mask=hidden).logits[0].log_softmax(-1)
    after = slice(first, len(prompt) + split[0] - 1)
    kl = (plain.exp() * (plain - masked)).sum(-1)[after]
    assert tally.thinking == len(kl) > 20
    assert tally.kl == pytest.approx(float(kl.sum()), rel=1e-3, abs=1e-3)
    assert abs(tally.top1 - int((plain.argmax(-1) == masked.argmax(-1))[after].sum())) <= 1
    said = torch.arange(len(prompt) + split[1], whole.shape[1])
    change = (masked - plain)[said - 1, whole[0, said]].sum()
    assert tally.answer == len(said)
    assert tally.answer_change == pytest.approx(float(change), rel=1e-3, abs=1e-3)


def test_steps_of_a_fixed_shape_follow_the_trace(random_models: dict[str, ModelHandle]) -> None:
    """Not the tokens that a GPU samples within a step."""
    handle = endless(random_models["llama"])
    values = {"local_window": 10, "ratio": 0.95, "ratio_over": "thinking"}
    chosen = tuple(
        policies.from_setting(Setting.from_parameters("window", kv_budget=budget, **values)) for budget in (70, 73)
    )
    (prompt,) = prompts(handle, 1)
    sampling, model = Sampling(0.8, 20, 0.95, 60), handle.load()
    tokens = next(Engine(handle, model, [FULL], sampling).run([Request(0, prompt, 7, (FULL,))])).tokens
    request = Request(0, prompt, 7, chosen, script=tokens)
    plain, fixed = (
        list(read(Engine(handle, model, chosen, sampling, backend=name), request)) for name in ("reference", "flex")
    )
    assert [likeness.departs_at for likeness in plain] == [likeness.departs_at for likeness in fixed]
    assert [likeness.kl for likeness in plain] == pytest.approx([likeness.kl for likeness in fixed], rel=1e-3)
    assert min(likeness.kl for likeness in fixed) > 0


def _window_mask(prompt: int, length: int, budget: int, window: int, ratio: float) -> tuple[torch.Tensor, int]:
    """0 or -inf [1, 1, length, length], and the first position whose token sees less than all."""
    cached, first = list(range(prompt)), length
    mask = torch.full((length, length), float("-inf"))
    for row in range(prompt):
        mask[row, : row + 1] = 0
    for position in range(prompt, length):
        cached.append(position)
        mask[position, cached] = 0
        if len(cached) >= budget:
            first = min(first, position + 1)
            older = [item for item in cached[:-window] if item >= prompt]
            stay = older[len(older) - int(ratio * len(older)) :]
            cached = list(range(prompt)) + stay + cached[-window:]
    return mask[None, None], first


def test_what_has_lost_nothing_measures_nothing_lost() -> None:
    assert measures(Likeness(), 30) == {
        "unchanged": 1.0, "agreed": 1.0, "top1": 1.0, "likeness": 1.0, "answer_kept": 1.0,
        "kl": 0.0, "answer_change": 0.0,
    }  # fmt: skip
    lost = measures(Likeness(10, thinking=4, kl=2.0, top1=3, answer=2, answer_change=-1.0), 40)
    assert (lost["agreed"], lost["departs_at"], lost["top1"]) == (0.25, 10, 0.75)
    assert lost["likeness"] == math.exp(-0.5)
    assert lost["answer_kept"] == math.exp(-1)

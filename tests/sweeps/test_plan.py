import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, canonical
from kvatlas.models import ENDLESS, ModelHandle, embedded, handle
from kvatlas.models import find as find_model
from kvatlas.report.materials import RunMaterials
from kvatlas.results import Manifest
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import Progress, make_plan, parse_spec, sweep
from kvatlas.sweeps.executors import cores
from kvatlas.sweeps.measured_rate import TimedEngine, decoding_rate
from kvatlas.sweeps.plan_notes import settings_notes
from tests.counting import calls
from tests.r1 import AIME, FIRST_TEMPLATE, copied
from tests.sweeps.conftest import Build

#: Bits of cached numbers as an axis.
BITS: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN6"],
    "problems": 2,
    "sampling": {"max_new_tokens": 120},
    "settings": [{"policy": "window", "kv_budget": 160, "ratio": 0.3}],
    "axes": {"kv_bits": [16, 4], "local_window": [32, 40]},
}


def test_a_plan_names_every_trace(spec_data: Build) -> None:
    plan = make_plan(parse_spec(spec_data()))
    assert plan.traces == 2 * 3 * 2 * 9
    units = plan.units(plan.manifest().expected, {})
    assert sum(len(unit.settings) for unit in units) == plan.traces
    manifest = plan.manifest()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert [cell.baseline for cell in manifest.expected] == ([False] * 8 + [True]) * 2


def test_tokens_of_settings_alone_and_the_mean_cache_by_hand(spec_data: Build) -> None:
    settings = [{"policy": "window", "kv_budget": 100, "local_window": 20, "ratio": 0.5}]
    plan = make_plan(parse_spec(spec_data(settings=settings, axes={}, samples=4, expected_output_tokens=80)))
    # Two settings, three problems of two benchmarks, four samples.
    assert plan.estimate()["decoded_tokens"]["separate"] == 2 * 3 * 2 * 4 * 80

    # From prompt to end in the full cache; from the window and half of the rest to the budget with the policy.
    model = plan.models[0]
    full = (plan.longest_prompt(model) + plan.longest_trace(model)) / 2
    compressed = (20 + 0.5 * (100 - 20) + 100) / 2
    assert len(plan.policies) == 2
    assert plan.mean_cached(model) == round((full + compressed) / 2)


def test_a_plan_whose_traces_are_all_there_looks_at_each_in_passing(spec_data: Build) -> None:
    plan = make_plan(parse_spec(spec_data(problems=20, samples=50)))
    keys = {(plan.compute_keys()[name], name[2].id, name[1]) for name in plan.compute_keys()}
    ids = {name: [problem.id for problem in problems] for name, problems in plan.problems.items()}
    done = {(*key, problem): frozenset(range(50)) for key in keys for problem in ids[key[2]]}
    expected = plan.manifest().expected
    units, count = calls(lambda: plan.units(expected, done))
    assert units == []
    assert count < plan.traces / 2


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"problems": 2, "samples": 5, "benchmarks": ["CHAIN4"]}, True),
        ({"axes": {"local_window": [4], "ratio": [0.2]}}, True),
        ({"seed": 4}, False),
        ({"sampling": {"temperature": 0.9, "max_new_tokens": 90}}, False),
        ({"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 80}}, False),
    ],
)
def test_run_keys_follow_what_can_change_an_answer_and_nothing_else(
    spec_data: Build, changes: dict[str, Any], same: bool
) -> None:
    first, other = make_plan(parse_spec(spec_data())), make_plan(parse_spec(spec_data(**changes)))
    shared = [key for key in other.compute_keys() if key in first.compute_keys()]
    assert shared
    assert all((first.compute_keys()[key] == other.compute_keys()[key]) is same for key in shared)


def test_keys_of_16_bits_are_those_without_bits() -> None:
    plain = make_plan(parse_spec({**BITS, "axes": {"local_window": [32, 40]}}))
    keys = make_plan(parse_spec(BITS)).compute_keys()
    assert {name: key for name, key in keys.items() if "kv_bits" not in name[2].values} == dict(plain.compute_keys())
    packed = {key for (_, _, setting), key in keys.items() if "kv_bits" in setting.values}
    assert len(packed) == 1
    assert not packed & {*plain.compute_keys().values()}


def test_bits_are_an_axis_and_bytes_are_known(tmp_path: Path) -> None:
    plan = make_plan(parse_spec(BITS))
    sweep(plan, tmp_path, workers=1)
    shape = plan.models[0].shape
    (map_,) = maps_of_run(RunData.open(tmp_path))
    assert dict(map_.axes) == {"kv_bits": (4, 16), "local_window": (32, 40)}
    # 4 layers of 2 KV heads with keys and values of 32 numbers; 32 codes of 4 bits and two numbers of fp16.
    assert shape.kv_bytes_per_token() == 16 * 32 * 4
    for (bits, _), cell in map_.cells.items():
        token, beside = (16 * 20, 32 * 16 * 32 * 4) if bits == 4 else (16 * 32 * 4, 0)
        assert cell.number("kv_memory") == cell.number("mean_kv_tokens") * token + beside
        assert cell.number("kv_bytes_peak") == cell.number("peak_kv_tokens") * token + beside


def test_the_manifest_holds_what_statistics_ask_of_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a new run are those of an old one, whose policies are asked when it is read."""
    in_bytes = {"policy": "window", "kv_budget": "256KiB", "ratio": 0.3}
    share = {"policy": "rkv", "kv_budget": 160, "ratio": 0.5, "local_window": "25%", "strict_budget": True}
    plan = make_plan(parse_spec(BITS | {"settings": [*BITS["settings"], in_bytes, share]}))
    stored = Manifest.from_json(json.loads(json.dumps(plan.manifest().to_json())))
    asked = {
        cell.name: replace(cell, facts=None).facts_with(plan.prompts[cell.model, cell.benchmark])
        for cell in stored.expected
    }
    monkeypatch.setattr("kvatlas.results.manifest.SETTING_FACTS", "kvatlas:nothing_is_asked")
    for cell in stored.expected:
        facts = cell.facts_with(plan.prompts[cell.model, cell.benchmark])
        assert facts == asked[cell.name]
        assert (facts.compressions is None) == (cell.setting.policy == "full")


@pytest.mark.parametrize(
    ("template", "stops", "same"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", 1, True),
        ("{{ bos_token }}{{ messages[0].content }}", [1, 5], False),
        ("{{ bos_token }}{{ messages[0].content }}!", 1, False),
        ("{{ strftime_now('%Y') }}{{ messages[0].content }}", 1, False),
    ],
)
def test_run_keys_follow_stop_tokens_and_prompts(
    r1_model: Callable[..., ModelHandle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    stops: Any,
    same: bool,
) -> None:
    folder = copied(r1_model(), tmp_path / "model").folder

    def keys(template: str, stops: Any, **options: str) -> list[str]:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        entry = {"model": f"hf:{folder}", **options}
        spec = {"models": [entry], "benchmarks": ["CHAIN4"], "problems": 1, "sampling": {"max_new_tokens": 90}}
        plan = make_plan(parse_spec(spec))
        monkeypatch.setattr(ModelHandle, "tokenizer_digest", "")
        return list(plan.compute_keys().values())

    before = keys("{{ bos_token }}{{ messages[0].content }}", 1)
    assert (keys(template, stops) == before) is same
    # The date is part of the key where the template asks for it, and nowhere else.
    assert (keys(template, stops) == keys(template, stops, date="2031-02-03")) is ("strftime" not in template)


def test_values_of_the_template_are_part_of_the_key(r1_model: Callable[..., ModelHandle]) -> None:
    template = "{{ messages[0].content }}{% if loud is defined and loud %}!{% endif %}{# quiet #}{{ quiet or '' }}"
    name = r1_model(template=template).name

    def keys(**options: Any) -> list[str]:
        entry = {"model": name, **options}
        spec = {"models": [entry], "benchmarks": ["CHAIN4"], "problems": 1, "sampling": {"max_new_tokens": 90}}
        return list(make_plan(parse_spec(spec)).compute_keys().values())

    before = keys()
    assert keys(template_values={}) == before
    # A value that changes no prompt of these problems may change that of others.
    values = [{"loud": True}, {"loud": False}, {"quiet": 1}, {"loud": True, "quiet": 1}]
    assert len({canonical(keys(template_values=own)) for own in values} | {canonical(before)}) == len(values) + 1
    assert keys(template_values={"quiet": 1, "loud": True}) == keys(template_values=values[-1])
    with pytest.raises(KvatlasError, match=r"does not read 'silent' of template_values; it reads loud, quiet\."):
        keys(template_values={"silent": 1})


def test_the_estimate_of_known_lengths_is_exact(spec_data: Build) -> None:
    data = spec_data(benchmarks=["CHAIN4"], problems=1, samples=1, expected_output_tokens=80)
    plan = make_plan(parse_spec(data))
    (prompt,) = plan.prompts[plan.models[0].name, "CHAIN4"]
    estimate = plan.estimate(tokens_per_second=10.0, memory=2**30)
    fork = 64 - prompt + 1
    assert estimate["decoded_tokens"] == {"separate": 9 * 80, "shared": 80 + 8 * (80 - fork)}
    assert estimate["settings"] == 9
    assert estimate["traces"] == 9
    assert estimate["kv_bytes_per_sequence"] == 64 * plan.models[0].shape.kv_bytes_per_token()
    (model,) = plan.models
    weights = (model.folder / "model.safetensors").stat().st_size
    assert estimate["peak_bytes"]["weights"] == weights
    assert estimate["batch_size"] > 64
    assert plan.estimate(memory=weights)["batch_size"] == 0
    for size in (1, 8, 64):
        taken = plan.estimate(batch_size=size)["peak_bytes"]["total"]
        assert plan.estimate(memory=math.ceil(taken / 0.9))["batch_size"] >= size
    assert estimate["seconds"] == pytest.approx((80 + 8 * (80 - fork)) / 10, abs=0.1)
    # Of eight settings that compress four are weak, and lose three of ten traces to the limit.
    looping = 0.3 * 4 * (plan.spec.sampling.max_new_tokens - 80)
    assert looping > 0
    assert estimate["seconds_with_loops"] == pytest.approx(estimate["seconds"] + looping / 10, abs=0.2)
    assert plan.estimate()["seconds"] is plan.estimate()["seconds_with_loops"] is None


def test_planned_seconds_hold_those_of_compressions(spec_data: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of nine settings compress, each by half of its budget."""
    data = spec_data(benchmarks=["CHAIN4"], problems=1, samples=1, expected_output_tokens=80)
    plan = make_plan(parse_spec(data))
    monkeypatch.setattr(TimedEngine, "time_compression", lambda *_: (2 * 3600.0, 32))
    seconds = plan.estimate(tokens_per_second=decoding_rate(plan))["seconds"]
    tokens = plan.estimate()["decoded_tokens"]["shared"]
    assert seconds * cores() / tokens == pytest.approx(8 / 9 * 2 * 3600 / 32, rel=0.01)


@pytest.mark.parametrize(
    "rule",
    [
        {"kv_budget": 64, "ratio_over": "thinking"},
        # Prompts longer than the budget, which a strict one takes.
        {"kv_budget": 20, "strict_budget": True},
    ],
)
def test_the_plan_and_the_run_agree_on_decoded_tokens(spec_data: Build, tmp_path: Path, rule: dict[str, Any]) -> None:
    """For traces of known length, to the token."""
    settings = [{"policy": name, **rule} for name in ("window", "random")]
    data = spec_data(benchmarks=["CHAIN4"], samples=1, settings=settings, expected_output_tokens=90)
    plan = make_plan(parse_spec(data))
    plan = replace(plan, models=(replace(plan.models[0], overrides=ENDLESS),))
    told: list[Progress] = []
    sweep(plan, tmp_path, workers=1, on_trace=told.append)
    tokens = plan.estimate()["decoded_tokens"]
    assert told[-1].decoded_tokens == tokens["shared"]
    assert told[-1].decoded_tokens + told[-1].saved_tokens == tokens["separate"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": {"policy": "window"}}, "needs a value for kv_budget"),
        ({"baseline": [{"policy": "full"}, {"policy": "full"}]}, "is repeated"),
        ({"settings": {"policy": "dynts", "kv_budget": 64}}, "needs a trained predictor"),
        ({"sampling": {"max_new_tokens": 5000}}, "sampling.max_new_tokens 5000 and the longest prompt"),
        ({"benchmarks": [f"AIME24@{AIME}"]}, "does not fit AIME24: "),
        ({"strict_budget": True}, "strict_budget is true and ratio_over is 'thinking'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_decoded(
    spec_data: Build, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KvatlasError) as caught:
        make_plan(parse_spec(spec_data(**changes)))
    assert sentence in str(caught.value)


def test_a_sweep_says_what_a_plan_notes(spec_data: Build, r1_model: Callable[..., ModelHandle], tmp_path: Path) -> None:
    model = r1_model(FIRST_TEMPLATE, ())
    data = spec_data(models=[model.name], problems=1, samples=1, settings=[], axes={}, sampling={"max_new_tokens": 4})
    told: list[str] = []
    begun: list[str] = []
    sweep(make_plan(parse_spec(data)), tmp_path / "run", workers=1, on_message=told.append, on_start=begun.append)
    (note,) = told
    (workers,) = begun
    assert workers.startswith(f"{model.name}: 1 worker of up to ")
    assert note.startswith(f"The model {model.name!r} has no think tags: its whole output is its answer")
    assert note.endswith("ratio_over thinking and budget_over thinking count all new tokens.")
    data["models"] = [{"model": model.name, "think_close": ""}]
    assert make_plan(parse_spec(data)).notes == ()


def test_a_plan_says_that_a_file_has_fewer_problems_than_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"question": problem.question, "answer": problem.answer} for problem in find("CHAIN4").problems(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for problems, expected in ((4, 1), (3, 0), (2, 0), (None, 0)):
        spec = {
            "models": ["embedded:tiny-llama"],
            "benchmarks": [{"name": "mine", "file": str(file), "prompt": "{question}"}],
            "problems": problems,
        }
        notes = [note for note in make_plan(parse_spec(spec)).notes if "of the spec" in note]
        assert notes == ["Warning: mine has 3 problems, fewer than the 4 of the spec."] * expected


def test_a_plan_says_that_16_bits_of_float32_are_32() -> None:
    """On CPUs few bits hold more tokens of the same bytes than beside bfloat16."""
    by_bits = {"policy": "window", "local_window": 40, "ratio": 0.3}
    in_bytes = BITS | {"settings": [by_bits | {"kv_budget": "256KiB"}], "axes": {"kv_bits": [16, 4]}}
    sentence = "has a cache in float32: a number takes 4 bytes at kv_bits 16"
    assert any(sentence in note for note in make_plan(parse_spec(in_bytes)).notes)
    in_bfloat16 = in_bytes | {"models": [{"model": "embedded:tiny-llama", "dtype": "bfloat16"}]}
    beside_int8 = in_bytes | {"models": [{"model": "embedded:tiny-llama", "weights": "int8"}]}
    in_few_bits = in_bytes | {"axes": {"kv_bits": [8, 4]}}
    in_tokens = in_bytes | {"settings": [by_bits | {"kv_budget": 160}]}
    for other in (in_bfloat16, beside_int8, in_few_bits, in_tokens):
        assert not any(sentence in note for note in make_plan(parse_spec(other)).notes)


def test_models_are_named_once_and_options_reach_their_keys(
    spec_data: Build, r1_model: Callable[..., ModelHandle]
) -> None:
    model = r1_model().name

    def keys(**options: Any) -> set[str]:
        data = spec_data(models=[{"model": model, **options}], benchmarks=[f"AIME24@{AIME}"], settings=[], axes={})
        return set(make_plan(parse_spec(data)).compute_keys().values())

    plain = keys()
    assert keys(name="R1", device="cpu", cache="somewhere") == plain
    for options in ({"dtype": "bfloat16"}, {"weights": "bfloat16"}, {"think_close": "so:"}, {"think_open": "<think>"}):
        assert not keys(**options) & plain
    assert not keys(weights="int8") & (plain | keys(weights="bfloat16"))
    twice = [{"model": model}, {"model": model, "dtype": "bfloat16"}]
    with pytest.raises(KvatlasError, match="Two entries of the spec are the model"):
        make_plan(parse_spec(spec_data(models=twice)))
    entries = [f"AIME24@{AIME}", {"name": "AIME24", "file": str(AIME), "prompt": "plain"}]
    with pytest.raises(KvatlasError, match="Two entries of the spec are the benchmark 'AIME24'"):
        make_plan(parse_spec(spec_data(models=[model], benchmarks=entries)))


def test_a_strict_budget_of_the_spec_is_part_of_every_setting_that_compresses(spec_data: Build) -> None:
    settings = [{"policy": "window", "kv_budget": 64}]
    usual, strict = (
        make_plan(parse_spec(spec_data(settings=settings, strict_budget=value))) for value in (False, True)
    )
    assert [policy.setting.values.get("strict_budget") for policy, _ in strict.policies] == [True] * 4 + [None]
    assert not any("strict_budget" in policy.setting.values for policy, _ in usual.policies)
    shared = {item.setting for item in strict.manifest().expected} & {
        item.setting for item in usual.manifest().expected
    }
    assert [setting.policy for setting in shared] == ["full"]


def test_models_that_can_read_the_task_of_mazes_are_told_it(
    r1_model: Callable[..., ModelHandle], tmp_path: Path
) -> None:
    r1 = copied(r1_model(), tmp_path / "r1", "config.json", max_position_embeddings=8192)
    (maze,) = find("SEQBENCH-4x4").problems(1)
    spec = {"problems": 1, "samples": 1, "sampling": {"max_new_tokens": 3}, "models": [r1.name, *embedded()]}
    plan = make_plan(parse_spec({**spec, "benchmarks": ["SEQBENCH-4x4", "SEQBENCH-4x4-facts"]}))
    sweep(plan, tmp_path / "run", workers=1)
    told, facts, *tiny = (plan.prompts[key] for key in plan.prompts)
    assert told == [len(r1.encode(find("SEQBENCH-4x4-full").prompt(maze)))]
    assert facts == [len(r1.encode(maze.question))]
    # The embedded models have no tokens for the task, whatever their tokenizers make of such characters.
    assert (tiny[0], tiny[2]) == (tiny[1], tiny[3])
    run = RunData.open(tmp_path / "run")
    assert run.manifest.about["SEQBENCH-4x4"] == {maze.id: dict(maze.about)}
    sources = RunMaterials.from_manifest(run.manifest)
    with run.store() as store:
        for _, trace in store.traces(texts=False):
            asked = plan.prompts[trace.model, trace.benchmark]
            assert [trace.usage.prompt_tokens] == [len(sources.prompt(trace) or ())] == asked


def test_a_context_that_is_too_short_is_told_in_numbers(tiny_llama: ModelHandle, tmp_path: Path) -> None:
    short = copied(tiny_llama, tmp_path / "copy", "config.json", max_position_embeddings=64)
    spec = {"problems": 1, "sampling": {"max_new_tokens": 20}, "models": [short.name], "benchmarks": ["SEQBENCH-5x5"]}
    with pytest.raises(KvatlasError, match=r"has \d+ tokens, and the model .* reads at most 64, its answer included"):
        make_plan(parse_spec(spec))


def test_shorter_weights_are_offered(random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "SHARED_FROM", 0)
    model = random_models["llama"]
    short = find_model(model.name, weights="int8")
    (note,) = settings_notes([model, short], [])
    assert note.startswith(f"The weights of the model {model.name!r} are in float32; --model-option weights=bfloat16")

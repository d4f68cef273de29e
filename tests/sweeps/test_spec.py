import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvatlas import benchmarks, models
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.policies import from_setting, policies
from kvatlas.sweeps import parse_spec, read_spec
from tests.sweeps.conftest import Build

SERVED = {"name": "mine", "endpoint": "http://127.0.0.1:1/v1"}


def test_the_grid_is_settings_times_axes_and_baselines_stand_beside_it(spec_data: Build) -> None:
    cells = parse_spec(spec_data()).cells()
    assert len(cells) == 2 * 2 * 2 + 1
    wanted = Setting.from_parameters("window", kv_budget=64, ratio_over="thinking", local_window=4, ratio=0.2)
    assert cells[0] == (wanted, False)
    assert cells[-1] == (Setting.from_parameters("full"), True)


def test_defaults_are_the_published_ones() -> None:
    spec = parse_spec({"models": ["m"], "benchmarks": ["b"]})
    assert spec.sampling.sampling() == Sampling(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=0)
    assert spec.samples == 1
    assert spec.cells() == [(Setting.from_parameters("full"), True)]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sample": 3}, "Unknown key 'sample' in spec; expected models, benchmarks, problems, samples"),
        ({"sampling": {"temp": 1}}, "Unknown key 'sampling.temp' in spec; expected temperature, top_k"),
        ({"benchmarks": [{"name": "AIME24", "path": "x"}]}, "expected name, file, prompt, columns"),
        ({"models": [{"name": "R1"}]}, "The key 'models.0.model' is missing in spec"),
        ({"models": [{1: "a", None: "b"}]}, "The key 'models.0.model' is missing in spec, which has 1, None there"),
        (
            {"models": [{"name": "R1"}], "serve_cmd": "vllm"},
            "Wrong key 'serve_cmd' in spec: expected 'serve_cmd' of a model (as models: [{name: NAME, serve_cmd: ",
        ),
        ({"server_ready_timeout": 40}, "Did you mean 'server_ready_timeout' of a model (as models: [{name: NAME, "),
        ({"axes": [{"ratio": [0.1]}]}, "axes: expected a mapping, as {local_window: [8, 16], ratio: [0.3, 0.5]}"),
        ({"models": "embedded:tiny-llama"}, "models: expected a list, as [embedded:tiny-llama]"),
        ({"axes": {"ratio": "0.1-0.7"}}, "axes.ratio: expected a list, as [0.3, 0.5], given '0.1-0.7'"),
        ({"sampling": {"do_sample": False}}, "Did you mean 'sampling.temperature' (0 is greedy)?"),
        ({"problems": "all"}, "given 'all'; without the key all are asked"),
        ({"samples": 0}, "Wrong value in spec, samples: expected a number >= 1, given 0"),
        ({"problems": True}, "problems: expected an integer, given True"),
        ({"seed": "3"}, "seed: expected an integer, given '3'"),
        ({"lose_at_most": True}, "lose_at_most: expected a number, given True"),
        ({"benchmarks": ["CHAIN4", "CHAIN4"]}, "'CHAIN4' is named twice"),
        ({"axes": {"ratio": []}}, "ratio has no values"),
        ({"settings": [], "baseline": []}, "neither settings nor baseline name a policy"),
        ({"settings": []}, "axes need settings to vary"),
        ({"strict_budget": 1}, "strict_budget: expected true or false, given 1"),
        ({"settings": [{"policy": "rkv", "querys": None}]}, "'querys' is no parameter of the policy 'rkv' and no axis"),
        ({"settings": [{"kv_budget": 3}]}, "The key 'settings.0.policy' is missing in spec"),
        ({"models": [{**SERVED, "reference": {}}]}, "ready_timeout, kv_bytes. It is a key of the spec, beside models"),
        ({"models": [SERVED], "settings": [{"kv_budget": 3}]}, "as policy: rkv, or of served models policy: served"),
        ({"models": [SERVED], "settings": [{"policy": "rkv"}]}, "in spec: settings of served models are {policy: serv"),
    ],
)
def test_a_wrong_spec_is_told_in_one_sentence(spec_data: Build, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KvatlasError) as caught:
        parse_spec(spec_data(**changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_may_be_meant_otherwise_are_asked_about(spec_data: Build) -> None:
    fixed = [{"policy": "rkv", "kv_budget": 96, "ratio": 0.4}, {"policy": "window", "kv_budget": 96}]
    spec = parse_spec(spec_data(settings=fixed, axes={"local_window": [8], "ratio": [0.3, 0.5]}, lose_at_most=0.03))
    assert spec.notes == [
        "lose_at_most counts points; was 3 meant, and not 0.03?",
        "A setting of rkv fixes ratio, so that no axis varies it.",
    ]


def test_a_ratio_that_keeps_all_is_noted(spec_data: Build) -> None:
    fixed = {"policy": "rkv", "kv_budget": 96, "local_window": 8, "ratio": 1}
    spec = parse_spec(spec_data(settings=[fixed], axes={}))
    assert spec.notes == ["ratio is the share that a compression keeps: at 1 nothing is evicted."]
    assert parse_spec(spec_data(settings=[{**fixed, "ratio": 0.3}], axes={})).notes == []


@pytest.mark.parametrize("name", ["policy", "self", "cls", "setting", "parameters", "axes", "preset"])
@pytest.mark.parametrize("is_axis", [True, False])
def test_names_of_python_arguments_are_unknown_parameters(spec_data: Build, name: str, is_axis: bool) -> None:
    if is_axis:
        setting = parse_spec(spec_data(settings=[{"policy": "rkv"}], axes={name: [1]})).cells()[0][0]
    else:
        setting = Setting.from_parameters("rkv", **{name: 1})
    assert setting == Setting("rkv", ((name, 1),))
    with pytest.raises(KvatlasError, match=f"has no parameter '{name}'; expected: kv_budget"):
        from_setting(setting)


def test_names_are_guessed_and_a_folder_hides_no_recipe(
    spec_data: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert read_spec(Path("demo")).problems
    guesses = {
        "Did you mean 'demo-quick'?": lambda: read_spec(Path("demo-quik")),
        "Did you mean 'problems'?": lambda: parse_spec(spec_data(problem=3)),
        "Did you mean 'top_k'?": lambda: parse_spec(spec_data(sampling={"topk": 3})),
        "Did you mean 'rkv'?": lambda: policies.get("rkw"),
        "Did you mean 'CHAIN'?": lambda: benchmarks.find("CHIAN8"),
        "Did you mean 'hf:Qwen/Qwen3-8B'?": lambda: models.find("Qwen/Qwen3-8B"),
        "Did you mean 'embedded:tiny-llama'?": lambda: models.find("embedded:tiny-lama"),
    }
    for sentence, wrong in guesses.items():
        with pytest.raises(KvatlasError, match=re.escape(sentence)):
            wrong()
    with pytest.raises(KvatlasError) as caught:
        models.find("zzz")
    assert "Did you mean" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match=r"There is no spec '.*none.yaml', and no recipe of that name"):
        read_spec(tmp_path / "none.yaml")
    path = tmp_path / "spec.yaml"
    for content, sentence in [
        (b"models: [a\nb: c", "is not valid YAML in line 2"),
        (b"- a\n- b", "expected a mapping with the keys models, benchmarks"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"seed: 1\nmodels: [a]\nseed: 2", "The key 'seed' is repeated in line 3"),
    ]:
        path.write_bytes(content)
        with pytest.raises(KvatlasError, match=sentence):
            read_spec(path)


def test_an_axis_of_a_file_that_every_setting_fixes_is_refused(tmp_path: Path, spec_data: Build) -> None:
    data = spec_data(settings=[{"policy": "rkv", "kv_budget": 96, "ratio": 0.4}], axes={"ratio": [0.3, 0.5]})
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(data))
    with pytest.raises(KvatlasError, match=r"spec\.yaml: axes ratio: each setting fixes a value"):
        read_spec(path)
    # Grids that were added up have such axes, where each setting is a cell.
    assert len(parse_spec(data).cells()) == 2


def test_a_file_spells_values_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    values = "{enable_thinking: false, reasoning_effort: high, budget: 64, tools_note: null}"
    path.write_text(
        f"models: [{{model: embedded:tiny-llama, template_values: {values}}}]\nbenchmarks: [CHAIN4]\n"
        "sampling: {max_new_tokens: 9}\n"
    )
    spec = read_spec(path)
    expected = {"enable_thinking": False, "reasoning_effort": "high", "budget": 64, "tools_note": None}
    assert dict(spec.models[0].find().options.template_values) == expected
    # As a run stores it.
    stored = parse_spec(spec.model_dump(mode="json"))
    assert stored.models[0].find() == spec.models[0].find()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("high", "template_values is 'high'; expected a mapping of names"),
        ({"messages": "x"}, "template_values has messages, which kvatlas sets itself"),
        ({"effort": ["high"]}, r"template_values has effort \['high'\]; expected a mapping"),
    ],
)
def test_wrong_values_of_a_template_are_refused(values: Any, sentence: str) -> None:
    with pytest.raises(KvatlasError, match=sentence):
        models.find("embedded:tiny-llama", template_values=values)


def test_a_file_spells_numbers_and_may_repeat_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "models: [embedded:tiny-llama]\nbenchmarks: [CHAIN4]\nproblems: null\nseed: 16_384\nlose_at_most: 2\n"
        "sampling: {temperature: 1e-1, max_new_tokens: '90'}\nstrict_budget: no\n"
        "settings: [&first {policy: window, kv_budget: 64}, {<<: *first, kv_budget: 1_28}]\n"
        "axes: {ratio: [1e-1, 0.5], local_window: [4]}\n"
    )
    spec = read_spec(path)
    assert (spec.problems, spec.seed, spec.lose_at_most, spec.strict_budget) == (None, 16_384, 2.0, False)
    assert (spec.sampling.temperature, spec.sampling.max_new_tokens) == (0.1, 90)
    first, *_, last = [setting for setting, baseline in spec.cells() if not baseline]
    assert first == Setting.from_parameters("window", kv_budget=64, local_window=4, ratio=0.1)
    assert last == Setting.from_parameters("window", kv_budget=128, local_window=4, ratio=0.5)

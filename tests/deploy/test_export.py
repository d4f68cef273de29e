"""Settings as configurations of serving engines: exact, or refused by name with the nearest."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.deploy.engine_config import TARGETS, OpenedThinking, export_setting
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Signal
from kvatlas.policies.triattention import load_statistics
from tests.command_line import Call
from tests.stored import decode_run

#: What each target can be told exactly.
EXACT: dict[str, dict[str, Any]] = {
    "tensorrt-llm": {"policy": "triattention", "local_window": 1, "budget_over": "thinking", "every_from": "prompt"},
    "kvatlas-vllm": {"policy": "dynts", "local_window": 128, "keep_prompt": True},
    "triattention-vllm": {"policy": "triattention", "local_window": 128, "budget_over": "thinking"},
    "r-kv-vllm": {
        "policy": "rkv", "local_window": 8, "every_from": "prompt", "keep_prompt": False, "scope": "global",
        "unlike": "first",
    },
    "kvpress": {
        "policy": "snapkv", "local_window": 32, "every_from": "prompt", "keep_prompt": False, "pooling": "avg",
    },
}  # fmt: skip


def setting(target: str, **changes: Any) -> Setting:
    values = {"kv_budget": 2048, "every": 128, **EXACT[target], **changes}
    return Setting.from_parameters(values.pop("policy"), **values)


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(.*)$", text, flags=re.M))


def test_every_target_takes_its_own_terms_as_they_are() -> None:
    assert EXACT.keys() == TARGETS.keys()
    made = {target: export_setting(setting(target), target) for target in TARGETS}
    assert all(not item.changed for item in made.values())
    config = yaml.safe_load(made["tensorrt-llm"].text)
    assert config["kv_cache_compression_config"] == {
        "algorithm": "triattention", "budget": 2048, "beta": 128, "eviction_mode": "per_layer_perhead",
        "normalize_scores": True, "calibration_path": "stats.pt",
    }  # fmt: skip
    assert config["kv_cache_config"]["use_kv_cache_manager_v2"] is True
    vllm = {
        "ENABLE_TRIATTENTION": "true",
        "TRIATTN_RUNTIME_KV_BUDGET": "2048",
        "TRIATTN_RUNTIME_DIVIDE_LENGTH": "128",
        "TRIATTN_RUNTIME_WINDOW_SIZE": "128",
        "TRIATTN_RUNTIME_PRUNING_MODE": "per_layer_per_head",
        "TRIATTN_RUNTIME_PROTECT_PREFILL": "true",
        "TRIATTN_RUNTIME_INCLUDE_PREFILL_IN_BUDGET": "false",
        "TRIATTN_RUNTIME_SPARSE_STATS_PATH": "stats.pt",
    }
    assert variables(made["triattention-vllm"].text) == vllm
    changed = {"TRIATTN_RUNTIME_PROTECT_PREFILL": "false", "TRIATTN_RUNTIME_INCLUDE_PREFILL_IN_BUDGET": "true"}
    cache = setting("triattention-vllm", budget_over="cache", keep_prompt=False)
    assert variables(export_setting(cache, "triattention-vllm").text) == vllm | changed
    assert variables(made["r-kv-vllm"].text) == {
        "VLLM_V1_R_KV_BUDGET": "2048",
        "VLLM_V1_R_KV_BUFFER": "128",
        "VLLM_V1_R_KV_WINDOW": "8",
        "VLLM_V1_R_KV_KERNEL": "7",
        "VLLM_V1_R_KV_MIX_LAMBDA": "0.1",
    }
    assert made["kvpress"].text == (
        "from kvpress import DecodingPress, SnapKVPress\n\npress = DecodingPress(\n"
        "    base_press=SnapKVPress(window_size=32, kernel_size=7),\n    compression_interval=128,\n"
        "    target_size=2048,\n    hidden_states_buffer_size=256,\n)\n"
    )


def test_the_plug_in_takes_every_policy_that_it_can_observe_as_it_is() -> None:
    """Of kvatlas's policies, those that choose by hidden states and queries, without random numbers."""
    seen = {Signal.HIDDEN, Signal.QUERIES}
    budget = {"kv_budget": 512, "local_window": 64, "ratio": 0.5}
    ours = {
        name: policies.from_setting(Setting.from_parameters(name, **budget))
        for name in policies.policies.ours
        if name != "full"
    }
    fit = {
        name
        for name, policy in ours.items()
        if isinstance(policy, CompressingPolicy) and not policy.random and policy.observes <= seen
    }
    assert set(TARGETS["kvatlas-vllm"].policies) == fit
    for name in fit:
        asked = Setting.from_parameters(name, **budget)
        made = export_setting(asked, "kvatlas-vllm")
        given = re.search(r"--additional-config '(.*)'", made.text)
        assert given is not None
        values = json.loads(given[1])["kvatlas"]
        assert Setting.from_parameters(values.pop("policy"), **values) == asked

    for lacking, named in (({"thinking_tokens": 256}, "thinking_tokens"), ({"kv_bits": 8}, "few bits")):
        with pytest.raises(KvatlasError, match=f"needs .*{named}.*, which kvatlas-vllm does not have"):
            export_setting(Setting.from_parameters("rkv", **budget, **lacking), "kvatlas-vllm")


def test_every_scope_that_an_engine_has_is_written_in_its_word() -> None:
    """As the authors' own setting, whose choice of a KV head holds in all layers."""

    def mode(asked: Setting) -> str:
        made = export_setting(asked, "tensorrt-llm")
        assert made.changed == ()
        return str(yaml.safe_load(made.text)["kv_cache_compression_config"]["eviction_mode"])

    words = {"head": "per_layer_perhead", "kv_head": "per_head", "union": "union"}
    for scope, word in words.items():
        assert mode(setting("tensorrt-llm", scope=scope)) == word
    counted = {"budget_over": "thinking", "every_from": "prompt"}
    budget = {"kv_budget": 2048, "every": 128}
    assert mode(Setting.from_parameters("triattention@paper", **budget, **counted)) == "per_head"
    # The engine's own settings need nothing besides.
    presets = {"": "union", "-per-head": "per_head", "-per-layer-perhead": "per_layer_perhead"}
    for ending, word in presets.items():
        assert mode(Setting.from_parameters(f"triattention@tensorrt-llm{ending}", **budget)) == word


def test_expected_attention_has_the_steps_since_the_last_compression() -> None:
    values = {"kv_budget": 512, "every": 64, "every_from": "prompt", "keep_prompt": False, "local_window": 1}
    asked = Setting.from_parameters("expected_attention", queries=128, **values)
    with pytest.raises(KvatlasError, match="queries is 128 and can be 64"):
        export_setting(asked, "kvpress")
    made = export_setting(asked, "kvpress", nearest=True)
    assert "ExpectedAttentionPress(n_future_positions=512, n_sink=4)" in made.text
    assert "hidden_states_buffer_size=63," in made.text
    assert export_setting(made.setting, "kvpress").text == made.text
    rkv = setting("r-kv-vllm", every=16, queries=32, local_window=32)
    with pytest.raises(KvatlasError, match="queries is 32 and can be 16"):
        export_setting(rkv, "r-kv-vllm")
    assert "WINDOW=16" in export_setting(rkv, "r-kv-vllm", nearest=True).text


@pytest.mark.parametrize(
    ("target", "changes", "named"),
    [
        ("tensorrt-llm", {"local_window": 64}, "local_window is 64 and can be 1"),
        ("tensorrt-llm", {"scope": "layer"}, "scope is layer and can be head"),
        ("triattention-vllm", {"scope": "kv_head"}, "scope is kv_head and can be head"),
        ("tensorrt-llm", {"every_from": "budget"}, "every_from is budget and can be prompt"),
        ("r-kv-vllm", {"local_window": 100}, "local_window is 100 and can be 8"),
        ("kvpress", {"keep_prompt": True}, "keep_prompt is True and can be False"),
        ("kvpress", {"kv_bits": 8}, "kv_bits is 8 and can be 16"),
    ],
)
def test_what_a_target_cannot_express_is_named_with_the_nearest(target: str, changes: Any, named: str) -> None:
    asked = setting(target, **changes)
    with pytest.raises(KvatlasError, match=f"{target} cannot express .*{named}"):
        export_setting(asked, target)
    made = export_setting(asked, target, nearest=True)
    assert named in made.changed
    # What is written is a setting that the target takes as it is.
    assert export_setting(made.setting, target).text == made.text


def test_a_setting_of_a_server_is_nothing_to_export() -> None:
    with pytest.raises(KvatlasError, match="a command of its own, with nothing to decode or to export"):
        export_setting(Setting.from_parameters("served", ratio=0.5, w=16), "kvpress")


def test_a_ratio_is_told_as_what_it_keeps() -> None:
    values = {"kv_budget": 2176, "local_window": 128, "ratio": 0.9375}
    values |= {"ratio_over": "older", "keep_prompt": False}
    made = export_setting(Setting.from_parameters("triattention", **values), "triattention-vllm")
    assert (made.setting.values["kv_budget"], made.setting.values["every"]) == (2048, 128)
    thinking = Setting.from_parameters("triattention", **{**values, "ratio_over": "thinking", "keep_prompt": True})
    # Of 2,176 - 100 - 128 thinking tokens 1,826 stay, and the window: 1,954 beside the prompt.
    with pytest.raises(KvatlasError, match="with prompts of 100 tokens, kv_budget 1954 and every 122"):
        export_setting(thinking, "triattention-vllm", prompt=100)
    # A budget of thinking tokens, and a ratio that counts the prompt, too: of 2,048 + 100 - 128 tokens 1,010 stay, and
    # the window, of which 1,038 are no prompt.
    mixed = {"kv_budget": 2048, "local_window": 128, "ratio": 0.5, "ratio_over": "older", "budget_over": "thinking"}
    with pytest.raises(KvatlasError, match="with prompts of 100 tokens, kv_budget 1038 and every 1010"):
        export_setting(Setting.from_parameters("triattention", **mixed), "triattention-vllm", prompt=100)
    with pytest.raises(KvatlasError, match="The length of prompts is unknown"):
        export_setting(thinking, "triattention-vllm")
    window = Setting.from_parameters("window", kv_budget=64, local_window=8, every=8)
    for asked, target, sentence in [
        (Setting.from_parameters("full"), "triattention-vllm", "never compresses"),
        (window, "triattention-vllm", "has no policy 'window'; it has triattention"),
        (thinking, "vllm", "Unknown target 'vllm'; expected: tensorrt-llm"),
        (setting("kvpress", kv_budget="12MiB"), "kvpress", "expected a number of tokens"),
    ]:
        with pytest.raises(KvatlasError, match=sentence):
            export_setting(asked, target)


def test_a_cell_of_a_run_is_written_with_its_values_and_its_statistics(kvatlas: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    spec = {
        "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"], "problems": 2, "samples": 1,
        "settings": [{"policy": "triattention", "local_window": 8, "budget_over": "thinking"}],
        "axes": {"kv_budget": [16, 24], "every": [8]}, "sampling": {"max_new_tokens": 60},
    }  # fmt: skip
    run = decode_run(spec, tmp_path / "run")
    words = ("deploy", "export", run, "--out", out, "--policy", "triattention kv_budget=16")
    kvatlas.succeed(*words, "--to", "triattention-vllm")
    text = (out / "triattention-vllm.sh").read_text()
    assert "# Limits:" not in text
    assert "# embedded:tiny-llama under triattention(" in text
    assert re.search(r"# CHAIN4: Pass@1 [\d.]+ % \(95 % CI [\d.]+ to [\d.]+\), n = 2", text)
    assert variables(text)["TRIATTN_RUNTIME_SPARSE_STATS_PATH"] == str(out / "statistics.pt")
    result = torch.load(out / "statistics.pt", weights_only=True)
    model = models.find("embedded:tiny-llama")
    ours = load_statistics(str(model.folder / "kvatlas" / "triattention.safetensors"))
    shape = model.shape
    assert result["metadata"]["head_dim"] == shape.head_dim
    assert len(result["metadata"]["sampled_heads"]) == len(result["stats"]) == shape.layers * shape.heads
    head = result["stats"]["layer01_head02"]
    assert set(head) == {"q_mean_real", "q_mean_imag", "q_abs_mean"}
    assert torch.equal(head["q_mean_imag"], ours["center_imag"][1, 2])
    assert torch.equal(head["q_abs_mean"], ours["norm"][1, 2])
    assert "local_window is 8 and can be 1" in kvatlas.refuse(*words, "--to", "tensorrt-llm")
    kvatlas.succeed(*words, "--to", "tensorrt-llm", "--nearest")
    text = (out / "tensorrt-llm.yaml").read_text()
    assert "not that cell but the nearest" in text
    limits = next(line for line in text.splitlines() if line.startswith("# Limits:"))
    assert all(word in limits for word in ("SM100", "BF16", "4 or 8 heads", "MLA", "SSM", "Qwen3-8B"))


def test_a_press_that_chooses_otherwise_is_said_in_its_file(kvatlas: Call, tmp_path: Path) -> None:
    common = {"kv_budget": 48, "every": 8, "every_from": "prompt", "keep_prompt": False, "local_window": 32}
    spec = {
        "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"], "problems": 1, "samples": 1,
        "settings": [{"policy": "snapkv", "pooling": "avg", **common}, {"policy": "random", **common}],
        "sampling": {"max_new_tokens": 20},
    }  # fmt: skip
    run = decode_run(spec, tmp_path / "run")
    for policy in ("snapkv", "random"):
        words = ("deploy", "export", run, "--out", tmp_path, "--policy", policy, "--to", "kvpress", "--nearest")
        kvatlas.succeed(*words)
        assert ("rotates all buffered queries" in (tmp_path / "kvpress.py").read_text()) == (policy == "snapkv")


def test_a_cap_on_thinking_is_a_budget_of_each_request_to_vllm(tiny_llama: ModelHandle) -> None:
    for target in ("triattention-vllm", "r-kv-vllm"):
        exported = export_setting(setting(target, thinking_tokens=512), target)
        assert not exported.changed
        assert '"thinking_token_budget": 512' in exported.text
        assert '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}' in exported.text
        assert "thinking_token_budget" not in export_setting(setting(target), target).text
    for target in ("tensorrt-llm", "kvpress"):
        with pytest.raises(KvatlasError, match="thinking_tokens is 512 and can be unlimited"):
            export_setting(setting(target, thinking_tokens=512), target)
    with pytest.raises(KvatlasError, match="thinking_token_budget=64"):
        export_setting(Setting.from_parameters("full", thinking_tokens=64), "kvpress")


def test_prompt_tokens_behind_the_opening_tag_count_in_vllm(
    tiny_llama: ModelHandle, r1_model: Callable[..., ModelHandle]
) -> None:
    assert OpenedThinking.of(tiny_llama) == ("<think>", "</think>", 0)
    # The template of DeepSeek-R1's distilled models has a line break behind the tag.
    r1 = OpenedThinking.of(r1_model())
    assert r1.tokens == 1
    assert r1.budget(512) == 513

"""A setting as the configuration of the engine that is to serve it, or what of it that engine cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.policies import CompressingPolicy, share

if TYPE_CHECKING:
    from torch import Tensor

#: Parameters of a setting by name, defaults included.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """An engine: the policies it has, what of a setting it can be told, and how it is told.

    `only` are parameters with the one value that they have there; all others that `told` does not name must have the
    default of the policy. `windows` names the parameter that is a policy's local window there, or its length.
    `text` writes the configuration, whose format `source` documents.
    """

    name: str
    policies: tuple[str, ...]
    only: Mapping[str, Any]
    told: tuple[str, ...]
    text: Callable[[str, Values, str], str]
    source: str
    suffix: str = ".sh"
    calibrated: bool = False
    remark: str = ""
    windows: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """What is written: the configuration, the setting that it is in our own terms, and what is not as it was asked."""

    target: Target
    text: str
    setting: Setting
    changed: tuple[str, ...]


def export_setting(
    setting: Setting, name: str, prompt: int | None = None, nearest: bool = False, statistics: str = "stats.pt"
) -> Exported:
    """The setting for the target of that name; `prompt` is a typical prompt's length, for budgets that count it.

    Raises KvatlasError for a target or a policy that is not there and, unless the `nearest` will do, for all that the
    target cannot express, each with the nearest that it can.
    """
    target = TARGETS.get(name)
    if target is None:
        raise KvatlasError(f"Unknown target {name!r}; valid are: {', '.join(TARGETS)}.")
    policy = policies.of(setting)
    base = policy.name.partition("@")[0]
    if not isinstance(policy, CompressingPolicy):
        raise KvatlasError(f"{setting} never compresses: there is nothing to tell {name}; serve without compression.")
    if base not in target.policies:
        raise KvatlasError(f"{name} has no policy {base!r}; it has {', '.join(target.policies)}. Make a map of those.")
    values, changed = _kept(policy, target.only.get("budget_over"), prompt)
    usual = {field.name: field.default for field in fields(policy)}
    window = target.windows.get(base)
    if window is not None:
        able = values[window] if isinstance(window, str) else window
        if values["local_window"] > able:
            changed.append(f"local_window is {values['local_window']} and can be {able}")
        values["local_window"] = able
    for word, value in values.items():
        able = value if word in target.told else target.only.get(word, usual.get(word))
        if value != able:
            values[word] = able
            changed.append(f"{word} is {value} and can be {able}")
    if changed and not nearest:
        raise KvatlasError(f"{name} cannot express {setting}: {'; '.join(changed)}. --nearest writes that.")
    at = Setting.of(base, **{word: str(value) if word == "scope" else value for word, value in values.items()})
    return Exported(target, target.text(base, values, statistics), policies.of(at).setting, tuple(changed))


def _kept(policy: CompressingPolicy, only: str | None, prompt: int | None) -> tuple[dict[str, Any], list[str]]:
    """The parameters with the budget as tokens that are kept and an interval, and what is not the same then.

    A ratio is exact where it and the target's budget count the same, and else with a typical prompt.
    """
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    del values["ratio"], values["ratio_over"]
    if policy.every:
        return values, []
    over, counted = policy.ratio_over == "thinking", policy.budget_over == "thinking"
    beside = over or counted if only is None else only == "thinking"
    exact = over == counted == beside
    if not exact and prompt is None:
        raise KvatlasError("How long prompts are is not known here: make a map with every, and without ratio.")
    before = 0 if exact or prompt is None else prompt
    total = policy.kv_budget + (before if counted else 0)
    aside = before if over else 0
    kept = policy.local_window + aside + share(policy.ratio, max(0, total - policy.local_window - aside))
    now = {"kv_budget": kept - (before if beside else 0), "every": total - kept}
    if now["kv_budget"] <= policy.local_window or now["every"] < 1:
        raise KvatlasError(f"Of {total} tokens {kept} stay: there is nothing to choose, so nothing to tell an engine.")
    text = f"kv_budget {policy.kv_budget} with ratio {policy.ratio} counts otherwise and is, with prompts of {prompt}"
    changed = [] if exact else [f"{text} tokens, kv_budget {now['kv_budget']} and every {now['every']}"]
    return {**values, **now, "budget_over": "thinking" if beside else "cache"}, changed


def statistics_file(source: Path, model: Any) -> dict[str, Any]:
    """Our query statistics as the authors' calibration has them: `metadata` and, for each query head, `stats`.

    `stats["layerLL_headHH"]` holds q_mean_real, q_mean_imag and q_abs_mean [planes] (github.com/WeianMao/triattention,
    docs/calibration.md and triattention/sglang/stats_loader.py at 6dfdd97).
    """
    from kvatlas.policies.triattention import load_statistics

    statistics: dict[str, Tensor] = load_statistics(str(source))
    layers, heads, planes = statistics["center_real"].shape
    names = {"q_mean_real": "center_real", "q_mean_imag": "center_imag", "q_abs_mean": "norm"}
    sampled = [[layer, head] for layer in range(layers) for head in range(heads)]
    return {
        "metadata": {
            "num_traces": 1,
            "head_dim": 2 * planes,
            "dtype": "float32",
            "rope_style": "half",
            "rope_type": "default",
            "num_attention_heads": heads,
            "num_key_value_heads": model.shape.kv_heads,
            "sampled_heads": sampled,
        },
        "stats": {
            f"layer{layer:02d}_head{head:02d}": {
                theirs: statistics[ours][layer, head].float().clone() for theirs, ours in names.items()
            }
            for layer, head in sampled
        },
    }


def _environment(pairs: Mapping[str, Any]) -> str:
    return "".join(
        f"export {name}={str(value).lower() if isinstance(value, bool) else value}\n" for name, value in pairs.items()
    )


def _tensorrt_llm(_: str, values: Values, statistics: str) -> str:
    return (
        "backend: pytorch\nkv_cache_compression_config:\n  algorithm: triattention\n"
        f"  budget: {values['kv_budget']}\n  beta: {values['every']}\n  eviction_mode: per_layer_perhead\n"
        f"  normalize_scores: true\n  calibration_path: {statistics}\n"
        "kv_cache_config:\n  enable_block_reuse: true\n  use_kv_cache_manager_v2: true\n"
    )


def _triattention(_: str, values: Values, statistics: str) -> str:
    return _environment(
        {
            "ENABLE_TRIATTENTION": True,
            "TRIATTN_RUNTIME_KV_BUDGET": values["kv_budget"],
            "TRIATTN_RUNTIME_DIVIDE_LENGTH": values["every"],
            "TRIATTN_RUNTIME_WINDOW_SIZE": values["local_window"],
            "TRIATTN_RUNTIME_PRUNING_MODE": "per_layer_per_head",
            "TRIATTN_RUNTIME_PROTECT_PREFILL": values["keep_prompt"],
            "TRIATTN_RUNTIME_INCLUDE_PREFILL_IN_BUDGET": values["budget_over"] == "cache",
            "TRIATTN_RUNTIME_SPARSE_STATS_PATH": statistics,
        }
    )


def _rkv(_: str, values: Values, __: str) -> str:
    return _environment(
        {
            "VLLM_V1_R_KV_BUDGET": values["kv_budget"],
            "VLLM_V1_R_KV_BUFFER": values["every"],
            "VLLM_V1_R_KV_WINDOW": values["queries"],
            "VLLM_V1_R_KV_KERNEL": values["kernel"],
            "VLLM_V1_R_KV_MIX_LAMBDA": values["mix"],
        }
    )


def _kvpress(policy: str, values: Values, _: str) -> str:
    made = {
        "keydiff": "KeyDiffPress()",
        "random": "RandomPress()",
        "streaming": f"StreamingLLMPress(n_sink={values.get('sinks')})",
        "tova": "TOVAPress()",
        "snapkv": f"SnapKVPress(window_size={values.get('queries')}, kernel_size={values.get('kernel')})",
    }[policy]
    kind = made.partition("(")[0]
    buffer = values.get("queries", 0)
    return (
        f"from kvpress import DecodingPress, {kind}\n\npress = DecodingPress(\n    base_press={made},\n"
        f"    compression_interval={values['every']},\n    target_size={values['kv_budget']},\n"
        f"    hidden_states_buffer_size={max(256, 2 * buffer)},\n)\n"
    )


_TRIATTENTION = "github.com/WeianMao/triattention"
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "tensorrt-llm",
            ("triattention",),
            {"budget_over": "thinking", "every_from": "prompt"},
            ("kv_budget", "every", "local_window", "statistics"),
            _tensorrt_llm,
            "TriAttentionKvCacheCompressionConfig, TensorRT-LLM's page on TriAttention",
            ".yaml",
            calibrated=True,
            windows={"triattention": 1},
        ),
        Target(
            "triattention-vllm",
            ("triattention",),
            {},
            ("kv_budget", "every", "local_window", "keep_prompt", "budget_over", "statistics"),
            _triattention,
            f"{_TRIATTENTION}, README.md (configuration reference) and triattention/vllm/runtime/runner.py at 6dfdd97",
            calibrated=True,
        ),
        Target(
            "triattention-sglang",
            ("triattention",),
            {},
            ("kv_budget", "every", "local_window", "keep_prompt", "budget_over", "statistics"),
            _triattention,
            f"{_TRIATTENTION}, docs/sglang.md; the variables of its vLLM runtime",
            calibrated=True,
            remark="Its page names budget, divide length and statistics alone; the rest may do nothing.",
        ),
        Target(
            "r-kv-vllm",
            ("rkv",),
            {"keep_prompt": False, "every_from": "prompt", "scope": "global", "unlike": "first"},
            ("kv_budget", "every", "local_window", "queries", "kernel", "mix"),
            _rkv,
            "github.com/Zefan-Cai/R-KV, vLLM/README.md and vLLM/docs/IMPLEMENTATION.md at 0123002",
            remark="It waits for budget + buffer tokens before its first compression.",
            windows={"rkv": "queries"},
        ),
        Target(
            "kvpress",
            ("snapkv", "tova", "keydiff", "streaming", "random"),
            {"keep_prompt": False, "every_from": "prompt", "pooling": "avg"},
            ("kv_budget", "every", "local_window", "sinks", "queries", "kernel"),
            _kvpress,
            "github.com/NVIDIA/kvpress, kvpress/presses/decoding_press.py of 0.5.5",
            ".py",
            windows={"snapkv": "queries", "tova": 1, "keydiff": 1, "random": 1},
        ),
    )
}

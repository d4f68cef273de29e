"""A cell of a run, and the configuration of an engine that is to serve it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas import benchmarks, policies
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Setting, Trace
from kvatlas.policies import CompressingPolicy, parameters, share
from kvatlas.policies.triattention import TriAttention, load_statistics
from kvatlas.results import Expected
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, systems_of
from kvatlas.stats.table import select
from kvatlas.sweeps.spec import BenchmarkSpec, ModelSpec

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle


@dataclass(frozen=True)
class MeasuredCell:
    """A model and a setting of a run, with the cells that hold its problems, and how they are sampled."""

    run: RunData
    model: str
    setting: Setting
    cells: tuple[Expected, ...]
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, name: str = "") -> MeasuredCell:
        """Return the cell that words name (as `compare --only`), else the recommended one.

        Raises KvatlasError if there is not exactly one, or the run was no sweep.
        """
        run = RunData.open(folder)
        if not run.manifest.spec:
            raise KvatlasError(f"{str(folder)!r} was no sweep: how its problems were asked is not known.")
        if name:
            (system,) = choose(systems_of([run], "pass@1"), [name])
            model, setting = system.model, system.setting
        else:
            model, setting = _recommended(run)
        cells = tuple(cell for cell in run.manifest.expected if (cell.model, cell.setting) == (model, setting))
        return cls(run, model, setting, cells, run.manifest.spec["sampling"])

    def traces(self, setting: Setting) -> dict[tuple[str, str, int], Trace]:
        """Return the run's traces of a setting by benchmark, problem and sample; empty if it has none."""
        cells = select(self.run.cells, model=self.model, setting=setting)
        with self.run.store() as store:
            return {key[2:]: store.trace(key) for key in sorted(key for cell in cells for key in cell.stored_keys())}

    def benchmarks(self) -> dict[str, Benchmark]:
        """Return the benchmarks as the run asked them; raises KvatlasError if this version asks or grades otherwise."""
        recorded = {entry[0]: list(entry) for entry in self.run.manifest.provenance.get("benchmarks", ())}
        by_name = {}
        for entry in self.run.manifest.spec["benchmarks"]:
            benchmark = BenchmarkSpec(**entry).find()
            if benchmark.name in recorded and list(benchmarks.identity(benchmark)) != recorded[benchmark.name]:
                raise KvatlasError(f"{benchmark.name} is asked or graded otherwise here than in the run; sweep anew.")
            by_name[benchmark.name] = benchmarks.asked_of(benchmark, self._reads())
        return by_name

    def _reads(self) -> Callable[[str], bool]:
        for entry in self.run.manifest.spec["models"]:
            with contextlib.suppress(KvatlasError):
                model = ModelSpec(**entry).find()
                if model.name == self.model:
                    return model.reads
        return lambda _: True


def _recommended(run: RunData) -> tuple[str, Setting]:
    from kvatlas.stats.run_analysis import RunAnalysis

    choices = RunAnalysis(run).choices
    settings = [(choice.model, choice.by_memory.setting) for choice in choices if choice.by_memory is not None]
    if len(settings) != 1:
        there = "; ".join(f"{model} {setting}" for model, setting in settings) or "none"
        raise KvatlasError(f"The run recommends not one setting but: {there}. Name a cell with --cell.")
    return settings[0]


@dataclass(frozen=True)
class Target:
    """An engine: the policies it has, the parameters it takes, and its configuration.

    `only` are parameters with the one value that they have there; all others that `takes` does not name must have the
    default of the policy. `windows` names the parameter that is a policy's local window there, or its length.
    `text` is filled with the parameters; `source` documents its format.
    """

    policies: tuple[str, ...]
    only: Mapping[str, Any]
    takes: tuple[str, ...]
    text: str
    source: str
    suffix: str = ".sh"
    remark: str = ""
    windows: Mapping[str, str | int] = field(default_factory=dict)


class Exported(NamedTuple):
    """The configuration, the setting that it is in our own terms, and the differences from the one asked for."""

    text: str
    setting: Setting
    changed: tuple[str, ...]


def export_setting(
    setting: Setting, name: str, prompt: int | None = None, nearest: bool = False, statistics: str = "stats.pt"
) -> Exported:
    """Return the setting for the target of that name.

    `prompt` is a typical prompt's length, for budgets that count it; `statistics` is the file that is named for them.
    Raises KvatlasError for an unknown target or policy and, unless the `nearest` will do, for all that the target
    cannot express, each with the nearest that it can.
    """
    if name not in TARGETS:
        raise KvatlasError(f"Unknown target {name!r}; expected: {', '.join(TARGETS)}.")
    target, policy = TARGETS[name], policies.of(setting)
    base = policy.name.partition("@")[0]
    if not isinstance(policy, CompressingPolicy):
        raise KvatlasError(f"{setting} never compresses: there is nothing to tell {name}; serve without compression.")
    if base not in target.policies:
        raise KvatlasError(f"{name} has no policy {base!r}; it has {', '.join(target.policies)}. Make a map of those.")
    values, changed = _kept(policy, target.only.get("budget_over"), prompt)
    able = {field.name: target.only.get(field.name, field.default) for field in parameters(policy)}
    able |= {word: values[word] for word in target.takes if word in values}
    if base in target.windows:
        window = target.windows[base]
        able["local_window"] = values[window] if isinstance(window, str) else window
        # The engine keeps its own window anyway.
        values["local_window"] = max(values["local_window"], able["local_window"])
    changed += [f"{word} is {value} and can be {able[word]}" for word, value in values.items() if value != able[word]]
    if changed and not nearest:
        raise KvatlasError(f"{name} cannot express {setting}: {'; '.join(changed)}. --nearest writes that.")
    values = {word: str(able[word]) if word == "scope" else able[word] for word in values}
    said = {word: str(value).lower() if isinstance(value, bool) else value for word, value in values.items()}
    said |= {
        "file": statistics,
        "prompt_counts": str(values["budget_over"] == "cache").lower(),
        "press": _PRESSES.get(base, "").format(**values),
        "kind": _PRESSES.get(base, "").partition("(")[0],
        "buffer": max(256, 2 * values.get("queries", 0)),
    }
    return Exported(target.text.format(**said), policies.of(Setting.of(base, **values)).setting, tuple(changed))


def _kept(policy: CompressingPolicy, only: str | None, prompt: int | None) -> tuple[dict[str, Any], list[str]]:
    """The parameters with the budget as tokens that are kept and an interval, and what is not the same then.

    A ratio is exact where it and the target's budget count the same, and else with a typical prompt.
    """
    values = {field.name: getattr(policy, field.name) for field in parameters(policy)}
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


def write_export(run: Path, cell: str, target: str, folder: Path, nearest: bool = False) -> list[Path]:
    """Write a run's cell, by words or the recommended one, for a target; return the files.

    The configuration begins with a comment: the cell with its values and intervals, and its differences from the map's.
    """
    reference = MeasuredCell.of(run, cell)
    prompts = [trace.usage.prompt_tokens for trace in reference.traces(reference.setting).values()]
    typical = int(median(known)) if (known := [count for count in prompts if count is not None]) else None
    statistics = folder.absolute() / "statistics.pt"
    made, engine = export_setting(reference.setting, target, typical, nearest, str(statistics)), TARGETS[target]
    lines = [f"{reference.model} under {reference.setting}"]
    for traces in reference.run.cells:
        if traces.expected in reference.cells:
            shown = traces.cell().estimate
            between = "" if shown.low is None else f" (95 % CI {100 * shown.low:.1f} to {100 * (shown.high or 0):.1f})"
            lines.append(f"{traces.expected.benchmark}: Pass@1 {100 * shown.value:.1f} %{between}, n = {traces.stored}")
    lines.append(f"Format: {engine.source}.")
    if made.changed:
        lines.append(f"Not that cell but the nearest: {'; '.join(made.changed)}.")
        lines.append(f"In kvatlas' terms it is {made.setting}; a map of it says what it loses.")
    lines += [engine.remark] if engine.remark else []
    lines.append("Prove it: kvatlas deploy verify URL --against RUN --out SERVED")
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{target}{engine.suffix}"]
    written[0].write_text("".join(f"# {line}\n" for line in lines) + made.text, encoding="utf-8")
    policy = policies.of(reference.setting)
    if isinstance(policy, TriAttention):
        import torch

        models = [ModelSpec(**entry).find() for entry in reference.run.manifest.spec["models"]]
        model = next((candidate for candidate in models if candidate.name == reference.model), None)
        if model is None:
            raise KvatlasError(f"The model {reference.model!r} is not here, so its statistics cannot be written.")
        policy.check(model)
        torch.save(_statistics(policy.file(model), model), statistics)
        written.append(statistics)
    return written


def _statistics(source: Path, model: ModelHandle) -> dict[str, Any]:
    """Our query statistics as the authors' calibration has them: `metadata` and, for each query head, `stats`.

    `stats["layerLL_headHH"]` holds q_mean_real, q_mean_imag and q_abs_mean [planes] (github.com/WeianMao/triattention,
    docs/calibration.md and triattention/sglang/stats_loader.py at 6dfdd97).
    """
    ours = load_statistics(str(source))
    layers, heads, planes = ours["center_real"].shape
    names = {"q_mean_real": "center_real", "q_mean_imag": "center_imag", "q_abs_mean": "norm"}
    every_head = [[layer, head] for layer in range(layers) for head in range(heads)]
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            name: ours[own][layer, head].float().clone() for name, own in names.items()
        }
        for layer, head in every_head
    }
    text = {"dtype": "float32", "rope_style": "half", "rope_type": "default"}
    counts = {"num_traces": 1, "head_dim": 2 * planes, "num_attention_heads": heads}
    counts["num_key_value_heads"] = model.shape.kv_heads
    return {"metadata": {**counts, **text, "sampled_heads": every_head}, "stats": stats}


_PRESSES = {
    "keydiff": "KeyDiffPress()",
    "random": "RandomPress()",
    "streaming": "StreamingLLMPress(n_sink={sinks})",
    "tova": "TOVAPress()",
    "snapkv": "SnapKVPress(window_size={queries}, kernel_size={kernel})",
}
_TRIATTENTION = """\
export ENABLE_TRIATTENTION=true
export TRIATTN_RUNTIME_KV_BUDGET={kv_budget}
export TRIATTN_RUNTIME_DIVIDE_LENGTH={every}
export TRIATTN_RUNTIME_WINDOW_SIZE={local_window}
export TRIATTN_RUNTIME_PRUNING_MODE=per_layer_per_head
export TRIATTN_RUNTIME_PROTECT_PREFILL={keep_prompt}
export TRIATTN_RUNTIME_INCLUDE_PREFILL_IN_BUDGET={prompt_counts}
export TRIATTN_RUNTIME_SPARSE_STATS_PATH={file}
"""
_TAKEN = ("kv_budget", "every", "local_window", "keep_prompt", "budget_over", "statistics")
TARGETS = {
    "tensorrt-llm": Target(
        ("triattention",),
        {"budget_over": "thinking", "every_from": "prompt"},
        ("kv_budget", "every", "statistics"),
        "backend: pytorch\nkv_cache_compression_config:\n  algorithm: triattention\n  budget: {kv_budget}\n"
        "  beta: {every}\n  eviction_mode: per_layer_perhead\n  normalize_scores: true\n  calibration_path: {file}\n"
        "kv_cache_config:\n  enable_block_reuse: true\n  use_kv_cache_manager_v2: true\n",
        "TriAttentionKvCacheCompressionConfig, TensorRT-LLM's page on TriAttention",
        suffix=".yaml",
        windows={"triattention": 1},
    ),
    "triattention-vllm": Target(
        ("triattention",),
        {},
        _TAKEN,
        _TRIATTENTION,
        "github.com/WeianMao/triattention, README.md (configuration reference) and "
        "triattention/vllm/runtime/runner.py at 6dfdd97",
    ),
    "triattention-sglang": Target(
        ("triattention",),
        {},
        _TAKEN,
        _TRIATTENTION,
        "github.com/WeianMao/triattention, docs/sglang.md; the variables of its vLLM runtime",
        remark="Its page names budget, divide length and statistics alone; the rest may do nothing.",
    ),
    "r-kv-vllm": Target(
        ("rkv",),
        {"keep_prompt": False, "every_from": "prompt", "scope": "global", "unlike": "first"},
        ("kv_budget", "every", "queries", "kernel", "mix"),
        "export VLLM_V1_R_KV_BUDGET={kv_budget}\nexport VLLM_V1_R_KV_BUFFER={every}\n"
        "export VLLM_V1_R_KV_WINDOW={queries}\nexport VLLM_V1_R_KV_KERNEL={kernel}\n"
        "export VLLM_V1_R_KV_MIX_LAMBDA={mix}\n",
        "github.com/Zefan-Cai/R-KV, vLLM/README.md and vLLM/docs/IMPLEMENTATION.md at 0123002",
        remark="It waits for budget + buffer tokens before its first compression.",
        windows={"rkv": "queries"},
    ),
    "kvpress": Target(
        ("snapkv", "tova", "keydiff", "streaming", "random"),
        {"keep_prompt": False, "every_from": "prompt", "pooling": "avg"},
        ("kv_budget", "every", "local_window", "sinks", "queries", "kernel"),
        "from kvpress import DecodingPress, {kind}\n\npress = DecodingPress(\n    base_press={press},\n"
        "    compression_interval={every},\n    target_size={kv_budget},\n"
        "    hidden_states_buffer_size={buffer},\n)\n",
        "github.com/NVIDIA/kvpress, kvpress/presses/decoding_press.py of 0.5.5",
        suffix=".py",
        windows={"snapkv": "queries", "tova": 1, "keydiff": 1, "random": 1},
    ),
}

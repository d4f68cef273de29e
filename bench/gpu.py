"""Decoding on a GPU: an 8B Llama with random bf16 weights under a KV budget against the full cache, batch 1 to 64.

    python bench/gpu.py --out bench/results/gpu.json
    python bench/gpu.py --tiny          # the same program on a CPU with a tiny model, to see that it works

Speed and memory do not depend on what the weights are. Every run decodes `--tokens` new tokens a sequence from prompts
of the same length after a warm-up; `full` and `window` (kv_budget) take turns, each without CUDA graphs and with them
(`graph_steps` of all `passes`: prompts are read without). `same_tokens` is the mean number of tokens that both ways
begin with alike (in bf16 kernels round differently). A batch that does not fit is noted. Prints one JSON document with
the hardware named; without a GPU and without --tiny one sentence and exit code 2.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common import arguments, endless, keep
from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle

#: Of Llama-3.1-8B, on which DeepSeek-R1-Distill-Llama-8B is built.
EIGHT_B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
TINY = {
    **EIGHT_B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(folder: Path, tiny: bool) -> tuple[ModelHandle, LlamaForCausalLM]:
    """The model, whose traces never end, and its weights made in place: nothing is written but its config."""
    config = LlamaConfig(**(TINY if tiny else EIGHT_B))
    config.save_pretrained(folder)
    handle = endless(folder)
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return handle, model.eval().requires_grad_(False)


def measure(
    handle: ModelHandle, model: LlamaForCausalLM, setting: Setting, graphs: bool, batch: int, prompt: int, tokens: int
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Tokens per second and bytes of one batch, {"fits": False} where memory ran out; and what it wrote."""
    cuda = model.device.type == "cuda"
    policy = policies.from_setting(setting)
    prompts = [tuple((7 * row + i) % 500 + 5 for i in range(prompt)) for row in range(batch)]

    def decode(count: int) -> tuple[Engine, list[tuple[int, ...]]]:
        engine = Engine(handle, model, [policy], Sampling(max_new_tokens=count), batch, backend="flex")
        if not graphs:
            engine.graphs = None
        traces = list(engine.run([Request(row, ids, row, (policy,)) for row, ids in enumerate(prompts)]))
        return engine, [trace.tokens for trace in sorted(traces, key=lambda trace: trace.key)]

    try:
        decode(8)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        engine, written = decode(tokens)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"fits": False}, []
    by_name = {
        "fits": True,
        "passes": engine.passes,
        "graph_steps": engine.graphs.steps if engine.graphs else 0,
        "tokens_per_second": round(engine.decoded_tokens / seconds, 1),
        "kv_bytes": engine.cache.bytes,
        "peak_bytes": int(torch.cuda.max_memory_allocated()) if cuda else None,
    }
    return by_name, written


def alike(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that two traces begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )


def main() -> None:
    options = arguments(
        __doc__, tiny=False, batches=[1, 4, 16, 64], budget=5000, window=2000, ratio=0.3, prompt=256, tokens=6000
    )
    if not options.tiny and not torch.cuda.is_available():
        print("bench/gpu.py needs a GPU that PyTorch can use; --tiny tries it on this CPU.", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)

    window = Setting.from_parameters(
        "window", kv_budget=options.budget, local_window=options.window, ratio=options.ratio
    )
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        handle, model = build(Path(folder), options.tiny)
        for batch in options.batches:
            for setting in (window, Setting.from_parameters("full")):
                traces = []
                for graphs in (False, True):
                    result, written = measure(handle, model, setting, graphs, batch, options.prompt, options.tokens)
                    results.append({"batch": batch, "policy": setting.policy, "graphs": graphs, **result})
                    traces.append(written)
                if all(traces):
                    same = [alike(trace, other) for trace, other in zip(*traces, strict=True)]
                    results[-1]["same_tokens"] = round(statistics.mean(same), 1)
    keep(
        options,
        bench="gpu",
        hardware=platform.processor() or platform.machine() if options.tiny else torch.cuda.get_device_name(),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
        results=results,
    )


if __name__ == "__main__":
    main()

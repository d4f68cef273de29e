"""Decoding speed against transformers' own loop, on one model with random weights, one thread, fp32.

    python bench/decode.py --tokens 512 --batch 8

`generate` is transformers' greedy generation with its DynamicCache; `full` and `window` are our loop with the full
cache and with a KV budget. All write the same number of tokens from prompts of the same length, in turn, after a
warm-up; ratios are medians over the rounds. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import Model


def bench_model(folder: Path, layers: int, hidden: int) -> Model:
    """A Llama with random weights that never ends a trace."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=32_768,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    model = Model(f"hf:{folder}", folder)
    vars(model).update(stops=frozenset(), think_close=-1)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), options.layers, options.hidden)
        prompts = [tuple((7 * row + i) % 4000 + 5 for i in range(options.prompt)) for row in range(options.batch)]
        reference = model.network()
        sampling = Sampling(temperature=0.0, max_new_tokens=options.tokens)

        def generate() -> None:
            ids = torch.tensor(prompts)
            reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
                pad_token_id=0,
            )

        def ours(setting: Setting) -> Callable[[], None]:
            policy = policies.of(setting)
            engine = Engine(model, model.network(), [policy], sampling, options.batch)
            work = [Request(row, prompt, row, (policy,)) for row, prompt in enumerate(prompts)]
            return lambda: [None for _ in engine.run(work)] and None

        window = Setting.of(
            "window", kv_budget=options.budget, local_window=options.budget // 4, ratio=0.3, ratio_over="thinking"
        )
        loops = {"generate": generate, "full": ours(Setting.of("full")), "window": ours(window)}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(options.rounds + 1):
            for name, loop in loops.items():
                began = time.perf_counter()
                loop()
                if turn:
                    seconds[name].append(time.perf_counter() - began)

    written = options.batch * options.tokens
    print(
        json.dumps(
            {
                "bench": "decode",
                "options": vars(options),
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
                "tokens_per_second": {
                    name: round(written / statistics.median(times), 1) for name, times in seconds.items()
                },
                "speed_against_generate": {
                    name: round(statistics.median(g / t for g, t in zip(seconds["generate"], times, strict=True)), 2)
                    for name, times in seconds.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()

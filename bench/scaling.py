"""Model the time of a published grid on 1, 8 and 64 GPUs from the share of the bandwidth that steps reach.

    python bench/scaling.py --bandwidth 3.35e12 --share 0.7 --memory 80

Tokens are those that bench/sweep_cost.py counts for the 4 x 5 grid over four benchmarks with 5 samples, as trees. A
decoding step reads the weights once and the kept keys and values of every row, and takes as long as that at the
`--share` of the `--bandwidth` (bytes per second, of the data sheet) that our loop reaches: 58 to 67 % on an H200, 67 to
78 % of a large copy's rate, which bench/gpu.py measures; on a CPU bench/decode.py does. The batch is what fits into
`--memory` GiB by the formula of `kvatlas plan`. A worker starts in `--start` seconds, and at the end one tree of the
longest traces is waited for. `--model` is 8B or 32B, of DeepSeek-R1's distilled models. Prints one JSON document."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from common import arguments, keep
from kvatlas.engine.memory_plan import GPU_BATCH, Peak, largest_batch, peak
from kvatlas.models import ModelHandle, Overrides
from sweep_cost import BUDGET, GRID, LONGEST, PROMPT, lengths, tokens, window_policy

#: Of DeepSeek-R1-Distill-Llama-8B and DeepSeek-R1-Distill-Qwen-32B.
SHAPES = {
    "8B": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "32B": {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
#: Their parameters, which are counted, not loaded.
PARAMETERS = {"8B": 8_030_261_248, "32B": 32_763_876_352}


def main() -> None:
    options = arguments(__doc__, bandwidth=3.35e12, share=0.7, memory=80.0, start=60.0, gpus=[1, 8, 64], model="8B")
    parameters = PARAMETERS[options.model]
    grid = [window_policy(BUDGET, window, ratio) for window, ratio in GRID]
    results = [length for item in lengths(None, 5, 0).values() for length in item]
    separate, shared = tokens(results, BUDGET - PROMPT + 1, len(grid))
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**SHAPES[options.model], max_position_embeddings=131_072, dtype="bfloat16").save_pretrained(folder)
        facts = Overrides(dtype="bfloat16", weight_bytes=2 * parameters)
        model = ModelHandle(f"hf:{folder}", Path(folder), overrides=facts)
        vars(model)["device"] = "cuda"

        def peak_of(size: int) -> Peak:
            return peak(model, grid, size, 10**6, PROMPT, LONGEST)

        batch = largest_batch(options.memory * 2**30, GPU_BATCH, peak_of)
        # Between compressions a cache grows evenly from what was kept to the budget.
        kept = statistics.mean(w + r * (BUDGET - w) for w, r in GRID)
        cached = (kept + BUDGET) / 2
        read = 2 * parameters + batch * cached * model.kv_bytes_per_token
    step = read / (options.bandwidth * options.share)
    rate = batch / step
    tail = LONGEST * step
    hours: dict[str, Any] = {}
    for gpus in options.gpus:
        hours[str(gpus)] = {
            "trees": round((shared / rate / gpus + options.start + tail) / 3600, 2),
            "separate": round((separate / rate / gpus + options.start + tail) / 3600, 2),
        }
    keep(
        options,
        bench="scaling",
        tokens={"separate": separate, "trees": shared},
        batch=batch,
        cached_tokens_mean=round(cached),
        step_ms=round(1000 * step, 2),
        tokens_per_second_and_gpu=round(rate),
        hours=hours,
    )


if __name__ == "__main__":
    main()

"""Maps of a pretrained model as it was published, on problems in wide use: a run for each part.

    python recipes/real/maps.py --panel panel/panel.jsonl --out runs/real                  # goes on where it stopped
    python recipes/real/maps.py --panel panel/panel.jsonl --out runs/real --parts maps
    kvatlas map runs/real/maps --out real.svg

The panel is that of panel.py. Parts, each in a folder of its own under `--out`:

- `maps`: `rkv` and `snapkv` (with a head `dynts` instead), 4 windows by 5 ratios, and at two of these settings `h2o`,
  `random` and `window`.
- `bytes`: tokens against bits at equal memory, `full` and three policies at 16, 8 and 4 bits.
- `prompt`: policies that keep the whole prompt, and that may forget it, with the same number of cached tokens.

The budgets of the last two count the prompt, so they take the problems with short prompts alone.

Models without think tags have no thinking: `ratio_over: thinking` and `budget_over: thinking` count all new tokens. A
greedy sample of each problem. With weights in bfloat16 a core decodes 60 to 80 tokens a second with the model of 1.5B
parameters if it multiplies such numbers, and half as many otherwise, so a part is an evening or a night. Give `--head`
for `dynts`, trained on traces of the pilot:

    kvatlas predictor train runs/pilot --out head.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from short_prompts import write_short

import kvatlas
from kvatlas import models
from kvatlas.core import Shape, Storage
from kvatlas.sweeps import Progress

BUDGET = 192
WINDOWS = [32, 64, 96, 128]
RATIOS = [0.1, 0.2, 0.3, 0.4, 0.5]
#: Windows and ratios at which other policies stand beside those of the map.
SETTINGS = ((64, 0.3), (32, 0.5))
RIVALS = ("h2o", "random", "window")
OVER = {"ratio_over": "thinking", "budget_over": "thinking"}
#: Tokens at 16 bits, prompt included; their memory holds 1.7 and 3 times as many at 8 and 4 bits.
MEMORY_TOKENS = 288
BITS = (16, 8, 4)
#: Newest tokens that are read unpacked.
RESIDUAL = 16
#: Tokens that stay after a compression, the prompt included, and the new ones until the next one.
KEPT = 128
EVERY = 64
PROMPT_WINDOW = 32
#: Tokens of the longest prompt of which all, and the local window, may stay.
LONGEST_PROMPT = 94


def rivals() -> Iterator[dict[str, Any]]:
    for window, ratio in SETTINGS:
        for policy in RIVALS:
            yield {"policy": policy, "kv_budget": BUDGET, "local_window": window, "ratio": ratio, **OVER}


def mapped(head: str) -> Iterator[dict[str, Any]]:
    yield {"policy": "rkv", "kv_budget": BUDGET, **OVER}
    if head:
        yield {"policy": "dynts", "predictor": head, "kv_budget": BUDGET, **OVER}
    else:
        yield {"policy": "snapkv", "kv_budget": BUDGET, **OVER}


def equal_bytes(shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield settings with budgets in tokens: one in bytes would count 32 bits where a CPU computes in float32."""
    memory = MEMORY_TOKENS * shape.kv_bytes_per_token(bytes_per_value=2)
    for bits in BITS:
        tokens = MEMORY_TOKENS
        packed = {}
        if bits < 16:
            packed = {"kv_bits": bits, "residual": RESIDUAL}
            token_bytes, sequence_bytes = shape.kv_bytes(Storage(bits, bits, residual=RESIDUAL), bytes_per_value=2)
            tokens = (memory - sequence_bytes) // token_bytes
            yield {"policy": "full", **packed}
        for policy in ("rkv", "random", "window"):
            yield {"policy": policy, "kv_budget": tokens, "local_window": 64, "ratio": 0.3, **packed}


def prompts(policies: Sequence[str]) -> Iterator[dict[str, Any]]:
    common = {"kv_budget": KEPT, "every": EVERY, "local_window": PROMPT_WINDOW}
    for policy in policies:
        for keeps in (True, False):
            yield {"policy": policy, "keep_prompt": keeps, **common}


def spec(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the sweep of a part."""
    panel = options.panel
    if part in ("bytes", "prompt"):
        # Their budgets hold the prompt too.
        panel = write_short(f"MATH500@{panel}", options.model, LONGEST_PROMPT, options.out / "short.jsonl")
    baseline: list[dict[str, Any]] = [{"policy": "full"}]
    axes: dict[str, Any] = {}
    if part == "maps":
        baseline += rivals()
        settings = list(mapped(options.head))
        axes = {"local_window": WINDOWS, "ratio": RATIOS}
    elif part == "bytes":
        settings = list(equal_bytes(models.find(options.model).shape))
    else:
        settings = list(prompts(options.policies))
    sampling = {"temperature": 0.0, "max_new_tokens": options.max_new_tokens}
    return {
        "models": [{"model": options.model, "weights": options.weights}],
        "benchmarks": [f"MATH500@{panel}"],
        "problems": options.problems,
        "samples": 1,
        "seed": 0,
        "sampling": sampling,
        "baseline": baseline,
        "settings": settings,
        "axes": axes,
    }


def show(progress: Progress) -> None:
    """Print every 50th trace."""
    if progress.done % 50 == 0:
        print(f"{progress.done:,} of {progress.total:,} traces", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b.gguf", help="a model, as fetch.py writes it")
    parser.add_argument("--panel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--parts", nargs="+", default=["maps", "bytes", "prompt"])
    parser.add_argument("--problems", type=int, help="the first problems of the panel (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=900)
    parser.add_argument("--weights", default="auto", help="bfloat16: half the memory, and twice as fast on some CPUs")
    parser.add_argument("--head", default="", help="a head for dynts")
    names = ["random", "h2o", "snapkv", "rkv"]
    parser.add_argument("--policies", nargs="+", default=names, help="policies with the prompt and without")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    for part in options.parts:
        run = kvatlas.sweep(
            spec(part, options), options.out / part, workers=options.workers, on_trace=show, on_message=print
        )
        print(run.cells()[["policy", "local_window", "ratio", "value", "low", "high"]].to_string())


if __name__ == "__main__":
    main()

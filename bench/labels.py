"""Peak memory and time of the DynTS labels against the length of a trace.

    python bench/labels.py --lengths 2048 4096 8192 16384

Each length runs in a process of its own, which prints the highest resident memory (on a GPU: allocated memory) less
what was there before: the model and the libraries. `matrix` is `output_attentions=True` for comparison, on the shorter
lengths alone. `exponent` is the slope of log memory over log length: 1 is linear, 2 the whole matrix. Prints one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# The process that starts the others imports nothing heavy: their peak memory begins with that of the one that started
# them.


def llama(options: argparse.Namespace) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=max(1, options.hidden // 128),
        max_position_embeddings=131_072,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False).to(options.device)


def peak(device: str) -> int:
    import torch

    if device != "cpu":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from kvatlas.predictor import answer_attention

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    model = llama(options)
    tokens = [i * 7919 % 1000 for i in range(options.one)]
    start = options.one - options.answer

    def work(length: int) -> None:
        if options.matrix:
            model.set_attn_implementation("eager")
            ids = torch.tensor([tokens[:length]], device=options.device)
            result = model.get_decoder()(input_ids=ids, use_cache=False, output_attentions=True)
            torch.stack([layer[0, :, -options.answer :].mean((0, 1)) for layer in result.attentions]).mean(0)
        else:
            answer_attention(model, tokens[:length], min(start, length - 1))

    work(64)
    before = peak(options.device)
    began = time.perf_counter()
    work(options.one)
    return {"bytes": peak(options.device) - before, "seconds": round(time.perf_counter() - began, 2)}


def hardware(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    import torch

    return str(torch.cuda.get_device_name())


def exponent(result: dict[str, dict[str, float]]) -> float | None:
    """Least-squares slope of log memory over log length; None for fewer than two lengths."""
    if len(result) < 2:
        return None
    points = [(math.log(int(length)), math.log(entry["bytes"])) for length, entry in result.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return round(sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16_384])
    parser.add_argument("--matrix-lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--answer", type=int, default=256, help="tokens of the answer")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--matrix", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return

    def apart(length: int, *more: str) -> dict[str, float]:
        common = [sys.executable, __file__, "--one", str(length), "--answer", str(options.answer)]
        common += ["--layers", str(options.layers), "--hidden", str(options.hidden), "--device", options.device]
        done = subprocess.run([*common, *more], check=True, capture_output=True, text=True)
        document: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return document

    blocks = {str(length): apart(length) for length in options.lengths}
    matrix = {str(length): apart(length, "--matrix") for length in options.matrix_lengths}
    print(
        json.dumps(
            {
                "bench": "labels",
                "options": {name: value for name, value in vars(options).items() if name not in ("one", "matrix")},
                "torch": version("torch"),
                "hardware": hardware(options.device),
                "blocks": blocks,
                "matrix": matrix,
                "exponent": {"blocks": exponent(blocks), "matrix": exponent(matrix)},
            }
        )
    )


if __name__ == "__main__":
    main()

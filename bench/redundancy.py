"""What R-KV's redundancy costs at a compression: our exact search against the matrix of all similarities.

    python bench/redundancy.py --tokens 1024 4096 16384 --matrix-tokens 1024 4096 16384 --matrix-heads 2

`model`: keys that a real model gives its own benchmark's problems, one after another; `unlike`: random keys, of which
hardly one repeats another, so that all pairs have to be compared: the worst case. Both for as many KV heads as
bench/policies.py's model has (`--heads`). Times are processor seconds of one thread, ours the least of three for each
head, as other programs on the machine slow it down; the matrix is timed once for `--matrix-heads` of them, and that
time counts for all. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from kvatlas import benchmarks, models
from kvatlas.policies.rkv import redundancy

#: Times that our search is timed.
TURNS = 3
#: Rows of the matrix that are held at a time, and tokens of a prefill.
CHUNK = 512


def by_matrix(key: Tensor, threshold: float) -> Tensor:
    """The same [KV heads, cached] from all similarities, row by row, in O(n^2 d)."""
    unit = F.normalize(key, dim=-1, eps=1e-8)
    number = torch.arange(key.shape[1])
    total = torch.zeros_like(unit[..., 0])
    for start in range(0, key.shape[1], CHUNK):
        rows = number[start : start + CHUNK, None]
        similarity = (unit[:, start : start + CHUNK] @ unit.transpose(-1, -2)).masked_fill(rows == number, 0.0)
        newest = torch.where(similarity > threshold, number, -1).amax(-1, keepdim=True)
        total += similarity.masked_fill(newest == number, 0.0).sum(1)
    return (total / key.shape[1]).softmax(-1)


@torch.inference_mode()
def keys_of(name: str, tokens: int) -> Tensor:
    """Keys [KV heads of all layers, tokens, head size] of a model that reads problems of CHAIN12."""
    handle = models.find(name)
    text: list[int] = []
    for problem in benchmarks.find("CHAIN12").problems(tokens // 8):
        text += handle.encode(problem.question)
        if len(text) >= tokens:
            break
    model, cache = handle.load(), DynamicCache()
    for start in range(0, tokens, CHUNK):
        part = torch.tensor([text[:tokens][start : start + CHUNK]])
        model.get_decoder()(input_ids=part, past_key_values=cache, use_cache=True)
    return torch.cat([layer.keys[0] for layer in cache.layers]).float()


def seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began = time.thread_time()
    result = call()
    return time.thread_time() - began, result


def measure(key: Tensor, heads: int, matrix: int) -> dict[str, float | None]:
    """Seconds for `heads` heads, and the largest relative difference of the two ways; the keys' heads take turns."""
    own, theirs, difference = 0.0, 0.0, 0.0
    for head in range(heads):
        item = key[head % len(key)][None]
        turns = [seconds(lambda entry=item: redundancy(entry, 0.5)) for _ in range(TURNS)]  # type: ignore[misc]
        own += min(taken for taken, _ in turns)
        if head < matrix:
            taken, wanted = seconds(lambda value=item: by_matrix(value, 0.5))  # type: ignore[misc]
            theirs += taken * heads / matrix
            difference = max(difference, float(((turns[0][1] - wanted) / wanted).abs().max()))
    row: dict[str, float | None] = {"seconds": round(own, 4), "matrix_seconds": None, "relative_difference": None}
    return row | ({"matrix_seconds": round(theirs, 4), "relative_difference": difference} if matrix else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--matrix-tokens", type=int, nargs="*", default=[1024, 4096], help="where both ways are timed")
    parser.add_argument("--heads", type=int, default=24, help="layers times KV heads")
    parser.add_argument("--model", default="embedded:tiny-llama")
    parser.add_argument("--matrix-heads", type=int, default=24, help="for how many of them the matrix is made")
    options = parser.parse_args()
    matrix = min(options.heads, options.matrix_heads)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {}
    real = keys_of(options.model, max(options.tokens))
    for tokens in options.tokens:
        unlike = torch.randn(len(real), tokens, 64)
        rows[str(tokens)] = {
            name: measure(key, options.heads, matrix if tokens in options.matrix_tokens else 0)
            for name, key in (("model", real[:, :tokens]), ("unlike", unlike))
        }
    print(
        json.dumps(
            {
                "bench": "redundancy",
                "options": vars(options),
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
                "cached_tokens": rows,
            }
        )
    )


if __name__ == "__main__":
    main()

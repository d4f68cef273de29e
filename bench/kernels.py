"""What stands between a decode step and the memory limit on a CPU: bytes per second of the kernels that it could use.

    python bench/kernels.py --compile --out bench/results/kernels.json

One thread, fp32, the shapes of `bench/decode.py`: attention of one new token for 8 rows with 12 heads on 4 KV heads of
64 over 4096 cached tokens, and linear layers of 768 for 8 rows. Each kernel is timed by the CPU seconds of its thread,
in turns, on fresh memory each time; `bandwidth` is what summing a table of the same size reads. With --compile
FlexAttention is among them, which needs a C++ compiler. Prints one JSON document with GB/s and shares of the bandwidth.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from keeping import keep

ROWS, KV_HEADS, GROUP, SIZE, HIDDEN, WIDE = 8, 4, 3, 64, 768, 2048
#: Layers, each with memory of its own, as in a model: nothing is read from a cache of the processor twice.
LAYERS = 8


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What the engine calls."""
    return F.scaled_dot_product_attention(query, keys, values)


def matmuls(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same as two batched products and a softmax."""
    return torch.softmax(query @ keys.transpose(-1, -2) / SIZE**0.5, -1) @ values


def turned(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Keys times queries: the large table comes first in the first product."""
    scores = (keys @ query.transpose(-1, -2)).transpose(-1, -2) / SIZE**0.5
    return torch.softmax(scores, -1) @ values


def pieces(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The values in pieces of 256 tokens, added up at the end (split-KV)."""
    weights = torch.softmax((keys @ query.transpose(-1, -2)).transpose(-1, -2) / SIZE**0.5, -1)
    count = values.shape[2] // 256
    parts = weights.unflatten(-1, (count, 256)).transpose(2, 3).flatten(0, 2)
    found = torch.bmm(parts, values.unflatten(2, (count, 256)).flatten(0, 2))
    return found.unflatten(0, (*values.shape[:2], count)).sum(2)


def one_by_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Matrix times vector for every head."""
    found = torch.empty_like(query)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            for place in range(query.shape[2]):
                weights = torch.softmax(torch.mv(keys[row, head], query[row, head, place]) / SIZE**0.5, 0)
                found[row, head, place] = torch.mv(values[row, head].t(), weights)
    return found


def flex() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def call(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = compiled(query.flatten(1, 2)[:, :, None], keys, values, enable_gqa=True)
        return found.unflatten(1, query.shape[1:3])[:, :, :, 0]

    return call


def packed(weights: list[Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """oneDNN's linear over weights in its own order, a second copy of them."""
    made = []
    for weight in weights:
        own = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        made.append(lambda x, own=own: torch.ops.mkldnn._linear_pointwise(x, own, None, "none", [], ""))
    return made


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables = [
        (
            torch.randn(ROWS, KV_HEADS, GROUP, SIZE),
            *(torch.randn(ROWS, KV_HEADS, options.cached, SIZE) for _ in range(2)),
        )
        for _ in range(LAYERS)
    ]
    weights = [torch.randn(WIDE, HIDDEN) for _ in range(4 * LAYERS)]
    x = torch.randn(ROWS, HIDDEN)
    attention: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        each.__name__: each for each in (sdpa, matmuls, turned, pieces, one_by_one)
    }
    if options.compile:
        attention["flex"] = flex()
    fast = packed(weights)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "bandwidth": (2 * LAYERS, lambda: [table.sum() for _, *both in tables for table in both]),
        **{name: (2 * LAYERS, lambda call=call: [call(*each) for each in tables]) for name, call in attention.items()},
    }
    table = tables[0][1].numel() * 4
    read = {name: count * table for name, (count, _) in work.items()}
    linear = {
        "linear": lambda: [F.linear(x, weight) for weight in weights],
        "packed": lambda: [call(x) for call in fast],
    }
    work |= {name: (0, call) for name, call in linear.items()}
    read |= dict.fromkeys(linear, sum(weight.numel() for weight in weights) * 4)
    for name, call in attention.items():
        torch.testing.assert_close(call(*tables[0]), sdpa(*tables[0]), rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(fast[0](x), F.linear(x, weights[0]), rtol=1e-4, atol=1e-4)
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        for name, (_, call) in work.items():
            taken[name].append(seconds(call))
    rates = {name: read[name] / statistics.median(each) for name, each in taken.items()}
    keep(
        {
            "bench": "kernels",
            "cached": options.cached,
            "rounds": options.rounds,
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "gb_per_second": {name: round(rate / 1e9, 2) for name, rate in rates.items()},
            "share_of_bandwidth": {name: round(rate / rates["bandwidth"], 3) for name, rate in rates.items()},
        },
        options.out,
    )


if __name__ == "__main__":
    main()

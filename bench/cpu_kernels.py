"""The CPU kernels against what the processor can do, and against torch's.

    python bench/cpu_kernels.py --out bench/results/cpu_kernels.json

One thread, fp32. `attention`: new tokens over pages in random order; sdpa reads contiguous keys and values of one
length. `linear`: packed weights, torch's F.linear and oneDNN over weights in its own order. What is timed for one case
takes turns, by the CPU seconds of its thread, and every layer has memory of its own. The roofline of a case is the time
that its bytes take at the bandwidth of reading, or its multiply-adds at the rate of a product that stays in the cache,
whichever is longer; `share` is that time over the measured one (medians). Both limits are measured in every round,
beside the case; layers of a small model stay in the caches, so that they can read faster than memory. Prints one JSON
document.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from common import arguments, keep
from kvatlas.cpu import native

PAGE = 128
#: Rows, cached tokens, new tokens, heads, KV heads, size.
ATTENTION = (
    (8, 4096, 1, 12, 4, 64),
    (1, 4096, 1, 12, 4, 64),
    (8, 1024, 1, 12, 4, 64),
    (8, 4096, 1, 12, 12, 64),
    (8, 4096, 1, 32, 8, 128),
    (64, 200, 1, 4, 2, 32),
    (1, 0, 512, 12, 4, 64),
    (1, 3584, 512, 12, 4, 64),
)
#: Inputs, outputs.
LINEAR = ((768, 3072), (2048, 768), (128, 352))
ROWS = (1, 2, 4, 8, 16, 64, 512)
#: Bytes that one timing goes through: more than the caches hold.
TRAFFIC = 128 << 20

Calls = dict[str, Callable[[], object]]


def attention(kernels: native.Native, case: tuple[int, ...], layers: int) -> Calls:
    """One step of `layers` layers."""
    rows, cached, new, heads, kv_heads, size = case
    width = -(-(cached + new) // PAGE)
    slots, tokens = rows * width * PAGE, rows * new
    table = torch.randperm(rows * width).int().view(rows, width)
    starts, lengths = torch.arange(0, tokens + 1, new).int(), torch.full((rows,), cached).int()
    batch = native.PagedBatch(table, starts, lengths, page_size=PAGE, longest=cached + new)
    pools = [[torch.randn(kv_heads, slots, size) for _ in range(2)] for _ in range(layers)]
    query = torch.randn(tokens, heads, size)
    key, value = torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)
    asked = query.view(rows, new, heads, size).transpose(1, 2)
    stored = [
        [pool.view(kv_heads, rows, -1, size).transpose(0, 1)[:, :, : cached + new] for pool in both] for both in pools
    ]
    mask = torch.ones(new, cached + new, dtype=torch.bool).tril(cached) if new > 1 else None

    def native_attention() -> None:
        for keys, values in pools:
            layer = kernels.paged_layer(batch, heads, (size, size), keys, values, size**-0.5)
            kernels.attention(batch, layer, query, key, value)

    return {
        "native": native_attention,
        "sdpa": lambda: [
            F.scaled_dot_product_attention(asked, *both, attn_mask=mask, enable_gqa=heads > kv_heads) for both in stored
        ],
    }


def linear(kernels: native.Native, inputs: int, outputs: int, rows: int, layers: int) -> Calls:
    """`layers` layers, one after the other."""
    weights = [torch.randn(outputs, inputs) for _ in range(layers)]
    packed = [kernels.linear(weight) for weight in weights]
    own = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    x = torch.randn(rows, inputs)
    torch.testing.assert_close(packed[0](x), F.linear(x, weights[0]), rtol=1e-4, atol=1e-3)
    return {
        "native": lambda: [layer(x) for layer in packed],
        "torch": lambda: [F.linear(x, weight) for weight in weights],
        "onednn": lambda: [torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in own],
    }


def measured(calls: Calls, limits: Calls, rounds: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of one call."""
    taken: dict[str, list[float]] = {name: [] for name in (*calls, *limits)}
    for _ in range(rounds + 1):
        for name, call in (calls | limits).items():
            count = repeats if name in calls else 1
            began = time.thread_time()
            for _ in range(count):
                call()
            taken[name].append((time.thread_time() - began) / count)
    return {name: statistics.median(item[1:]) for name, item in taken.items()}


def main() -> None:
    options = arguments(__doc__, rounds=7, quick=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = native.load()
    if kernels is None:
        raise SystemExit(native.why_not())
    traffic = 1 << 20 if options.quick else TRAFFIC
    table, warm = torch.randn(traffic // 4), kernels.linear(torch.randn(192, 128))
    block = torch.randn(512, 128)
    limits: Calls = {"reading": table.sum, "computing": lambda: [warm(block) for _ in range(20)]}
    computed = 2.0 * 512 * 128 * 192 * 20

    def case(calls: Calls, nbytes: float, flops: float) -> dict[str, Any]:
        repeats = max(1, round(min(traffic / nbytes, 2e9 / flops)))
        result = measured(calls, limits, 1 if options.quick else options.rounds, repeats)
        bandwidth, peak = traffic / result["reading"], computed / result["computing"]
        least = max(nbytes / bandwidth, flops / peak)
        return {
            "bound": "memory" if nbytes / bandwidth > flops / peak else "compute",
            "reading_gb_per_second": round(bandwidth / 1e9, 2),
            "computing_gflops": round(peak / 1e9, 1),
            "gb_per_second": {name: round(nbytes / result[name] / 1e9, 2) for name in calls},
            "share": {name: round(least / result[name], 3) for name in calls},
        }

    cases: dict[str, list[dict[str, Any]]] = {"attention": [], "linear": []}
    for shape in ATTENTION[: 1 if options.quick else None]:
        rows, cached, new, heads, kv_heads, size = shape
        layer_bytes = 8.0 * rows * kv_heads * (cached + new) * size
        layers = max(1, round(min(traffic / layer_bytes, 24)))
        flops = 4.0 * rows * heads * size * new * (cached + (new + 1) / 2) * layers
        named = dict(zip(("rows", "cached", "new", "heads", "kv_heads", "size"), shape, strict=True))
        cases["attention"].append(named | case(attention(kernels, shape, layers), layer_bytes * layers, flops))
    for inputs, outputs in LINEAR[: 1 if options.quick else None]:
        for rows in ROWS[: 1 if options.quick else None]:
            layer_bytes = 4.0 * inputs * outputs
            # Layers of a small model stay in the cache, and are measured there.
            layers = 4 if inputs * outputs < 1e5 else max(1, round(min(traffic / layer_bytes, 16)))
            named = {"inputs": inputs, "outputs": outputs, "rows": rows}
            flops = 2.0 * rows * inputs * outputs * layers
            cases["linear"].append(
                named | case(linear(kernels, inputs, outputs, rows, layers), layer_bytes * layers, flops)
            )
    keep(options, bench="kernels", target=kernels.target, **cases)


if __name__ == "__main__":
    main()

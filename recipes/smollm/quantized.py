"""Perplexity of SmolLM2-think's own traces under packed KV caches: ours beside transformers' QuantizedCache.

    pip install optimum-quanto hqq
    python recipes/smollm/quantized.py RUN --traces 5 --out bench/results/quantized_cache.json

RUN holds full-cache traces (bytes.yaml). Each one goes through the model of transformers in float32, the prompt at
once, then token by token, with one cache for each scheme: `exact`; `kvatlas`, whose tokens are packed and unpacked by
`kvatlas.bits.storage`; `quanto` and `hqq`, the backends of `QuantizedCache` as they are, with the same group of
channels and the same number of newest tokens in full precision. Prints one JSON document: nats a token, and the
difference to `exact` with its 95 % interval over traces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from scipy.stats import t
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.bits.storage import pack_bits, unpack_bits
from kvatlas.core import Setting
from kvatlas.results import Store

MODEL, GROUP, RESIDUAL = "smollm2-135m-think", 32, 16
#: quanto has no 8 bits; hqq packs 2 bits of even numbers of tokens alone.
BITS = {"kvatlas": (8, 4, 2), "quanto": (4, 2), "hqq": (8, 4)}


class PackedLayer(DynamicLayer):
    """A layer whose keys and values are read packed, but the newest RESIDUAL ones."""

    bits = 4

    def update(self, key, value, *args, **options):  # type: ignore[no-untyped-def]
        sides = super().update(key, value, *args, **options)
        if not hasattr(self, "read"):
            self.read = [side[:, :, :0] for side in sides]
        read = []
        for number, side in enumerate(sides):
            done, packed = self.read[number].shape[2], max(0, side.shape[2] - RESIDUAL)
            fresh = side[:, :, done:packed]
            if packed > done:
                back = unpack_bits(pack_bits(fresh, self.bits, GROUP), side.shape[-1], self.bits, GROUP).to(side.dtype)
                self.read[number] = torch.cat([self.read[number], back], 2)
            read.append(torch.cat([self.read[number], side[:, :, packed:]], 2))
        return tuple(read)


def packed(bits: int) -> Cache:
    """Return a cache of kvatlas's scheme."""
    layer = type("Layer", (PackedLayer,), {"bits": bits})
    return Cache(layer_class_to_replicate=layer)


@torch.inference_mode()
def nats(model: torch.nn.Module, cache: Cache, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
    """Return the mean negative log-likelihood of the tokens after the prompt."""
    logits = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]
    total = 0.0
    for token in tokens:
        total -= float(logits.log_softmax(-1)[token])
        logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
    return total / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    handle = models.find(MODEL)
    model = handle.load()
    model.set_attn_implementation("sdpa")
    with Store.open(options.run) as store:
        traces = [trace for _, trace in store.traces() if trace.setting == Setting.from_parameters("full")]
    traces = sorted(traces, key=lambda trace: trace.problem)[: options.traces]
    schemes: dict[str, Callable[[], Cache]] = {"exact": DynamicCache}
    for bits in BITS["kvatlas"]:
        schemes[f"kvatlas, {bits} bits"] = lambda bits=bits: packed(bits)
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        for bits in BITS[backend]:
            arguments = (backend, model.config, bits, axis, axis, GROUP, RESIDUAL)
            schemes[f"{backend}, {bits} bits"] = lambda arguments=arguments: QuantizedCache(*arguments)
    found: dict[str, list[float]] = {name: [] for name in schemes}
    for trace in traces:
        benchmark = find(trace.benchmark)
        problem = next(one for one in benchmark.problems(400) if one.id == trace.problem)
        prompt = tuple(handle.encode(benchmark.prompt(problem)))
        for name, make in schemes.items():
            found[name].append(nats(model, make(), prompt, trace.tokens))
            print(trace.problem, name, round(found[name][-1], 4), flush=True)
    rows = {}
    for name, own in found.items():
        more = np.subtract(own, found["exact"])
        half = t.isf(0.025, len(more) - 1) * more.std(ddof=1) / len(more) ** 0.5
        rows[name] = {
            "nats": round(float(np.mean(own)), 4),
            "more": round(float(more.mean()), 4),
            "low": round(float(more.mean() - half), 4),
            "high": round(float(more.mean() + half), 4),
        }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    asked = {"traces": len(traces), "group": GROUP, "residual": RESIDUAL}
    text = json.dumps({"bench": "quantized_cache", "options": asked, **versions, "schemes": rows})
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

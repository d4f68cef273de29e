"""Run kvpress' LagKVPress on random numbers, without a model, in the environment that environment.py makes.

    ENV/bin/python tests/conformance/kvpress_random.py INPUT OUTPUT

INPUT holds by case keys and values [KV heads, cached, size], and in its metadata the number of tokens that stay and the
arguments of the press; OUTPUT the keys that are left.
"""

import json
import sys
from types import SimpleNamespace

import torch
from kvpress import LagKVPress
from safetensors import safe_open
from safetensors.torch import save_file

#: What the press needs to know of the attention module.
MODULE = SimpleNamespace(layer_idx=0, head_dim=None)


@torch.inference_mode()
def main(source: str, target: str) -> None:
    left = {}
    with safe_open(source, framework="pt") as store:
        for case, (kept, arguments) in json.loads(store.metadata()["cases"]).items():
            keys, values = (store.get_tensor(f"{case}.{name}")[None].clone() for name in ("keys", "values"))
            # A share in the middle between two numbers of tokens: rounding cannot change it.
            MODULE.head_dim = keys.shape[3]
            ratio = 1 - (kept + 0.5) / keys.shape[2]
            new, _ = LagKVPress(compression_ratio=ratio, **arguments).compress(MODULE, None, keys, values, None, {})
            left[f"{case}.keys"] = new[0].contiguous()
    save_file(left, target)


if __name__ == "__main__":
    main(*sys.argv[1:])

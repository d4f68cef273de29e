"""Run kvpress' presses on random numbers, without a model, in the environment that environment.py makes.

    ENV/bin/python tests/conformance/kvpress_random.py INPUT OUTPUT

INPUT holds by case keys and values [KV heads, cached, size], accumulated attention and random numbers in (0, 1) [KV
heads, cached], and in its metadata the press, the number of tokens that stay and its arguments; OUTPUT the keys and
values that are left. The random numbers stand in for those that the press would draw.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kvpress import CAMPress, LagKVPress, ScorerPress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

#: What the presses need to know of the attention module.
MODULE = SimpleNamespace(layer_idx=0, head_dim=None)


class GivenScores(ScorerPress):
    """A press whose scores [1, KV heads, cached] are given."""

    given: Tensor

    def score(self, *_: Any, **__: Any) -> Tensor:
        return self.given


def merge(keys: Tensor, values: Tensor, mass: Tensor, draws: Tensor, kept: int, neighbours: int) -> Any:
    """Return the keys and values that CAMPress leaves."""
    scorer = GivenScores()
    scorer.given = mass
    press = CAMPress(scorer, target_size=kept, merge_budget=neighbours)
    # As many tokens came since the last compression as are evicted, so that all of these merge.
    evicted = mass[0].mean(0).topk(mass.shape[2] - kept, largest=False).indices.sort().values
    press.layer_step_counts[0] = len(evicted)
    press._running_attn_sum[0] = mass

    def bernoulli(probability: Tensor) -> Tensor:
        return (draws[:, :, evicted] < probability).to(probability.dtype)

    with mock.patch.object(torch, "bernoulli", bernoulli):
        return press.compress(MODULE, None, keys, values, mass, {})


@torch.inference_mode()
def main(source: str, target: str) -> None:
    left = {}
    with safe_open(source, framework="pt") as store:
        for case, (press, kept, arguments) in json.loads(store.metadata()["cases"]).items():
            keys, values, mass, draws = (
                store.get_tensor(f"{case}.{name}")[None].clone() for name in ("keys", "values", "mass", "draws")
            )
            if press == "CAMPress":
                new = merge(keys, values, mass, draws, kept, **arguments)
            else:
                # A share in the middle between two numbers of tokens: rounding cannot change it.
                MODULE.head_dim = keys.shape[3]
                ratio = 1 - (kept + 0.5) / keys.shape[2]
                new = LagKVPress(compression_ratio=ratio, **arguments).compress(MODULE, None, keys, values, None, {})
            left[f"{case}.keys"], left[f"{case}.values"] = (numbers[0].contiguous() for numbers in new)
    save_file(left, target)


if __name__ == "__main__":
    main(*sys.argv[1:])

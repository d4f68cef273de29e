"""Run kvpress' CAMPress for a test, in the environment that environment.py makes.

    ENV/bin/python tests/conformance/kvpress_cam.py INPUT OUTPUT

INPUT holds by case keys and values [KV heads, cached, size], accumulated attention and random numbers in (0, 1) [KV
heads, cached], and in its metadata the number of tokens that stay and of neighbours; OUTPUT the keys and values left.
Random numbers stand in for those of torch, so that both programs draw the same.
"""

import json
import sys
from types import SimpleNamespace

import torch
from kvpress import CAMPress, ScorerPress
from safetensors import safe_open
from safetensors.torch import save_file


class GivenScores(ScorerPress):
    """A press whose scores are given: [1, KV heads, cached]."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
        return self.given


@torch.inference_mode()
def main(source: str, target: str) -> None:
    left = {}
    with safe_open(source, framework="pt") as store:
        for case, (kept, neighbours) in json.loads(store.metadata()["cases"]).items():
            keys, values, mass, draws = (
                store.get_tensor(f"{case}.{name}")[None].clone() for name in ("keys", "values", "mass", "draws")
            )
            scores = GivenScores()
            scores.given = mass
            press = CAMPress(scores, target_size=kept, merge_budget=neighbours)
            # As many tokens came since the last compression as are evicted, so that all of these merge.
            press.layer_step_counts[0] = keys.shape[2] - kept
            press._running_attn_sum[0] = mass

            def bernoulli(probability: torch.Tensor, draws: torch.Tensor = draws, mass: torch.Tensor = mass) -> torch.Tensor:
                evicted = mass.mean(1).topk(mass.shape[2] - kept, largest=False).indices.sort().values
                return (draws[:, :, evicted[0]] < probability).to(probability.dtype)

            torch.bernoulli = bernoulli
            new = press.compress(SimpleNamespace(layer_idx=0), None, keys, values, mass, {})
            left[f"{case}.keys"], left[f"{case}.values"] = (item[0].contiguous() for item in new)
    save_file(left, target)


if __name__ == "__main__":
    main(*sys.argv[1:])

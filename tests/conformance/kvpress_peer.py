"""Run kvpress' presses for the tests, in the environment that environment.py makes.

    ENV/bin/python tests/conformance/kvpress_peer.py MODEL INPUT OUTPUT

INPUT holds keys, values, attention and the states that go into attention, by scene and layer, OUTPUT a mask of what a
press keeps of them, and the scores; both are safetensors. The presses stand in INPUT's metadata.
"""

import json
import sys
from typing import Any

import kvpress
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


def press_of(name: str, arguments: dict[str, Any], ratio: float) -> Any:
    """A press; that of AdaKV wraps one of SnapKV with the arguments."""
    if name == "AdaKVPress":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=ratio, **arguments))
    return getattr(kvpress, name)(compression_ratio=ratio, **arguments)


@torch.inference_mode()
def main(folder: str, source: str, target: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = [layer.self_attn for layer in model.model.layers]
    for layer in layers:
        # Presses that turn queries anew find the rotation here.
        layer.rotary_emb = model.model.rotary_emb
    by_name = {}
    with safe_open(source, framework="pt") as store:
        asked = json.loads(store.metadata()["presses"])
        for name, (press, arguments, scene, kept) in asked.items():
            for number, module in enumerate(layers):
                keys, values = (store.get_tensor(f"{scene}.{what}.{number}")[None] for what in ("keys", "values"))
                states = store.get_tensor(f"states.{number}")[None]
                attention = store.get_tensor(f"attention.{number}")[None] if press == "ObservedAttentionPress" else None
                # A share in the middle between two numbers of tokens: rounding cannot change it.
                ratio = 1 - (kept + 0.5) / keys.shape[2]
                chosen = press_of(press, arguments, ratio)
                turned = model.model.rotary_emb(states, torch.arange(states.shape[1])[None])
                passed = (module, states, keys, values, attention, {"position_embeddings": turned})
                left, _ = chosen.compress(*passed)
                masked = getattr(module, "masked_key_indices", None)
                if masked is None:
                    # Keys are rotated by their positions, so that no two are the same.
                    same = (left[0][:, :, None] == keys[0][:, None]).all(-1)
                    assert same.sum(-1).eq(1).all()
                    mask = same.any(1)
                else:
                    # AdaKV leaves the keys, and hides some of them later.
                    mask = torch.ones(keys.shape[1:3], dtype=torch.bool)
                    mask[masked[1:]] = False
                    module.masked_key_indices = None
                by_name[f"{name}.kept.{number}"] = mask.byte()
                scorer = getattr(chosen, "press", chosen)
                by_name[f"{name}.scores.{number}"] = scorer.score(*passed)[0].contiguous()
    save_file(by_name, target)


if __name__ == "__main__":
    main(*sys.argv[1:])

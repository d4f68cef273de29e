"""The engine beside transformers' own `generate`: equal, or refused in a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvatlas.cpu import native
from kvatlas.models import Overrides, find
from tests.decoding import greedy
from tests.models import every_model
from tests.r1 import edit

EQUAL = (
    "bamba", "falcon_h1", "gemma4_text", "gpt_neox stray", "lfm2", "llama dynamic", "minicpm3", "mixtral", "nemotron",
    "nemotron_h", "opt stray", "phi3 longrope", "qwen3_5", "whisper",
)  # fmt: skip
REFUSED = ("bert", "falcon alibi", "llama dynamic beyond", "llama4_text", "mimo_v2_flash", "recurrent_gemma")
EITHER = ("cohere norms", "glm4_moe", "ministral3", "stablelm")


#: Left to `make deep`: tests of the engine or another of these models has their kinds of layers.
DEEP = (
    *("falcon_h1", "nemotron_h", "qwen3_5", "mixtral", "minicpm3", "whisper", "nemotron"),
    *("glm4_moe", "ministral3", "stablelm"),
)
NAMES = [pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in (*EQUAL, *REFUSED, *EITHER)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_decoded_as_by_transformers_or_refused(name: str) -> None:
    result = every_model.attempt(name)
    verdict = every_model.verdict(result)
    assert verdict in ("equal", "refused"), result
    assert name in EITHER or verdict == ("equal" if name in EQUAL else "refused"), result
    if verdict == "refused":
        assert result["refused"].endswith(".")
    elif native.load() is not None:
        assert result["bits"]


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_weights_in_four_bits_are_decoded_as_by_transformers(name: str, tmp_path: Path) -> None:
    """Experts as GPT-OSS is published, of which transformers makes floats on a CPU, and compressed-tensors."""
    every_model.save(name, tmp_path)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(tmp_path / "model.safetensors")
    ends = ("gate_up_proj", "down_proj") if name == "gpt_oss" else ("proj.weight",)
    for key in [key for key in weights if key.endswith(ends)]:
        *experts, rows, columns = weights.pop(key).shape
        if name == "gpt_oss":
            blocks, scales = (*experts, columns, rows // 32, 16), (*experts, columns, rows // 32)
            weights[f"{key}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
            weights[f"{key}_scales"] = torch.randint(118, 124, scales, dtype=torch.uint8, generator=generator)
        else:
            weights[f"{key}_packed"] = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator).int()
            weights[f"{key}_scale"] = torch.rand(rows, columns // 32, generator=generator) / 100
            weights[f"{key}_shape"] = torch.tensor([rows, columns])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    quantized: dict[str, Any] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    if name == "llama":
        quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
        scheme = {"num_bits": 4, "strategy": "group", "group_size": 32}
        groups = {"all": {"targets": ["Linear"], "weights": scheme}}
        quantized |= {"quantization_status": "compressed", "config_groups": groups}
    edit(tmp_path, "config.json", quantization_config=quantized)
    handle = find(f"hf:{tmp_path}")
    handle = replace(handle, overrides=Overrides(stops=frozenset()))
    prompt = (5, 6, 7, 8, 9)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    output = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert greedy(handle, prompt, 12) == output[0, len(prompt) :].tolist()

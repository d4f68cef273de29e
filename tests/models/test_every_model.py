"""The engine beside transformers' own `generate`: equal, or refused in a sentence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvatlas import native
from kvatlas.models import find
from tests.decoding import greedy
from tests.models import every_model

pytestmark = pytest.mark.slow

EQUAL = (
    "bamba", "falcon_h1", "gemma4_text", "gpt_neox stray", "lfm2", "llama dynamic", "minicpm3", "mixtral", "nemotron",
    "nemotron_h", "opt stray", "phi3 longrope", "qwen3_5", "whisper",
)  # fmt: skip
REFUSED = ("bert", "falcon alibi", "llama dynamic beyond", "llama4_text", "mimo_v2_flash", "recurrent_gemma")
EITHER = ("cohere norms", "glm4_moe", "ministral3", "stablelm")


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED, *EITHER])
def test_a_model_is_decoded_as_by_transformers_or_refused(name: str) -> None:
    result = every_model.attempt(name)
    verdict = every_model.verdict(result)
    assert verdict in ("equal", "refused"), result
    assert name in EITHER or verdict == ("equal" if name in EQUAL else "refused"), result
    if verdict == "refused":
        assert result["refused"].endswith(".")
    elif native.load() is not None:
        assert result["bits"]


def test_mxfp4_checkpoints_are_decoded_as_by_transformers(tmp_path: Path) -> None:
    """Experts in four bits, as GPT-OSS is published: on a CPU transformers turns them into floating-point numbers."""
    every_model.save("gpt_oss", tmp_path)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks, scales = (experts, outputs, inputs // 32, 16), (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.randint(118, 124, scales, dtype=torch.uint8, generator=generator)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantized}))
    handle = find(f"hf:{tmp_path}")
    vars(handle)["stops"] = frozenset()
    prompt = (5, 6, 7, 8, 9)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    output = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert greedy(handle, prompt, 12) == output[0, len(prompt) :].tolist()

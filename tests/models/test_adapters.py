"""LoRA adapters: what is decoded equals the merged weights, and other files are refused in a sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle, find

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none"}


#: Entries that peft writes for a plain adapter.
WRITTEN: dict[str, Any] = {
    **{"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None},
    **{"base_model_name_or_path": "lab/base", "corda_config": None, "ensure_weight_tying": False, "eva_config": None},
    **{"exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True},
    **{"layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}},
    **{"lora_bias": False, "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core"},
    **{"modules_to_save": None, "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {}},
    **{"revision": None, "target_modules": ["q_proj", "down_proj"], "target_parameters": None},
    **{"task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False, "use_qalora": False},
    **{"use_rslora": False},
}


def save_adapter(base: ModelHandle, folder: Path, **changes: Any) -> Path:
    """A random adapter of two layers, as peft writes it."""
    folder.mkdir(exist_ok=True)
    weights = load_file(base.folder / "model.safetensors")
    made = {}
    for layer in LAYERS:
        out, into = weights[f"{layer}.weight"].shape
        made[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(4, into)
        made[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(out, 4)
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture
def base(r1_model: Callable[..., ModelHandle]) -> ModelHandle:
    return r1_model()


def with_adapter(base: ModelHandle, folder: Path) -> ModelHandle:
    return find(f"hf:{base.folder}", adapter=str(folder))


@pytest.mark.parametrize(("changes", "scale"), [({}, 1.5), ({"use_rslora": True}, 3.0), (WRITTEN, 1.5)])
def test_logits_are_those_of_the_merged_weights(
    base: ModelHandle, tmp_path: Path, changes: dict[str, Any], scale: float
) -> None:
    from transformers import AutoModelForCausalLM

    adapted = with_adapter(base, save_adapter(base, tmp_path / "a", **changes))
    adapted.check()
    made = load_file(tmp_path / "a" / "adapter_model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    for layer in LAYERS:
        a, b = (made[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
        merged.get_submodule(layer).weight.data += scale * b @ a
    ids = torch.tensor([adapted.encode("Is it so?")])
    with torch.no_grad():
        wanted, plain = merged(ids).logits, base.load()(ids).logits
        torch.testing.assert_close(adapted.load()(ids).logits, wanted, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(plain, wanted, atol=0.1)


def test_an_adapter_makes_another_run_and_brings_its_template(base: ModelHandle, tmp_path: Path) -> None:
    folder = save_adapter(base, tmp_path / "a")
    adapted = with_adapter(base, folder)
    assert adapted.weights_digest != base.weights_digest
    assert adapted.tokenizer_digest == base.tokenizer_digest
    assert adapted.prompt("x") == base.prompt("x")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<think>")
    again = replace(adapted)
    assert again.prompt("x") == "x<think>"
    assert again.tokenizer_digest != base.tokenizer_digest
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    assert replace(adapted).weights_digest != adapted.weights_digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora True; expected False"),
        ({"use_qalora": True, "qalora_group_size": 16}, "use_qalora True; expected none"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens \[1, 2\]; expected none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'; expected True"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; expected 'LORA'"),
        ({"r": 0}, "r 0; expected an integer >= 1"),
        ({"r": "many"}, "no readable adapter_config.json"),
        (None, r"lacks adapter_config\.json; expected a folder of a LoRA adapter"),
    ],
)
def test_what_the_formula_does_not_cover_is_refused(
    base: ModelHandle, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    folder = tmp_path if changes is None else save_adapter(base, tmp_path / "a", **changes)
    with pytest.raises(KvatlasError, match=message):
        with_adapter(base, folder).check()


def test_tensors_of_another_rank_than_the_config_says(base: ModelHandle, tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match=r"does not fit the model .* \(64, 4\) and \(4, 64\) with r 8"):
        with_adapter(base, save_adapter(base, tmp_path / "a", r=8)).load()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda made: {name: tensor[:, :3] for name, tensor in made.items()}, "does not fit the model"),
        (lambda made: {name: made[name] for name in made if "lora_A" in name}, "has no pairs of lora_A and lora_B"),
        (lambda made: {"lm_head.weight": torch.zeros(2, 2)}, "holds 'lm_head.weight'"),
        (lambda made: {name: tensor[0] for name, tensor in made.items()}, "expected pairs of matrices"),
        (
            lambda made: made | {name.replace(".we", ".default.we"): made[name] + 1 for name in made},
            "pairs of matrices",
        ),
        (lambda made: {name: tensor.to(torch.complex64) for name, tensor in made.items()}, "in C64; expected floating"),
        (lambda made: {name: tensor.to(torch.int8) for name, tensor in made.items()}, "in I8; expected floating"),
        (
            lambda made: {name.replace("self_attn.q_proj", "input_layernorm"): made[name] for name in made},
            "does not fit the model",
        ),
        (lambda made: {name: tensor * torch.inf for name, tensor in made.items()}, r"'base.*lora_[AB]\.weight' that"),
    ],
)
def test_tensors_of_another_model(base: ModelHandle, tmp_path: Path, damage: Any, message: str) -> None:
    folder = save_adapter(base, tmp_path / "a")
    made = load_file(folder / "adapter_model.safetensors")
    save_file({name: each.contiguous() for name, each in damage(made).items()}, folder / "adapter_model.safetensors")
    with pytest.raises(KvatlasError, match=message):
        with_adapter(base, folder).load()
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(KvatlasError, match=r"no readable adapter_model\.safetensors"):
        with_adapter(base, folder).load()


def test_a_factor_that_is_not_finite_is_the_adapters(base: ModelHandle, tmp_path: Path) -> None:
    """Merged, its numbers would be told as a fault of the model's own weights."""
    folder = save_adapter(base, tmp_path / "adapter", lora_alpha=float("inf"))
    with pytest.raises(KvatlasError, match=r"^The adapter .* holds values for .* that are no finite numbers\.$"):
        with_adapter(base, folder).load()

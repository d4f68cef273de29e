from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle
from tests.conftest import save_random_model


@pytest.mark.parametrize(
    ("name", "architecture"), [("tiny-llama", "LlamaForCausalLM"), ("tiny-qwen", "Qwen2ForCausalLM")]
)
def test_the_embedded_models_are_real_hugging_face_folders(name: str, architecture: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.find(f"embedded:{name}").folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == architecture
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for benchmark in ("CHAIN8", "SEQBENCH-5x5-B1"):
        question = find(benchmark).problems(1)[0].question
        ids = tokenizer(question)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == question


def test_prompts_end_where_thinking_begins(tiny_llama: ModelHandle) -> None:
    ids = tiny_llama.encode("a = 1 ; b = a + a ? b")
    assert tiny_llama.tokenizer.decode(list(ids)).endswith("<think>")


def test_text_leaves_the_end_token_out(tiny_llama: ModelHandle) -> None:
    (end,) = tiny_llama.stops
    b, equals, two = tiny_llama.tokenizer.convert_tokens_to_ids(["b", " = ", "2"])
    assert tiny_llama.text((tiny_llama.think_close, b, equals, two, end)) == "</think>b = 2"


def test_the_shape_tells_what_a_cached_token_costs(random_models: dict[str, ModelHandle]) -> None:
    shape = random_models["qwen3"].shape
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.hidden) == (3, 2, 16, 64)
    assert shape.kv_bytes_per_token() == 2 * 3 * 2 * 16 * 4


def test_digests_follow_the_content(tmp_path: Path) -> None:
    item = save_random_model("llama", tmp_path / "one")
    shutil.copytree(item.folder, tmp_path / "same")
    same = models.find(f"hf:{tmp_path / 'same'}")
    assert (item.weights_digest, item.tokenizer_digest) == (same.weights_digest, same.tokenizer_digest)
    config = json.loads((item.folder / "config.json").read_text())
    (tmp_path / "same" / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert models.find(f"hf:{tmp_path / 'same'}").weights_digest != item.weights_digest


def test_weights_are_loaded_in_fp32_and_frozen(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"].load()
    assert all(p.dtype is torch.float32 and not p.requires_grad for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("name", ["tiny-llama", "embedded:huge", "hf:", "gpt"])
def test_an_unknown_model_names_the_valid_ones(name: str) -> None:
    named = "embedded:tiny-llama, embedded:tiny-qwen, smollm2-135m, smollm2-135m-think"
    with pytest.raises(KvatlasError, match=f"valid are {named}, hf:FOLDER, hf:FILE.gguf and hf:OWNER/NAME"):
        models.find(name)


@pytest.mark.parametrize("path", ["./nofolder", "../nofolder", ".hidden/nofolder", "~/nofolder", "-x/y", "x/.y"])
def test_a_path_is_never_looked_up_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KvatlasError, match=rf"is not there: '{path}' is no folder with a config\.json\.$"):
        models.find(f"hf:{path}")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match=r"is no folder with a config\.json"):
        models.find(f"hf:{tmp_path}")


def test_what_a_model_folder_lacks_is_named(random_models: dict[str, ModelHandle], tmp_path: Path) -> None:
    source = random_models["llama"].folder

    def broken(name: str) -> ModelHandle:
        folder = tmp_path / name
        shutil.copytree(source, folder)
        return models.find(f"hf:{folder}")

    item = broken("pickled")
    (item.folder / "model.safetensors").rename(item.folder / "pytorch_model.bin")
    with pytest.raises(KvatlasError, match=r"model\*\.safetensors is missing"):
        _ = item.weights_digest
    item = broken("config")
    (item.folder / "config.json").write_text("{")
    with pytest.raises(KvatlasError, match=r"no readable config\.json"):
        _ = item.shape
    item = broken("shapeless")
    (item.folder / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(KvatlasError, match="lacks 'num_attention_heads'"):
        _ = item.shape
    item = broken("speechless")
    (item.folder / "chat_template.jinja").unlink()
    with pytest.raises(KvatlasError, match="has no chat template"):
        _ = item.tokenizer


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 1024),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 256}}, 256),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 256}, 256),
        ({"rope_parameters": {"full": {"rope_type": "longrope", "original_max_position_embeddings": 256}}}, 256),
    ],
)
def test_positions_end_where_the_rotation_follows_the_longest_text(
    tmp_path: Path, rope: dict[str, Any], positions: int
) -> None:
    item = save_random_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config | rope))
    assert item.positions == positions
    assert any("rotates" in note for note in item.notes) == ("yarn" not in str(rope))

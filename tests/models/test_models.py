import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle, weights
from kvatlas.policies import from_setting
from tests.r1 import TEMPLATE, copied, edit, save_model


@pytest.mark.parametrize(
    ("name", "architecture"), [("tiny-llama", "LlamaForCausalLM"), ("tiny-qwen", "Qwen2ForCausalLM")]
)
def test_the_embedded_models_are_real_hugging_face_folders(name: str, architecture: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.find(f"embedded:{name}").folder
    # Their figures were drawn with these random streams.
    provenance = json.loads((folder / "provenance.json").read_text())
    assert models.find(f"embedded:{name}").stream == provenance["weights_digest"]
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


def test_text_leaves_the_end_token_out(tiny_llama: ModelHandle) -> None:
    (end,) = tiny_llama.stops
    b, equals, two = tiny_llama.tokenizer.convert_tokens_to_ids(["b", " = ", "2"])
    assert tiny_llama.text((tiny_llama.think_close, b, equals, two, end)) == "</think>b = 2"


def test_the_shape_tells_what_a_cached_token_costs(random_models: dict[str, ModelHandle]) -> None:
    shape = random_models["qwen3"].shape
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.hidden) == (2, 2, 16, 64)
    assert shape.kv_bytes_per_token() == 2 * 2 * 2 * 16 * 4


def rewrite_weights(folder: Path, change: float = 0.0, parts: int = 1) -> None:
    """Save the tensors under other names with an index, with other metadata, the first value changed."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["model.norm.weight"][0] += change
    names = sorted(tensors)
    files = {key: f"model-{number % parts}.safetensors" for number, key in enumerate(names)}
    for file in set(files.values()):
        own = {key: tensors[key] for key in names if files[key] == file}
        save_file(own, folder / file, metadata={"format": "pt", "by": "me"})
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewrite_tokenizer(folder: Path, old: str = "", new: str = "") -> None:
    """Exchange two texts of the tokenizer in its file of another layout."""
    content = (folder / "tokenizer.json").read_text()
    swapped = new.join(old.join(part.split(new)) for part in content.split(old)) if old else content
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(swapped), indent=3))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda folder: edit(folder, "config.json", transformers_version="9.9"), ""),
        (lambda folder: edit(folder, "config.json", rope_theta=5.0), "weights"),
        (rewrite_weights, ""),
        (lambda folder: rewrite_weights(folder, parts=3), ""),
        (lambda folder: rewrite_weights(folder, change=1e-3), "weights"),
        (rewrite_tokenizer, ""),
        (lambda folder: rewrite_tokenizer(folder, '"4"', '"5"'), "tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"), "tokenizer"),
    ],
)
def test_digests_follow_what_files_mean(
    random_models: dict[str, ModelHandle], tmp_path: Path, change: Callable[[Path], object], differs: str
) -> None:
    item = random_models["llama"]
    other = copied(item, tmp_path / "other")
    change(other.folder)
    # Texts that were encoded before change nothing.
    other.tokenizer("a = 1", truncation=True, max_length=2)
    assert (other.weights_digest == item.weights_digest) is (differs != "weights")
    assert (other.tokenizer_digest == item.tokenizer_digest) is (differs != "tokenizer")


@pytest.mark.parametrize("named", [False, True])
def test_the_digest_is_that_of_the_weights_that_are_loaded(
    random_models: dict[str, ModelHandle], tmp_path: Path, named: bool
) -> None:
    """In a folder with shards, their index and a whole file, and with a config that names another file."""
    other = copied(random_models["llama"], tmp_path / "other")
    whole = load_file(other.folder / "model.safetensors")
    whole["model.norm.weight"] += 1
    save_file(whole, other.folder / "model.safetensors", metadata={"format": "pt"})
    both = copied(random_models["llama"], tmp_path / "both")
    if named:
        shutil.copy(other.folder / "model.safetensors", both.folder / "new.safetensors")
        edit(both.folder, "config.json", transformers_weights="new.safetensors")
    else:
        rewrite_weights(both.folder, parts=3)
        shutil.copy(other.folder / "model.safetensors", both.folder)
    ids = torch.tensor([other.encode("a = 1")])
    with torch.no_grad():
        logits = [model.load()(ids).logits for model in (both, random_models["llama"], other)]
    tensors = [weights.hash_tensors(model.weight_files()) for model in (both, random_models["llama"], other)]
    assert [torch.equal(logits[0], each) for each in logits[1:]] == [tensors[0] == each for each in tensors[1:]]
    assert torch.equal(logits[0], logits[1]) is named


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "CTRLTokenizer"])
def test_a_tokenizer_without_tokenizer_json_is_digested_by_what_it_does(tmp_path: Path, kind: str) -> None:
    """One of the library tokenizers, and one in Python."""
    model = save_model("llama", tmp_path / "m")
    core = json.loads((model.folder / "tokenizer.json").read_text())["model"]
    (model.folder / "tokenizer.json").unlink()
    config = {"tokenizer_class": kind, "chat_template": TEMPLATE, "eos_token": "!", "unk_token": "?"}
    (model.folder / "tokenizer_config.json").write_text(json.dumps(config))

    def digest(vocabulary: dict[str, int], merges: list[list[str]]) -> str:
        (model.folder / "vocab.json").write_text(json.dumps(vocabulary))
        (model.folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges), ""]))
        return models.find(model.name).tokenizer_digest

    vocabulary, merges = core["vocab"], core["merges"]
    before = digest(vocabulary, merges)
    assert digest(vocabulary, merges) == before
    assert digest(vocabulary | {"1": vocabulary["2"], "2": vocabulary["1"]}, merges) != before
    assert digest(vocabulary, merges[:-1]) != before


@pytest.mark.parametrize("name", ["tiny-llama", "embedded:huge", "hf:", "gpt"])
def test_an_unknown_model_names_the_valid_ones(name: str) -> None:
    named = "embedded:tiny-llama, embedded:tiny-qwen, smollm2-135m, smollm2-135m-think"
    with pytest.raises(KvatlasError, match=f"expected {named}, a folder, FILE.gguf or hf:OWNER/NAME"):
        models.find(name)


def test_a_run_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").touch()
    with pytest.raises(KvatlasError, match=r"is a run and no model; `kvatlas describe .*` reads it"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("path", ["./nofolder", "~/nofolder", "-x/y"])
def test_a_path_is_never_looked_up_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KvatlasError, match=rf"is not there: '{path}' is no folder with a config\.json, as"):
        models.find(f"hf:{path}")


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 1024),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 256, **FACTORS}}, 256),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 256}, 256),
        ({"rope_parameters": {"full": {"rope_type": "longrope", "original_max_position_embeddings": 256}}}, 256),
    ],
)
def test_positions_end_where_the_rotation_follows_the_longest_text(
    random_models: dict[str, ModelHandle], tmp_path: Path, rope: dict[str, Any], positions: int
) -> None:
    changes = {"rope_parameters": None, **rope}
    item = copied(random_models["llama"], tmp_path / "m", "config.json", **changes)
    assert item.positions == positions
    assert any("rotates" in note for note in item.notes) == ("yarn" not in str(rope))


def test_a_model_without_a_tokenizer_and_an_end_is_decoded_to_its_limit(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**sizes)
    config.save_pretrained(tmp_path)
    handle = ModelHandle("hf:measured", tmp_path, overrides=replace(models.ENDLESS, opens_thinking=True))
    policy = from_setting(Setting("full"))
    engine = Engine(handle, LlamaForCausalLM(config).eval(), [policy], Sampling(max_new_tokens=12), 1)
    (generation,) = engine.run([Request(0, (5, 6, 7), 0, (policy,))])
    assert len(generation.tokens) == generation.usage.thinking_tokens == 12
    assert not generation.finished

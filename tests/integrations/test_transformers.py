"""`kvatlas.generate` inside transformers: the engine's tokens, and everything else honoured or refused by name."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import RepetitionPenaltyLogitsProcessor

import kvatlas
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import ModelHandle
from kvatlas.policies.random import Random
from tests.by_the_engine import VALUES, generations

pytestmark = pytest.mark.newest

SETTING: dict[str, Any] = {name: VALUES[name] for name in ("kv_budget", "local_window", "ratio")}
HOW: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": 80}
OURS: dict[str, Any] = {"custom_generate": kvatlas.generate, "policy": "dynts", **SETTING, "seed": 3}
OURS["settings"] = {"ratio_over": "thinking"}


@pytest.fixture(scope="module")
def model(tiny_llama: ModelHandle) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama.folder)


@pytest.fixture(scope="module")
def texts(tiny_llama: ModelHandle) -> list[str]:
    benchmark_ = [benchmark(name) for name in ("CHAIN3", "CHAIN4", "CHAIN4")]
    return [tiny_llama.prompt(item.prompt(item.problems(1)[0])) for item in benchmark_]


class Writes(StoppingCriteria):
    """Ends once a text was written after the first `start` tokens."""

    def __init__(self, handle: ModelHandle, text: str, start: int) -> None:
        self.model, self.text, self.start = handle, text, start

    def __call__(self, input_ids: Any, scores: Any, **others: Any) -> Any:
        return torch.tensor([self.text in self.model.text(row[self.start :].tolist()) for row in input_ids])


def encoded(handle: ModelHandle, texts: list[str]) -> dict[str, Any]:
    handle.tokenizer.padding_side = "left"
    result = handle.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {"input_ids": result["input_ids"], "attention_mask": result["attention_mask"]}


def by_the_engine(handle: ModelHandle, texts: list[str]) -> list[tuple[int, ...]]:
    prompts = [handle.tokens(text) for text in texts]
    return [item.tokens for item in generations(handle, prompts, Sampling(0.9, 20, 0.95, 80), 3)]


@pytest.mark.parametrize(("pad", "ends", "padding"), [(0, 2, 0), (None, 2, 2), (None, [3, 2], 3)])
def test_a_padded_batch_gets_the_engines_tokens(
    tiny_llama: ModelHandle, model: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch, pad: Any, ends: Any,
    padding: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(model.generation_config, "pad_token_id", pad)
    monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
    inputs = encoded(tiny_llama, texts)
    length = inputs["input_ids"].shape[1]
    result = model.generate(**inputs, **HOW, **OURS)
    expected = by_the_engine(tiny_llama, texts)
    assert torch.equal(result[:, :length], inputs["input_ids"])
    assert len({len(tokens) for tokens in expected}) > 1
    for row, tokens in zip(result[:, length:].tolist(), expected, strict=True):
        assert row == [*tokens, *[padding] * (len(row) - len(tokens))]
    # The second and third prompt are one: two samples of it.
    assert expected[1] != expected[2]
    assert model.config._attn_implementation == "sdpa"


def test_greedy_with_the_full_cache_is_what_transformers_writes(
    tiny_llama: ModelHandle, model: Any, texts: list[str]
) -> None:
    inputs = encoded(tiny_llama, texts[:1])
    how = {"do_sample": False, "max_new_tokens": 60, "repetition_penalty": 1.2, "return_dict_in_generate": True}
    own = model.generate(**inputs, **how)
    ours = model.generate(**inputs, **how, custom_generate=kvatlas.generate)
    assert torch.equal(own.sequences, ours.sequences)


def test_processors_and_criteria_are_honoured(tiny_llama: ModelHandle, model: Any, texts: list[str]) -> None:
    inputs = encoded(tiny_llama, texts[:1])
    length = inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, **HOW, **OURS)[0, length:].tolist()
    words = tiny_llama.text(plain)
    stop = words[8:11]
    criteria = StoppingCriteriaList([Writes(tiny_llama, stop, length)])
    result = model.generate(**inputs, **HOW, **OURS, stopping_criteria=criteria)
    written = tiny_llama.text(result[0, length:].tolist())
    assert words.startswith(written)
    assert stop in written
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(5.0)])
    other = model.generate(**inputs, **HOW, **OURS, logits_processor=processors)[0, length:].tolist()
    assert other != plain
    assert max(Counter(other).values()) <= max(Counter(plain).values())


def test_a_criterion_may_return_a_bool(tiny_llama: ModelHandle, model: Any, texts: list[str]) -> None:
    inputs = encoded(tiny_llama, texts[:1])
    most = inputs["input_ids"].shape[1] + 6
    criteria = StoppingCriteriaList([lambda ids, scores: ids.shape[1] >= most])
    own = model.generate(**inputs, do_sample=False, max_new_tokens=60, stopping_criteria=criteria)
    ours = model.generate(
        **inputs, do_sample=False, max_new_tokens=60, stopping_criteria=criteria, custom_generate=kvatlas.generate
    )
    assert torch.equal(own, ours)
    assert ours.shape[1] == most


def test_a_streamer_is_refused_and_its_reader_does_not_wait(
    tiny_llama: ModelHandle, model: Any, texts: list[str]
) -> None:
    streamer = TextIteratorStreamer(tiny_llama.tokenizer, skip_prompt=True, timeout=30)
    with pytest.raises(KvatlasError, match="streamer is not supported"):
        model.generate(**encoded(tiny_llama, texts[:1]), **HOW, **OURS, streamer=streamer)
    assert not "".join(streamer)


def test_the_seed_comes_from_torch_where_none_is_given(tiny_llama: ModelHandle, model: Any, texts: list[str]) -> None:
    inputs = encoded(tiny_llama, texts[1:2])
    without = {name: value for name, value in OURS.items() if name != "seed"}
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(model.generate(**inputs, **{**HOW, "temperature": 3.0, "top_k": 0}, **without).tolist())
    assert results[0] == results[1] != results[2]


def test_a_cap_ends_thinking_with_the_text_that_the_user_names(
    tiny_llama: ModelHandle, model: Any, texts: list[str]
) -> None:
    inputs = encoded(tiny_llama, texts[:1])
    prompt = inputs["input_ids"].shape[1]
    close = " , 9 .\n"
    (row,) = model.generate(
        **inputs, do_sample=False, max_new_tokens=30, custom_generate=kvatlas.generate,
        policy="full", settings={"thinking_tokens": 10}, think_close=close,
    )  # fmt: skip
    assert tiny_llama.text(row[prompt + 10 :].tolist()).startswith(close)


def test_0_is_a_seed_of_its_own(tiny_llama: ModelHandle, model: Any, texts: list[str]) -> None:
    inputs = encoded(tiny_llama, texts[1:2])
    how = {**HOW, "temperature": 3.0, "top_k": 0}
    zero, one = (model.generate(**inputs, **how, **{**OURS, "seed": seed}).tolist() for seed in (0, 1))
    assert zero != one


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_beams": 2}, "num_beams is 2, and the generation mode beam_sample; expected greedy search or sampling"),
        ({"min_p": 0.1}, "The logits processor MinPLogitsWarper is not supported"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is set"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"queries": 8}, r"queries is given beside the policy; expected settings=\{'queries': 8\}, which has all"),
        ({"batch_size": 0}, "batch_size is 0; expected an integer >= 1"),
        ({"batch_size": "2"}, "batch_size is '2'; expected an integer >= 1"),
        ({"batch_size": 1.5}, r"batch_size is 1\.5; expected an integer >= 1"),
        ({"settings": {"kv_budget": 60}}, "kv_budget is given twice, as an argument and in settings"),
        ({"settings": "queries=8"}, r"settings is 'queries=8'; expected a mapping, as \{'queries': 8\}"),
        *[({"seed": seed}, "seed is .*; expected an integer >= 0") for seed in ("1", 1.5, -1, [1, 2])],
        ({"policy": Random}, r"policy is <class .*Random'>; expected a name, as 'rkv', FILE\.py, or that of register"),
        ({"think_tokenizer": "name"}, "think_tokenizer is 'name'; expected a tokenizer"),
        ({"kv_budget": 20}, "kv_budget 20 is too small for this prompt"),
        ({"max_new_tokens": 4000}, "The model has 1536 positions"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tiny_llama: ModelHandle, model: Any, texts: list[str], changes: dict[str, Any], sentence: str
) -> None:
    inputs = encoded(tiny_llama, texts[:1])
    with pytest.raises(KvatlasError, match=sentence):
        model.generate(**inputs, **{**HOW, **OURS, **changes})


def test_inputs_that_the_engine_would_ignore_are_refused(tiny_llama: ModelHandle, model: Any, texts: list[str]) -> None:
    """Inputs that `generate` prepares itself are accepted: an empty cache and the positions of the tokens."""
    inputs = encoded(tiny_llama, texts)
    positions = inputs["attention_mask"].cumsum(-1) - 1
    cache = DynamicCache(config=model.config)
    expected = model.generate(**inputs, **HOW, **OURS)
    assert torch.equal(model.generate(**inputs, **HOW, **OURS, position_ids=positions, past_key_values=cache), expected)
    keys = torch.zeros(3, 2, 1, 16)
    cache.update(keys, keys, 0)
    for ignored in ({"position_ids": positions + 1}, {"past_key_values": cache}):
        with pytest.raises(KvatlasError, match="is given; the engine decodes from input_ids and an attention_mask"):
            model.generate(**inputs, **HOW, **OURS, **ignored)


def test_a_model_from_memory_needs_its_tokenizer(tiny_llama: ModelHandle, texts: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaForCausalLM(LlamaConfig(**{**tiny_llama.config, "name_or_path": ""})).eval()
    how = {"max_new_tokens": 5, "do_sample": False, "custom_generate": kvatlas.generate}
    with pytest.raises(KvatlasError, match="its tokenizer has to be given"):
        made.generate(**encoded(tiny_llama, texts[:1]), **how)
    result = made.generate(**encoded(tiny_llama, texts[:1]), **how, think_tokenizer=tiny_llama.tokenizer)
    assert torch.equal(result, made.generate(**encoded(tiny_llama, texts[:1]), max_new_tokens=5, do_sample=False))

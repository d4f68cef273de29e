"""Every logits processor that `generate` makes of its arguments, on three rows: transformers' tokens, or a refusal."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import StopStringCriteria, logits_process

import kvatlas
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle

pytestmark = pytest.mark.newest

NEW, END = 24, 2
#: Lengths of the three prompts.
ROWS = {"padded": (20, 8, 3), "of one length": (20, 20, 20)}


class WantsTheEnd(LogitsProcessor):
    """Makes the end token the likeliest one, unless it is forbidden."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.index_add(1, torch.tensor([END]), torch.full((len(scores), 1), 50.0))


def a_third(row: int, tokens: Any) -> list[int]:
    """Allow a third of the vocabulary, another one in each row."""
    return [token for token in range(3, 60) if token % 3 == row % 3]


SOON: dict[str, Any] = {"logits_processor": LogitsProcessorList([WantsTheEnd()])}
LIKELIEST: dict[str, Any] = {"do_sample": True, "top_k": 1}
#: Arguments of transformers' `generate`, with others that give them an effect.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "bad_words_ids": {"bad_words_ids": [[79], [11, 87]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 40))},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5)},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": END},
    "min_length": {"min_length": 28, **SOON},
    "min_new_tokens": {"min_new_tokens": 5, **SOON},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 2.5},
    "sequence_bias": {"sequence_bias": [[[79], -30.0], [[11, 87], -30.0]]},
    "suppress_tokens": {"suppress_tokens": [79, 87]},
    "temperature": {"temperature": 0.5, **LIKELIEST},
    "top_k": LIKELIEST,
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 1e-6},
}
REFUSED: dict[str, dict[str, Any]] = {
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": a_third},
    "epsilon_cutoff": {"epsilon_cutoff": 3e-4, **LIKELIEST},
    "eta_cutoff": {"eta_cutoff": 3e-4, **LIKELIEST},
    "guidance_scale": {"guidance_scale": 1.5},
    "min_p": {"min_p": 0.1, **LIKELIEST},
    "top_h": {"top_h": 0.4, **LIKELIEST},
    "typical_p": {"typical_p": 0.9, **LIKELIEST},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "watermarking_config (SynthID)": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3),
        **LIKELIEST,
    },
}
#: Cases that leave these prompts' tokens as they are.
WITHOUT_EFFECT = {"none", "forced_bos_token_id", "remove_invalid_values", "renormalize_logits", "temperature", "top_k"}
WITHOUT_EFFECT |= {"top_p"}


@pytest.fixture(scope="module")
def model(tiny_llama: ModelHandle) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama.folder)


def inputs(handle: ModelHandle, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The ends of three prompts, of these lengths, padded at the left."""
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    problems = benchmark("CHAIN4").problems(3)
    prompts = [handle.tokens(handle.prompt(benchmark("CHAIN4").prompt(problem))) for problem in problems]
    texts = [prompt[-length:] for prompt, length in zip(prompts, lengths, strict=True)]
    return {
        "input_ids": torch.tensor([[0] * pad + list(text) for pad, text in zip(padding, texts, strict=True)]),
        "attention_mask": torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
    }


def tokens(model: Any, batch: dict[str, Any], **arguments: Any) -> list[list[int]]:
    how = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, **arguments}
    return model.generate(**batch, **how)[:, batch["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("case", "padding"),
    [
        # Each case on one kind of rows, in turn.
        pytest.param(case, padding, marks=() if number % len(ROWS) == turn else pytest.mark.deep)
        for number, case in enumerate(CASES)
        for turn, padding in enumerate(ROWS)
    ],
)
def test_rows_get_the_tokens_of_transformers(tiny_llama: ModelHandle, model: Any, case: str, padding: str) -> None:
    batch = inputs(tiny_llama, ROWS[padding])
    expected = tokens(model, batch, **CASES[case])
    assert tokens(model, batch, **CASES[case], custom_generate=kvatlas.generate) == expected
    if case not in WITHOUT_EFFECT:
        others = {name: value for name, value in CASES[case].items() if name != case}
        assert expected != tokens(model, batch, **others)


@pytest.mark.parametrize("padding", ROWS)
@pytest.mark.parametrize("case", REFUSED)
def test_other_processors_are_refused_by_their_class(
    tiny_llama: ModelHandle, model: Any, case: str, padding: str
) -> None:
    with pytest.raises(KvatlasError, match=r"^The logits processor \w+ is not supported"):
        tokens(model, inputs(tiny_llama, ROWS[padding]), **REFUSED[case], custom_generate=kvatlas.generate)


def test_every_processor_of_this_version_has_a_case(tiny_llama: ModelHandle, model: Any) -> None:
    named = GenerationMixin._get_logits_processor.__code__.co_names
    classes = [getattr(logits_process, name, None) for name in named]
    made = {kind for kind in classes if isinstance(kind, type) and issubclass(kind, LogitsProcessor)}
    seen: set[type] = set()

    def note(model: Any, input_ids: Any, logits_processor: Any, **_: Any) -> Any:
        seen.update(map(type, logits_processor))
        return input_ids

    for arguments in (*CASES.values(), *REFUSED.values()):
        tokens(model, inputs(tiny_llama, ROWS["padded"]), **arguments, custom_generate=note)
    assert made <= seen
    assert len(made) > 20


def test_criteria_see_padded_rows(tiny_llama: ModelHandle, model: Any) -> None:
    """A stop string as an argument needs a tokenizer, which transformers does not pass on; as a criterion it works."""
    batch = inputs(tiny_llama, ROWS["padded"])
    plain = tokens(model, batch)
    stop = tiny_llama.text(plain[1][4:6])
    criteria = StoppingCriteriaList([StopStringCriteria(tiny_llama.tokenizer, [stop])])
    expected = tokens(model, batch, stopping_criteria=criteria)
    assert expected != plain
    assert tokens(model, batch, stopping_criteria=criteria, custom_generate=kvatlas.generate) == expected
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        tokens(model, batch, stop_strings=[stop], tokenizer=tiny_llama.tokenizer, custom_generate=kvatlas.generate)


@pytest.mark.parametrize(
    ("processors", "name"),
    [
        ([logits_process.TopKLogitsWarper(5)], "TopKLogitsWarper comes after TopKLogitsWarper"),
        ([logits_process.TopPLogitsWarper(0.5)], "TopKLogitsWarper comes after TopPLogitsWarper"),
        ([logits_process.TemperatureLogitsWarper(0.5), WantsTheEnd()], "WantsTheEnd comes after Temperature"),
    ],
)
def test_an_order_that_the_engine_does_not_keep_is_refused(
    tiny_llama: ModelHandle, model: Any, processors: list[Any], name: str
) -> None:
    how = {"do_sample": True, "temperature": 1.0, "top_k": 20, "logits_processor": LogitsProcessorList(processors)}
    with pytest.raises(KvatlasError, match=f"The logits processor {name}"):
        tokens(model, inputs(tiny_llama, ROWS["padded"]), **how, custom_generate=kvatlas.generate)

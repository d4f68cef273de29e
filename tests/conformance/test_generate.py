"""The full cache at temperature 0 writes what transformers' `generate` writes."""

from __future__ import annotations

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from tests.conformance.agreement import Results
from tests.conformance.real import NAME, Activations

pytestmark = [pytest.mark.slow, pytest.mark.conformance]

TOKENS = 100
#: Digits, line ends, runs of spaces and signs; the embedded models know the words of their benchmarks alone.
TEXT = "If x_1 + 12 = 19, what is $x_1^2$?\n\n  Let's think: 1,234.5 - 7%."


def test_the_full_cache_writes_what_generate_writes(real: Activations, results: Results) -> None:
    model, prompt = real.model, real.tokens[: real.prompt_length]
    full = policies.of(Setting.of("full"))
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    (generation,) = Engine(model, model.network(), [full], sampling, 1).run([Request(0, prompt, 0, (full,))])
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        text = model.network().generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
    theirs = text[0, len(prompt) :].tolist()
    same = sum(a == b for a, b in zip(generation.tokens, theirs, strict=False))
    results.facts["generate"] = {"tokens": len(theirs), "same": same}
    assert len(theirs) == TOKENS or model.name != NAME
    assert list(generation.tokens) == theirs


def test_the_tokenizer_gives_back_the_text_that_it_reads(real: Activations) -> None:
    """One that was converted wrongly reads half of a prompt as unknown tokens, and nothing else says so."""
    model, prompt = real.model, real.tokens[: real.prompt_length]
    text = TEXT if model.name == NAME else model.tokenizer.decode(list(prompt))
    tokens = model.tokens(text)
    assert model.tokenizer.decode(list(tokens)) == text
    assert model.tokenizer.unk_token_id not in [*tokens, *real.tokens]

"""The full cache at temperature 0 writes what transformers' `generate` writes."""

from copy import copy

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from tests.conformance.agreement import Results
from tests.conformance.real import NAME, Activations

pytestmark = [pytest.mark.slow, pytest.mark.conformance]

TOKENS = 300
#: Beside the prompt that all comparisons share; the embedded models know the words of their benchmarks alone.
QUESTIONS = (
    "Write a story about a lighthouse keeper who finds a letter from the future.",
    "What is 17 * 24? Show each step, then check the result by another way.",
    "List the planets of the solar system with one fact about each of them.",
    "Explain to a child why the sky is blue, and then to a student of physics.",
)
#: Digits, line ends, runs of spaces and signs.
TEXT = "If x_1 + 12 = 19, what is $x_1^2$?\n\n  Let's think: 1,234.5 - 7%."


def test_the_full_cache_writes_what_generate_writes(real: Activations, results: Results) -> None:
    handle = copy(real.model)
    # Neither ends before the last token.
    vars(handle).update(stops=frozenset())
    prompts = [real.tokens[: real.prompt_length]]
    prompts += [handle.encode(question) for question in QUESTIONS if handle.name == NAME]
    full = policies.of(Setting.of("full"))
    engine = Engine(handle, handle.load(), [full], Sampling(temperature=0.0, max_new_tokens=TOKENS), len(prompts))
    requests = [Request(number, prompt, 0, (full,)) for number, prompt in enumerate(prompts)]
    ours = {generation.key: list(generation.tokens) for generation in engine.run(requests)}
    model = handle.load()
    model.generation_config.eos_token_id = None
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS)
        theirs.append(text[0, len(prompt) :].tolist())
    same = sum(a == b for number, text in enumerate(theirs) for a, b in zip(ours[number], text, strict=True))
    results.facts["generate"] = {"tokens": sum(map(len, theirs)), "same": same}
    assert sum(map(len, theirs)) == TOKENS * len(prompts)
    assert [ours[number] for number in range(len(prompts))] == theirs


def test_the_tokenizer_gives_back_the_text_that_it_reads(real: Activations) -> None:
    """One that was converted wrongly reads half of a prompt as unknown tokens, and nothing else says so."""
    model, prompt = real.model, real.tokens[: real.prompt_length]
    text = TEXT if model.name == NAME else model.tokenizer.decode(list(prompt))
    tokens = model.tokens(text)
    assert model.tokenizer.decode(list(tokens)) == text
    assert model.tokenizer.unk_token_id not in [*tokens, *real.tokens]

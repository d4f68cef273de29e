from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas import models
from kvatlas.answers.reading import PUBLISHED
from kvatlas.benchmarks import find
from kvatlas.core import Check, CheckResult
from kvatlas.engine import Engine
from kvatlas.models import ModelHandle, Overrides
from kvatlas.sweeps import doctor
from kvatlas.sweeps.doctor import check_model
from tests.benchmarks.test_reading import CHANNELS, GEMMA, GPT_OSS
from tests.r1 import FIRST_TEMPLATE, copied

NAMES = ["model", "layers", "vocabulary", "unknown tokens", "round trip", "marker letters", "think tags", "stop tokens"]
NAMES += ["one step", "generation"]
CHAIN: Sequence[str] = tuple(problem.question for problem in find("CHAIN8").problems(3))


def findings(model: ModelHandle, messages: Sequence[str] = CHAIN, new_tokens: int = 12) -> dict[str, CheckResult]:
    return {item.name: item for item in check_model(model, messages, new_tokens)}


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3"])
def test_every_line_is_there_and_fine(random_models: dict[str, ModelHandle], kind: str) -> None:
    lines = findings(random_models[kind])
    assert list(lines) == NAMES
    assert {line.status for name, line in lines.items() if name != "generation"} == {Check.OK}


def test_another_scale_and_half_precision_pass(tmp_path: Path, random_models: dict[str, ModelHandle]) -> None:
    scaled = copied(random_models["gemma3"], tmp_path / "m", "config.json", query_pre_attn_scalar=64)
    lines = findings(models.find(scaled.name, dtype="bfloat16"))
    assert lines["one step"].status is Check.OK
    assert "in bfloat16 on cpu (stored in float32)" in lines["model"].message


def test_a_step_unlike_transformers_own_fails(monkeypatch: pytest.MonkeyPatch, tiny_llama: ModelHandle) -> None:
    forward = Engine.forward

    def wrong(*given: Any) -> Any:
        logits, states = forward(*given)
        return logits + logits.std(), states

    monkeypatch.setattr(Engine, "forward", wrong)
    line = findings(tiny_llama)["weights"]
    assert line.status is Check.FAILED
    assert "would compute other logits than in transformers" in line.message


def test_nothing_is_decoded_where_something_failed(tmp_path: Path, random_models: dict[str, ModelHandle]) -> None:
    lines = findings(random_models["llama"], ["Was ist das?"])
    assert lines["unknown tokens"].status is Check.FAILED
    assert "one step" not in lines
    chunked = {"layer_types": ["chunked_attention"] * 2}
    lines = findings(copied(random_models["llama"], tmp_path / "chunked", "config.json", **chunked))
    assert lines["model"].status is Check.FAILED
    assert "chunked_attention layers" in lines["model"].message
    broken = copied(random_models["llama"], tmp_path / "broken")
    (broken.folder / "model.safetensors").write_bytes(b"no weights")
    assert findings(broken)["weights"].status is Check.FAILED


def test_tags_are_looked_for_in_a_generation(r1_model: Callable[..., ModelHandle]) -> None:
    model = r1_model()
    lines = findings(model)
    assert lines["think tags"].message == "'<think>' to '</think>' (one token), opened by the prompt"
    assert "still thinking after 12 tokens" in lines["generation"].message
    # What the model happens to write is the end of its thinking.
    written = doctor._generate(model, model.load(), model.encode(CHAIN[0]), 12)
    close = model.tokenizer.decode(list(written.tokens)[5:8])
    lines = findings(models.find(model.name, think_close=close))
    assert "(found in the text)" in lines["think tags"].message
    assert lines["generation"].message.startswith(f"{close!r} after ")
    first = r1_model(template=FIRST_TEMPLATE)
    assert "to be opened by the model" in findings(first)["think tags"].message
    assert findings(first)["generation"].status is Check.WARNING
    assert "thinking was not opened" in findings(first)["generation"].message
    none = findings(r1_model(template=FIRST_TEMPLATE, tags=()))
    assert none["think tags"].message == "none: the whole output is the answer"
    assert none["generation"].status is Check.OK


def test_a_model_that_ends_within_its_thinking_is_told(r1_model: Callable[..., ModelHandle]) -> None:
    """Its third token is made a stop token."""
    model = r1_model()
    third = doctor._generate(model, model.load(), model.encode(CHAIN[0]), 12).tokens[2]
    line = findings(replace(model, overrides=Overrides(stops=frozenset({third}))))["generation"]
    assert (line.status, line.message) == (Check.WARNING, "ended after 3 tokens without '</think>'")
    assert line.advice == "such traces have no answer; set think_close to the text that the model writes"


@pytest.mark.parametrize("tags", PUBLISHED)
def test_the_tags_of_published_models_are_found(r1_model: Callable[..., ModelHandle], tags: tuple[str, str]) -> None:
    line = doctor._tags_check(r1_model(template=FIRST_TEMPLATE, tags=tags))
    assert line.message == f"{tags[0]!r} to {tags[1]!r} (one token), to be opened by the model"


@pytest.mark.parametrize("token", ["<|begin_reasoning|>", "[THOUGHTS]", "<rethink>"])
def test_a_token_that_may_be_an_unknown_tag_is_told(r1_model: Callable[..., ModelHandle], token: str) -> None:
    line = doctor._tags_check(r1_model(template=FIRST_TEMPLATE, tags=(token,)))
    assert line.status is Check.WARNING
    assert line.message == f"none: the whole output is the answer, although {token!r} is a token of its own"
    assert line.advice == "name the text that ends thinking with think_close"


def test_a_tag_that_the_tokenizer_cannot_write_fails(tiny_llama: ModelHandle) -> None:
    lines = findings(models.find(tiny_llama.name, think_close="</Gedanke>"))
    assert lines["think tags"].status is Check.FAILED
    assert "is not found in its own tokens" in lines["think tags"].message


def test_a_template_that_ends_turns_otherwise_is_told(r1_model: Callable[..., ModelHandle], tmp_path: Path) -> None:
    model = r1_model()
    assert findings(model)["stop tokens"].message == "<｜end▁of▁sentence｜>"
    other = copied(model, tmp_path / "m", "generation_config.json", eos_token_id=5)
    line = findings(other)["stop tokens"]
    assert line.status is Check.WARNING
    assert "the chat template ends a turn with <｜end▁of▁sentence｜>; add 1 to eos_token_id" in str(line)


def test_a_token_that_ends_messages_inside_a_turn_is_no_stop_token(r1_model: Callable[..., ModelHandle]) -> None:
    """As stop token of gpt-oss <|end|> would end each trace after its analysis."""
    line = findings(r1_model(template=GPT_OSS, tags=CHANNELS))["stop tokens"]
    assert (line.status, line.advice) == (Check.OK, "")
    # Told by the template alone, of tags that are named.
    named = GPT_OSS.replace("analysis<|message|>", "inner<|message|>").replace("final<|message|>", "outer<|message|>")
    model = models.find(r1_model(template=named, tags=CHANNELS).name, think_close="<|channel|>outer<|message|>")
    assert findings(model)["stop tokens"].status is Check.OK


def test_variables_of_the_template_are_named(r1_model: Callable[..., ModelHandle]) -> None:
    tags = ("<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|think|>")
    closed = r1_model(template=GEMMA, tags=tags)
    lines = findings(closed)
    assert lines["template values"].message == "not set, left to the template: enable_thinking"
    assert lines["think tags"].status is Check.WARNING
    assert "closed by the prompt: the model does not think" in lines["think tags"].message
    assert "template_values set what the template reads: enable_thinking" in lines["think tags"].advice
    lines = findings(models.find(closed.name, template_values={"enable_thinking": True}))
    assert lines["template values"].message == "enable_thinking=True"
    assert lines["think tags"].message.endswith("to be opened by the model")
    assert "template values" not in findings(r1_model())

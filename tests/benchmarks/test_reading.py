"""Reading of what a model wrote: tokens and text, with its think tags, to thinking, answer and status."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas import models
from kvatlas.answers.reading import HARMONY, JOINED, PUBLISHED, Reading, Tags, join_thinking, read_text, read_tokens
from kvatlas.core import Grade, Status
from kvatlas.models import ModelHandle
from kvatlas.results import Store
from kvatlas.results.regrade import regrade
from kvatlas.serve.text_stream import Detokenizer
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.r1 import save_model

Make = Callable[..., ModelHandle]
CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
#: The parts of gpt-oss's template that write a turn.
GPT_OSS = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% if message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message.role + '<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}"
    "{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
#: Those of Gemma 4's, which closes thinking in the prompt unless it is switched on.
GEMMA = (
    "{% if enable_thinking %}{{ '<|think|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|turn>' + message.role + '\n' + message.content + '<turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("hm</think>7", None, Reading("hm", "7", Status.OK)),
        ("<think>hm</think>7", None, Reading("hm", "7", Status.OK)),
        ("<think>hm", None, Reading("hm", None, Status.NO_ANSWER)),
        ("[THINK]The answer is 7.", None, Reading("The answer is 7.", None, Status.NO_ANSWER)),
        ("[THINK]hm[/THINK]7", None, Reading("hm", "7", Status.OK)),
        ("It is 7.", None, Reading("", "It is 7.", Status.OK)),
        ("", None, Reading("", "", Status.NO_ANSWER)),
        ("hm", Tags("[THINK]", "[/THINK]", opened=True), Reading("hm", None, Status.NO_ANSWER)),
        ("hm", Tags("[THINK]", "[/THINK]"), Reading("", "hm", Status.OK)),
        ("so </think> is a tag", Tags(), Reading("", "so </think> is a tag", Status.OK)),
        ("a</think>b</think>c", JOINED, Reading("a", "b</think>c", Status.OK)),
        ("a: 7", Tags("", "a:"), Reading("", " 7", Status.OK)),
        ("7", Tags("", "a:"), Reading("7", None, Status.NO_ANSWER)),
    ],
)
def test_a_text_is_read_by_the_tags_of_its_model(text: str, tags: Tags | None, expected: Reading) -> None:
    assert read_text(text, tags) == expected
    assert read_text(text, tags, cut=True) == Reading(expected.thinking, expected.answer, Status.TRUNCATED)


@pytest.mark.parametrize("tags", PUBLISHED)
def test_the_tags_of_each_published_model_are_known_in_a_text(tags: tuple[str, str]) -> None:
    opening, closing = tags
    assert read_text(f"{opening}hm{closing}7") == Reading("hm", "7", Status.OK)
    assert read_text(f"{opening}The answer is 7.").answer is None


def test_parts_that_come_apart_are_read_as_they_came() -> None:
    for thinking in ("hm", "the tag </think> ends it", ""):
        read = read_text(join_thinking(thinking, "7"), JOINED)
        assert (read.answer, bool(read.thinking)) == ("7", bool(thinking))


def test_the_final_channel_of_gpt_oss_is_the_answer(r1_model: Make) -> None:
    model = r1_model(template=GPT_OSS, tags=CHANNELS)
    assert (model.thinking.open, model.thinking.close) == HARMONY
    turn = "<|end|><|start|>assistant"
    analysis = "<|channel|>analysis<|message|>Try \\boxed{5}? no, 4."
    final = "<|channel|>final<|message|>The final answer is 4."
    tokens = model.tokens(f"{analysis}{turn}{final}")
    read = read_tokens(model, tokens)
    assert (read.thinking, read.answer) == ("Try \\boxed{5}? no, 4.", "The final answer is 4.")
    assert model.text(tokens[: read.span[0]]) == f"{analysis}{turn}"
    assert read_text(model.text(tokens), model.tags) == Reading(read.thinking, read.answer, Status.OK)
    assert read_tokens(model, model.tokens(analysis)).status is Status.NO_ANSWER
    assert read_tokens(model, model.tokens(final)).answer == "The final answer is 4."
    assert Detokenizer(model).push(model.tokens(final), last=True) == ("", "The final answer is 4.")


def test_thinking_of_gemma_is_switched_on_by_a_template_value(r1_model: Make) -> None:
    tags = ("<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|think|>")
    closed = r1_model(template=GEMMA, tags=tags)
    assert closed.thinking.close == "<channel|>"
    assert closed.prompt("x").endswith("<|channel>thought\n<channel|>")
    assert read_tokens(closed, closed.tokens("It is 7.")).answer == "It is 7."
    thinks = models.find(closed.name, template_values={"enable_thinking": True})
    assert thinks.prompt("x").startswith("<|think|>")
    read = read_tokens(thinks, thinks.tokens("<|channel>thought\nTry 5.<channel|>It is 7."))
    assert (read.thinking, read.answer) == ("\nTry 5.", "It is 7.")


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_is_graded_again_where_its_model_is_gone(tmp_path: Path, kept: bool) -> None:
    """A model of [THINK] whose prompt opens thinking; earlier runs have not `kept` its tags."""
    folder = tmp_path / "model"
    save_model("llama", folder, template="{{ messages[0].content }}[THINK]", tags=("[THINK]", "[/THINK]"))
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "How many?", "answer": "7"}))
    spec = {
        "models": [f"hf:{folder}"],
        "benchmarks": [{"name": "MINE", "file": str(file)}],
        "sampling": {"max_new_tokens": 8},
        "samples": 2,
    }
    run = tmp_path / "run"
    sweep(make_plan(parse_spec(spec)), run)
    model = models.find(f"hf:{folder}")
    texts = ("I think that \\boxed{7} may be right, but", "so[/THINK]\\boxed{7}")
    with Store.create(run) as store:
        manifest = store.manifest()
        assert manifest.provenance["tags"] == {model.name: {"open": "[THINK]", "close": "[/THINK]", "opened": True}}
        if not kept:
            provenance = {name: value for name, value in manifest.provenance.items() if name != "tags"}
            store.put_manifest(replace(manifest, provenance=provenance))
        for (key, trace), text in zip(list(store.traces()), texts, strict=True):
            tokens = (*model.tokens(text), min(model.stops))
            thinking = model.thinking_tokens(tokens, (read_tokens(model, tokens).span or (None,))[0])
            usage = replace(trace.usage, output_tokens=len(tokens), thinking_tokens=thinking)
            grade = Grade(False, 0.0, None, Status.NO_ANSWER)
            store.add(key, replace(trace, tokens=tokens, text=text, usage=usage, grade=grade))
    (there,) = regrade(run)
    folder.rename(tmp_path / "elsewhere")
    (gone,) = regrade(run)
    assert there == gone
    assert (there["pass@1"], there["graded:kvatlas"]) == (0, 50)

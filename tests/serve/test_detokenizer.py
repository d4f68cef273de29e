"""Tokens into text as they come: however they are cut in pieces, the parts are those of the whole."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas import models
from kvatlas.serve.text_stream import Detokenizer

MODEL = models.find("embedded:tiny-llama")
PLAIN = sorted(set(range(len(MODEL.tokenizer))) - MODEL.stops)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)] or [""]


def parts(writing: Detokenizer, texts: list[str]) -> tuple[str, str]:
    results = [writing.split(text, last=number == len(texts) - 1) for number, text in enumerate(texts)]
    return "".join(thinking for thinking, _ in results), "".join(answer for _, answer in results)


@given(st.lists(st.sampled_from(PLAIN), max_size=30), st.lists(st.integers(0, 30), max_size=6), st.booleans())
@settings(max_examples=150)
def test_text_in_pieces_is_the_text(tokens: list[int], cuts: list[int], ends: bool) -> None:
    tokens = [*tokens, next(iter(MODEL.stops))] if ends else tokens
    decoder = Detokenizer(MODEL)
    texts = [decoder.decode(tokens[:cut]) for cut in sorted(min(cut, len(tokens)) for cut in cuts)]
    assert "".join([*texts, decoder.decode(tokens, last=True)]) == MODEL.text(tokens)


@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=200)
def test_no_character_is_torn(text: str, cuts: list[int]) -> None:
    # A tokenizer of bytes, as byte-level tokenizers behave within a character.
    tokenizer = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode("utf-8", "replace"))
    model, tokens = SimpleNamespace(stops=frozenset(), thinking=None, tokenizer=tokenizer), list(text.encode())
    decoder = Detokenizer(model, split=False)
    texts = [decoder.decode(tokens[:cut]) for cut in sorted(min(cut, len(tokens)) for cut in cuts)]
    assert "".join([*texts, decoder.decode(tokens, last=True)]) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in text for text in texts) or "\N{REPLACEMENT CHARACTER}" in text


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "a", "ab", "END", "E", "N", " "]), max_size=12)


@given(WORDS, st.lists(st.integers(0, 60), max_size=8), st.booleans(), st.booleans())
@settings(max_examples=300)
def test_parts_do_not_depend_on_the_pieces(words: list[str], cuts: list[int], split: bool, opened: bool) -> None:
    text = "".join(words)
    stop = ("END", "aba")
    whole = parts(Detokenizer(MODEL, stop, split, opened), [text])
    writing = Detokenizer(MODEL, stop, split, opened)
    result = parts(writing, pieces(text, cuts))
    # In pieces the first stop text that is complete counts, in one piece the one that begins first.
    if whole[1].count("END") == 0 and not writing.stopped:
        assert result == whole
    assert not any(item in result[1] for item in stop)
    if not split:
        assert result[0] == ""


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("I think</think> so", True, ("I think", " so")),
        ("\n<think>I think</think> so", False, ("I think", " so")),
        ("so, without a thought", False, ("", "so, without a thought")),
        ("I never stop", True, ("I never stop", "")),
        ("<thi", False, ("", "<thi")),
        ("a</think>bENDc", True, ("a", "b")),
        ("END</think>bE", True, ("END", "bE")),
    ],
)
def test_thinking_and_answer(text: str, opened: bool, expected: tuple[str, str]) -> None:
    for size in (1, 2, 5, 100):
        cuts = list(range(0, len(text), size))
        assert parts(Detokenizer(MODEL, ("END",), opened=opened), pieces(text, cuts)) == expected

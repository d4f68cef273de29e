"""What a run was made with, found again, and the text of single tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.report.sources import Sources, token_texts
from kvatlas.results import Manifest


class Bytes:
    """A tokenizer of bytes: characters beyond ASCII are several tokens."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain text", "数学 é 𝕏 mixed", "ends in é"])
def test_texts_of_tokens_join_to_the_whole(text: str) -> None:
    model: Any = SimpleNamespace(tokenizer=Bytes())
    tokens = tuple(text.encode())
    texts = token_texts(model.tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"models": ["hf:/nowhere"], "benchmarks": ["NONE"]},
    ],
)
def test_what_is_gone_is_missing_and_no_error(spec: dict[str, Any]) -> None:
    result = Sources.of(Manifest((), (), spec, {}))
    assert (result.models, result.benchmarks, result.problems) == ({}, {}, {})
    assert result.pieces("m", (1, 2)) is None

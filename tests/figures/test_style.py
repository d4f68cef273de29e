from __future__ import annotations

from kvatlas.figures import style


def test_models_are_shown_without_where_they_come_from() -> None:
    names = ["embedded:tiny-llama", "hf:/models/R1-Llama/", "R1-Qwen", "openai:gpt", "hf:"]
    assert [style.model(name) for name in names] == ["tiny-llama", "R1-Llama", "R1-Qwen", "openai:gpt", "hf:"]

from __future__ import annotations

from kvatlas.figures import style


def test_models_are_shown_without_where_they_come_from() -> None:
    names = ["embedded:tiny-llama", "hf:/models/R1-Llama/", "R1-Qwen", "openai:gpt", "hf:"]
    assert [style.model(name) for name in names] == ["tiny-llama", "R1-Llama", "R1-Qwen", "openai:gpt", "hf:"]


def test_a_widened_scale_stays_among_percentages() -> None:
    assert style.span([100.0, 99.8]) == (99.0, 100.0)
    assert style.span([0.0]) == (0.0, 1.0)
    assert style.span([50.0]) == (49.5, 50.5)
    assert style.span([2000.0]) == (1999.5, 2000.5)
    assert style.span([100.0, 90.0]) == (90.0, 100.0)

"""The engine beside transformers' own `generate`: equal, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from kvatlas import native
from kvatlas.models.packing import packed
from tests.models import every_model

pytestmark = pytest.mark.slow

EQUAL = (
    "bamba",
    "falcon_h1",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gpt_neox stray",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2",
    "llama dynamic",
    "minicpm3",
    "minimax",
    "mixtral",
    "nemotron_h",
    "opt stray",
    "phi3 longrope",
    "qwen2_moe",
    "qwen3_5",
)
REFUSED = (
    "bert",
    "doge",
    "falcon alibi",
    "llama dynamic beyond",
    "llama4_text",
    "mimo_v2_flash",
    "moshi",
    "recurrent_gemma",
)
EITHER = ("cohere norms", "glm4_moe", "ministral3", "stablelm")


@pytest.fixture(scope="module")
def tried() -> dict[str, dict[str, Any]]:
    return dict(every_model.results([*EQUAL, *REFUSED, *EITHER]))


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED, *EITHER])
def test_a_model_is_decoded_as_by_transformers_or_refused(tried: dict[str, dict[str, Any]], name: str) -> None:
    result = tried[name]
    verdict = every_model.verdict(result)
    assert verdict in ("equal", "refused"), result
    assert name in EITHER or verdict == ("equal" if name in EQUAL else "refused"), result
    if verdict == "refused":
        assert result["refused"].endswith(".")
    elif native.load() is not None:
        assert result["bits"]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_experts_of_somebody_else_are_as_they_were_afterwards(kind: str) -> None:
    """Of tables with gates, of turned ones with biases, and of some without gates."""
    config = every_model.small_config(CONFIG_MAPPING[kind], every_model.OWN.get(kind, {}))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = model(ids).logits
        with packed(model):
            assert native.load() is None or any(type(module).__name__ == "PackedExperts" for module in model.modules())
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(ids).logits, expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

"""The heads of the policy `learned`: their target, their training, their file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvatlas import policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.models import ModelHandle
from kvatlas.policies.learned import load_scorer
from kvatlas.predictor.kv_heads import LAST, LEAST, HeadExamples, evaluate_heads, examples_of, train_heads
from tests.decoding import requests, run


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_target_is_the_mean_of_later_rows_of_the_attention_matrix(
    random_models: dict[str, ModelHandle], kind: str
) -> None:
    handle = random_models[kind]
    tokens = [5 + i * 7919 % 40 for i in range(90)]
    found = examples_of(handle, handle.load(), tokens)
    assert found is not None
    model = handle.load()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model.get_decoder()(input_ids=torch.tensor([tokens]), output_attentions=True)
    groups = handle.shape.heads // handle.shape.kv_heads
    for layer, weights in enumerate(output.attentions):
        by_head = weights[0].unflatten(0, (-1, groups)).mean(1)
        for token in range(len(tokens) - LAST):
            later = by_head[:, token + 1 :, token].mean(-1)
            torch.testing.assert_close(found.target[layer, :, token], (later + LEAST).log(), atol=1e-4, rtol=1e-3)
        cached = output.past_key_values.layers[layer]
        torch.testing.assert_close(found.values[layer], cached.values[0, :, : len(tokens) - LAST], atol=1e-4, rtol=1e-3)
        # The first token is at position 0, where nothing is turned.
        torch.testing.assert_close(found.keys[layer, :, 0], cached.keys[0, :, 0], atol=1e-4, rtol=1e-3)
    assert examples_of(handle, handle.load(), tokens[: LAST + 1]) is None


def drawn(seed: int, tokens: int = 300) -> HeadExamples:
    """Examples of 2 layers and 2 heads whose target is twice a channel of the key, another one in each head."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 2, tokens, 8, generator=random) * 3 + 1
    values = torch.randn(2, 2, tokens, 8, generator=random)
    return HeadExamples(keys, values, torch.stack([keys[0, ..., 1], keys[1, ..., 2]]) * 2 - 5)


def test_heads_learn_the_target_in_its_own_unit() -> None:
    scorer = train_heads([drawn(0), drawn(1)], steps=300, seed=0)
    quality = evaluate_heads(scorer, [drawn(2)])
    assert quality.traces == 1
    assert quality.spearman > 0.98
    assert quality.overlap > 0.9
    again = train_heads([drawn(0), drawn(1)], steps=300, seed=0)
    assert all(torch.equal(numbers, again[name]) for name, numbers in scorer.items())


def test_the_policy_decodes_with_trained_heads(random_models: dict[str, ModelHandle], tmp_path: Path) -> None:
    handle = random_models["llama"]
    examples = examples_of(handle, handle.load(), [5 + i * 7919 % 40 for i in range(90)])
    assert examples is not None
    file = tmp_path / "heads.safetensors"
    save_file(train_heads([examples], steps=5, seed=0), file)
    values = {"scorer": str(file), "kv_budget": 64, "local_window": 8, "ratio": 0.3}
    policy = policies.from_setting(Setting.from_parameters("learned", **values))
    policy.check(handle)
    assert "scorer" in policy.identity(handle)
    _, generations = run(handle, requests(handle, [policy], 1), 8, max_new_tokens=90)
    assert generations[0].usage.compressions > 0


def test_other_files_are_refused(random_models: dict[str, ModelHandle], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"first": torch.zeros(2, 2)}, file)
    with pytest.raises(KvatlasError, match="holds first; expected first, first_bias"):
        load_scorer(str(file))
    save_file(train_heads([drawn(0, 40)], steps=1, seed=0), file)
    values = {"scorer": str(file), "kv_budget": 64, "local_window": 8, "ratio": 0.3}
    policy = policies.from_setting(Setting.from_parameters("learned", **values))
    with pytest.raises(KvatlasError, match=r"is for \(layers, KV heads, key and value\) \(2, 2, 16\), "):
        policy.check(random_models["llama"])
    file.write_text("no tensors")
    with pytest.raises(KvatlasError, match="cannot be read"):
        load_scorer(str(file))

"""Presets against slow readings of what the code that they are named after does, on fixed inputs.

The facts are from Robin930/DynTS at a55dc37 (inference/*.py, utils/*.py, recipes/inference/*.sh), the code of arXiv
2601.18383, and from Zefan-Cai/R-KV at 31cf555 (rkv/utils.py, rkv/compression/r1_kv.py, HuggingFace/run_math.py), the
code of arXiv 2505.24133. There k = int(ratio * tokens older than the kept window) of these are kept.
"""

import math
import pickle
from dataclasses import replace

import pytest
import torch

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request, scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row, compress
from kvatlas.models import ModelHandle
from kvatlas.policies import PRESETS, CacheView, CompressingPolicy, select_tokens
from tests.decoding import endless, prompts
from tests.policies.scenes import make, scene

#: Of 60 cached tokens 50 are older than the local window: 20 of them stay.
OLDER, ROOM = 50, 20


def kept(policy: CompressingPolicy, cached: CacheView) -> list[int]:
    """Slots that stay of the 50 older ones, for a policy with one choice for all."""
    slots = select_tokens(policy, cached)
    assert slots.shape[:2] == (1, 1)
    assert slots[0, 0, -10:].tolist() == list(range(OLDER, 60))
    return slots[0, 0, :-10].tolist()


def test_what_the_presets_resolve_to() -> None:
    for name, preset in PRESETS.items():
        values = {"kv_budget": 60, "local_window": preset.values.get("local_window", 10)}
        # Serving engines compress every so many tokens.
        values |= {"every": 8} if "every_from" in preset.values else {"ratio": 0.4}
        item = policies.from_setting(Setting.from_parameters(name, **values))
        assert isinstance(item, policies.policies.get(preset.policy))
        chosen = item.parameter_values()
        assert all(chosen[key] == value for key, value in preset.values.items())
        assert item.setting.policy == name
        assert policies.from_setting(item.setting) == item == pickle.loads(pickle.dumps(item))
        assert preset.source
        assert preset.says


def test_what_a_preset_fixes_nobody_changes() -> None:
    with pytest.raises(KvatlasError, match="preset 'h2o@dynts-paper' fixes keep_prompt = False, True was asked for"):
        make("h2o@dynts-paper", keep_prompt=True)
    with pytest.raises(KvatlasError, match="fixes local_window = 8, 10 was asked for; leave it out, or take the polic"):
        make("rkv@r-kv-paper")
    assert (
        policies.from_setting(Setting.from_parameters("rkv@r-kv-paper", kv_budget=60, ratio=0.4)).setting.values[
            "local_window"
        ]
        == 8
    )
    with pytest.raises(KvatlasError, match="'h2o@dynts-paper' has no parameter 'sinks'"):
        make("h2o@dynts-paper", sinks=4)
    with pytest.raises(KvatlasError, match="Unknown preset 'h2o@unknown'; expected: dynts@dynts-paper, "):
        make("h2o@unknown")


def test_a_prune_kvlength_of_dynts_is_a_budget_of_one_token_more(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of inference/window.py: after a pass, `is_pruning_step` gets the length that the step before noted."""
    length_limit, window, new = 60, 10, 140
    handle = endless(random_models["llama"])
    (prompt,) = prompts(handle, 1)
    expected = []
    cached, noted = list(range(len(prompt))), 0
    for step in range(new - 2):
        cached.append(len(prompt) + step)
        if noted >= length_limit:
            cached = cached[-window - int(0.5 * (len(cached) - window)) :]
            expected.append(cached.copy())
        noted = len(cached)

    seen = []

    def watched(model: ModelHandle, cache: KVCache, row: Row[int]) -> int:
        evicted = compress(model, cache, row)
        seen.append(row.kept[0, 0].tolist())
        return evicted

    monkeypatch.setattr(scheduler, "compress", watched)
    policy = make("window@dynts-paper", kv_budget=length_limit + 1, local_window=window, ratio=0.5)
    request = Request(0, prompt, 0, (policy,))
    list(Engine(handle, handle.load(), [policy], Sampling(max_new_tokens=new), 1).run([request]))
    assert seen == expected
    assert len(seen) > 2


def test_window_and_streaming_of_dynts_drop_the_prompt() -> None:
    assert kept(make("window@dynts-paper"), scene(make("window"), 0)) == list(range(OLDER - ROOM, OLDER))
    # A ratio whose share is the 10 sinks leaves what is left there: 10 sinks and the kept window.
    streaming = make("streaming@dynts-paper", ratio=0.2)
    first = replace(scene(streaming, 0), positions=torch.arange(60)[None, None], length=60, prompt_length=20)
    assert kept(streaming, first) == list(range(10))


@pytest.mark.parametrize("ratio", [0.08, 0.4, 1.0])
def test_sepllm_of_dynts_keeps_the_newest_single_separators_and_nothing_else(
    tiny_llama: ModelHandle, ratio: float
) -> None:
    """min(number of separators, int(ratio * older)) of them, from the right, the prompt's among them; alone in a batch
    nothing is filled up."""
    policy = make("sepllm@dynts-paper", ratio=ratio)
    cached = replace(scene(policy, 1), model=tiny_llama)
    tokens = cached.tokens().clone()
    dot = next(token for token in range(1000) if tiny_llama.tokenizer.decode([token]) == ".")
    tokens[::4] = dot
    cached = replace(cached, tokens=lambda: tokens)
    texts = [tiny_llama.tokenizer.decode([token]) for token in tokens.tolist()]
    at = cached.positions[0, 0].tolist()
    separators = [slot for slot in range(OLDER) if texts[at[slot]] in (".", ",", "?", "!", ";", ":", "\n", " ")]
    assert 4 < len(separators) < 50
    most = min(len(separators), int(ratio * OLDER + 1e-9))
    assert kept(policy, cached) == separators[len(separators) - most :]
    assert len(kept(make("sepllm", keep_prompt=False, ratio=ratio), cached)) == int(ratio * OLDER + 1e-9)


def test_ablations_of_dynts_let_the_prompt_go() -> None:
    importance = torch.rand(1, 1, 60, generator=torch.Generator().manual_seed(1))
    bottom = make("dynts-bottom@dynts-paper")
    cached = scene(bottom, 2, {"importance": importance})
    scores = [math.inf if slot < 9 else float(importance[0, 0, slot]) for slot in range(OLDER)]
    assert kept(bottom, cached) == sorted(sorted(range(OLDER), key=lambda slot: scores[slot])[:ROOM])
    random = make("dynts-random@dynts-paper")
    gone = [set(range(9)) - set(kept(random, replace(cached, stream=stream))) for stream in range(20)]
    assert all(gone)
    assert all(len(kept(random, replace(cached, stream=stream))) == ROOM for stream in range(20))

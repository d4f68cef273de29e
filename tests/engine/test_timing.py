"""Seconds of one compression, for plans."""

import pytest

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.sweeps.measured_rate import TimedEngine
from tests.decoding import requests


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("name", ["window", "random", "h2o", "snapkv", "rkv", "keydiff", "dynts", "lazyeviction"])
def test_a_timed_compression_evicts_what_one_of_a_trace_does(tiny_llama: ModelHandle, name: str, kv_bits: int) -> None:
    values = {
        "kv_budget": 128,
        "local_window": 28,
        "ratio": 0.3,
        "ratio_over": "older",
        "kv_bits": kv_bits,
        "residual": 28,
    }
    policy = policies.from_setting(Setting.from_parameters(name, **values)).bind(tiny_llama)
    engine = TimedEngine(tiny_llama, tiny_llama.load(), [policy], Sampling(max_new_tokens=8), 2)
    work = requests(tiny_llama, [policy], 2)
    before = [generation.tokens for generation in engine.run(work)]
    seconds, evicted = engine.time_compression(policy, 20, 128)
    assert seconds > 0
    assert evicted == 70
    assert [generation.tokens for generation in engine.run(work)] == before

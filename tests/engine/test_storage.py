"""Packed keys and values: the bound of a round trip, their names, their bytes."""

from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Setting, Storage
from kvatlas.engine.attention import ForwardBatch
from kvatlas.engine.cache import KVCache, Layer
from kvatlas.engine.engine import backend_for
from kvatlas.engine.storage import pack, unpack
from kvatlas.models import ModelHandle, Shape
from kvatlas.native import load
from tests.decoding import endless, requests, run

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(load() is None, reason="no native kernels for this machine")


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("size", "group"), [(16, 16), (20, 16), (32, 32), (80, 32), (128, 64)])
def test_a_round_trip_is_within_the_bound(bits: int, size: int, group: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randn(500, size, generator=generator) * 3 + torch.randn(500, 1, generator=generator)
    rows = pack(numbers, bits, group)
    assert rows.shape[-1] == Storage(bits, bits, group).row_bytes(bits, size)
    differences = (unpack(rows, size, bits, group) - numbers).abs()
    for off, whole in zip(differences.split(group, 1), numbers.split(group, 1), strict=True):
        low, high = whole.aminmax(dim=1)
        step = (high - low) / (2**bits - 1)
        # Half a step, and the rounding of zero point and scale to the 11 bits of fp16.
        bound = step / 2 + 2.0**-11 * (low.abs() + (high - low))
        assert (off <= bound[:, None] * 1.0001).all()
        assert bits > 4 or off.max() > step.min() / 4


def test_equal_numbers_come_back() -> None:
    numbers = torch.tensor([[0.0] * 32, [1.5] * 32, [-2.0] * 16 + [6.0] * 16])
    for bits in (8, 4, 3, 2):
        assert torch.equal(unpack(pack(numbers, bits, 32), 32, bits, 32)[:2], numbers[:2])
        assert torch.equal(unpack(pack(numbers, bits, 16), 32, bits, 16), numbers)


def test_settings_name_their_bits() -> None:
    def named(**values: Any) -> dict[str, Any]:
        return policies.of(Setting.of("full", **values)).setting.values

    assert named(kv_bits=16, residual=5) == named(key_bits=16) == {}
    assert named(key_bits=4, value_bits=4, group=64) == named(kv_bits=4, group=64) == {"kv_bits": 4, "group": 64}
    assert named(key_bits=8, kv_bits=4) == {"key_bits": 8, "value_bits": 4}


@pytest.mark.parametrize("storage", [Storage(), Storage(8, 8), Storage(4, 2, 16, 5), Storage(16, 3)])
def test_planned_bytes_are_allocated(storage: Storage) -> None:
    shape, rows, tokens = Shape(layers=3, heads=4, kv_heads=2, head_dim=40, hidden=64), 3, 640
    cache = KVCache(shape, rows, {}, 0, CPU, torch.float32, storage=storage)
    sequence = cache.begin()
    before = cache.bytes
    cache.reserve(sequence, tokens)
    token, beside = shape.kv_bytes(storage)
    # Page 0 belongs to no sequence, and the idle sequence has a row.
    assert cache.bytes - before == (tokens + cache.page_size) * token
    assert before == (rows + 1) * beside


@needs_native
@pytest.mark.parametrize("storage", [Storage(8, 3), Storage(4, 2, 16), Storage(3, 8, 64), Storage(2, 4)])
@pytest.mark.parametrize("size", [20, 64, 80])
def test_kernels_write_the_rows_of_plain_torch(storage: Storage, size: int) -> None:
    shape, source = Shape(layers=1, heads=2, kv_heads=2, head_dim=size, hidden=64), torch.Generator().manual_seed(size)
    key, value = (torch.randn(70, 2, size, generator=source) * 5 for _ in range(2))
    key[3], value[5, 1], key[7, :, ::2] = 1.25, 0.0, 0.0
    pools = []
    for name in ("cpu", "reference"):
        cache = KVCache(shape, 1, {}, 0, CPU, torch.float32, storage=storage)
        sequence = cache.begin()
        cache.reserve(sequence, len(key))
        batch = ForwardBatch(cache, [sequence], [[0] * len(key)], [0])
        backend_for(CPU, torch.float32, name).attend(batch, Layer(0, 1.0), key, key, value)
        pools.append([pool[0][:, batch.entered_slots] for pool in (cache.keys, cache.values)])
    assert all(torch.equal(own, theirs) for own, theirs in zip(*pools, strict=True))


@needs_native
def test_a_budget_in_bytes_decodes_as_the_tokens_that_it_holds(tiny_llama: ModelHandle) -> None:
    model = endless(tiny_llama)
    values = {"local_window": 16, "ratio": 0.3, "kv_bits": 8, "residual": 8}
    policy = policies.of(Setting.of("window", kv_budget="70KiB", **values))
    token, beside = model.kv_bytes(policy.storage)
    tokens = policies.of(Setting.of("window", kv_budget=(70 * 1024 - beside) // token, **values))
    (of_bytes, of_tokens) = (run(model, requests(model, [each], 3), 3)[1] for each in (policy.on(model), tokens))
    assert [(g.key, g.tokens, g.usage.compressions) for g in of_bytes] == [
        (g.key, g.tokens, g.usage.compressions) for g in of_tokens
    ]
    assert all(0 <= 70 * 1024 - (g.usage.peak_kv_tokens * token + beside) < token for g in of_bytes)

"""The cache by itself: growth and compaction."""

import pytest
import torch

from kvatlas.core import Shape, Storage
from kvatlas.engine import cache as cache_module
from kvatlas.engine.cache import SMALL, CachedSequence, KVCache, growth

SHAPE = Shape(layers=3, heads=4, kv_heads=2, head_dim=20, hidden=80)
CPU = torch.device("cpu")


def filled(storage: Storage, tokens: int) -> tuple[KVCache, CachedSequence]:
    """A cache with random numbers in all its slots, and its sequence of so many tokens."""
    source = torch.Generator().manual_seed(5)
    cache = KVCache(SHAPE, 1, {}, 0, CPU, torch.float32, storage=storage)
    sequence = cache.begin()
    cache.reserve(sequence, tokens)
    sequence.length = tokens
    for pool in (*cache.keys, *cache.values):
        numbers = torch.randint(0, 255, pool.shape, generator=source)
        pool.copy_(numbers)
    cache.watch_window(1).copy_(torch.randint(0, 999, cache.keys[1].shape[:2], generator=source))
    return cache, sequence


@pytest.mark.parametrize("scope", [(1, 1), (3, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("bits", [16, 4])
def test_native_compaction_moves_the_tokens_that_torch_does(
    scope: tuple[int, int], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, count = 200, 90
    source = torch.Generator().manual_seed(7)
    order = torch.rand(*scope, tokens, generator=source).argsort(-1)
    kept = order[..., :count].sort(-1).values
    storage = Storage(key_bits=bits, value_bits=bits)
    results = []
    for load in (cache_module.load, lambda: None):
        monkeypatch.setattr(cache_module, "load", load)
        cache, sequence = filled(storage, tokens)
        before = cache.slots(sequence)
        expected = cache.keys[2][1, before[kept[-1, -1]]].clone()
        cache.compact(sequence, kept, ())
        after = cache.slots(sequence)
        assert len(after) == sequence.length == count
        assert torch.equal(cache.keys[2][1, after], expected)
        results.append([pool[:, after] for pool in (*cache.keys, *cache.values, cache.positions[1])])
    for native, plain in zip(*results, strict=True):
        assert torch.equal(native, plain)


def test_a_small_cache_on_a_cpu_is_copied_a_few_times_until_it_has_all_its_pages() -> None:
    cache = KVCache(SHAPE, 64, {}, 0, CPU, torch.float32)
    sequences = [cache.begin() for _ in range(64)]
    for tokens in range(64, 700, 64):
        for sequence in sequences:
            cache.reserve(sequence, tokens)
    assert len(cache.holders) > 640
    # The tables of pages grow, too, ten times.
    assert cache.moves <= 30


def test_a_large_cache_and_one_on_a_gpu_grow_by_little() -> None:
    assert growth(SMALL - 1, "cpu") == 2
    assert growth(SMALL, "cpu") == growth(0, "cuda") == 16

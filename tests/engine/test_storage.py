"""Packed keys and values: the bound of a round trip, equal backends, the same traces however they are decoded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvatlas import models, policies
from kvatlas.core import KvatlasError, Setting, Storage
from kvatlas.engine.attention import AttentionBackend, ForwardBatch
from kvatlas.engine.cache import CachedSequence, KVCache, Layer
from kvatlas.engine.engine import backend_for
from kvatlas.engine.storage import pack, unpack
from kvatlas.models import Shape
from kvatlas.native import load
from tests.decoding import endless, outcome, requests, run

MODEL = "embedded:tiny-llama"
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


#: New tokens of two sequences in each step.
STEPS = [(70, 3), (1, 1), (1, 40), (33, 1), (1, 1), (1, 1)]


def attend(
    backend: AttentionBackend, shape: Shape, storage: Storage, steps: list[tuple[int, ...]], kind: Any = (None, None)
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and watched attention of sequences that grow in steps, by sequence."""
    rows = len(steps[0])
    cache = KVCache(shape, rows, {}, 0, CPU, torch.float32, backend.page_size, storage=storage)
    sequences: list[CachedSequence] = [cache.begin() for _ in range(rows)]
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    drawn = []
    for number in range(rows):
        source = torch.Generator().manual_seed(number)
        drawn.append([torch.randn(107, heads, shape.head_dim, generator=source) for heads in sizes])
    outputs: list[list[Tensor]] = [[] for _ in range(rows)]
    masses: list[list[Tensor]] = [[] for _ in range(rows)]
    for step in steps:
        active = [number for number in range(rows) if step[number]]
        chosen = [sequences[number] for number in active]
        for number in active:
            cache.reserve(sequences[number], sequences[number].length + step[number])
        counts = [step[number] for number in active]
        batch = ForwardBatch(
            *(cache, chosen, [[0] * count for count in counts], [own.length for own in chosen]),
            watched=tuple(range(len(active))),
        )
        spans = [slice(sequences[n].length, sequences[n].length + step[n]) for n in active]
        new = [torch.cat([drawn[n][side][span] for n, span in zip(active, spans, strict=True)]) for side in range(3)]
        out = backend.attend(batch, Layer(0, shape.head_dim**-0.5, *kind), *new)
        for at, (number, part) in enumerate(zip(active, out.split(counts), strict=True)):
            outputs[number].append(part)
            masses[number].append(batch.attention[0, at, :, : sequences[number].length + step[number]].clone())
            sequences[number].length += step[number]
    return [torch.cat(own) for own in outputs], [torch.cat(own, -1) for own in masses]


@needs_native
@pytest.mark.parametrize("kind", [(None, None), (25, 3.0)])
@pytest.mark.parametrize(
    ("storage", "size", "heads"),
    [
        (Storage(8, 8), 64, 6),
        (Storage(4, 4, 32, 0), 32, 4),
        (Storage(3, 2, 16, 5), 40, 2),
        (Storage(16, 4, 32, 16), 16, 16),
        (Storage(2, 16, 64, 1), 128, 2),
    ],
)
def test_native_attention_is_that_of_plain_torch(storage: Storage, size: int, heads: int, kind: Any) -> None:
    shape = Shape(layers=1, heads=heads, kv_heads=2, head_dim=size, hidden=64)
    result = attend(backend_for(CPU, torch.float32), shape, storage, STEPS, kind)
    expected = attend(backend_for(CPU, torch.float32, "reference"), shape, storage, STEPS, kind)
    exact = attend(backend_for(CPU, torch.float32), shape, Storage(), STEPS, kind)
    for own, theirs in zip((*result[0], *result[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(own, theirs, atol=2e-5, rtol=1e-4)
    # A window within the unpacked tokens sees no codes.
    unlike = kind[0] is None or kind[0] > storage.residual
    assert all(torch.equal(own, full) != unlike for own, full in zip(result[0], exact[0], strict=True))


@needs_native
@pytest.mark.parametrize("storage", [Storage(), Storage(4, 3, 32, 8)])
def test_a_sequence_is_the_same_alone_and_in_any_chunks(storage: Storage) -> None:
    shape = Shape(layers=1, heads=6, kv_heads=2, head_dim=32, hidden=64)
    backend = backend_for(CPU, torch.float32)
    together = attend(backend, shape, storage, STEPS)[0]
    one_by_one = attend(backend, shape, storage, [(1, 1)] * 47)[0]
    assert torch.equal(one_by_one[0], together[0][:47])
    assert torch.equal(one_by_one[1], together[1])
    assert torch.equal(attend(backend, shape, storage, [(7, 1)] * 15 + [(2, 1)])[0][0], together[0])


def settings() -> list[Any]:
    bits: list[dict[str, Any]] = [{}, {"kv_bits": 8}, {"kv_bits": 4, "residual": 8}, {"key_bits": 4, "value_bits": 2}]
    results = [Setting.of("full", **own) for own in bits]
    for name in ("random", "rkv"):
        results += [Setting.of(name, kv_budget=80, local_window=32, ratio=0.3, **own) for own in bits]
    return [policies.of(setting) for setting in results]


@needs_native
def test_traces_do_not_depend_on_batch_size_order_or_sharing() -> None:
    model = endless(models.find(MODEL))
    work = requests(model, settings(), 2)
    _, generations = run(model, work, 32, max_new_tokens=100)
    found = outcome(generations)
    assert len(found) == len(generations) == 2 * 12
    assert outcome(run(model, work[::-1], 3, max_new_tokens=100)[1]) == found
    policy = settings()[10]
    alone = outcome(run(model, requests(model, [policy], 2), 2, max_new_tokens=100)[1])
    assert alone == {key: value for key, value in found.items() if key[1] == policy.setting.id}
    tokens = {own: [found[key, own][0] for key in range(2)] for own in {name for _, name in found}}
    names = [policy.setting.id for policy in settings()]
    assert all(tokens[names[0]] != tokens[name] for name in names[2:4])
    assert sum(found[0, name][3] for name in names[4:]) > 8


def test_settings_name_their_bits() -> None:
    def named(**values: Any) -> dict[str, Any]:
        return policies.of(Setting.of("full", **values)).setting.values

    assert named(kv_bits=16, residual=5) == named(key_bits=16) == {}
    assert named(key_bits=4, value_bits=4, group=64) == named(kv_bits=4, group=64) == {"kv_bits": 4, "group": 64}
    assert named(key_bits=8, kv_bits=4) == {"key_bits": 8, "value_bits": 4}
    window = {"kv_budget": 96, "local_window": 16, "ratio": 0.5}
    for policy, wrong, words in (
        ("full", {"kv_bits": 5}, "kv_bits is 5; expected 16, 8, 4, 3, 2"),
        ("full", {"kv_bits": 4, "group": 24}, "group is 24; expected a multiple of 16"),
        ("window", {**window, "kv_bits": 4}, "residual is 32, more than the local_window 16"),
    ):
        with pytest.raises(KvatlasError, match=words):
            policies.of(Setting.of(policy, **wrong))


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
def test_a_budget_in_bytes_decodes_as_the_tokens_that_it_holds() -> None:
    model = endless(models.find(MODEL))
    values = {"local_window": 16, "ratio": 0.3, "kv_bits": 8, "residual": 8}
    policy = policies.of(Setting.of("window", kv_budget="70KiB", **values))
    token, beside = model.kv_bytes(policy.storage)
    tokens = policies.of(Setting.of("window", kv_budget=(70 * 1024 - beside) // token, **values))
    (of_bytes, of_tokens) = (run(model, requests(model, [each], 3), 3)[1] for each in (policy.on(model), tokens))
    assert [(g.key, g.tokens, g.usage.compressions) for g in of_bytes] == [
        (g.key, g.tokens, g.usage.compressions) for g in of_tokens
    ]
    assert all(0 <= 70 * 1024 - (g.usage.peak_kv_tokens * token + beside) < token for g in of_bytes)

"""Native attention equals plain torch, whatever else is in the batch; packed keys and values: their bound and bytes."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvatlas import policies
from kvatlas.bits.storage import pack_bits, unpack_bits
from kvatlas.core import KvatlasError, Setting, Shape, Storage
from kvatlas.cpu import native
from kvatlas.engine.attention import AttentionBackend, backend_for
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import CachedSequence, KVCache, Layer
from kvatlas.engine.gpu.flex import FlexBackend
from kvatlas.engine.native_backend import CpuBackend
from kvatlas.engine.reference import ReferenceBackend
from kvatlas.models import ModelHandle
from tests.command_line import Call
from tests.decoding import endless, requests, run

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(native.load() is None, reason="no native kernels for this machine")
#: New tokens of each sequence in each step.
Steps = list[tuple[int, ...]]
#: Window, soft cap and whether there are sinks.
PLAIN = (None, None, False)


def attend(
    backend: AttentionBackend,
    shape: Shape,
    steps: Steps,
    storage: Storage = Storage(),  # noqa: B008
    kind: tuple[int | None, float | None, bool] = PLAIN,
    members: list[int] | None = None,
    scaling: float = 1.0,
    gap: int = 0,
    device: str = "cpu",
    kv_dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of sequences that grow in steps, and the watched attention of every other one in each step.

    Pages lie in disorder; true positions leave `gap` out between two steps. Only `members` are there, and none of them
    is watched.
    """
    rows = list(range(len(steps[0]))) if members is None else members
    place = torch.device(device)
    own = {"storage": storage, "kv_dtype": kv_dtype}
    cache = KVCache(shape, len(rows), {}, 0, place, torch.float32, backend.page_size, **own)
    sequences: dict[int, CachedSequence] = {row: cache.begin() for row in rows}
    drawn, outputs, noted = {}, {row: list[Tensor]() for row in rows}, list[Tensor]()
    for row in rows:
        source = torch.Generator().manual_seed(row)
        count = max(107, sum(step[row] for step in steps))
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        drawn[row] = [torch.randn(count, heads, shape.head_dim, generator=source).to(device) for heads in sizes]
    window, softcap, sinks = kind
    layer = Layer(
        *(0, scaling * shape.head_dim**-0.5, window, softcap), torch.linspace(-1, 2, shape.heads) if sinks else None
    )
    for number, step in enumerate(steps):
        active = [row for row in rows if step[row]]
        if not active:
            continue
        order = [row for row in active for _ in range(step[row])]
        random.Random(3).shuffle(order)
        for at, row in enumerate(order):
            cache.reserve(sequences[row], sequences[row].length + order[: at + 1].count(row))
        chosen, counts = [sequences[row] for row in active], [step[row] for row in active]
        watched = range(number % 2, len(active), 2) if members is None else ()
        starts = [own.length + number * gap for own in chosen]
        batch = ForwardBatch(cache, chosen, [[0] * count for count in counts], starts, tuple(watched))
        spans = {row: slice(sequences[row].length, sequences[row].length + step[row]) for row in active}
        new = [torch.cat([drawn[row][side][span] for row, span in spans.items()]) for side in range(3)]
        for row, part in zip(active, backend.attend(batch, layer, *new).split(counts), strict=True):
            outputs[row].append(part)
            sequences[row].length += step[row]
        noted += list(batch.attention[0])
    return [torch.cat(own) for own in outputs.values()], noted


GROWING: Steps = [(70, 3), (1, 1), (1, 40), (33, 1), (1, 1), (1, 1)]
SCENES: list[Steps] = [
    [(5, 0, 130, 64, 63, 300), (1, 7, 1, 1, 65, 3)],
    [(100, 17, 400, 1), (1, 1, 1, 1)],
    [(70, 1)],
    GROWING,
]


KINDS = [PLAIN, (25, None, False), (None, 3.0, False), (25, 50.0, True)]
#: Storage, the type of what is not packed, query heads for each KV head, the size of a head, and the scaling.
SHAPES: list[tuple[Storage, torch.dtype, int, int, float]] = [
    (Storage(), torch.float32, 1, 20, 1.0),
    (Storage(), torch.float32, 3, 16, 30.0),
    (Storage(), torch.float32, 8, 80, 1.0),
    (Storage(), torch.float32, 3, 256, 1.0),
    (Storage(), torch.bfloat16, 1, 20, 1.0),
    (Storage(), torch.bfloat16, 3, 64, 30.0),
    (Storage(), torch.bfloat16, 8, 80, 1.0),
    (Storage(8, 8), torch.float32, 3, 64, 1.0),
    (Storage(4, 4, 32, 0), torch.float32, 2, 32, 1.0),
    (Storage(3, 2, 16, 5), torch.float32, 1, 40, 1.0),
    (Storage(16, 4, 32, 16), torch.bfloat16, 8, 16, 1.0),
    (Storage(2, 16, 64, 1), torch.float32, 1, 128, 1.0),
    (Storage(8, 16, 32, 3), torch.bfloat16, 2, 40, 1.0),
]


@needs_native
@pytest.mark.parametrize(
    ("storage", "kv_dtype", "group", "size", "scaling", "kind"),
    [
        # One of the kinds in turn.
        pytest.param(*shape, kind, marks=[pytest.mark.deep] if place != number % len(KINDS) else [])
        for number, shape in enumerate(SHAPES)
        for place, kind in enumerate(KINDS)
    ],
)
def test_native_attention_is_that_of_plain_torch(
    storage: Storage,
    kv_dtype: torch.dtype,
    group: int,
    size: int,
    scaling: float,
    kind: tuple[int | None, float | None, bool],
) -> None:
    """On every target to the bit, alone as among others, for scores that are huge, too."""
    from tests.native.targets import ALL, BEST

    shape = Shape(layers=1, heads=2 * group, kv_heads=2, head_dim=size, hidden=64)
    own: Any = {"kind": kind, "scaling": scaling, "gap": 0 if storage.packed else 7, "kv_dtype": kv_dtype}
    # The larger a score, the more its rounding tells.
    atol, rtol = (2e-5, 1e-4) if storage.packed else (1e-5 * scaling, 1e-5 * scaling)
    for steps in [*SCENES, [(1100,), (2,)]] if size == 20 else SCENES:
        result, noted = attend(CpuBackend(BEST), shape, steps, storage, **own)
        wanted, expected = attend(ReferenceBackend(), shape, steps, storage, **own)
        for ours, theirs in zip([*result, *noted], [*wanted, *expected], strict=True):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
        for number, kernels in enumerate(ALL):
            index = number % len(result)
            (alone,), _ = attend(CpuBackend(kernels), shape, steps, storage, members=[index], **own)
            assert torch.equal(alone, result[index])
    if storage.packed:
        exact, _ = attend(CpuBackend(BEST), shape, GROWING, **own | {"kv_dtype": torch.float32})
        # A window within the unpacked tokens sees no codes.
        unlike = kind[0] is None or kind[0] > storage.residual
        assert all(torch.equal(ours, full) != unlike for ours, full in zip(result, exact, strict=True))


@needs_native
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", [Storage(), Storage(4, 3, 32, 8)])
def test_a_sequence_is_the_same_in_any_chunks(storage: Storage, kv_dtype: torch.dtype) -> None:
    shape = Shape(layers=1, heads=6, kv_heads=2, head_dim=32, hidden=64)
    backend = backend_for(CPU, torch.float32)
    together, _ = attend(backend, shape, GROWING, storage, kv_dtype=kv_dtype)
    one_by_one, _ = attend(backend, shape, [(1, 1)] * 47, storage, kv_dtype=kv_dtype)
    assert torch.equal(one_by_one[0], together[0][:47])
    assert torch.equal(one_by_one[1], together[1])
    sevens, _ = attend(backend, shape, [(7, 1)] * 15 + [(2, 1)], storage, kv_dtype=kv_dtype)
    assert torch.equal(sevens[0], together[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (3, 32), (4, 128)])
def test_flex_attention_over_pages_is_that_of_plain_torch(device: str, group: int, size: int) -> None:
    """Compiled on a GPU, in plain torch without one; cached tokens end around every border of pages of 128."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU that PyTorch can use")
    shape = Shape(layers=1, heads=2 * group, kv_heads=2, head_dim=size, hidden=64)
    steps: Steps = [(0, 1, 127, 128, 129, 255, 325), (1,) * 7]
    result, wanted = (
        attend(backend_for(torch.device(device), torch.float32, name), shape, steps, members=[*range(7)], device=device)
        for name in ("flex", "reference")
    )
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)


def test_without_native_kernels_a_command_says_so_once_and_writes_the_same_tokens(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "embedded:tiny-llama", "CHAIN4", "--problems", 1, "--max-new-tokens", 30, "--workers", 1]
    kvatlas.succeed(*words, "--out", tmp_path / "on")
    monkeypatch.setenv(native.VARIABLE, "off")
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    code, _, said = kvatlas(*words, "--out", tmp_path / "off")
    assert (code, said.count("The native CPU kernels are switched off (KVATLAS_NATIVE=off).")) == (0, 1)
    assert "hold the same tokens" in kvatlas.succeed("compare", tmp_path / "off", tmp_path / "on")


def test_an_unknown_backend_is_a_sentence() -> None:
    with pytest.raises(KvatlasError, match="The attention backend is 'fast'; expected 'reference' or 'flex' here"):
        backend_for(CPU, torch.float32, "fast")


def test_flex_attention_is_compiled_for_one_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for any number of them is not the one that splits a sequence over the processors of a GPU."""
    compiled: list[list[torch.Size]] = []

    def noted(graph: Any, inputs: Any) -> Any:
        compiled.append([item.shape for item in inputs if isinstance(item, torch.Tensor)])
        return graph

    # Kernels that other tests compiled count towards torch's limit.
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda kernel, **_: compile_(kernel, backend=noted))
    backend, shape = FlexBackend(compiled=True), Shape(layers=1, heads=6, kv_heads=2, head_dim=32, hidden=64)
    for length, rows in ((300, 2), (700, 2), (700, 3), (800, 4), (900, 2)):
        with torch.inference_mode():
            attend(backend, shape, [(length,) * rows, (1,) * rows], members=[*range(rows)])
    batches = [next(shape[0] for shape in shapes if len(shape) == 4) for shapes in compiled]
    assert batches == [2, 2, 3, 4]
    assert all(type(batch) is int for batch in batches)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("size", "group"), [(16, 16), (20, 16), (32, 32), (80, 32), (128, 64)])
def test_a_round_trip_is_within_the_bound(bits: int, size: int, group: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randn(500, size, generator=generator) * 3 + torch.randn(500, 1, generator=generator)
    rows = pack_bits(numbers, bits, group)
    assert rows.shape[-1] == Storage(bits, bits, group).row_bytes(bits, size)
    differences = (unpack_bits(rows, size, bits, group) - numbers).abs()
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
        assert torch.equal(unpack_bits(pack_bits(numbers, bits, 32), 32, bits, 32)[:2], numbers[:2])
        assert torch.equal(unpack_bits(pack_bits(numbers, bits, 16), 32, bits, 16), numbers)


def test_settings_name_their_bits() -> None:
    def named(**values: Any) -> dict[str, Any]:
        return policies.from_setting(Setting.from_parameters("full", **values)).setting.values

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
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_keys_and_values_take_half_the_memory_beside_short_weights(tiny_llama: ModelHandle, weights: str) -> None:
    short = replace(tiny_llama, options=replace(tiny_llama.options, weights=weights))
    packed, whole = Storage(8, 8, 32, 16), Storage()
    assert [2 * size for size in short.kv_bytes(whole)] == [*tiny_llama.kv_bytes(whole)]
    # Packed rows are as long beside any weights, and the newest tokens are kept in float32.
    assert short.kv_bytes(packed) == tiny_llama.kv_bytes(packed)
    full = policies.from_setting(Setting.from_parameters("full"))
    texts = {}
    for name in ("cpu", "reference"):
        engine, generations = run(short, requests(short, [full], 2), 2, name, temperature=0.0, max_new_tokens=24)
        texts[name] = sorted((each.key, each.tokens) for each in generations)
        assert engine.cache.bytes == len(engine.cache.holders) * engine.cache.page_size * short.kv_bytes_per_token
    assert texts["cpu"] == texts["reference"]


@needs_native
def test_a_budget_in_bytes_decodes_as_the_tokens_that_it_holds(tiny_llama: ModelHandle) -> None:
    model = endless(tiny_llama)
    values = {"local_window": 16, "ratio": 0.3, "kv_bits": 8, "residual": 8}
    policy = policies.from_setting(Setting.from_parameters("window", kv_budget="70KiB", **values))
    token, beside = model.kv_bytes(policy.storage)
    tokens = policies.from_setting(Setting.from_parameters("window", kv_budget=(70 * 1024 - beside) // token, **values))
    (of_bytes, of_tokens) = (run(model, requests(model, [each], 3), 3)[1] for each in (policy.bind(model), tokens))
    assert [(g.key, g.tokens, g.usage.compressions) for g in of_bytes] == [
        (g.key, g.tokens, g.usage.compressions) for g in of_tokens
    ]
    assert all(0 <= 70 * 1024 - (g.usage.peak_kv_tokens * token + beside) < token for g in of_bytes)

"""Native attention equals plain torch, and a sequence's numbers do not depend on what else is in the batch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas import native
from kvatlas.core import KvatlasError
from kvatlas.engine.attention import AttentionBackend, CpuBackend, ForwardBatch, ReferenceBackend
from kvatlas.engine.cache import CachedSequence, KVCache, Layer
from kvatlas.engine.engine import backend_for
from kvatlas.engine.flex import FlexBackend
from kvatlas.models import Shape
from kvatlas.native import load
from tests.command_line import Call

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
MODEL = "embedded:tiny-llama"
needs_native = pytest.mark.skipif(load() is None, reason="no native kernels for this machine")


def fill(cache: KVCache, lengths: list[int], generator: torch.Generator) -> list[CachedSequence]:
    """Sequences whose pages lie in disorder, filled with random keys and values."""
    results = [cache.begin() for _ in lengths]
    order = [number for number, length in enumerate(lengths) for _ in range(length)]
    random.Random(3).shuffle(order)
    have = [0] * len(lengths)
    for number in order:
        have[number] += 1
        cache.reserve(results[number], have[number])
    for sequence, length in zip(results, lengths, strict=True):
        sequence.length = length
        slots = cache.slots(sequence)
        for pool in (*cache.keys, *cache.values):
            pool[:, slots] = torch.randn(pool.shape[0], length, pool.shape[2], generator=generator).to(pool)
    return results


def attend(
    backend: AttentionBackend,
    shape: Shape,
    lengths: list[int],
    counts: list[int],
    kind: tuple[int | None, float | None, bool] = (None, None, False),
    members: list[int] | None = None,
    device: str = "cpu",
    scaling: float = 1.0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs and the watched attention of the sequences `members` of a scene."""
    generator = torch.Generator().manual_seed(len(lengths))
    cache = KVCache(shape, len(lengths), {}, 0, torch.device(device), torch.float32, backend.page_size)
    sequences = fill(cache, lengths, generator)
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    tensors = [torch.randn(sum(counts), heads, shape.head_dim, generator=generator) for heads in sizes]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    chosen = list(range(len(lengths))) if members is None else members
    window, softcap, sinks = kind
    if window is not None:
        places = cache.watch_window(0)
        for sequence in sequences:
            places[:, cache.slots(sequence)] = 2 * torch.arange(sequence.length, dtype=torch.int32)
    for index in chosen:
        cache.reserve(sequences[index], lengths[index] + counts[index])
    batch = ForwardBatch(
        cache,
        [sequences[index] for index in chosen],
        [[0] * counts[index] for index in chosen],
        [2 * lengths[index] for index in chosen],
        watched=tuple(range(0, len(chosen), 2)) if members is None else (),
    )
    rows = torch.cat([torch.arange(starts[index], starts[index] + counts[index]) for index in chosen])
    sink = torch.linspace(-1, 2, shape.heads) if sinks else None
    layer = Layer(0, scaling * shape.head_dim**-0.5, window, softcap, sink)
    out = backend.attend(batch, layer, *(tensor[rows].to(device) for tensor in tensors))
    return list(out.split([counts[index] for index in chosen])), list(batch.attention[0])


SCENES = [
    ([5, 0, 130, 64, 63, 300], [1, 7, 1, 1, 65, 3]),
    ([100, 17, 400, 1], [1, 1, 1, 1]),
    ([0, 0], [70, 1]),
]


@needs_native
@pytest.mark.parametrize("kind", [(None, None, False), (40, None, False), (None, 3.0, False), (40, 50.0, True)])
@pytest.mark.parametrize(("group", "size", "scaling"), [(1, 20, 1.0), (3, 16, 30.0), (8, 80, 1.0), (3, 256, 1.0)])
def test_native_attention_is_that_of_plain_torch(
    group: int, size: int, scaling: float, kind: tuple[int | None, float | None, bool]
) -> None:
    """On every target to the bit, alone as among others, for scores that are huge, too."""
    from tests.native.targets import ALL, BEST

    shape = Shape(layers=1, heads=2 * group, kv_heads=2, head_dim=size, hidden=64)
    for lengths, counts in [*SCENES, ([4095], [2])] if size == 20 else SCENES:
        result, noted = attend(CpuBackend(BEST), shape, lengths, counts, kind, scaling=scaling)
        wanted, expected = attend(ReferenceBackend(), shape, lengths, counts, kind, scaling=scaling)
        for own, theirs in zip([*result, *noted], [*wanted, *expected], strict=True):
            # The larger a score, the more its rounding tells.
            torch.testing.assert_close(own, theirs, atol=1e-5 * scaling, rtol=1e-5 * scaling)
        for number, kernels in enumerate(ALL):
            index = number % len(lengths)
            (alone,), _ = attend(CpuBackend(kernels), shape, lengths, counts, kind, [index], scaling=scaling)
            assert torch.equal(alone, result[index])


#: Cached tokens before the new one, around every border of pages of 128.
BORDERS = [0, 1, 127, 128, 129, 255, 325]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (3, 32), (4, 128)])
def test_flex_attention_over_pages_is_that_of_plain_torch(device: str, group: int, size: int) -> None:
    """Compiled on a GPU, in plain torch without one."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU that PyTorch can use")
    shape = Shape(layers=1, heads=2 * group, kv_heads=2, head_dim=size, hidden=64)
    everyone = list(range(len(BORDERS)))
    result, wanted = (
        attend(
            backend_for(torch.device(device), torch.float32, name),
            shape,
            BORDERS,
            [1] * 7,
            members=everyone,
            device=device,
        )[0]
        for name in ("flex", "reference")
    )
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)


def test_without_native_kernels_a_command_says_so_once_and_writes_the_same_tokens(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", MODEL, "CHAIN4", "--problems", "1", "--samples", "1", "--max-new-tokens", "30", "--workers", "1"]
    kvatlas.succeed(*words, "--out", tmp_path / "on")
    monkeypatch.setenv(native.VARIABLE, "off")
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    code, _, said = kvatlas(*words, "--out", tmp_path / "off")
    assert (code, said.count("The native CPU kernels are switched off (KVATLAS_NATIVE=off).")) == (0, 1)
    assert "hold the same tokens" in kvatlas.succeed("compare", tmp_path / "off", tmp_path / "on")


def test_an_unknown_backend_is_a_sentence() -> None:
    with pytest.raises(KvatlasError, match="The attention backend is 'fast'; expected 'reference' or 'flex' here"):
        backend_for(torch.device("cpu"), torch.float32, "fast")


def test_flex_attention_is_compiled_for_one_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for any number of them is not the one that splits a sequence over the processors of a GPU."""
    compiled: list[list[torch.Size]] = []

    def noted(graph: Any, inputs: Any) -> Any:
        compiled.append([item.shape for item in inputs if isinstance(item, torch.Tensor)])
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda kernel, **_: compile_(kernel, backend=noted))
    backend, shape = FlexBackend(compiled=True), Shape(layers=1, heads=6, kv_heads=2, head_dim=32, hidden=64)
    for lengths in ([300] * 2, [700] * 2, [700] * 3, [800] * 4, [900] * 2):
        with torch.inference_mode():
            attend(backend, shape, lengths, [1] * len(lengths), members=list(range(len(lengths))))
    batches = [next(shape[0] for shape in shapes if len(shape) == 4) for shapes in compiled]
    assert batches == [2, 2, 3, 4]
    assert all(type(batch) is int for batch in batches)

"""Native attention equals plain torch, and a sequence's numbers do not depend on what else is in the batch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from kvatlas.core import KvatlasError
from kvatlas.engine.attention import AttentionBackend, ForwardBatch
from kvatlas.engine.cache import CachedSequence, KVCache, Layer
from kvatlas.engine.engine import backend_for
from kvatlas.engine.flex import FlexBackend
from kvatlas.models import ModelHandle, Shape
from kvatlas.models.packing import PackedLinear, packed
from kvatlas.native import load

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
needs_native = pytest.mark.skipif(load() is None, reason="no native kernels for this machine")


def cache_of(shape: Shape, rows: int, page_size: int = 64) -> KVCache:
    return KVCache(shape, rows, {}, 0, torch.device("cpu"), torch.float32, page_size)


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
            pool[:, slots] = torch.randn(pool.shape[0], length, pool.shape[2], generator=generator)
    return results


def drawn(shape: Shape, counts: list[int], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    return tuple(torch.randn(sum(counts), heads, shape.head_dim, generator=generator) for heads in sizes)


def attend(
    backend: AttentionBackend,
    shape: Shape,
    lengths: list[int],
    counts: list[int],
    kind: tuple[int | None, float | None, bool] = (None, None, False),
    members: list[int] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the sequences `members` of a scene get, each for itself: outputs and watched attention."""
    generator = torch.Generator().manual_seed(len(lengths))
    cache = cache_of(shape, len(lengths), backend.page_size)
    sequences = fill(cache, lengths, generator)
    tensors = drawn(shape, counts, generator)
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
    layer = Layer(0, shape.head_dim**-0.5, window, softcap, torch.linspace(-1, 2, shape.heads) if sinks else None)
    out = backend.attend(batch, layer, *(tensor[rows] for tensor in tensors))
    return list(out.split([counts[index] for index in chosen])), list(batch.attention[0])


SCENES = [
    ([5, 0, 130, 64, 63, 300], [1, 7, 1, 1, 65, 3]),
    ([100, 17, 400, 1], [1, 1, 1, 1]),
    ([0, 0], [70, 1]),
]


@needs_native
@pytest.mark.parametrize("kind", [(None, None, False), (40, None, False), (None, 3.0, False), (40, 50.0, True)])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("size", [16, 64, 80])
def test_native_attention_is_that_of_plain_torch(
    group: int, size: int, kind: tuple[int | None, float | None, bool]
) -> None:
    shape = Shape(layers=1, heads=2 * group, kv_heads=2, head_dim=size, hidden=64)
    for lengths, counts in SCENES:
        result, noted = attend(backend_for(torch.device("cpu"), torch.float32), shape, lengths, counts, kind)
        wanted, expected = attend(
            backend_for(torch.device("cpu"), torch.float32, "reference"), shape, lengths, counts, kind
        )
        for own, theirs in zip([*result, *noted], [*wanted, *expected], strict=True):
            torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


@needs_native
def test_a_sequence_alone_gets_the_same_bits() -> None:
    shape = Shape(layers=1, heads=6, kv_heads=2, head_dim=64, hidden=64)
    backend = backend_for(torch.device("cpu"), torch.float32)
    for lengths, counts in SCENES:
        together, _ = attend(backend, shape, lengths, counts)
        for index in range(len(lengths)):
            ((alone), *_), _ = attend(backend, shape, lengths, counts, members=[index])
            assert torch.equal(alone, together[index])


def test_flex_attention_over_pages_is_that_of_plain_torch() -> None:
    shape = Shape(layers=1, heads=6, kv_heads=2, head_dim=32, hidden=64)
    lengths, counts = SCENES[1]
    result, _ = attend_unwatched("flex", shape, lengths, counts)
    wanted, _ = attend_unwatched("reference", shape, lengths, counts)
    for own, theirs in zip(result, wanted, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


def attend_unwatched(name: str, shape: Shape, lengths: list[int], counts: list[int]) -> Any:
    backend = backend_for(torch.device("cpu"), torch.float32, name)
    return attend(backend, shape, lengths, counts, members=list(range(len(lengths))))


def test_an_unknown_backend_is_a_sentence() -> None:
    with pytest.raises(KvatlasError, match="The attention backend is 'fast'; expected 'reference' or 'flex' here"):
        backend_for(torch.device("cpu"), torch.float32, "fast")


@needs_native
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3"])
def test_logits_of_a_row_do_not_depend_on_how_many_there_are(random_models: dict[str, ModelHandle], kind: str) -> None:
    model = random_models[kind].load()
    tokens = torch.arange(3, 67)[None] % 60
    with torch.inference_mode():
        states = model.get_input_embeddings()(tokens)
        layer = model.get_decoder().layers[0].mlp
        whole = model.get_output_embeddings()(layer(states))
        for count in (1, 3, 7):
            some = model.get_output_embeddings()(layer(states[:, :count]))
            assert torch.equal(some, whole[:, :count])


@needs_native
def test_a_model_of_somebody_else_gets_its_weights_back(tiny_llama: ModelHandle) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama.folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        wanted = model(inputs).logits
        with packed(model):
            assert any(isinstance(module, PackedLinear) for module in model.modules())
            torch.testing.assert_close(model(inputs).logits, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(inputs).logits, wanted)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


WITHOUT = """
import torch
from kvatlas import models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
model = models.find("embedded:tiny-llama")
full = policies.of(Setting.of("full"))
engine = Engine(model, model.load(), [full], Sampling(0.8, 20, 0.95, 30), 4)
(found,) = engine.run([Request(0, tuple(range(10, 40)), 5, (full,))])
print(engine.backend.name, *found.tokens)
"""


def test_without_native_kernels_plain_torch_decodes() -> None:
    def run(native: str) -> list[str]:
        environment = {**os.environ, "KVATLAS_NATIVE": native, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WITHOUT]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    name, *tokens = run("off")
    assert name == "reference"
    assert tokens == run("")[1:]


def test_a_command_says_once_that_it_computes_with_plain_torch() -> None:
    command = [
        sys.executable,
        "-m",
        "kvatlas",
        "run",
        "embedded:tiny-llama",
        "CHAIN4",
        "--problems",
        "1",
        "--samples",
        "1",
    ]
    command += ["--policy", "full", "--max-new-tokens", "5"]
    environment = {**os.environ, "KVATLAS_NATIVE": "off", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.count("The native CPU kernels are switched off (KVATLAS_NATIVE=off).") == 1


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

"""Keys with large biases: packed without them, they are as exact in few bits as those of other models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas import models, policies
from kvatlas.bits.key_biases import KeyBiases, find_key_biases
from kvatlas.bits.storage import turn
from kvatlas.core import Setting, Shape, Storage
from kvatlas.cpu import native
from kvatlas.engine import Request
from kvatlas.engine.attention import AttentionBackend
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import CachedSequence, KVCache, Layer
from kvatlas.engine.native_backend import CpuBackend
from kvatlas.engine.reference import ReferenceBackend
from kvatlas.models import ModelHandle
from tests.decoding import endless, prompts, run
from tests.r1 import copied

CPU = torch.device("cpu")
FIRST = 700
LENGTH = 150
needs_native = pytest.mark.skipif(native.load() is None, reason="no native kernels for this machine")


class Rotary:
    """The angles of rotary positions as transformers gives them."""

    def __init__(self, size: int) -> None:
        self.frequencies = 10_000.0 ** -(torch.arange(0, size, 2) / size)

    def __call__(self, _x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.frequencies
        twice = torch.cat([angles, angles], -1)
        return twice.cos(), twice.sin()


class Case:
    """A sequence of random keys with biases, from the position `FIRST` on."""

    def __init__(self, size: int, storage: Storage) -> None:
        source = torch.Generator().manual_seed(size)
        self.shape = Shape(layers=1, heads=6, kv_heads=2, head_dim=size, hidden=64, key_biases=True)
        self.storage = storage
        self.biases = KeyBiases([torch.randn(2, size, generator=source) * 30], Rotary(size))
        self.biases.angles(FIRST + LENGTH)
        self.query, key, self.value = (torch.randn(LENGTH, heads, size, generator=source) for heads in (6, 2, 2))
        self.key = key + self.biases.rotated(0, torch.arange(FIRST, FIRST + LENGTH)[None]).transpose(0, 1)

    def attend(self, backend: AttentionBackend, steps: list[int]) -> tuple[Tensor, KVCache, CachedSequence]:
        """Return the outputs in steps of so many tokens, the cache, and the sequence in it."""
        cache = KVCache(self.shape, 1, {}, 0, CPU, torch.float32, storage=self.storage, key_biases=self.biases)
        sequence = cache.begin()
        cache.reserve(sequence, LENGTH)
        outputs = []
        for count in steps:
            done = slice(sequence.length, sequence.length + count)
            batch = ForwardBatch(cache, [sequence], [[0] * count], [FIRST + sequence.length], (0,))
            layer = Layer(0, self.shape.head_dim**-0.5)
            outputs.append(backend.attend(batch, layer, self.query[done], self.key[done], self.value[done]))
            sequence.length += count
        return torch.cat(outputs), cache, sequence


@pytest.mark.parametrize("size", [16, 20, 80, 128])
def test_turning_twice_gives_numbers_back(size: int) -> None:
    numbers = torch.randn(7, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn(turn(numbers)), numbers)
    torch.testing.assert_close(turn(numbers).norm(dim=-1), numbers.norm(dim=-1))
    single = torch.zeros(size)
    single[3] = 8.0
    assert turn(single).abs().max() < 8.0


@needs_native
@pytest.mark.parametrize("size", [20, 64, 80, 128])
@pytest.mark.parametrize(
    "storage", [Storage(8, 8, 32, 8), Storage(4, 16, 32, 0), Storage(3, 4, 16, 5), Storage(2, 2, 64, 32)]
)
def test_kernels_read_keys_with_biases_as_plain_torch_does(size: int, storage: Storage) -> None:
    from tests.native.targets import ALL

    case = Case(size, storage)
    expected, plain, sequence = case.attend(ReferenceBackend(), [90, 1, 59])
    for kernels in ALL:
        output, cache, own = case.attend(CpuBackend(kernels), [90, 1, 59])
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(cache.keys[0][:, cache.slots(own)], plain.keys[0][:, plain.slots(sequence)])
        one_by_one, _, _ = case.attend(CpuBackend(kernels), [1] * LENGTH)
        assert torch.equal(one_by_one, output)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_keys_come_back_as_exact_as_without_their_biases(bits: int) -> None:
    case = Case(64, Storage(bits, bits))
    _, cache, sequence = case.attend(ReferenceBackend(), [LENGTH])
    back = cache.read(0, 0, cache.slots(sequence)).transpose(0, 1)
    # The channels of these keys have a deviation of 1, and their biases one of 30.
    assert (back - case.key).abs().mean() < 2.0 / 2**bits


def test_kept_tokens_keep_their_positions() -> None:
    """After a compression in which each KV head keeps other tokens, keys are what they were."""
    case = Case(64, Storage(8, 8))
    _, cache, sequence = case.attend(ReferenceBackend(), [LENGTH])
    before = cache.read(0, 0, cache.slots(sequence))
    kept = torch.stack([torch.arange(0, LENGTH, 3), torch.arange(1, LENGTH, 3)])[None]
    cache.compact(sequence, kept, ())
    after = cache.read(0, 0, cache.slots(sequence))
    for head in range(2):
        assert torch.equal(after[head], before[head, kept[0, head]])


@pytest.fixture
def biased(random_models: dict[str, ModelHandle], tmp_path: Path) -> ModelHandle:
    """A Qwen2 with random weights and key biases like those of Qwen2.5."""
    model = copied(random_models["qwen2"], tmp_path / "biased")
    weights = load_file(model.folder / "model.safetensors")
    source = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            tensor.copy_(torch.randn(tensor.shape, generator=source))
            tensor[3] = 150.0
    save_file(weights, model.folder / "model.safetensors", metadata={"format": "pt"})
    return models.find(str(model.folder))


def test_biases_of_a_model_are_found_by_its_own_rotation(biased: ModelHandle) -> None:
    assert biased.shape.key_biases
    found = find_key_biases(biased.load(), list(biased.shape.place))
    assert found is not None
    weights = load_file(biased.folder / "model.safetensors")
    for number, bias in enumerate(found.layers):
        assert torch.equal(bias.flatten(), weights[f"model.layers.{number}.self_attn.k_proj.bias"])


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "qwen3_next"])
def test_models_without_biases_or_with_another_rotation_are_packed_as_they_are(
    kind: str, random_models: dict[str, ModelHandle]
) -> None:
    model = random_models[kind]
    assert find_key_biases(model.load(), list(model.shape.place)) is None


def logits_after(model: ModelHandle, prompt: tuple[int, ...], backend: str | None, **values: Any) -> Tensor:
    """Return the logits of the first two new tokens under the full cache, likeliest first."""
    found: list[Tensor] = []

    def keep(_tokens: Sequence[int], logits: Tensor) -> Tensor:
        found.append(logits.clone())
        return logits

    policy = policies.from_setting(Setting.from_parameters("full", **values))
    request = Request(0, prompt, 0, (policy,), logits_processor=keep)
    run(model, [request], 1, backend, temperature=0.0, max_new_tokens=2)
    return torch.stack(found[:2])


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_engine_decodes_without_the_biases_in_its_packed_keys(biased: ModelHandle, backend: str | None) -> None:
    model = endless(biased)
    (prompt,) = prompts(model, 1, (60, 61))
    exact = logits_after(model, prompt, backend)
    packed = logits_after(model, prompt, backend, kv_bits=8, residual=0)
    # With the biases in the packed keys, it is 0.17 deviations.
    assert (packed - exact).abs().mean() < 0.05 * exact.std()

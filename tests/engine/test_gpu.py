"""The CUDA path on a stand-in for a GPU: every policy's signals, and what capturing a step as a graph demands."""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.models.weights import load_weights
from kvatlas.policies import Policy, ReferenceTrace, Signal
from tests.decoding import endless, outcome
from tests.engine.gpu_stand_in import Gpu, gpu, moved

__all__ = ["gpu"]

SMALL: dict[str, dict[str, Any]] = {"snapkv": {"queries": 12}, "vase": {"queries": 16}, "lazyeviction": {"alpha": 0.01}}
EVERY = [name for name in policies.policies.names() if name != "full"]
#: Prompts that a compression follows soon, and such that fill a page soon.
SHORT, LONG = 6, 118
GROWING = ("full", "snapkv")


def setting(name: str, prompt: int) -> Policy:
    values = {
        "kv_budget": prompt + 18,
        "local_window": 5,
        "ratio": 0.3,
        "ratio_over": "thinking",
        **SMALL.get(name, {}),
    }
    return policies.from_setting(Setting.from_parameters(name, **(values if name != "full" else {})))


def on_cpu(handle: ModelHandle) -> Any:
    model: Any = load_weights(handle.name, handle.folder, "float32", "cpu")
    model.model.layers = model.model.layers[: handle.shape.layers]
    return model


def decode(
    handle: ModelHandle, model: Any, names: Iterable[str], backend: str | None = None, prompt: int = SHORT
) -> tuple[Engine, Any]:
    """A sequence under each of these policies, two where they are long, 22 new tokens each: they compress once."""
    chosen = tuple(setting(name, prompt) for name in names)
    device = next(model.parameters()).device
    engine = Engine(handle, model, chosen, Sampling(0.8, 20, 0.95, max_new_tokens=22), 40, backend)
    reference = ReferenceTrace(tuple(range(5, 45)), torch.linspace(0, 1, 40).to(device))
    prompts = [tuple(5 + (7 * row + 3 * i) % 100 for i in range(prompt + row)) for row in range(1 + (prompt == LONG))]
    work = [Request(row, ids, 100 + row, chosen, reference=reference) for row, ids in enumerate(prompts)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return engine, outcome(engine.run(work))


@pytest.mark.parametrize("watching", [False, True])
def test_every_policy_writes_on_the_gpu_what_it_writes_on_a_cpu(
    tiny_llama: ModelHandle, gpu: Gpu, watching: bool
) -> None:
    model = endless(tiny_llama)
    names = tuple(name for name in EVERY if (Signal.ATTENTION in policies.policies.get(name).observes) == watching)
    seen = {signal for name in names for signal in policies.policies.get(name).observes}
    assert seen == ({Signal.ATTENTION} if watching else set(Signal) - {Signal.ATTENTION})
    engine, written = decode(model, moved(on_cpu(model)), names)
    assert written == decode(model, on_cpu(model), names, "reference")[1]
    assert engine.cache.keys[0].device.type == "cuda"
    assert gpu.captured
    assert engine.graphs.steps


def test_steps_are_graphs_through_growth(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """The cache grows on the way, that of the first layer alone."""
    shallow = endless(tiny_llama)
    shallow.keep_shape(replace(tiny_llama.shape, layers=1))
    engine, written = decode(shallow, moved(on_cpu(shallow)), GROWING, prompt=LONG)
    assert written == decode(shallow, on_cpu(shallow), GROWING, "reference", LONG)[1]
    assert engine.graphs.steps > 18
    # One generation of graphs after the other: each has its pool, and left nothing in the last one.
    assert engine.cache.moves > 1
    assert len(gpu.pools) > 1
    assert [pool.retired for pool in gpu.pools] == [True] * (len(gpu.pools) - 1) + [False]

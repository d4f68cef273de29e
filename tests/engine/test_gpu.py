"""The CUDA path on a stand-in for a GPU: every policy's signals, and what capturing a step as a graph demands."""

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request, memory_plan, scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.gpu.compiled import compiled_layers
from kvatlas.engine.rows import compress
from kvatlas.machine import compiled, compiles
from kvatlas.models import ModelHandle
from kvatlas.models.weights import load_weights
from kvatlas.policies import Policy, Signal
from kvatlas.sweeps.measured_rate import TimedEngine
from tests.decoding import endless, outcome
from tests.engine.gpu_stand_in import Gpu, gpu, moved

__all__ = ["gpu"]

SMALL: dict[str, dict[str, Any]] = {"snapkv": {"queries": 12}, "vase": {"queries": 16}, "lazyeviction": {"alpha": 0.01}}
SMALL |= {name: {"queries": 12} for name in ("caote", "dropkv", "expected_attention")}
#: Scores that outlive a compression, and the plan.
SMALL["keydiff"] = {"plan_prefix": 3, "scope": "kv_head"}
SMALL["h2o"] = {"per_query": True}
SMALL["lagkv"] = {"sinks": 3}
#: All that need no file which the embedded models lack.
EVERY = [name for name in policies.policies.names() if name not in ("full", "learned")]
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


def shallow(handle: ModelHandle) -> ModelHandle:
    """The first layer alone of a model without an end token."""
    model = endless(handle)
    model.keep_shape(replace(handle.shape, layers=1))
    return model


def on_cpu(handle: ModelHandle) -> Any:
    model: Any = load_weights(handle.name, handle.folder, "float32", "cpu")
    model.model.layers = model.model.layers[: handle.shape.layers]
    return model


def decode(
    handle: ModelHandle, model: Any, names: Iterable[str], backend: str | None = None, prompt: int = SHORT
) -> tuple[Engine, Any]:
    """A sequence under each of these policies, two where they are long, 22 new tokens each: they compress once."""
    chosen = tuple(setting(name, prompt) for name in names)
    engine = Engine(handle, model, chosen, Sampling(0.8, 20, 0.95, max_new_tokens=22), 40, backend)
    prompts = [tuple(5 + (7 * row + 3 * i) % 100 for i in range(prompt + row)) for row in range(1 + (prompt == LONG))]
    work = [Request(row, ids, 100 + row, chosen) for row, ids in enumerate(prompts)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return engine, outcome(engine.run(work))


@pytest.mark.parametrize("watching", [False, True])
def test_every_policy_writes_what_it_writes_on_a_cpu_starts_few_kernels_and_rarely_waits(
    tiny_llama: ModelHandle, gpu: Gpu, watching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of waits does not grow with layers and heads; noise for all tokens takes some 200 kernels once."""
    counts: dict[str, tuple[int, int]] = {}

    def counted(model: ModelHandle, cache: Any, row: Any) -> int:
        before = (gpu.launches, gpu.waits)
        evicted = compress(model, cache, row)
        counts[row.policies[0].name] = (gpu.launches - before[0], gpu.waits - before[1])
        return evicted

    model = endless(tiny_llama)
    names = tuple(name for name in EVERY if (Signal.ATTENTION in policies.policies.get(name).observes) == watching)
    seen = {signal for name in names for signal in policies.policies.get(name).observes}
    assert seen == ({Signal.ATTENTION} if watching else set(Signal) - {Signal.ATTENTION})
    expected = decode(model, on_cpu(model), names, "reference")[1]
    monkeypatch.setattr(scheduler, "compress", counted)
    engine, written = decode(model, moved(on_cpu(model)), names)
    assert written == expected
    assert engine.cache.keys[0].device.type == "cuda"
    assert gpu.captured
    assert engine.graphs.steps
    layers = tiny_llama.shape.layers
    assert set(counts) == set(names)
    for name, (launches, waits) in counts.items():
        assert launches <= 60 * layers + 250, (name, launches)
        assert waits <= 20, (name, waits)


def test_steps_are_graphs_through_growth(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """The cache grows on the way, that of the first layer alone."""
    model = shallow(tiny_llama)
    engine, written = decode(model, moved(on_cpu(model)), GROWING, prompt=LONG)
    assert written == decode(model, on_cpu(model), GROWING, "reference", LONG)[1]
    assert engine.graphs.steps > 18
    # One generation of graphs after the other: each has its pool, and left nothing in the last one.
    assert engine.cache.moves > 1
    assert len(gpu.pools) > 1
    assert [pool.retired for pool in gpu.pools] == [True] * (len(gpu.pools) - 1) + [False]


def test_a_cache_with_the_room_of_a_plan_never_grows(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    model = shallow(tiny_llama)
    chosen = tuple(setting(name, LONG) for name in GROWING)
    engine = Engine(model, moved(on_cpu(model)), chosen, Sampling(0.8, 20, 0.95, max_new_tokens=22), 4)
    vars(model)["device"] = "cuda:0"
    engine.reserve(memory_plan.peak(model, chosen, 4, 2, LONG + 1, 22))
    before = engine.cache.moves
    prompt = tuple(5 + 3 * i % 100 for i in range(LONG))
    work = [Request(row, prompt, row, chosen) for row in range(2)]
    list(engine.run(work))
    assert engine.cache.moves == before
    assert len(gpu.pools) == 1


def test_timed_steps_are_captured_and_leave_no_trace(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    model = shallow(tiny_llama)
    policy = setting("window", SHORT)
    engine = TimedEngine(model, moved(on_cpu(model)), [policy], Sampling(0.8, 20, 0.95, max_new_tokens=22), 3)
    seconds, tokens = engine.time_steps([policy], 200, 4)
    assert seconds > 0
    assert tokens == 12
    assert gpu.captured == 1
    requests = [Request(0, tuple(range(5, 11)), 100, (policy,))]
    again = outcome(engine.run(requests))
    fresh = Engine(model, on_cpu(model), [policy], Sampling(0.8, 20, 0.95, max_new_tokens=22), 3, "reference")
    assert again == outcome(fresh.run(requests))


def test_without_a_compiler_plain_torch_decodes(
    tiny_llama: ModelHandle, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore")

    monkeypatch.setattr(torch, "compile", refuse)
    compiles.cache_clear()
    model = shallow(tiny_llama)
    with pytest.warns(UserWarning, match=r"cannot compile for this GPU \(Failed to find C compiler.*variable\.\)"):
        engine, written = decode_warned(model, moved(on_cpu(model)))
    assert engine.backend.name == "reference"
    assert written == decode(model, on_cpu(model), ("window",), "reference")[1]
    compiles.cache_clear()


def decode_warned(handle: ModelHandle, model: Any) -> tuple[Engine, Any]:
    policy = setting("window", SHORT)
    engine = Engine(handle, model, [policy], Sampling(0.8, 20, 0.95, max_new_tokens=22), 40)
    return engine, outcome(engine.run([Request(0, tuple(5 + 3 * i % 100 for i in range(SHORT)), 100, (policy,))]))


def test_prompts_are_read_apart_from_rows_in_decoding(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """All decoding steps are captured, also those between the parts of a long prompt that comes later."""
    model = shallow(tiny_llama)
    policy = setting("full", SHORT)
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=14)
    long = tuple(5 + 7 * i % 100 for i in range(1300))

    def source() -> Any:
        yield Request(0, tuple(range(5, 40)), 1, (policy,))
        yield None
        yield Request(1, long, 2, (policy,))

    engine = Engine(model, moved(on_cpu(model)), [policy], sampling, 4)
    written = outcome(engine.run(source()))
    fresh = Engine(model, on_cpu(model), [policy], sampling, 4, "reference")
    assert written == outcome(fresh.run(source()))
    # One pass for the short prompt, three for the long one.
    assert engine.passes - engine.graphs.steps == 4


def test_prompts_and_rows_in_decoding_take_turns(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """Many prompts let the others go on; a prompt after many passes without any does not wait."""
    model = endless(tiny_llama)
    engine = Engine(model, moved(on_cpu(model)), [setting("full", SHORT)], Sampling(), 4)
    turns = engine.scheduler
    decoding = SimpleNamespace(prompt_left=0)
    prompt = SimpleNamespace(prompt_left=9)

    def passes(rows: list[Any], count: int) -> list[int]:
        turns.rows = rows
        return [turns._candidates()[-1].prompt_left for _ in range(count)]

    most = scheduler.PROMPT_PASSES
    assert passes([decoding, prompt], most + 2) == [9] * most + [0, 9]
    assert passes([decoding], 3) == [0] * 3
    assert passes([decoding, prompt], most + 1) == [9] * most + [0]


def test_what_does_not_compile_is_computed_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    errors: list[Exception] = [ValueError("of the function itself")]

    def fail(*_: Any) -> Any:
        raise errors[0]

    monkeypatch.setattr(torch, "compile", lambda _function, **_: fail)
    doubled = compiled(lambda number: 2 * number)
    with pytest.raises(ValueError, match="of the function itself"):
        doubled(torch.ones(1))
    # A smaller batch may have room for it.
    errors[0] = BackendCompilerFailed(compiles, RuntimeError("CUDA out of memory"), None)
    with pytest.raises(BackendCompilerFailed):
        doubled(torch.ones(1))
    errors[0] = BackendCompilerFailed(compiles, RuntimeError("no such instruction"), None)
    with pytest.warns(UserWarning, match="cannot compile"):
        assert doubled(torch.ones(1)) == 2
    assert doubled(torch.ones(1)) == 2


def test_watched_attention_in_a_table_that_is_wider_than_the_pool(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """From 16 pages on a table grows by more than what is asked for, the pool of a single row by less."""
    model = shallow(tiny_llama)
    policy = policies.from_setting(Setting.from_parameters("h2o", kv_budget=4100, local_window=5, ratio=0.3))
    requests = [Request(0, tuple(5 + 7 * i % 100 for i in range(4090)), 1, (policy,))]
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=4)
    engine = Engine(model, moved(on_cpu(model)), [policy], sampling, 1)
    written = outcome(engine.run(requests))
    assert engine.cache.table.shape[1] * engine.cache.page_size > engine.cache.keys[0].shape[1]
    assert written == outcome(Engine(model, on_cpu(model), [policy], sampling, 1, "reference").run(requests))


def test_steps_of_all_sizes_watch_in_the_same_memory(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    model = shallow(tiny_llama)
    # Compressed after seven tokens, by what was watched at every size.
    policy = policies.from_setting(Setting.from_parameters("h2o", kv_budget=SHORT + 7, local_window=3, ratio=0.3))
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=11)
    lengths = [3] * 2 + [4] * 8 + [5] * 4 + [6] * 2 + [9, 11]
    requests = [
        Request(row, tuple(range(5, 11)), row, (policy,), sampling=replace(sampling, max_new_tokens=length))
        for row, length in enumerate(lengths)
    ]
    engine = Engine(model, moved(on_cpu(model)), [policy], sampling, 18)
    written = outcome(engine.run(requests))
    assert gpu.captured == 6
    assert len({step.batch.attention.held.data_ptr() for step in engine.graphs._captured.values()}) == 1
    assert written == outcome(Engine(model, on_cpu(model), [policy], sampling, 18, "reference").run(requests))


def test_a_first_pass_in_decoding_does_not_capture_windows(random_models: dict[str, ModelHandle], gpu: Gpu) -> None:
    """Prompts of one token are decoding; no layer has said yet that it has a window."""
    # A copy, since a handle remembers its device.
    handle = replace(random_models["gemma3"])
    policy = setting("full", SHORT)
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=6)
    requests = [Request(row, (5 + row,), row, (policy,)) for row in range(3)]
    engine = Engine(handle, moved(loaded(handle)), [policy], sampling, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = outcome(engine.run(requests))
    assert not gpu.captured
    assert not engine.graphs.broken
    assert written == outcome(Engine(handle, loaded(handle), [policy], sampling, 3, "reference").run(requests))


def loaded(handle: ModelHandle) -> Any:
    return load_weights(handle.name, handle.folder, "float32", "cpu")


@pytest.mark.parametrize(
    ("kind", "more", "compiles_layers"),
    [
        # Its layers have no window of their own: the configuration has it.
        ("Mistral", {"sliding_window": 12}, True),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, True),
        # Its layers have Llama's code and call another rotation.
        ("Ernie4_5", {"use_bias": True}, False),
    ],
)
def test_relatives_of_llama(
    tiny_llama: ModelHandle, gpu: Gpu, kind: str, more: dict[str, Any], compiles_layers: bool
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        **shape, vocab_size=tiny_llama.vocabulary, num_key_value_heads=2, head_dim=8, **more
    )
    here = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, weight in here.named_parameters():
        if "_proj" in name:
            # Attention as uneven as that of a trained model: every fault changes logits.
            weight.data.normal_(std=0.4)
    there = moved(copy.deepcopy(here))
    policy = setting("full", SHORT)
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=20)
    requests = [Request(row, tuple(range(5, 12 + row)), row, (policy,)) for row in range(2)]
    written = outcome(Engine(endless(tiny_llama), there, [policy], sampling, 2).run(requests))
    with compiled_layers(there):
        assert ("forward" in vars(there.get_decoder())) == compiles_layers
    assert written == outcome(Engine(endless(tiny_llama), here, [policy], sampling, 2, "reference").run(requests))


def test_layers_that_are_replaced_after_the_first_engine_are_used(tiny_llama: ModelHandle, gpu: Gpu) -> None:
    """Adapters are added to a model so. Nothing of the compiled form is left on a model between two runs."""

    class Turned(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -self.layer(x)

    model = shallow(tiny_llama)
    policy = setting("full", SHORT)
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=10)
    requests = [Request(0, tuple(range(5, 30)), 1, (policy,))]
    there = moved(on_cpu(model))
    here = on_cpu(model)
    engine = Engine(model, there, [policy], sampling, 1)
    first = outcome(engine.run(requests))
    assert "forward" not in vars(there.get_decoder())
    for changed in (there, here):
        gated = changed.model.layers[0].mlp
        gated.down_proj = Turned(gated.down_proj)
    expected = outcome(Engine(model, here, [policy], sampling, 1, "reference").run(requests))
    assert expected != first
    assert outcome(engine.run(requests)) == expected
    assert outcome(Engine(model, there, [policy], sampling, 1).run(requests)) == expected


def test_a_plan_for_more_memory_than_there_is_lets_the_cache_grow(
    tiny_llama: ModelHandle, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = KVCache._pool

    def limited(cache: KVCache, pages: int, *others: Any) -> Any:
        if pages > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pool(cache, pages, *others)

    model = shallow(tiny_llama)
    chosen = tuple(setting(name, LONG) for name in GROWING)
    sampling = Sampling(0.8, 20, 0.95, max_new_tokens=22)
    requests = [Request(row, tuple(5 + 3 * i % 100 for i in range(LONG)), row, chosen) for row in range(4)]
    expected = outcome(Engine(model, on_cpu(model), chosen, sampling, 4, "reference").run(requests))
    monkeypatch.setattr(KVCache, "_pool", limited)
    engine = Engine(model, moved(on_cpu(model)), chosen, sampling, 4)
    vars(model)["device"] = "cuda:0"
    engine.reserve(memory_plan.peak(model, chosen, 4, 4, LONG + 1, 22))
    assert outcome(engine.run(requests)) == expected
    assert engine.batch_size < 4


def test_kernels_of_this_gpu_are_compiled_on_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of another GPU takes no memory of the first one."""
    asked = []
    zeros = torch.zeros

    def noted(*sizes: Any, device: Any = None) -> Any:
        asked.append(device)
        return zeros(*sizes)

    monkeypatch.setattr(torch, "zeros", noted)
    compiles.cache_clear()
    assert compiles(torch.device("cuda:3"))
    assert asked == [torch.device("cuda:3")]
    compiles.cache_clear()

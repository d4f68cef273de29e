"""Measure the engine on a GPU, with random weights in the shapes of Llama 8B and Qwen 7B, within some minutes.

    python bench/gpu.py --minutes 5 --out gpu.json

Nothing is downloaded. Parts, in order of value; one begins while there is time:

steps         a decoding step at batch 1, 16 and 64 with 4,096 cached tokens each, beside transformers' `generate`
              with its DynamicCache, and the roofline: weights, keys and values read once at the measured rate of a copy
tokens        greedy tokens in float32 beside those of `generate`
compressions  one compression of each policy, 5,000 cached tokens in 32 layers
searches      the search of `rkv` in one layer: a table of similarities, and one kernel without a table
passes        a prompt beside decoding rows, and steps whose attention policies watch
sweep         what `kvatlas plan` says of a small sweep beside what the sweep takes

`--tiny` runs the same on a CPU with small models, to see that it works. Prints one JSON document.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common import arguments, keep
from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.cache import KVCache, Layer
from kvatlas.engine.memory_plan import peak
from kvatlas.engine.rows import Row, compress
from kvatlas.engine.signals import SignalCollector
from kvatlas.models import ENDLESS, ModelHandle, embedded, find
from kvatlas.policies import Policy, rkv
from kvatlas.sweeps import make_plan, parse_spec, sweep
from kvatlas.sweeps.measured_rate import TimedEngine
from kvatlas.sweeps.measured_rate import decoding_rate as planned_rate
from kvatlas.sweeps.run import Progress

#: Of Llama-3.1-8B, on which DeepSeek-R1-Distill-Llama-8B is built.
LLAMA = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
#: Of Qwen2.5-7B, on which DeepSeek-R1-Distill-Qwen-7B is built.
QWEN = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "llama": (LLAMA, LlamaConfig, LlamaForCausalLM),
    "qwen2": (QWEN, Qwen2Config, Qwen2ForCausalLM),
}
SAMPLING = Sampling(0.6, 20, 0.95, max_new_tokens=16_384)
COMPRESSING = ("window", "random", "snapkv", "keydiff", "h2o", "dynts", "rkv", "vase")
STEPS = 32
#: With `--tiny`, where FlexAttention is not compiled.
TINY_STEPS = 6


@dataclass(frozen=True)
class Machine:
    """The device, the folder for models, and whether everything is small."""

    device: torch.device
    folder: Path
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def steps(self) -> int:
        return TINY_STEPS if self.tiny else STEPS

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Give memory back, and count its peak from now on."""
        gc.collect()
        if not self.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return None if self.tiny else int(torch.cuda.max_memory_allocated())

    def seconds(self, work: Callable[[], object], repeats: int = 1, warm: int = 1) -> float:
        """Return the median seconds of some work, after `warm` calls that are not counted."""
        for _ in range(warm):
            work()
        taken = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def model(self, kind: str, layers: int | None = None, dtype: torch.dtype | None = None) -> tuple[ModelHandle, Any]:
        """Return a model with random weights, made in place: nothing but its config is written."""
        shape, config_class, model_class = KINDS[kind]
        shape = shape | (TINY if self.tiny else {}) | ({"num_hidden_layers": layers} if layers else {})
        config = config_class(**shape)
        folder = self.folder / f"{kind}-{layers}"
        config.save_pretrained(folder)
        torch.manual_seed(0)
        torch.set_default_dtype(dtype or self.dtype)
        try:
            with self.device:
                model = model_class(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        facts = replace(
            ENDLESS,
            opens_thinking=True,
            dtype=str(dtype or self.dtype).removeprefix("torch."),
            weight_bytes=sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        )
        handle = ModelHandle(f"hf:{folder}", folder, overrides=facts)
        vars(handle)["device"] = str(self.device)
        return handle, model


def policy_of(name: str, budget: int = 5000, window: int = 1000) -> Policy:
    if name == "full":
        return policies.from_setting(Setting.from_parameters("full"))
    values = {"kv_budget": budget, "local_window": window, "ratio": 0.3, "ratio_over": "older"}
    return policies.from_setting(Setting.from_parameters(name, **values))


def copy_rate(machine: Machine) -> float:
    """Return the bytes a second of a large copy, bytes read and bytes written."""
    size = 2**22 if machine.tiny else 2**31
    source, target = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    source.random_()
    return 2 * size / machine.seconds(lambda: target.copy_(source), 5)


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(machine: Machine) -> Iterator[dict[str, Any]]:
    handle, model = machine.model("llama")
    rate = copy_rate(machine)
    embedding = model.get_input_embeddings().weight
    weights = (handle.weight_bytes or 0) - embedding.numel() * embedding.element_size()
    yield {"copy_bytes_per_second": round(rate), "weight_bytes_of_a_step": weights}
    for batch, cached in [(1, 100), (3, 100)] if machine.tiny else [(1, 4096), (16, 4096), (64, 4096), (1, 16_000)]:
        roofline = (weights + batch * cached * handle.kv_bytes_per_token) / rate
        case = {"batch": batch, "cached": cached, "roofline_ms": _ms(roofline)}
        machine.forget()
        yield case | _our_step(machine, handle, model, batch, cached, roofline)
        machine.forget()
        seconds = _generate_step(machine, model, batch, cached)
        yield case | {"by": "generate", "ms": _ms(seconds), "share_of_roofline": _share(roofline, seconds)}


def _our_step(
    machine: Machine, handle: ModelHandle, model: Any, batch: int, cached: int, roofline: float
) -> dict[str, Any]:
    policy = policy_of("full")
    engine = TimedEngine(handle, model, [policy], SAMPLING, batch, "flex")
    planned = peak(handle, [policy], batch, batch, cached, 2 * machine.steps)
    engine.cache.make_room(planned.tokens, planned.longest)
    # Zeros take less power, and so less time.
    for pool in (*engine.cache.keys, *engine.cache.values):
        pool.normal_()
    seconds, tokens = engine.time_steps([policy], cached, machine.steps)
    step = seconds / tokens * batch
    assert engine.graphs is not None
    graphs = [captured.graph for captured in engine.graphs._captured.values() if captured.graph is not None]
    on_device = machine.seconds(graphs[-1].replay, 20) if graphs else None
    return {
        "by": "kvatlas",
        "ms": _ms(step),
        "tokens_per_second": round(batch / step, 1),
        "share_of_roofline": _share(roofline, step),
        "host_share": on_device and round(1 - on_device / step, 3),
        "captured": bool(graphs),
        "peak_bytes": machine.peak_bytes(),
        "planned_bytes": planned.total,
    }


def _generate_step(machine: Machine, model: Any, batch: int, cached: int) -> float:
    """Return the seconds of a step of `generate`, from the difference of two lengths."""
    config = model.config
    cache = DynamicCache(config=config)
    head_size = config.hidden_size // config.num_attention_heads
    size = (batch, config.num_key_value_heads, cached, head_size)
    for layer in range(config.num_hidden_layers):
        key, value = (torch.randn(size, device=machine.device, dtype=model.dtype) for _ in range(2))
        cache.update(key, value, layer)
    ids = torch.full((batch, cached + 1), 7, device=machine.device)

    def generate(count: int) -> None:
        added = cache.get_seq_length() - cached
        if added:
            cache.crop(-added)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )

    generate(2)
    few = machine.seconds(partial(generate, 2), warm=0)
    many = machine.seconds(partial(generate, 14), warm=0)
    return (many - few) / 12


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokens(machine: Machine) -> Iterator[dict[str, Any]]:
    count = 24 if machine.tiny else 160
    for kind in KINDS:
        machine.forget()
        handle, model = machine.model(kind, 2 if machine.tiny else 4, torch.float32)
        prompts = [
            tuple((31 * row + 7 * place * place + 3 * place) % handle.vocabulary for place in range(length))
            for row, length in enumerate((37, 90, 140))
        ]
        expected = [_generated(model, prompt, count) for prompt in prompts]
        policy = policy_of("full")
        engine = Engine(handle, model, [policy], Sampling(0, max_new_tokens=count), len(prompts), "flex")
        requests = [Request(row, prompt, row, (policy,)) for row, prompt in enumerate(prompts)]
        found = {generation.key: generation.tokens for generation in engine.run(requests)}
        equal = sum(found[row] == tokens for row, tokens in enumerate(expected))
        captured = engine.graphs.steps if engine.graphs is not None else 0
        yield {"kind": kind, "equal_to_generate": equal, "of": len(prompts), "captured_steps": captured}


@torch.inference_mode()
def _generated(model: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    ids = torch.tensor([list(prompt)], device=model.device)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tuple(written[0, len(prompt) :].tolist())


# -- compressions ------------------------------------------------------------------------------------------------------


def compressions(machine: Machine) -> Iterator[dict[str, Any]]:
    """Keys resemble one another, as those of models do; the cost of `rkv` on CPUs depends on that."""
    length = 120 if machine.tiny else 5000
    config = LlamaConfig(**(LLAMA | TINY if machine.tiny else LLAMA))
    folder = machine.folder / "bare"
    config.save_pretrained(folder)
    handle = ModelHandle(f"hf:{folder}", folder, overrides=replace(ENDLESS, opens_thinking=True))
    vars(handle)["device"] = str(machine.device)
    for name in COMPRESSING:
        policy = policy_of(name, length, length // 5)
        seconds = _compression(machine, handle, policy, length)
        yield {"policy": name, "cached": length, "layers": handle.shape.layers, "ms": _ms(seconds)}


@torch.inference_mode()
def _compression(machine: Machine, handle: ModelHandle, policy: Policy, length: int) -> float:
    collector = SignalCollector(handle, [policy])
    state = collector.token_state()
    cache = KVCache(handle.shape, 1, state, collector.query_window, machine.device, machine.dtype, 128)
    cache.layers = {place: Layer(place, handle.shape.head_dim**-0.5) for place in range(handle.shape.layers)}
    sequence = cache.begin()
    cache.reserve(sequence, length)
    for pool in (*cache.keys, *cache.values, *cache.rings):
        pool.normal_(mean=1.0, std=0.7)
    for noted in cache.token_state.values():
        noted.uniform_()
    prompt = tuple(range(5, 69))
    request = Request(0, prompt, 0, (policy,))
    signals = collector.signals((policy,))

    def once() -> None:
        cache.reserve(sequence, length)
        sequence.length = length
        written = [5 + place % 50 for place in range(length - len(prompt) + 1)]
        row = Row(request, (policy,), signals, SAMPLING, length, sequence, tokens=written, position=length)
        compress(handle, cache, row)

    return machine.seconds(once, 3)


def searches(machine: Machine) -> Iterator[dict[str, Any]]:
    length = 120 if machine.tiny else 5000
    for dtype in (torch.float32,) if machine.tiny else (torch.bfloat16, torch.float32):
        for keys, mean in (("alike", 1.0), ("unlike", 0.0)):
            key = mean + 0.7 * torch.randn(8, length, 128, device=machine.device)
            unit = torch.nn.functional.normalize(key.to(dtype), dim=-1)
            by = {"table": rkv._newest_similar_of_all}
            if not machine.tiny:
                from kvatlas.policies import newest_similar_gpu

                by["one kernel"] = newest_similar_gpu.newest_similar_in_one_kernel
            taken = {name: _ms(machine.seconds(partial(search, unit, 0.5), 5, 3)) for name, search in by.items()}
            yield {"keys": keys, "dtype": str(dtype).removeprefix("torch."), "ms": taken}


# -- passes ------------------------------------------------------------------------------------------------------------


def passes(machine: Machine) -> Iterator[dict[str, Any]]:
    layers = 2 if machine.tiny else 8
    handle, model = machine.model("llama", layers)
    for batch in (3,) if machine.tiny else (16, 64):
        for name in ("full", "h2o"):
            machine.forget()
            policy = policy_of(name, budget=100_000)
            engine = TimedEngine(handle, model, [policy], SAMPLING, batch, "flex")
            seconds, count = engine.time_steps([policy], 100 if machine.tiny else 4096, machine.steps)
            yield {"batch": batch, "layers": layers, "policy": name, "ms": _ms(seconds / count * batch)}


# -- sweep -------------------------------------------------------------------------------------------------------------


def small_sweep(machine: Machine) -> Iterator[dict[str, Any]]:
    """A model of eight layers with the tokenizer of an embedded one decodes chains that it cannot solve."""
    donor = find(embedded()[0]).folder
    folder = machine.folder / "sweep-model"
    shape = (LLAMA | TINY if machine.tiny else LLAMA) | {"num_hidden_layers": 2 if machine.tiny else 8}
    folder.mkdir()
    for path in donor.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            (folder / path.name).write_bytes(path.read_bytes())
    # Hardly a trace ends before its limit.
    config = LlamaConfig(**shape, eos_token_id=shape["vocab_size"] - 1)
    torch.manual_seed(0)
    with machine.device:
        LlamaForCausalLM(config).to(machine.dtype).save_pretrained(folder)
    machine.forget()
    length = 120 if machine.tiny else 2400
    device = "cpu" if machine.tiny else "cuda"
    dtype = str(machine.dtype).removeprefix("torch.")
    spec = parse_spec(
        {
            "models": [{"model": f"hf:{folder}", "name": "random", "dtype": dtype, "device": device}],
            "benchmarks": ["CHAIN7"],
            "problems": 4 if machine.tiny else 64,
            "samples": 1,
            "expected_output_tokens": length,
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "max_new_tokens": length},
            "baseline": {"policy": "full"},
            "settings": [{"policy": "rkv", "kv_budget": length * 2 // 3}],
            "axes": {"local_window": [length // 10], "ratio": [0.2, 0.4]},
        }
    )
    plan = make_plan(spec)
    rate = planned_rate(plan)
    progress: list[Progress] = []
    began = time.perf_counter()
    sweep(plan, machine.folder / "run", workers=1, on_trace=progress.append)
    wall = time.perf_counter() - began
    full = [item.trace for item in progress if item.trace.setting == Setting.from_parameters("full")]
    # Of rows that share no trunk: their seconds count every step once.
    per_token = statistics.mean(trace.usage.seconds / len(trace.tokens) for trace in full)
    yield {
        "planned_tokens": plan.estimate(rate)["decoded_tokens"]["shared"],
        "decoded_tokens": progress[-1].decoded_tokens,
        "planned_tokens_per_second": rate and round(rate, 1),
        "tokens_per_second_of_steps": round(1 / per_token, 1),
        "seconds_with_start_and_compilers": round(wall, 1),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _share(roofline: float, seconds: float) -> float:
    return round(roofline / seconds, 3)


PARTS = {
    "steps": steps,
    "tokens": tokens,
    "compressions": compressions,
    "searches": searches,
    "passes": passes,
    "sweep": small_sweep,
}


def main() -> None:
    options = arguments(__doc__, tiny=False, minutes=5.0, parts=list(PARTS))
    if not options.tiny and not torch.cuda.is_available():
        print("bench/gpu.py needs a GPU that PyTorch can use; --tiny tries it on this CPU.", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    began = time.perf_counter()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(torch.device("cpu" if options.tiny else "cuda:0"), Path(folder), options.tiny)
        for name in options.parts:
            if time.perf_counter() - began > 60 * options.minutes:
                results[name] = "no time was left"
                continue
            results[name] = []
            try:
                for entry in PARTS[name](machine):
                    # A run that is cut off has said what it measured.
                    print(name, json.dumps(entry), file=sys.stderr)
                    results[name].append(entry)
            except (KvatlasError, RuntimeError) as error:
                results[name].append({"error": str(error)})
            machine.forget()
    card = platform.machine() if options.tiny else torch.cuda.get_device_name()
    keep(options, bench="gpu", hardware=card, results=results)


if __name__ == "__main__":
    main()

"""Decoding speed: our loop, transformers' caches and `generate`, the roofline, and the demo's grid.

    python bench/decode.py                                # batch 8 at 1k and 4k, batch 1 and 32 at 1k, the demo's grid
    python bench/decode.py --cases 8x4096 --bits 8 4 3 2 --demo 0    # one case, and packed keys and values
    python bench/decode.py --cases --trees . ../OLD --grid recipes/smollm/maps.yaml    # a grid by two versions

One Llama of 100M parameters with random weights, fp32, one thread, real kernels on caches that are filled by hand.
Times are CPU seconds of that thread, so that other processes disturb less. Every arm decodes the same batch at the same
mean cache length; the arms take turns, ratios are medians over rounds:

- `window`: our loop under a KV budget, sampling as published (temperature 0.6, top-k 20, top-p 0.95).
- `dynamic`: a loop over transformers' DynamicCache, greedy, which compresses at the same points by gathering what
  stays. Steps are measured at the mean length; a compression, by itself, is spread over the steps of its cycle.
- `static`: the same loop over transformers' StaticCache of the mean length and the measured steps, uncompressed.
- `generate`: transformers' generate with the full cache at that length.
- `bits B`: our loop with keys and values of B bits and the full cache.

`roofline`: a step has to read the weights and all kept keys and values once, and to multiply and add for all linear
layers and attention. Both are divided by what one thread reached in the same round. The longer of these times is the
bound; `share` is that time / the time of our step, `best_share` the least of such times over that of the fastest step
(other work on the machine only takes time), `overhead` the share of our step outside the model's forward pass.
`speed_against_best_peer` is the ratio to the fastest of transformers' arms, `speed_against_by_least_times` ratios of
the fastest rounds.

`demo` is the demo's grid on chains with `embedded:tiny-llama`, or that of another spec (`demo_grid.py`): decoded tokens
per CPU second, in fresh processes, by the source trees `--trees`, whose kernels are compiled, each by its own
`demo_grid.py`. Prints one JSON document.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from common import FilledEngine, arguments, bench_model, keep, without_folder
from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.cpu import native
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy

#: 12 layers of 768 with grouped heads: 100M parameters.
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": True,
}
GRID = "src/kvatlas/sweeps/demo.yaml"
#: The arms of transformers.
PEERS = ("dynamic", "static", "generate")
#: Of the published setting in the middle of the grid: window 1000 and ratio 0.3 at a budget of 5000.
WINDOW, RATIO = 0.2, 0.3


class Machine:
    """The peak speed of one thread: reading half a gigabyte, and multiplying matrices in its cache."""

    def __init__(self) -> None:
        self.table, self.vector = torch.rand(32_768, 4096), torch.rand(4096)
        self.left, self.right = torch.rand(512, 1024), torch.rand(1024, 1024)
        kernels = native.load()
        self.linear = kernels.linear(self.right) if kernels is not None else None

    def bandwidth(self) -> float:
        """Bytes per second: the better of a sum and a product with a vector."""
        return self.table.numel() * 4 / _fastest(self.table.sum, lambda: self.table @ self.vector)

    def flops(self) -> float:
        """Operations per second, an addition and a multiplication being two: the better of torch's and our product."""
        work: list[Callable[[], object]] = [lambda: self.left @ self.right]
        if self.linear is not None:
            work.append(lambda: self.linear(self.left))  # type: ignore[misc]
        return 2 * self.left.numel() * self.right.shape[1] / _fastest(*work * 3)


def _fastest(*work: Callable[[], object]) -> float:
    """CPU seconds of what takes the fewest."""
    taken = []
    for call in work:
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return min(taken)


class Case:
    """All arms at one batch size and one mean cache length."""

    def __init__(
        self, handle: ModelHandle, model: LlamaForCausalLM, batch: int, tokens: int, bits: list[int], steps: int
    ) -> None:
        self.handle, self.model, self.batch, self.tokens = handle, model, batch, tokens
        share = WINDOW + RATIO * (1 - WINDOW)
        self.budget = budget = round(2 * tokens / (1 + share))
        values = {"kv_budget": budget, "local_window": round(WINDOW * budget), "ratio": RATIO, "ratio_over": "older"}
        self.policy = policies.from_setting(Setting.from_parameters("window", **values))
        self.kept, self.cycle = budget - round((1 - share) * budget), round((1 - share) * budget)
        self.engine = FilledEngine(handle, [self.policy], Sampling(max_new_tokens=10**6), batch, budget)
        #: Engines with packed keys and values, and their policies.
        self.packed: dict[str, tuple[FilledEngine, Policy]] = {}
        for own in bits:
            full = policies.from_setting(Setting.from_parameters("full", kv_bits=own))
            self.packed[f"bits {own}"] = FilledEngine(handle, [full], self.engine.sampling, batch, tokens + 64), full
        self.cache = DynamicCache(config=model.config)
        self.static_cache = StaticCache(config=model.config, max_cache_len=tokens + steps)
        size = (batch, handle.shape.kv_heads, tokens, handle.shape.head_dim)
        for layer in range(handle.shape.layers):
            keys, values = torch.randn(size), torch.randn(size)
            self.cache.update(keys, values, layer)
            self.static_cache.update(keys, values, layer)

    @property
    def read_bytes(self) -> int:
        """Return the bytes that a step reads: weights, kept keys and values."""
        return (self.handle.weight_bytes or 0) + self.batch * self.tokens * self.handle.kv_bytes_per_token

    @property
    def flops(self) -> int:
        """Return the operations of a step, for each row: twice the weights of linear layers, and four times what
        attention reads with each query head."""
        shape = self.handle.shape
        weights = sum(module.weight.numel() for module in self.model.modules() if isinstance(module, torch.nn.Linear))
        attention = shape.layers * shape.heads * shape.head_dim * self.tokens
        return self.batch * (2 * weights + 4 * attention)

    def window(self, steps: int) -> float:
        """Seconds of our steps."""
        self.engine.put(self.tokens, self.policy)
        self.engine.forward_seconds = 0.0
        return self.engine.step(steps)

    def steps_packed(self, steps: int, name: str) -> float:
        """Seconds of our steps over packed keys and values."""
        engine, policy = self.packed[name]
        engine.put(self.tokens, policy)
        return engine.step(steps)

    def window_compression(self) -> float:
        """Seconds of our compression of all rows at the budget."""
        self.engine.put(self.budget, self.policy)
        return self.engine.compression(self.batch)

    def _cut(self) -> None:
        longer = self.cache.get_seq_length() - self.tokens
        if longer:
            self.cache.crop(-longer)

    def dynamic(self, steps: int) -> float:
        """Seconds of steps over a DynamicCache, which is cut back to the mean length at first."""
        self._cut()
        return self._greedy_steps(self.cache, steps)

    def static(self, steps: int) -> float:
        """Seconds of steps over a StaticCache, which goes on from the mean length."""
        for layer in self.static_cache.layers:
            layer.cumulative_length.fill_(self.tokens)
        return self._greedy_steps(self.static_cache, steps)

    def _greedy_steps(self, cache: DynamicCache | StaticCache, steps: int) -> float:
        ids = torch.full((self.batch, 1), 7)
        began = time.thread_time()
        with torch.inference_mode():
            for step in range(steps):
                at = torch.full((self.batch, 1), self.tokens + step)
                output = self.model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True)
                ids = output.logits[:, -1:].argmax(-1)
        return time.thread_time() - began

    def dynamic_compression(self) -> float:
        """Seconds of gathering what stays, for all rows, from a DynamicCache of the mean length."""
        self._cut()
        kept = torch.arange(min(self.kept, self.tokens)).expand(self.batch, -1)
        began = time.thread_time()
        for layer in self.cache.layers:
            index = kept[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            _ = layer.keys.gather(2, index), layer.values.gather(2, index)
        return time.thread_time() - began

    def generate(self, steps: int) -> float:
        """Seconds of `generate` that goes on from a full cache of that length."""
        self._cut()
        ids = torch.full((self.batch, self.tokens + 1), 7)
        began = time.thread_time()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
        )
        return time.thread_time() - began

    def measure(self, steps: int, rounds: int, machine: Machine) -> dict[str, Any]:
        """Medians over rounds in which the arms and what the machine can do take turns."""
        arms: dict[str, Callable[[int], float]]
        arms = {"window": self.window, "dynamic": self.dynamic, "static": self.static, "generate": self.generate}
        arms |= {name: partial(self.steps_packed, name=name) for name in self.packed}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        overhead, reading, computing = [], [], []
        for turn in range(-1, rounds):
            if turn >= 0:
                reading.append(self.read_bytes / machine.bandwidth())
                computing.append(self.flops / machine.flops())
            for name, arm in arms.items():
                taken = arm(steps) / steps
                if turn >= 0:
                    seconds[name].append(taken)
                    if name == "window":
                        overhead.append(1 - self.engine.forward_seconds / steps / taken)
        spread = {
            "window": median(self.window_compression() for _ in range(3)) / self.cycle,
            "dynamic": median(self.dynamic_compression() for _ in range(3)) / self.cycle,
            **dict.fromkeys(["static", "generate", *self.packed], 0.0),
        }
        whole = {name: [taken + spread[name] for taken in result] for name, result in seconds.items()}
        limits = [max(both) for both in zip(reading, computing, strict=True)]
        against = {
            name: round(median(t / o for t, o in zip(whole[name], whole["window"], strict=True)), 2)
            for name in whole
            if name != "window"
        }
        return {
            "batch": self.batch,
            "kv_tokens": self.tokens,
            "budget": self.budget,
            "kept": self.kept,
            "step_ms": {name: _ms(result) for name, result in seconds.items()},
            "compression_ms_per_step": {name: round(1000 * result, 3) for name, result in spread.items()},
            "tokens_per_second": {name: round(self.batch / median(result), 1) for name, result in whole.items()},
            "speed_against": against,
            "speed_against_by_least_times": {
                name: round(min(whole[name]) / min(whole["window"]), 2) for name in against
            },
            "speed_against_best_peer": min(against[name] for name in PEERS),
            "roofline": {
                "read_bytes": self.read_bytes,
                "flops": self.flops,
                "reading_ms": _ms(reading),
                "computing_ms": _ms(computing),
                "bound": "memory" if median(reading) >= median(computing) else "compute",
                "share": round(median(limit / s for limit, s in zip(limits, seconds["window"], strict=True)), 3),
                "best_share": round(max(min(reading), min(computing)) / min(seconds["window"]), 3),
            },
            "bandwidth": round(median(self.read_bytes / item for item in reading)),
            "flops_per_second": round(median(self.flops / item for item in computing)),
            "overhead": round(median(overhead), 4),
            "kv_bytes": {name: engine.cache.bytes for name, (engine, _) in self.packed.items()},
        }


def _ms(seconds: list[float]) -> float:
    return round(1000 * median(seconds), 2)


def demo(problems: int, spec: str, rounds: int, trees: list[str]) -> dict[str, Any]:
    """The grid of a spec of each tree in fresh processes, in turns; the first tree is compared with each."""
    names = [without_folder(Path(tree)) for tree in trees]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(rounds):
        for tree, own in zip(trees, runs.values(), strict=True):
            environment = os.environ | {"PYTHONPATH": str(Path(tree, "src").resolve())}
            command = [sys.executable, str(Path(tree, "bench/demo_grid.py")), str(problems), str(Path(tree, spec))]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            own.append(json.loads(done.stdout.splitlines()[-1]))
    speeds = {tree: [run["decoded_tokens"] / run["seconds"] for run in own] for tree, own in runs.items()}
    if len({run["decoded_tokens"] for own in runs.values() for run in own}) > 1:
        raise SystemExit("The trees decode other tokens: give a spec without defaults that changed between them.")
    first = speeds[names[0]]
    against = {tree: round(median(s / o for s, o in zip(first, own, strict=True)), 3) for tree, own in speeds.items()}
    # Other work on the machine can only take time.
    least = {tree: round(max(first) / max(own), 3) for tree, own in speeds.items()}
    return {
        "runs": runs,
        "tokens_per_cpu_second": {tree: round(median(own)) for tree, own in speeds.items()},
        "speed_of_first": against,
        "speed_of_first_by_least_times": least,
    }


def main() -> None:
    cases = ["1x1024", "8x1024", "8x4096", "32x1024"]
    options = arguments(__doc__, cases=cases, bits=[8, 4], steps=4, rounds=5, layers=12, demo=8, grid=GRID, trees=["."])
    torch.set_num_threads(1)
    outcome = []
    with tempfile.TemporaryDirectory() as folder:
        handle = bench_model(Path(folder), {**SHAPE, "num_hidden_layers": options.layers})
        # As transformers has it: not the layers that `ModelHandle.load` puts in.
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        machine = Machine()
        for batch, tokens in (map(int, case.split("x")) for case in options.cases):
            case = Case(handle, model, batch, tokens, options.bits, options.steps)
            outcome.append(case.measure(options.steps, options.rounds, machine))
            del case
        parameters = model.num_parameters()
    keep(
        options,
        bench="decode",
        kernels=getattr(native.load(), "target", None),
        parameters=parameters,
        results=outcome,
        demo=demo(options.demo, options.grid, options.rounds, options.trees) if options.demo else None,
    )


if __name__ == "__main__":
    main()

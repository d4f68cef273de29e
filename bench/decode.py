"""Decoding speed at a given cache length: our loop, transformers' DynamicCache, `generate`, and the memory bandwidth.

    python bench/decode.py                                # batch 8 at 1k and 4k, batch 1 and 32 at 1k
    python bench/decode.py --full --out bench/results/decode.json      # batch 1, 8, 32 at 1k, 4k, 16k where they fit
    python bench/decode.py --cases 8x4096 --compile
    python bench/decode.py --kvpress ENV/bin/python       # kvpress' decoding press too, in an environment of its own

One Llama of 100M parameters with random weights, fp32, one thread, real kernels on caches that are filled by hand.
Times are CPU seconds of that thread, so that other processes disturb less. Every arm decodes the same batch at the same
mean cache length; the arms take turns, ratios are medians over rounds:

- `window`: our loop under a KV budget, sampling as published (temperature 0.6, top-k 20, top-p 0.95).
- `dynamic`: a loop over transformers' DynamicCache with its own attention, greedy, which compresses at the same points
  by gathering what stays. Between compressions the cache grows from `kept` to `budget` tokens: steps are measured at
  the mean length, a compression is measured by itself and spread over the steps of its cycle.
- `generate`: transformers' generate with the full cache at that length.
- `fixed` (with --compile, which needs a C++ compiler): our loop with the fixed steps that GPUs get, FlexAttention
  compiled.

`bandwidth_share` is (bytes of the weights + bytes of the kept keys and values that a step has to read) / seconds of our
step / read bandwidth of one thread, measured in each round. `overhead` is the share of our step outside the model's
forward pass. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from keeping import keep
from kvatlas import policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.graphs import Graphs
from kvatlas.engine.rows import Row
from kvatlas.models import Model

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
PROMPT = 64
#: Of the published setting in the middle of the grid: window 1000 and ratio 0.3 at a budget of 5000.
WINDOW, RATIO = 0.2, 0.3


def shape_of(layers: int, hidden: int) -> dict[str, Any]:
    """A shape of that size with heads of 64, about four to a KV head."""
    return {
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "max_position_embeddings": 32_768,
    }


def bench_model(folder: Path, shape: dict[str, Any]) -> Model:
    """A Llama with random weights that never ends a trace."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    model = Model(f"hf:{folder}", folder)
    vars(model).update(stops=frozenset(), think_close=-1)
    return model


class Memory:
    """Half a gigabyte to read."""

    def __init__(self) -> None:
        self.table, self.vector = torch.rand(32_768, 4096), torch.rand(4096)

    def bandwidth(self) -> float:
        """Bytes per second that one thread reads: the better of a sum and a product with a vector."""
        best = 0.0
        for read in (self.table.sum, lambda: self.table @ self.vector):
            began = time.thread_time()
            read()
            best = max(best, self.table.numel() * 4 / (time.thread_time() - began))
        return best


class Case:
    """All arms at one batch size and one mean cache length."""

    def __init__(self, model: Model, batch: int, tokens: int, compiled: bool) -> None:
        self.model, self.batch, self.tokens = model, batch, tokens
        share = WINDOW + RATIO * (1 - WINDOW)
        budget = round(2 * tokens / (1 + share))
        values = {"kv_budget": budget, "local_window": round(WINDOW * budget), "ratio": RATIO, "ratio_over": "older"}
        self.policy = policies.of(Setting.of("window", **values))
        self.kept, self.cycle = budget - round((1 - share) * budget), round((1 - share) * budget)
        self.engine = Engine(model, model.network(), [self.policy], Sampling(max_new_tokens=10**6), batch)
        self.graphs: Graphs | None = None
        if compiled:
            self.graphs = Graphs(
                model, self.engine.slots, self.engine.observers, self.engine.sampling, self.engine._fixed
            )
            self.graphs.kernel = torch.compile(flex_attention)
        # As a run does; the steps here are taken outside of one.
        self.engine.network.set_attn_implementation("kvatlas")
        self.reference = model.network()
        self.budget, self.inside = budget, 0.0
        self._fill()
        self._time_forward()
        entered = self.engine.slots.key(0, 0)[:, tokens].clone()
        self.window(1)
        assert not torch.equal(entered, self.engine.slots.key(0, 0)[:, tokens]), "the step wrote no key into the slots"

    def _fill(self) -> None:
        torch.manual_seed(0)
        slots, shape = self.engine.slots, self.model.shape
        for row in range(self.batch):
            slots.take(row, self.budget, self.tokens)
        for table in (*slots.keys, *slots.values):
            for shelf in table:
                shelf.normal_()
        self.cache = DynamicCache(config=self.reference.config)
        for layer in range(shape.layers):
            size = (self.batch, shape.kv_heads, self.tokens, shape.head_dim)
            self.cache.update(torch.randn(size), torch.randn(size), layer)

    def _time_forward(self) -> None:
        forward = self.engine._forward

        def timed(*words: Any) -> Any:
            began = time.thread_time()
            found = forward(*words)
            self.inside += time.thread_time() - began
            return found

        self.engine._forward = timed  # type: ignore[method-assign]

    def _rows(self, length: int) -> None:
        prompt = tuple(5 + i % 50 for i in range(PROMPT))
        written = [5 + i % 50 for i in range(length - PROMPT + 1)]
        asked = self.engine.observers.asked((self.policy,))
        self.engine._rows = [
            Row(
                Request(row, prompt, row, (self.policy,)),
                (self.policy,),
                asked,
                self.engine.sampling,
                self.engine.sampling.max_new_tokens,
                tokens=list(written),
            )
            for row in range(self.batch)
        ]
        self.engine.slots.lengths[: self.batch] = [length] * self.batch

    def window(self, steps: int) -> float:
        """Seconds of our steps."""
        self._rows(self.tokens)
        self.inside, began = 0.0, time.thread_time()
        for _ in range(steps):
            self.engine._step()
        return time.thread_time() - began

    def fixed(self, steps: int) -> float:
        """Seconds of our steps in shapes that do not change."""
        self.engine.graphs = self.graphs
        try:
            return self.window(steps)
        finally:
            self.engine.graphs = None

    def window_compression(self) -> float:
        """Seconds of our compression of all rows at the budget."""
        self._rows(self.budget)
        began = time.thread_time()
        with torch.inference_mode():
            for row in range(self.batch):
                self.engine._compress(row)
        return time.thread_time() - began

    def _cut(self) -> None:
        longer = self.cache.get_seq_length() - self.tokens
        if longer:
            self.cache.crop(-longer)

    def dynamic(self, steps: int) -> float:
        """Seconds of steps over a DynamicCache, which is cut back to the mean length at first."""
        self._cut()
        ids = torch.full((self.batch, 1), 7)
        began = time.thread_time()
        with torch.inference_mode():
            for step in range(steps):
                at = torch.full((self.batch, 1), self.tokens + step)
                output = self.reference(input_ids=ids, position_ids=at, past_key_values=self.cache, use_cache=True)
                ids = output.logits[:, -1:].argmax(-1)
        return time.thread_time() - began

    def dynamic_compression(self) -> float:
        """Seconds of gathering what stays, for all rows, from a DynamicCache of the budget's length (scaled to it)."""
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
        self.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
        )
        return time.thread_time() - began

    def measure(self, steps: int, rounds: int, memory: Memory) -> dict[str, Any]:
        """Medians over rounds in which the arms take turns, and reading memory with them."""
        arms: dict[str, Callable[[int], float]] = {
            "window": self.window,
            "dynamic": self.dynamic,
            "generate": self.generate,
        }
        if self.graphs is not None:
            arms["fixed"] = self.fixed
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        overhead: list[float] = []
        limits: list[float] = []
        for turn in range(-1, rounds):
            limits += [memory.bandwidth()] if turn >= 0 else []
            for name, arm in arms.items():
                taken = arm(steps) / steps
                if turn >= 0:
                    seconds[name].append(taken)
                    if name == "window":
                        overhead.append(1 - self.inside / steps / taken)
        spread = {
            "window": statistics.median(self.window_compression() for _ in range(3)) / self.cycle,
            "dynamic": statistics.median(self.dynamic_compression() for _ in range(3)) / self.cycle,
            "generate": 0.0,
        }
        if self.graphs is not None:
            spread["fixed"] = spread["window"]
        whole = {name: [taken + spread[name] for taken in found] for name, found in seconds.items()}
        read = (self.model.weight_bytes or 0) + self.batch * self.tokens * self.model.kv_bytes_per_token
        return {
            "batch": self.batch,
            "kv_tokens": self.tokens,
            "budget": self.budget,
            "kept": self.kept,
            "step_ms": {name: round(1000 * statistics.median(found), 2) for name, found in seconds.items()},
            "compression_ms_per_step": {name: round(1000 * found, 3) for name, found in spread.items()},
            "tokens_per_second": {
                name: round(self.batch / statistics.median(found), 1) for name, found in whole.items()
            },
            "speed_against": {
                name: round(statistics.median(t / o for t, o in zip(whole[name], whole["window"], strict=True)), 2)
                for name in whole
                if name != "window"
            },
            "read_bytes": read,
            "bandwidth": round(statistics.median(limits)),
            "bandwidth_share": round(
                statistics.median(read / s / limit for s, limit in zip(seconds["window"], limits, strict=True)), 3
            ),
            "overhead": round(statistics.median(overhead), 4),
        }


QUICK = [(1, 1024), (8, 1024), (8, 4096), (32, 1024)]
FULL = [(batch, tokens) for tokens in (1024, 4096, 16_384) for batch in (1, 8, 32)]
#: Bytes of one case beyond which it is left out: two caches, one of which is copied at every step.
ROOM = 8 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--cases", nargs="+", metavar="BATCHxTOKENS")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compile", action="store_true", help="fixed steps with compiled FlexAttention, too")
    parser.add_argument("--kvpress", type=Path, metavar="PYTHON", help="the interpreter of an environment with kvpress")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)

    cases = FULL if options.full else QUICK
    if options.cases:
        cases = [tuple(int(part) for part in each.split("x")) for each in options.cases]  # type: ignore[misc]
    memory = Memory()
    found, left_out = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = bench_model(Path(folder), {**SHAPE, "num_hidden_layers": options.layers})
        for batch, tokens in cases:
            if 2.5 * batch * tokens * model.kv_bytes_per_token > ROOM:
                left_out.append([batch, tokens])
                continue
            case = Case(model, batch, tokens, options.compile)
            result = case.measure(options.steps, options.rounds, memory)
            if options.kvpress:
                # Not in turns with the others: a process of its own right after them.
                result["kvpress"] = _kvpress(options.kvpress, folder, case, options.steps, options.rounds)
            found.append(result)
            del case
        parameters = sum(each.numel() for each in model.network().parameters())
    keep(
        {
            "bench": "decode",
            "options": {"steps": options.steps, "rounds": options.rounds},
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "parameters": parameters,
            "results": found,
            "left_out_for_memory": left_out,
        },
        options.out,
    )


def _kvpress(python: Path, folder: str, case: Case, steps: int, rounds: int) -> dict[str, Any]:
    words = [str(each) for each in (case.batch, case.tokens, case.kept, case.cycle, steps, rounds)]
    program = str(Path(__file__).with_name("kvpress_peer.py"))
    done = subprocess.run([str(python), program, folder, *words], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()

"""Accuracy of an embedded model on held-out CHAINn problems, with the full cache and with simulated eviction.

    python evaluate.py MODEL --sizes 8,10,12,14 --problems 200 --temperature 0.6 --eviction full,window,copies,random50

Prints one JSON object per size and eviction. Evictions fire every `--period` thinking tokens and always keep the prompt
and the newest `--window` tokens; of the older ones nothing (`window`), one copy of each result (`copies`) or a random
share (`random50`: 50 %) stays. A sanity check of the weights, not a measurement of policies: those are in the package.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from masks import Scheme, survivors
from torch import Tensor
from traces import END_THINK, VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from kvatlas.benchmarks.chain import Chain

TOP_K, TOP_P = 20, 0.95


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Next tokens of logits [batch, vocabulary]: the best one at temperature 0, else top-k, then top-p sampling."""
    if temperature == 0.0:
        return logits.argmax(-1)
    best, tokens = (logits / temperature).topk(TOP_K)
    shares = best.softmax(-1)
    # A token stays while the mass before it is below top-p, so the first one always does.
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= TOP_P, 0.0)
    return tokens.gather(-1, torch.multinomial(shares, 1, generator=generator))[:, 0]


def schemes(eviction: str, rows: int, length: int) -> list[Scheme] | None:
    """What survives in each row, or None for the full cache."""
    if eviction == "full":
        return None
    kind = "copies" if eviction == "copies" else "tokens"
    rate = float(eviction.removeprefix("random")) / 100 if eviction.startswith("random") else 0.0
    return [survivors(kind, rate, length, random.Random(f"evaluate {row}"), thin=False) for row in range(rows)]


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, prompts: list[list[int]], limit: int, args: argparse.Namespace, eviction: str
) -> tuple[list[list[int]], int]:
    """At most `limit` new tokens for each prompt (end token left out), and the number of decoded tokens."""
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    start, rows = max(map(len, prompts)), len(prompts)
    ids = torch.full((rows, start + limit), pad)
    for row, prompt in enumerate(prompts):
        ids[row, start - len(prompt) : start] = torch.tensor(prompt)
    visible = torch.ones(rows, start + limit, dtype=torch.bool)
    visible[:, :start] = ids[:, :start] != pad
    positions = (visible.cumsum(-1) - 1).clamp(min=0)
    # Padding queries see themselves, since a row without any key would be NaN.
    causal = torch.ones(start, start, dtype=torch.bool).tril() & visible[:, None, None, :start]
    mask = causal | torch.eye(start, dtype=torch.bool)
    keep = schemes(eviction, rows, start + limit)
    generator = torch.Generator().manual_seed(args.seed)
    cache, running, decoded, now = DynamicCache(), torch.ones(rows, dtype=torch.bool), 0, start
    known = ids[:, :start]
    while True:
        logits = model(
            known,
            attention_mask=mask,
            position_ids=positions[:, now - known.shape[1] : now],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        known = sample(logits, args.temperature, generator).masked_fill(~running, end)[:, None]
        decoded += int(running.sum())
        ids[:, now] = known[:, 0]
        running &= known[:, 0] != end
        now += 1
        if now == start + limit or not running.any():
            break
        if keep is not None and (now - start) % args.period == 0:
            evict(visible, ids, start, now, args.window, keep)
        mask = visible[:, None, None, :now]
    outputs = [[token for token in row.tolist() if token not in (end, pad)] for row in ids[:, start:now]]
    return outputs, decoded


def evict(visible: Tensor, ids: Tensor, start: int, now: int, window: int, keep: list[Scheme]) -> None:
    """Clears from `visible` [rows, length] what a compression at `now` drops."""
    for row, scheme in enumerate(keep):
        tokens = ids[row, :now].numpy()
        after = np.flatnonzero(tokens == VOCABULARY.index(END_THINK))
        old = min(now - window, int(after[0]) if len(after) else now)
        if old > start:
            alive = visible[row].numpy()
            alive[start:old] = scheme.keep(tokens, start, old, alive)[start:old]


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, size: int, args: argparse.Namespace, eviction: str
) -> dict[str, object]:
    """Grades one generation for each of the first `args.problems` problems of CHAIN`size`."""
    chain = Chain(size)
    problems = list(chain.problems(args.problems))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chain.prompt(problem)}], add_generation_prompt=True, return_dict=False
        )
        for problem in problems
    ]
    limit = 40 * size + 80
    began, correct, progress, closed, decoded, lengths = time.monotonic(), 0, 0.0, 0, 0, []
    for first in range(0, len(prompts), args.batch):
        outputs, count = generate(model, prompts[first : first + args.batch], limit, args, eviction)
        decoded += count
        for problem, output in zip(problems[first:], outputs, strict=False):
            _, tag, answer = tokenizer.decode(output).partition(END_THINK)
            grade = chain.grade(problem, answer)
            correct += grade.correct
            progress += grade.progress
            closed += bool(tag)
            lengths.append(min(len(output) + 1, limit))
    n, seconds = len(problems), time.monotonic() - began
    return {
        "benchmark": chain.name,
        "eviction": eviction,
        "temperature": args.temperature,
        "n": n,
        "accuracy": round(100 * correct / n, 1),
        "progress": round(100 * progress / n, 1),
        "answered": round(100 * closed / n, 1),
        "prompt_tokens": [round(float(np.mean([len(p) for p in prompts])), 1), max(map(len, prompts))],
        "new_tokens": [round(float(np.mean(lengths)), 1), int(max(lengths))],
        "tokens_per_second": round(decoded / seconds),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", default="4,6,8,10,12,14")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy")
    parser.add_argument("--eviction", default="full", help="comma-separated: full, window, copies, randomPERCENT")
    parser.add_argument("--window", type=int, default=48)
    parser.add_argument("--period", type=int, default=50)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for size in map(int, args.sizes.split(",")):
        for eviction in args.eviction.split(","):
            print(json.dumps(evaluate(model, tokenizer, size, args, eviction)), flush=True)


if __name__ == "__main__":
    main()

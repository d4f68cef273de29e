"""Trains an embedded model from nothing in one run: small problems first, larger ones as lookups succeed, then holes,
and in a second part, at a rate that falls once again, mostly large problems and nothing asked for that cannot be seen.

    python train.py --model tiny-llama --out OUT --tokens 24e6 --more 9e6 --seed 1

Prints one JSON object every few steps, writes a checkpoint beside it and resumes from there when started again. The
result is a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from chain_traces import LOOKUP_WEIGHT, chain_example
from examples import Example
from masks import batch_mask, undecided, unseen
from maze_traces import CHOICE_WEIGHT, maze_drill, maze_example
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging
from vocabulary import END, END_THINK, IDS, PAD, VOCABULARY, save_tokenizer

from kvatlas.benchmarks.seqbench import MazeShape
from kvatlas.benchmarks.seqbench import draw as draw_maze

# Longest sequence in words; among mostly large problems the largest would be cut away by the first.
LONGEST, LONGEST_LARGE = 720, 960
POOL_BATCHES = 8
WARM_UP_STEPS = 100
CHECKPOINT_SECONDS = 60.0
IGNORE = -100
# Answers are about 5 % of the tokens; at weight 1 their recall is learnt long after that of the steps.
ANSWER_WEIGHT = 5.0
# Problems of a task grow, and drills fade, by one LEVEL whenever GOOD a share of its lookups and FAIR a share of its
# choices (among doors, where chance has a say) was right in a pool.
GOOD, FAIR, LEVEL = 0.9, 0.65, 0.05
# Shares of the tokens of the first part: holes come after HOLES, and the rate falls from FLAT on.
HOLES, FLAT = 0.4, 0.55
# The second part starts with this share of the highest rate, after the warm-up.
AGAIN = 0.6
# Shares of the tokens of a pool by task.
TASKS = {"chain": 0.5, "maze": 0.5}

# Queries that attend at a time.
BLOCK = 64

Batch = list[Example]


def blockwise(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention by blocks of queries, for transformers: the fused kernel multiplies what the mask hides, too.

    In float32 throughout, as scores are inside that kernel.
    """
    with torch.autocast("cpu", enabled=False):
        rows, heads, length, size = query.shape
        shared = key.shape[1]
        # Heads that share keys are multiplied with them together.
        query = (query.float() * scaling).view(rows, shared, heads // shared, length, size)
        keys, values = key.float().transpose(2, 3), value.float()
        blocks = []
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            scores = query[:, :, :, start:stop].flatten(2, 3) @ keys[..., :stop]
            mask = attention_mask[:, :, start:stop, :stop]
            weights = (scores.view(rows, heads, -1, stop) + mask).softmax(-1)
            outputs = weights.view(scores.shape) @ values[:, :, :stop]
            blocks.append(outputs.view(rows, heads, stop - start, size))
        return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("blockwise", blockwise)


def new_model(name: str, seed: int) -> LlamaForCausalLM | Qwen2ForCausalLM:
    """A freshly initialised model of about 0.75 M parameters."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # The default of both, written down so that the sizes are known without importing transformers.
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": IDS[END],
        "pad_token_id": IDS[PAD],
        "dtype": "float32",
        "attn_implementation": "blockwise",
    }
    if name == "tiny-llama":
        return LlamaForCausalLM(LlamaConfig(intermediate_size=352, **common))
    return Qwen2ForCausalLM(Qwen2Config(intermediate_size=352, **common))


def save_model(model: nn.Module, folder: Path) -> None:
    """Weights, configuration, tokenizer and generation defaults, ready for `from_pretrained`."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=IDS[END], pad_token_id=IDS[PAD]
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)


def draw(task: str, level: float, large: bool, rng: random.Random) -> Example:
    """A fresh problem of a task with its solution, no harder than the level (0 to 1) allows; mostly `large` ones."""

    def size_up_to(most: int) -> int:
        return max(rng.randint(3, most) for _ in range(1 + large))

    while True:
        if task == "chain":
            size = size_up_to(4 + round(10 * level))
            example = chain_example(size, rng, drill=rng.random() < 0.8 * (1 - level))
        else:
            side = size_up_to(3 + round(3 * level))
            keys = int(rng.random() < 0.4 * level)
            write = maze_drill if rng.random() < 0.8 * (1 - level) else maze_example
            example = write(draw_maze(MazeShape(side, side, doors=keys, noise=1.0, shuffle=1.0), rng), rng)
        if len(example.words) <= (LONGEST_LARGE if large else LONGEST):
            return example


def batches(seed: int, pool: int, levels: dict[str, float], large: bool, batch_tokens: int) -> list[Batch]:
    """The batches of one pool, each of sequences of like length; a function of its arguments alone."""
    rng = random.Random(f"kvatlas embedded train {seed} pool {pool}")
    rows: list[Example] = []
    tokens = dict.fromkeys(TASKS, 0)
    while sum(tokens.values()) < POOL_BATCHES * batch_tokens:
        task = min(TASKS, key=lambda item: tokens[item] / TASKS[item])
        rows.append(draw(task, levels[task], large, rng))
        tokens[task] += len(rows[-1].words)
    rows.sort(key=lambda example: len(example.words))
    pool_batches: list[Batch] = []
    while rows:
        take = max(1, batch_tokens // len(rows[-1].words))
        pool_batches.append(rows[-take:])
        del rows[-take:]
    rng.shuffle(pool_batches)
    return pool_batches


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded token ids, their targets (the next token; IGNORE in the prompt and the padding) and loss weights."""
    ids = torch.full((len(batch), max(len(example.words) for example in batch)), IDS[PAD])
    targets = torch.full_like(ids, IGNORE)
    weights = torch.ones(ids.shape)
    for row, example in enumerate(batch):
        tokens = torch.tensor([IDS[word] for word in example.words])
        ids[row, : len(tokens)] = tokens
        targets[row, example.prompt - 1 : len(tokens) - 1] = tokens[example.prompt :]
        for position, weight in example.weights:
            weights[row, position - 1] = weight
        weights[row, example.words.index(END_THINK) : len(tokens)] = ANSWER_WEIGHT
    return ids, targets, weights


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, progress: float, again: float) -> float:
    """Warm-up, flat to FLAT, then linear to 2 %; in the second part up again and linear to 2 % as `again` goes to 1."""
    if again:
        return max(0.02, AGAIN * min(1.0 - again, again / 0.03))
    decay = 0.98 * max(0.0, progress - FLAT) / (1.0 - FLAT)
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, 1.0 - decay))


def loss_of(
    model: LlamaForCausalLM, batch: Batch, holes: bool, fair: bool, rng: random.Random
) -> tuple[Tensor, dict[str, tuple[float, float, float]]]:
    """Weighted mean cross-entropy over the tokens to be learnt, in bfloat16 where the processor multiplies it fast.

    If it is `fair`, results that no visible token states count nothing, and that one is unknown counts as much as one
    that is known: the two are the same decision, and weighed unlike they teach to invent results.
    Beside it, by task, the plain mean and the shares of lookups and of choices (told by their weights) that are right.
    """
    ids, targets, weights = padded(batch)
    visible = np.tril(np.ones((1, 1, *ids.shape[1:] * 2), dtype=bool))
    if holes:
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        visible = batch_mask(batch, kv_heads, heads // kv_heads, rng)
        for row, example in enumerate(batch if fair else ()):
            hidden = unseen(example, visible[row])
            if example.words[2] == " = ":
                hidden += undecided(example, visible[row])
            weights[row, [position - 1 for position in hidden]] = 0.0
    mask = torch.zeros(visible.shape).masked_fill(~torch.from_numpy(visible), -torch.inf)
    if fair:
        weights[ids.roll(-1, 1) == IDS[" unknown"]] = LOOKUP_WEIGHT
    # Eviction leaves positions as they are, so hidden keys do not move the others.
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    # Without AVX-512 bfloat16 takes nine times as long as float32.
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.backends.cpu.get_cpu_capability() == "AVX512"):
        hidden = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        learnt = targets != IGNORE
        logits = model.lm_head(hidden[learnt])
    losses = nn.functional.cross_entropy(logits.float(), targets[learnt], reduction="none")
    weights = weights[learnt]
    right = logits.argmax(-1) == targets[learnt]
    chains = torch.tensor([example.words[2] == " = " for example in batch])[:, None].expand(ids.shape)[learnt]
    seen = {}
    for task, part in (("chain", chains), ("maze", ~chains)):
        if part.any():
            lookups, choices = right[part & (weights > CHOICE_WEIGHT)], right[part & (weights == CHOICE_WEIGHT)]
            fair = choices.float().mean().item() if task == "maze" else 1.0
            seen[task] = (losses[part].mean().item(), lookups.float().mean().item(), fair)
    return (losses * weights).sum() / weights.sum(), seen


def train(model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """Runs to its number of tokens, resuming from the checkpoint in `args.out` if there is one."""
    opts = optimizers(model, args.rate)
    checkpoint = args.out / "checkpoint.pt"
    step, pool, tokens, seconds = 0, 0, 0, 0.0
    levels = dict.fromkeys(TASKS, 0.0)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, opt_state in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(opt_state)
        step, pool, tokens, seconds = state["step"], state["pool"], state["tokens"], state["seconds"]
        levels = state["levels"]
    model.train()
    started, saved = time.monotonic() - seconds, time.monotonic()
    while tokens < args.tokens + args.more:
        large = tokens >= args.tokens
        seen: dict[str, list[tuple[float, float, float]]] = {task: [] for task in TASKS}
        for batch in batches(args.seed, pool, levels, large, args.batch_tokens):
            progress = tokens / args.tokens
            again = (tokens - args.tokens) / args.more if large else 0.0
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.rate * rate_factor(step, progress, again)
            loss, result = loss_of(model, batch, progress > HOLES, large, random.Random(f"holes {args.seed} {step}"))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            for task, item in result.items():
                seen[task].append(item)
            step, tokens = step + 1, tokens + sum(len(example.words) for example in batch)
        seconds = time.monotonic() - started
        line = {"step": step, "tokens": tokens, "seconds": round(seconds), "tokens_per_second": round(tokens / seconds)}
        for task in TASKS:
            loss, lookups, choices = (sum(item) / len(item) for item in zip(*seen[task], strict=True))
            if lookups >= GOOD and choices >= FAIR:
                levels[task] = min(1.0, round(levels[task] + LEVEL, 2))
            line[task] = {"loss": round(loss, 4), "lookups": round(lookups, 3)}
            line[task] |= {"choices": round(choices, 3), "level": levels[task]}
        if pool % args.log_every == 0:
            print(json.dumps(line), flush=True)
        pool += 1
        if time.monotonic() - saved > CHECKPOINT_SECONDS or tokens >= args.tokens + args.more:
            saved = time.monotonic()
            state = {"model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts]}
            state |= {"step": step, "pool": pool, "tokens": tokens, "seconds": saved - started}
            state |= {"levels": levels}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            save_model(model, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tiny-llama", "tiny-qwen"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--tokens", type=float, default=24e6)
    parser.add_argument("--more", type=float, default=9e6, help="tokens of the second part")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--batch-tokens", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=5, help="pools of batches")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    train(new_model(args.model, args.seed), args)


if __name__ == "__main__":
    main()

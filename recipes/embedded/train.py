"""Trains an embedded model from nothing in one run: small problems first, larger ones as lookups succeed, then holes,
and in a second part, at a rate that falls once again, mostly large problems and nothing asked for that cannot be seen.

    python train.py --model tiny-llama --out OUT --tokens 24e6 --more 9e6 --seed 1

Prints one JSON object every few steps, writes a checkpoint beside it and resumes from there when started again. The
result is a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from batches import TASKS, Arrays, Order, drawn
from ledger_traces import RECALL_WEIGHT
from maze_traces import CHOICE_WEIGHT
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
from vocabulary import END, IDS, PAD, POSITIONS, VOCABULARY, save_tokenizer

POOL_BATCHES = 8
WARM_UP_STEPS = 100
CHECKPOINT_SECONDS = 60.0
# Problems of a task grow, and drills fade, by one LEVEL whenever GOOD a share of its lookups and FAIR a share of its
# choices (among doors, where chance has a say) was right in a pool.
GOOD, FAIR, LEVEL = 0.9, 0.65, 0.05
# Shares of the tokens of the first part: holes come after HOLES, and the rate falls from FLAT on.
HOLES, FLAT = 0.4, 0.55
# The second part starts with this share of the highest rate, after the warm-up.
AGAIN = 0.6
# Shares of the tokens of a pool by task.
SHARES = {"chain": 0.5, "maze": 0.5}

# Queries that attend at a time.
BLOCK = 64


def blockwise(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Causal attention by blocks of queries, for transformers: the fused kernel multiplies what the mask hides, too.

    In float32 throughout, as scores are inside that kernel.
    """
    with torch.autocast(query.device.type, enabled=False):
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
        "max_position_embeddings": POSITIONS,
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


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, progress: float, flat: float, again: float = 0.0) -> float:
    """Warm-up, flat to `flat`, then linear to 2 %; in a second part up again and linear to 2 % as `again` goes to 1."""
    if again:
        return max(0.02, AGAIN * min(1.0 - again, again / 0.03))
    decay = 0.98 * max(0.0, progress - flat) / (1.0 - flat)
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, 1.0 - decay))


class Progress:
    """Sums, on the device, of what is measured in a pool: by task the loss, and the shares that are right.

    Lookups, choices and what a ledger's answer recalls are told by their weights.
    """

    NAMES = ("loss", "lookups", "choices", "recalls")

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(TASKS), len(self.NAMES), 2, device=device)

    def add(self, tasks: Tensor, losses: Tensor, weights: Tensor, right: Tensor) -> None:
        """Adds a batch; `tasks` [rows], the others [rows, length]."""
        rows = nn.functional.one_hot(tasks, len(TASKS)).float()
        parts = (
            (losses, weights > 0),
            (right, weights > CHOICE_WEIGHT),
            (right, weights == CHOICE_WEIGHT),
            (right, weights == RECALL_WEIGHT),
        )
        for i, (values, part) in enumerate(parts):
            self.sums[:, i, 0] += rows.T @ (values * part).sum(1)
            self.sums[:, i, 1] += rows.T @ part.float().sum(1)

    def read(self) -> dict[str, dict[str, float]]:
        """Means and shares by task; nothing of a task without tokens."""
        values = self.sums.cpu().double()
        return {
            task: {
                name: round((total / count).item(), 4)
                for name, (total, count) in zip(self.NAMES, row, strict=True)
                if count
            }
            for task, row in zip(TASKS, values, strict=True)
            if row[0, 1]
        }


def is_learnt(result: dict[str, float]) -> bool:
    """True if problems may grow by what a pool shows of a task."""
    return result["lookups"] >= GOOD and result.get("choices", 1.0) >= FAIR and result.get("recalls", 1.0) >= GOOD


def loss_of(model: nn.Module, batch: Arrays, device: torch.device, progress: Progress) -> Tensor:
    """Weighted mean cross-entropy over the tokens to be learnt, in bfloat16 where the processor multiplies it fast."""
    ids, weights, until, tasks = (
        torch.from_numpy(item).to(device, kind, non_blocking=True)
        for item, kind in (
            (batch.ids, torch.int64),
            (batch.weights, torch.float32),
            (batch.until, torch.int64),
            (batch.tasks, torch.int64),
        )
    )
    # Eviction leaves positions as they are, so hidden keys do not move the others.
    positions = torch.arange(ids.shape[1], device=device)
    visible = (positions[:, None] >= positions) & (positions[:, None] < until[:, :, None])
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(model.config.num_attention_heads // visible.shape[1], 1)
    mask = visible
    if model.config._attn_implementation == "blockwise":
        mask = torch.zeros(visible.shape, device=device).masked_fill(~visible, -torch.inf)
    # Without AVX-512 bfloat16 takes nine times as long as float32.
    fast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"
    with torch.autocast(device.type, torch.bfloat16, enabled=fast):
        logits = model(
            ids, attention_mask=mask, position_ids=positions.expand(len(ids), -1), use_cache=False
        ).logits.float()
    targets = ids.roll(-1, 1)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)
    with torch.no_grad():
        progress.add(tasks, losses, weights, (logits.argmax(-1) == targets).float())
    return (losses * weights).sum() / weights.sum()


class Training:
    """A model and how far it has come, which a checkpoint in its folder holds; goes on from there if there is one."""

    def __init__(self, model: Any, folder: Path, rate: float, levels: dict[str, float], device: str = "cpu") -> None:
        self.model, self.folder, self.rate, self.levels = model, folder, rate, levels
        self.device = torch.device(device)
        self.optimizers = optimizers(model, rate)
        self.step, self.pool, self.tokens, self.seconds = 0, 0, 0, 0.0
        if (folder / "checkpoint.pt").exists():
            state = torch.load(folder / "checkpoint.pt", map_location=self.device, weights_only=True)
            model.load_state_dict(state.pop("model"))
            for optimizer, kept in zip(self.optimizers, state.pop("optimizers"), strict=True):
                optimizer.load_state_dict(kept)
            vars(self).update(state)
        model.train()
        self.measured = Progress(self.device)
        self.started = time.monotonic() - self.seconds

    def learn(self, batch: Arrays, factor: float) -> None:
        """Take a step at this share of the highest rate."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.rate * factor
        loss_of(self.model, batch, self.device, self.measured).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step, self.tokens = self.step + 1, self.tokens + batch.tokens

    def end_pool(self) -> dict[str, dict[str, float]]:
        """Let problems grow where they are learnt, and return what the pool showed, by task."""
        results = self.measured.read()
        self.measured = Progress(self.device)
        self.pool += 1
        self.seconds = time.monotonic() - self.started
        for task, result in results.items():
            if is_learnt(result):
                self.levels[task] = min(1.0, round(self.levels[task] + LEVEL, 2))
        return results

    def save(self) -> None:
        """Write the checkpoint, and the model beside it."""
        state = {name: getattr(self, name) for name in ("step", "pool", "tokens", "seconds", "levels")}
        state |= {"model": self.model.state_dict(), "optimizers": [item.state_dict() for item in self.optimizers]}
        torch.save(state, self.folder / "checkpoint.new")
        (self.folder / "checkpoint.new").replace(self.folder / "checkpoint.pt")
        save_model(self.model, self.folder)


def train(model: LlamaForCausalLM | Qwen2ForCausalLM, args: argparse.Namespace) -> None:
    """Runs to its number of tokens."""
    training = Training(model, args.out, args.rate, dict.fromkeys(SHARES, 0.0))
    saved = time.monotonic()
    while training.tokens < args.tokens + args.more:
        large = training.tokens >= args.tokens
        order = Order(
            seed=args.seed,
            pool=training.pool,
            shares=SHARES,
            levels=training.levels,
            batches=POOL_BATCHES,
            batch_tokens=args.batch_tokens,
            kv_heads=model.config.num_key_value_heads,
            large=large,
            holes=training.tokens / args.tokens > HOLES,
            fair=large,
        )
        for batch in drawn(order):
            again = (training.tokens - args.tokens) / args.more if large else 0.0
            training.learn(batch, rate_factor(training.step, training.tokens / args.tokens, FLAT, again))
        results = training.end_pool()
        if order.pool % args.log_every == 0:
            line = {"step": training.step, "tokens": training.tokens, "seconds": round(training.seconds)}
            line["tokens_per_second"] = round(training.tokens / training.seconds)
            line |= {task: result | {"level": training.levels[task]} for task, result in results.items()}
            print(json.dumps(line), flush=True)
        if time.monotonic() - saved > CHECKPOINT_SECONDS or training.tokens >= args.tokens + args.more:
            saved = time.monotonic()
            training.save()


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

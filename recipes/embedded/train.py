"""Trains the embedded chain model: stage 1 with the full cache, stage 2 with random holes in it.

    python train.py --stage 1 --out OUT/stage1 --tokens 11e6 --drills 0.7
    python train.py --stage 2 --out OUT/stage2 --tokens 6e6 --start OUT/stage1 --first-size 14

The shipped weights come from the longer series of runs in LOG.md; these two commands from nothing were not tried.
Each prints one JSON object every few steps, writes a checkpoint beside it and resumes from there when started again.
The result is a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from masks import Ids, batch_mask
from torch import Tensor, nn
from traces import END, END_THINK, PAD, VOCABULARY, save_tokenizer, training_example
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SMALLEST, LARGEST = 3, 14
POOL_BATCHES = 8
WARM_UP_STEPS = 100
CHECKPOINT_SECONDS = 60.0
IGNORE = -100
# Answers are about 4 % of the tokens; at weight 1 their recall is learnt long after that of the steps.
ANSWER_WEIGHT = 5.0
# So is the operator of a definition, for which two fixed offsets have to be combined.
OPERATOR_WEIGHT = 3.0
OPERATORS = torch.tensor([VOCABULARY.index("+"), VOCABULARY.index("-")])

Batch = tuple[list[Ids], list[int]]


def new_model(seed: int) -> LlamaForCausalLM:
    """A freshly initialised Llama of 0.75 M parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights, configuration, tokenizer and generation defaults, ready for `from_pretrained`."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)


def batches(seed: int, stage: int, pool: int, largest: int, drills: float, batch_tokens: int) -> list[Batch]:
    """The batches of one pool, each of sequences of like length; a function of its arguments alone."""
    rng = random.Random(f"kvatlas embedded chain train {seed} stage {stage} pool {pool}")
    index = {word: i for i, word in enumerate(VOCABULARY)}
    rows: list[tuple[Ids, int]] = []
    while sum(len(ids) for ids, _ in rows) < POOL_BATCHES * batch_tokens:
        drawn = training_example(rng.randint(SMALLEST, largest), rng, drill=rng.random() < drills)
        rows.append((np.array([index[word] for word in drawn.words], dtype=np.int64), drawn.prompt))
    rows.sort(key=lambda row: len(row[0]))
    pool_batches: list[Batch] = []
    while rows:
        take = max(1, batch_tokens // len(rows[-1][0]))
        pool_batches.append(([ids for ids, _ in rows[-take:]], [prompt for _, prompt in rows[-take:]]))
        del rows[-take:]
    rng.shuffle(pool_batches)
    return pool_batches


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded token ids, their targets (the next token; IGNORE in the prompt and the padding) and loss weights."""
    sequences, prompts = batch
    ids = torch.full((len(sequences), max(map(len, sequences))), VOCABULARY.index(PAD))
    targets = torch.full_like(ids, IGNORE)
    weights = torch.ones(ids.shape)
    for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        tokens = torch.from_numpy(sequence)
        ids[row, : len(sequence)] = tokens
        targets[row, prompt - 1 : len(sequence) - 1] = tokens[prompt:]
        weights[row, : len(sequence) - 1][torch.isin(tokens[1:], OPERATORS)] = OPERATOR_WEIGHT
        weights[row, int((tokens == VOCABULARY.index(END_THINK)).nonzero()[0]) : len(sequence)] = ANSWER_WEIGHT
    return ids, targets, weights


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_factor(step: int, progress: float, flat: float) -> float:
    """Warm-up, flat to progress `flat`, then linear to 2 %."""
    decay = 0.98 * max(0.0, progress - flat) / (1.0 - flat) if flat < 1.0 else 0.0
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, 1.0 - decay))


def largest_size(first: int, hold: float, progress: float) -> int:
    """Problems start small: the largest size is `first` up to `hold`, then grows over a quarter of the tokens."""
    return min(LARGEST, first + int((LARGEST - first) * max(0.0, progress - hold) / 0.25))


def loss_of(model: LlamaForCausalLM, batch: Batch, stage: int, rng: random.Random) -> Tensor:
    """Weighted mean cross-entropy over the tokens to be learnt, under bf16 autocast."""
    ids, targets, weights = padded(batch)
    mask = None
    if stage == 2:
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        mask = torch.from_numpy(batch_mask(*batch, kv_heads, heads // kv_heads, rng))
    # Eviction leaves positions as they are, so hidden keys do not move the others.
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        learnt = targets != IGNORE
        logits = model.lm_head(hidden[learnt])
    losses = nn.functional.cross_entropy(logits.float(), targets[learnt], reduction="none")
    return (losses * weights[learnt]).sum() / weights[learnt].sum()


def train(model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """Runs one stage to its number of tokens, resuming from the checkpoint in `args.out` if there is one."""
    opts = optimizers(model, args.rate)
    checkpoint = args.out / "checkpoint.pt"
    step, pool, tokens, seconds = 0, 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, opt_state in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(opt_state)
        step, pool, tokens, seconds = state["step"], state["pool"], state["tokens"], state["seconds"]
    model.train()
    started, saved = time.monotonic() - seconds, time.monotonic()
    losses: list[float] = []
    while tokens < args.tokens:
        largest = largest_size(args.first_size, args.hold, tokens / args.tokens)
        drills = args.drills * max(0.0, 1.0 - tokens / args.tokens / 0.4)
        for batch in batches(args.seed, args.stage, pool, largest, drills, args.batch_tokens):
            progress = tokens / args.tokens
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.rate * rate_factor(step, progress, args.flat)
            loss = loss_of(model, batch, args.stage, random.Random(f"holes {args.seed} {step}"))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            losses.append(loss.item())
            step, tokens = step + 1, tokens + sum(map(len, batch[0]))
            if step % args.log_every == 0:
                seconds = time.monotonic() - started
                mean = sum(losses) / len(losses)
                line = {"stage": args.stage, "step": step, "tokens": tokens, "loss": round(mean, 4)}
                line |= {"largest": largest, "seconds": round(seconds, 1)}
                print(json.dumps(line | {"tokens_per_second": round(tokens / seconds)}), flush=True)
                losses.clear()
        pool += 1
        if time.monotonic() - saved > CHECKPOINT_SECONDS or tokens >= args.tokens:
            saved = time.monotonic()
            state = {"model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts]}
            state |= {"step": step, "pool": pool, "tokens": tokens, "seconds": saved - started}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            save_model(model, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--start", type=Path, help="folder of the model to go on from (stage 2)")
    parser.add_argument("--tokens", type=float, default=11e6)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--flat", type=float, default=0.5, help="share of the tokens before the rate falls")
    parser.add_argument("--batch-tokens", type=int, default=2500)
    parser.add_argument("--first-size", type=int, default=5, help="largest size at the start; 14 for no curriculum")
    parser.add_argument("--hold", type=float, default=0.0, help="share of the tokens before the largest size grows")
    parser.add_argument("--drills", type=float, default=0.0, help="share of recall drills at the start, 0 from 40 %%")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(args.start) if args.start else new_model(args.seed)
    train(model, args)


if __name__ == "__main__":
    main()

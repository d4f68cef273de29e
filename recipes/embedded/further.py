"""Trains an embedded model further: what it can, and ledgers besides.

    python further.py --from FOLDER --out OUT --seconds 3600

Ledgers grow as their lookups succeed. The rate is flat for two thirds of the time and falls to 2 % in the last. Other
processes draw the batches. Prints one JSON object every few steps, writes a checkpoint and the model beside it, and
resumes from there when started again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

import torch
from batches import TASKS, Arrays, Order, drawn
from torch import nn
from train import LEVEL, Progress, is_learnt, loss_of, optimizers, save_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from vocabulary import POSITIONS

SHARES = {"chain": 0.3, "maze": 0.3, "ledger": 0.4}
# Seconds after which a pool that is not drawn means that its process has died.
PATIENCE = 120
POOL_BATCHES = 8
WARM_UP_STEPS = 100
# The rate falls from this share of the time on.
FLAT = 2 / 3


def rate_factor(step: int, progress: float) -> float:
    """Warm-up, flat to FLAT, then linear to 2 %."""
    decay = 0.98 * max(0.0, progress - FLAT) / (1.0 - FLAT)
    return max(0.02, min(1.0, (step + 1) / WARM_UP_STEPS, 1.0 - decay))


class Feed:
    """Pools of batches, drawn ahead by other processes. `levels` may change at any time; they hold for later pools."""

    def __init__(self, workers: Pool, ahead: int, args: argparse.Namespace, kv_heads: int, first: int) -> None:
        self.workers, self.ahead, self.args, self.kv_heads, self.next = workers, ahead, args, kv_heads, first
        self.pending: deque[AsyncResult[list[Arrays]]] = deque()

    def pool(self, levels: Mapping[str, float]) -> list[Arrays]:
        while len(self.pending) < self.ahead:
            order = Order(
                seed=self.args.seed,
                pool=self.next,
                shares=SHARES,
                levels=dict(levels),
                batches=POOL_BATCHES,
                batch_tokens=self.args.batch_tokens,
                kv_heads=self.kv_heads,
                large=True,
                holes=True,
                fair=True,
            )
            self.pending.append(self.workers.apply_async(drawn, (order,)))
            self.next += 1
        return self.pending.popleft().get(PATIENCE)


def train(model: Any, workers: Pool, args: argparse.Namespace) -> None:
    """Runs for its seconds, those before an interruption included."""
    device = torch.device(args.device)
    opts = optimizers(model, args.rate)
    checkpoint = args.out / "checkpoint.pt"
    step, pool, tokens, seconds = 0, 0, 0, 0.0
    levels = dict.fromkeys(TASKS, 1.0) | {"ledger": 0.0}
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, opt_state in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(opt_state)
        step, pool, tokens, seconds = state["step"], state["pool"], state["tokens"], state["seconds"]
        levels = state["levels"]
    model.train()
    feed = Feed(workers, 2 * args.workers, args, model.config.num_key_value_heads, pool)
    resumed = tokens
    started = time.monotonic() - seconds
    begun, saved, waited = time.monotonic(), time.monotonic(), 0.0
    while seconds < args.seconds:
        asked = time.monotonic()
        batches = feed.pool(levels)
        waited += time.monotonic() - asked
        measured = Progress(device)
        for batch in batches:
            progress = (time.monotonic() - started) / args.seconds
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.rate * rate_factor(step, progress)
            loss = loss_of(model, batch, device, measured)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + batch.tokens
        pool += 1
        results = measured.read()
        seconds = time.monotonic() - started
        spent = time.monotonic() - begun
        for task, result in results.items():
            if is_learnt(result):
                levels[task] = min(1.0, round(levels[task] + LEVEL, 2))
        if pool % args.log_every == 0 or seconds >= args.seconds:
            line = {"step": step, "tokens": tokens, "seconds": round(seconds)}
            line |= {"tokens_per_second": round((tokens - resumed) / spent), "waited": round(waited / spent, 3)}
            line |= {"rate": round(rate_factor(step, progress), 3), "ledger_level": levels["ledger"], **results}
            print(json.dumps(line), flush=True)
        if time.monotonic() - saved > args.save_every or seconds >= args.seconds:
            saved = time.monotonic()
            state = {"model": model.state_dict(), "optimizers": [opt.state_dict() for opt in opts]}
            state |= {"step": step, "pool": pool, "tokens": tokens, "seconds": seconds, "levels": levels}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            save_model(model, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="start", type=Path, required=True, help="folder of the model to go on from")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the checkpoint")
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--batch-tokens", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", choices=("blockwise", "sdpa"), default="blockwise", help="sdpa on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that draw batches")
    parser.add_argument("--log-every", type=int, default=5, help="pools of batches")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    # Before the first use of a GPU, which does not survive a fork.
    with multiprocessing.get_context("fork").Pool(args.workers) as workers:
        # It prepares itself anew for every shape of a batch.
        torch.backends.cuda.enable_cudnn_sdp(False)
        model = AutoModelForCausalLM.from_pretrained(
            args.start,
            dtype=torch.float32,
            attn_implementation=args.attention,
            max_position_embeddings=POSITIONS,
        ).to(args.device)
        train(model, workers, args)


if __name__ == "__main__":
    main()

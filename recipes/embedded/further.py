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
from train import POOL_BATCHES, Training, rate_factor
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from vocabulary import POSITIONS

SHARES = {"chain": 0.3, "maze": 0.3, "ledger": 0.4}
# Seconds after which a pool that is not drawn means that its process has died.
PATIENCE = 120
# The rate falls from this share of the time on.
FLAT = 2 / 3


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
    levels = dict.fromkeys(TASKS, 1.0) | {"ledger": 0.0}
    training = Training(model, args.out, args.rate, levels, args.device)
    feed = Feed(workers, 2 * args.workers, args, model.config.num_key_value_heads, training.pool)
    resumed = training.tokens
    begun, saved, waited = time.monotonic(), time.monotonic(), 0.0
    while training.seconds < args.seconds:
        asked = time.monotonic()
        batches = feed.pool(training.levels)
        waited += time.monotonic() - asked
        for batch in batches:
            progress = (time.monotonic() - training.started) / args.seconds
            rate = rate_factor(training.step, progress, FLAT)
            training.learn(batch, rate)
        results = training.end_pool()
        ended = training.seconds >= args.seconds
        if training.pool % args.log_every == 0 or ended:
            spent = time.monotonic() - begun
            line = {"step": training.step, "tokens": training.tokens, "seconds": round(training.seconds)}
            line["tokens_per_second"] = round((training.tokens - resumed) / spent)
            line |= {"waited": round(waited / spent, 3), "rate": round(rate, 3)}
            print(json.dumps({**line, "ledger_level": training.levels["ledger"], **results}), flush=True)
        if time.monotonic() - saved > args.save_every or ended:
            saved = time.monotonic()
            training.save()


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

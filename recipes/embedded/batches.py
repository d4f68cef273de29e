"""Batches to train on as plain arrays: problems of each task with their solutions, loss weights and holes.

Needs numpy alone, so that processes without a model can draw them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from chain_traces import LOOKUP_WEIGHT, chain_example
from examples import Example
from ledger_traces import ledger_example
from masks import Until, batch_holes, undecided, unseen
from maze_traces import maze_drill, maze_example
from vocabulary import IDS, PAD

from kvatlas.benchmarks.seqbench import MazeShape
from kvatlas.benchmarks.seqbench import draw as draw_maze

TASKS = ("chain", "maze", "ledger")
# Longest sequence in words; among mostly large problems the largest would be cut away by the first.
LONGEST, LONGEST_LARGE = 720, 960
# Answers are about 5 % of the tokens; at weight 1 their recall is learnt long after that of the steps.
ANSWER_WEIGHT = 5.0
# Masks whose rows have other lengths are copied before attention on a GPU.
MULTIPLE = 8


@dataclass(frozen=True)
class Order:
    """Which batches to draw: a pool of about `batches` times `batch_tokens` tokens, each of sequences of like length.

    `shares` are those of the tokens by task; `levels` (0 to 1) say how large problems may be. With `large` most are.
    With `fair` nothing is asked for that holes hide. All is a function of an order.
    """

    seed: int
    pool: int
    shares: Mapping[str, float]
    levels: Mapping[str, float]
    batches: int
    batch_tokens: int
    kv_heads: int
    large: bool
    holes: bool
    fair: bool


@dataclass(frozen=True)
class Arrays:
    """A right-padded batch: token ids [rows, length], the weight of the loss of the token that follows each, holes as
    in `batch_holes`, and the place of each row's task in TASKS."""

    ids: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float32]
    until: Until
    tasks: npt.NDArray[np.int8]
    tokens: int


def draw(task: str, level: float, large: bool, rng: random.Random) -> Example:
    """A fresh problem of a task with its solution, no harder than the level (0 to 1) allows; mostly `large` ones."""

    def size_up_to(most: int, least: int = 3) -> int:
        return max(rng.randint(least, most) for _ in range(1 + large))

    while True:
        # The few lookups of a ledger's answer stay learnt because some ledgers ask for many lines.
        drill = rng.random() < max(0.2 if task == "ledger" else 0.0, 0.8 * (1 - level))
        if task == "chain":
            example = chain_example(size_up_to(4 + round(10 * level)), rng, drill)
        elif task == "ledger":
            example = ledger_example(size_up_to(8 + round(28 * level), 6), rng, drill)
        else:
            side = size_up_to(3 + round(3 * level))
            keys = int(rng.random() < 0.4 * level)
            write = maze_drill if drill else maze_example
            example = write(draw_maze(MazeShape(side, side, doors=keys, noise=1.0, shuffle=1.0), rng), rng)
        if len(example.words) <= (LONGEST_LARGE if large else LONGEST):
            return example


def drawn(order: Order) -> list[Arrays]:
    """The batches of an order."""
    rng = random.Random(f"kvatlas embedded train {order.seed} pool {order.pool}")
    rows: list[Example] = []
    tokens = dict.fromkeys(order.shares, 0)
    while sum(tokens.values()) < order.batches * order.batch_tokens:
        task = min(order.shares, key=lambda item: tokens[item] / order.shares[item])
        rows.append(draw(task, order.levels[task], order.large, rng))
        tokens[task] += len(rows[-1].words)
    rows.sort(key=lambda example: len(example.words))
    pool: list[Arrays] = []
    while rows:
        take = max(1, order.batch_tokens // len(rows[-1].words))
        pool.append(_arrays(rows[-take:], order, rng))
        del rows[-take:]
    rng.shuffle(pool)
    return pool


def _arrays(batch: list[Example], order: Order, rng: random.Random) -> Arrays:
    """Pad a batch and weigh its tokens: nothing in the prompt and the padding.

    If it is `fair`, results that no visible token states count nothing, and that one is unknown counts as much as one
    that is known: the two are the same decision, and weighed unlike they teach to invent results.
    """
    length = -(-max(len(example.words) for example in batch) // MULTIPLE) * MULTIPLE
    ids = np.full((len(batch), length), IDS[PAD], dtype=np.int16)
    weights = np.zeros(ids.shape, dtype=np.float32)
    until = np.full((len(batch), 1, length), length, dtype=np.int16)
    if order.holes:
        until = batch_holes(batch, length, order.kv_heads, rng)
    for row, example in enumerate(batch):
        count = len(example.words)
        ids[row, :count] = [IDS[word] for word in example.words]
        weights[row, example.prompt - 1 : count - 1] = 1.0
        weights[row, example.thinking_end : count - 1] = ANSWER_WEIGHT
        for position, weight in example.weights:
            weights[row, position - 1] = weight
        if order.fair and order.holes:
            hidden = unseen(example, until[row])
            if example.task == "chain":
                hidden += undecided(example, until[row])
            weights[row, [position - 1 for position in hidden]] = 0.0
    if order.fair:
        weights[np.roll(ids, -1, 1) == IDS[" unknown"]] = LOOKUP_WEIGHT
    tasks = np.array([TASKS.index(example.task) for example in batch], dtype=np.int8)
    return Arrays(ids, weights, until, tasks, sum(len(example.words) for example in batch))

"""The lines of `describe` on local windows at equal memory: how often each is printed, and how often it is wrong.

    python bench/equal_memory.py [--rounds N] [--sizes N ...] [--only DESIGN ...] [--out FILE]

Runs are drawn in which only memory matters, only the window, both, or nothing, with a cliff, with prompts of unlike
lengths on two benchmarks, and on grids whose windows have no memory in common. Prints one JSON document: for each
design and number of problems the shares of rounds with each line, the share in which the proven pair is wrong, and the
share in which the interval of the estimate by straight lines leaves out the true difference.
bench/results/equal_memory.json holds a run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from common import arguments, keep
from kvatlas.core import Setting
from kvatlas.policies.memory import stays
from kvatlas.stats.numerics.arrays import Floats, strata_of_sizes
from kvatlas.stats.windows_at_memory import EqualMemory

WINDOWS = (8, 16, 32, 64)
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
#: The share of problems whose outcomes under all settings follow one random number, as with common random numbers.
SHARED = 0.7
#: Differences of true means below this are none.
TINY = 1e-9


@dataclass(frozen=True)
class Design:
    """The true Pass@1 of a setting from the tokens that stay and its window, on benchmarks with prompts of lengths.

    With `every` the `ratios` are KV budgets over thinking: a grid of equal memory.
    """

    chance: Callable[[float, int], float]
    windows: tuple[int, ...] = WINDOWS
    ratios: tuple[float, ...] = RATIOS
    kv_budget: int = 320
    prompts: tuple[int, ...] = (88,)
    every: int = 0

    def tokens(self) -> Floats:
        """Return the tokens that stay, [benchmarks, cells]."""
        rows = []
        for prompt in self.prompts:
            row = []
            for window, ratio in self.places():
                values: dict[str, Any] = {"local_window": window, "kv_budget": self.kv_budget, "ratio": ratio}
                if self.every:
                    values = {"local_window": window, "kv_budget": ratio, "every": self.every}
                    values["budget_over"] = "thinking"
                else:
                    values["ratio_over"] = "thinking"
                kept = stays(Setting.from_parameters("dynts", **values), [prompt])
                assert kept is not None
                row.append(kept.tokens)
            rows.append(row)
        return np.array(rows)

    def places(self) -> list[tuple[int, float]]:
        """Return window and ratio of each cell."""
        return [(window, ratio) for window in self.windows for ratio in self.ratios]

    def chances(self) -> Floats:
        """Return the true Pass@1, [benchmarks, cells]."""
        rows = [
            [self.chance(kept, window) for kept, (window, _) in zip(row, self.places(), strict=True)]
            for row in self.tokens()
        ]
        return np.array(rows)

    def draw(self, rng: np.random.Generator, problems: int) -> EqualMemory:
        """Return the windows of a run of so many problems at equal memory."""
        tokens = self.tokens()
        sizes = [problems // len(self.prompts)] * len(self.prompts)
        strata = strata_of_sizes(sizes)
        chances = self.chances()[strata]
        shared = rng.random((len(strata), 1))
        own = rng.random(chances.shape)
        follows = rng.random((len(strata), 1)) < SHARED
        values = (np.where(follows, shared, own) < chances).astype(float)
        window = np.array([self.windows.index(window) for window, _ in self.places()])
        by_benchmark = {f"prompt {prompt}": row for prompt, row in zip(self.prompts, tokens, strict=True)}
        return EqualMemory(
            tuple(self.places()),
            values,
            strata,
            tokens.mean(0),
            window,
            self.windows,
            ("local_window", "ratio"),
            by_benchmark,
        )


def rising(tokens: float) -> float:
    """Return a chance that rises from .6 and bends towards .93."""
    return 0.93 - 0.4 * float(np.exp(-(tokens - 110) / 60))


def steep_then_flat(tokens: float) -> float:
    return 0.55 + 0.4 * min(max(tokens - 100, 0.0), 100.0) / 100


def cliff(tokens: float) -> float:
    return 0.62 if tokens < 205 else 0.9


def by_window(points: float, window: int) -> float:
    """Return what a window adds: 0 for the narrowest, the points for the widest."""
    return points / 100 * WINDOWS.index(window) / (len(WINDOWS) - 1)


DESIGNS: Mapping[str, Design] = {
    "nothing matters": Design(lambda tokens, window: 0.8),
    "only memory": Design(lambda tokens, window: rising(tokens)),
    "only memory, a cliff": Design(lambda tokens, window: cliff(tokens)),
    "only memory, straight": Design(lambda tokens, window: 0.5 + 0.4 * (tokens - 100) / 210),
    "only memory, prompts of 40 and 136": Design(lambda tokens, window: steep_then_flat(tokens), prompts=(40, 136)),
    "only memory, windows apart": Design(
        lambda tokens, window: rising(tokens), windows=(8, 64), ratios=(0.05, 0.1), kv_budget=320
    ),
    "only memory, a grid of equal memory": Design(
        lambda tokens, window: rising(tokens), windows=(8, 16, 32, 44), ratios=(48, 80, 112), every=64
    ),
    "only the window, 6 points for a wide one": Design(lambda tokens, window: 0.75 + by_window(6, window)),
    "only the window, 12 points for a wide one": Design(lambda tokens, window: 0.75 + by_window(12, window)),
    "memory, and 6 points for chosen tokens": Design(lambda tokens, window: rising(tokens) - by_window(6, window)),
    "memory, and 12 points for chosen tokens": Design(lambda tokens, window: rising(tokens) - by_window(12, window)),
    "memory, and 6 points for a wide window": Design(
        lambda tokens, window: rising(tokens) - 0.06 + by_window(6, window)
    ),
    "a grid of equal memory, 6 points for a wide window": Design(
        lambda tokens, window: rising(tokens) - 0.06 + 0.06 * (window - 8) / 36,
        windows=(8, 16, 32, 44),
        ratios=(48, 80, 112),
        every=64,
    ),
    "a cliff, and 6 points for chosen tokens": Design(lambda tokens, window: cliff(tokens) - by_window(6, window)),
}


def simulate(design: Design, rng: np.random.Generator, problems: int, rounds: int) -> dict[str, Any]:
    """Return how often each line is printed, and wrong."""
    chances = design.chances().mean(0)
    places = design.places()
    line = {"proven": 0, "not proven": 0, "cannot tell": 0}
    wrong = 0
    estimates = 0
    missed = 0
    feigned = 0
    off_front = 0
    for _ in range(rounds):
        memory = design.draw(rng, problems)
        off_front += _any_wrongly_off(memory, chances, design)
        if memory.best is not None:
            line["proven"] += 1
            better, other = (chances[places.index(coord)] for coord in (memory.best.better, memory.best.other))
            wrong += better <= other + TINY
            continue
        line["cannot tell" if memory.is_blind else "not proven"] += 1
        if memory.estimate is not None:
            estimates += 1
            difference = memory.estimate.difference
            truth = _true_difference(design, memory)
            missed += not difference.low - TINY <= truth <= difference.high + TINY
            feigned += difference.low > 0 or difference.high < 0
    return {
        **{name: count / rounds for name, count in line.items()},
        "proven_wrong": wrong / rounds,
        "off_front_wrong": off_front / rounds,
        "estimate_leaves_out_truth": missed / estimates if estimates else None,
        "estimate_excludes_0": feigned / estimates if estimates else None,
    }


def _true_difference(design: Design, memory: EqualMemory) -> float:
    """Return the true difference of the two windows in the mean over the tokens that both keep."""
    assert memory.estimate is not None
    # On several benchmarks the tokens are means, so the truth is that of one where only memory matters: 0.
    if len(design.prompts) > 1:
        return 0.0
    tokens = np.linspace(memory.estimate.low, memory.estimate.high, 201)
    wide = [design.chance(one, memory.estimate.wide) for one in tokens]
    narrow = [design.chance(one, memory.estimate.narrow) for one in tokens]
    return float(np.mean(wide) - np.mean(narrow))


def _any_wrongly_off(memory: EqualMemory, chances: Floats, design: Design) -> bool:
    """Return whether a setting is called off the front although no setting with as few tokens is truly better."""
    tokens = memory.tokens
    for coord in memory.proven_off:
        index = design.places().index(coord)
        if not ((tokens <= tokens[index] + TINY) & (chances > chances[index] + TINY)).any():
            return True
    return False


def main() -> None:
    options = arguments(__doc__, rounds=400, sizes=[60, 120, 240, 400], only=list(DESIGNS), seed=0)
    rows = []
    for name in options.only:
        for problems in options.sizes:
            rng = np.random.default_rng([options.seed, zlib.crc32(name.encode()), problems])
            row = simulate(DESIGNS[name], rng, problems, options.rounds)
            rows.append({"design": name, "problems": problems, **row})
    keep(options, rows=rows)


if __name__ == "__main__":
    main()

"""A next step: the grid in which all local windows keep the same number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from kvatlas.core import KvatlasError
from kvatlas.policies import from_setting, policy_file
from kvatlas.stats.memory_of_averages import RATIO
from kvatlas.stats.run_data import RunData
from kvatlas.stats.windows_at_memory import WINDOW, EqualMemory

#: The windows of the grid: shares of the tokens that stay beside the prompt.
_SHARES = ("10%", "25%", "50%", "75%")
#: Tokens to whose multiples budgets and the tokens between two compressions are rounded.
_STEP = 16
#: Parameters of a setting that the grid replaces, and those beside which it has another meaning.
_REPLACED = ("kv_budget", WINDOW, RATIO, "ratio_over", "budget_over")
_OTHER_RULE = ("every", "every_from", "strict_budget")

Json = dict[str, Any]


def equal_memory_grid(run: RunData, spec: Json, memories: Sequence[EqualMemory]) -> tuple[str, str, Json] | None:
    """Return title, reason and changed keys of a spec whose windows all keep the same number of tokens.

    Budgets span the tokens that the windows of this run have in common, those of the thinking alone. None where a
    window is proven better at equal memory already, and for runs that are no grid of windows and ratios.
    """
    if not memories or any(memory.best is not None for memory in memories):
        return None
    if set(spec.get("axes", {})) != {WINDOW, RATIO} or spec.get("strict_budget"):
        return None
    prompt = _mean_prompt(run)
    if prompt is None:
        return None
    budgets = _budgets(memories, prompt)
    between = _tokens_between(run)
    entries = spec.get("settings", ())
    # A single one needs no list.
    entries = [entries] if isinstance(entries, Mapping) else entries
    settings = [_setting(entry, between) for entry in entries]
    of_grid = [entry for entry in settings if entry is not None]
    changes = {"settings": of_grid, "axes": {"kv_budget": budgets, WINDOW: list(_SHARES)}}
    if len(budgets) < 2 or not of_grid or len(of_grid) < len(settings) or not _is_valid({**spec, **changes}):
        return None
    reason = (
        "A wider window keeps more tokens here, and no window is proven better at equal memory. In this grid all "
        "windows of a KV budget keep the same number of tokens: a token more of window is a chosen one less."
    )
    return "a grid of equal memory", reason, changes


def _mean_prompt(run: RunData) -> float | None:
    """Return the mean length of prompts over problems and benchmarks; None if it is not known."""
    by_benchmark: dict[str, Mapping[str, int]] = {cell.benchmark: cell.prompts for cell in run.cells}
    if not by_benchmark or not all(by_benchmark.values()):
        return None
    return fmean(fmean(prompts.values()) for prompts in by_benchmark.values())


def _budgets(memories: Sequence[EqualMemory], prompt: float) -> list[int]:
    """Return three numbers of tokens beside the prompt, from the fewest to the most that all windows keep."""
    lowest = []
    highest = []
    for memory in memories:
        by_window = [memory.tokens[memory.window == index] for index in range(len(memory.windows))]
        low = max(tokens.min() for tokens in by_window)
        high = min(tokens.max() for tokens in by_window)
        # Windows without memory in common say where they end.
        lowest.append(min(low, high))
        highest.append(max(low, high))
    ends = np.linspace(fmean(lowest), fmean(highest), 3) - prompt
    return sorted({max(_STEP, round(tokens / _STEP) * _STEP) for tokens in ends.tolist()})


def _tokens_between(run: RunData) -> int:
    """Return the new tokens between two compressions of a setting in the middle of the run, rounded."""
    kept = [cell.stays for cell in run.cells if cell.stays is not None and cell.stays.share > 0]
    rooms = [stays.tokens / stays.share - stays.tokens for stays in kept]
    middle = float(np.median(rooms)) if rooms else 0.0
    return max(_STEP, math.ceil(middle / _STEP) * _STEP)


def _setting(entry: Mapping[str, Any], between: int) -> Json | None:
    """Return a setting of the spec that compresses every so many tokens; None for one of another rule."""
    if any(entry.get(name) for name in _OTHER_RULE) or entry.get("keep_prompt") is False:
        return None
    kept = {name: value for name, value in entry.items() if name not in _REPLACED}
    return {**kept, "budget_over": "thinking", "every": between}


def _is_valid(spec: Json) -> bool:
    """Return whether a spec can be run, as far as its settings say; code of files is not run."""
    from kvatlas.sweeps.spec import parse_spec

    try:
        for setting, _ in parse_spec(spec).cells():
            if policy_file(setting.policy) is None:
                from_setting(setting)
    except KvatlasError:
        return False
    return True

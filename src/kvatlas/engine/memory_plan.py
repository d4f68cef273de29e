"""The memory of decoding: its peak before a run, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.core import grouped
from kvatlas.engine.cache import GPU_PAGE, PAGE, growth, pages_for
from kvatlas.engine.scheduler import OPEN_SETTINGS, PROMPT_TOKENS, ROWS_PER_REQUEST
from kvatlas.engine.signals import SignalCollector
from kvatlas.policies.cache_view import Signal

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle
    from kvatlas.policies.contract import Policy

#: The largest default batch of a CPU, where larger ones are not faster.
CPU_BATCH = 96
#: The largest default batch of a GPU.
GPU_BATCH = 256
#: The share of a memory that weights and batch may fill.
MARGIN = 0.9
#: Bytes of cuBLAS on a GPU: its workspaces for usual steps and for captured ones.
WORKSPACES = 2**26


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of decoding, without the interpreter and its libraries.

    `slots`: pages, token states and recent queries of all rows; `snapshots`: pages of waiting branches that no trunk
    shares; `workspace`: the logits with their copies in double precision, the states of a pass of prompts and watched
    attention, or one layer of a growing cache, whichever is more. `tokens` is the number of tokens with a slot, and
    `longest` that of the longest sequence.
    """

    weights: int
    slots: int
    snapshots: int
    workspace: int
    tokens: int
    longest: int

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.snapshots + self.workspace

    def to_json(self) -> dict[str, int]:
        parts = ("weights", "slots", "snapshots", "workspace", "total")
        return {name: getattr(self, name) for name in parts}


def largest_batch(memory: float, most: int, peak_of: Callable[[int], Peak]) -> int:
    """Return the largest batch of at most `most` rows that fits into so many bytes with the weights; 0 without one.

    `peak_of` has the peak of each size. Sizes below `most` are those of captured steps (`graphs.BUCKETS`).
    """
    sizes = [most, *range((most - 1) // 16 * 16, 0, -16), 8, 4, 2, 1]
    fitting = (size for size in sizes if size <= most and peak_of(size).total <= MARGIN * memory)
    return next(fitting, 0)


def peak(model: ModelHandle, policies: Sequence[Policy], batch_size: int, trees: int, prompt: int, output: int) -> Peak:
    """Return the peak of one worker that decodes `trees` requests under all `policies`, `batch_size` rows at a time.

    Prompts have `prompt` tokens, traces `output` new ones. Settings of unlike storages are decoded one after the other.
    """
    by_storage = grouped(policies, lambda policy: policy.storage)
    if len(by_storage) > 1:
        peaks = (peak(model, group, batch_size, trees, prompt, output) for group in by_storage.values())
        return max(peaks, key=lambda peak: peak.total)

    (storage,) = by_storage
    settings = len(policies)
    budgets = sorted({policy.budget.most(prompt) for policy in policies if policy.budget is not None})
    is_any_unbounded = any(policy.budget is None for policy in policies)
    longest = prompt + output
    largest_budget = budgets[-1] if budgets else longest
    page_size = PAGE if model.device == "cpu" else GPU_PAGE

    # A request starts while one setting fewer than the limit is open.
    most_open = max(OPEN_SETTINGS * batch_size - 1 + settings, batch_size // ROWS_PER_REQUEST * settings)
    open_trees = min(trees, -(-most_open // settings))

    # Each open tree has at most one row without a budget, its trunk, beside those that a cap on thinking makes.
    rows = min(batch_size, trees * settings)
    capped = sum(policy.budget is None and policy.cap is not None for policy in policies)
    unbounded_rows = min(open_trees * (1 + capped), rows) if is_any_unbounded else 0
    bounded_rows = rows - unbounded_rows if budgets else 0
    pages = unbounded_rows * pages_for(longest, page_size)
    pages += bounded_rows * pages_for(min(longest, largest_budget), page_size)

    # A snapshot that outlives its trunk stays until every branch of its tree has a row.
    open_settings = min(trees * settings, most_open)
    forked_trees = round((open_settings - rows) / max(1, settings - 1))
    snapshot_pages = 0
    if settings > 1:
        snapshot_pages = sum(pages_for(budget, page_size) for budget in budgets if budget < longest)
        caps = {policy.cap for policy in policies if policy.cap is not None}
        snapshot_pages += sum(pages_for(min(prompt + cap, longest), page_size) for cap in caps)

    shape = model.shape
    element_bytes = 4 if model.dtype == "float32" else 2
    token_bytes, tail_bytes = model.kv_bytes(storage)
    page_bytes = page_size * token_bytes
    cached_bytes = pages * page_bytes

    # The most tokens of a head.
    noted_tokens = longest if unbounded_rows else largest_budget

    # The notes of policies for each token, the recent queries, the unpacked newest tokens and the states of layers.
    collector = SignalCollector(model, policies)
    noted = sum(layers * heads for layers, heads in collector.token_state().values())
    query_bytes = collector.query_window * shape.layers * shape.heads * shape.head_dim * element_bytes
    row_bytes = 4 * noted * noted_tokens + query_bytes + tail_bytes + shape.state_bytes

    # The logits and states of a pass; while one layer of a cache grows, its old pages stand beside the new ones.
    prompt_state_bytes = min(prompt * rows, PROMPT_TOKENS) * 8 * shape.hidden * element_bytes
    pass_bytes = prompt_state_bytes + rows * model.vocabulary * (element_bytes + 2 * 8)
    if any(Signal.ATTENTION in policy.observes for policy in policies):
        # The weights of a pass, and their sums with earlier ones.
        pass_bytes += 2 * 4 * rows * shape.layers * shape.kv_heads * noted_tokens
    fixed_bytes = 0 if model.device == "cpu" else WORKSPACES

    snapshots = max(0, forked_trees - unbounded_rows) * snapshot_pages
    return Peak(
        weights=model.weight_bytes or 0,
        slots=int(cached_bytes * (1 + 1 / (2 * growth(cached_bytes, model.device)))) + rows * row_bytes,
        snapshots=snapshots * page_bytes,
        workspace=fixed_bytes + max(pass_bytes, cached_bytes // (2 * shape.layers)),
        tokens=(pages + snapshots) * page_size,
        longest=noted_tokens,
    )

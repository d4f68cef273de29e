"""A compression: what a row's policy selects stays in its cache."""

from __future__ import annotations

from typing import Any

import torch

from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row
from kvatlas.engine.signals import state_name
from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, select_tokens


def compress(model: ModelHandle, cache: KVCache, row: Row[Any]) -> int:
    """Keep what the row's one policy selects; positions stay true, so nothing is rotated again. Tokens evicted."""
    (policy,) = row.policies
    assert isinstance(policy, CompressingPolicy)
    length, prompt_length = row.cached.length, len(row.request.prompt)
    slots = cache.slots(row.cached)
    layers, heads = policy.scope.width(model.shape)
    fresh = torch.arange(row.since, row.position, device=cache.device).expand(layers, heads, -1)
    positions = fresh if row.kept is None else torch.cat([row.kept, fresh], dim=-1)
    names = {name: state_name(policy, name) for name in policy.columns}
    recent = torch.arange(max(0, row.position - policy.queries), row.position, device=cache.device)
    kept = select_tokens(
        policy,
        CacheView(
            model=model,
            positions=positions,
            prompt_length=prompt_length,
            thinking_end=None if row.thinking_end is None else prompt_length + row.thinking_end,
            length=row.position,
            stream=row.request.stream,
            columns={name: cache.token_state[state][row.cached.row, ..., :length] for name, state in names.items()},
            key=lambda layer: cache.keys[layer].index_select(1, slots),
            value=lambda layer: cache.values[layer].index_select(1, slots),
            query=lambda layer: cache.queries[layer][row.cached.row][:, recent % cache.query_window],
            window=cache.windows.get,
            scaling=cache.scalings.__getitem__,
            tokens=lambda: torch.tensor([*row.request.prompt, *row.tokens[:-1]], device=cache.device),
            reference=row.request.reference,
        ),
    )
    cache.compact(row.cached, kept, tuple(names.values()))
    row.kept = positions.gather(-1, kept)
    row.since = row.position
    row.evictions = row.evictions.after(row.kept, row.position, len(row.tokens))
    row.compressions += 1
    row.trigger = row.next_trigger()
    return length - kept.shape[-1]

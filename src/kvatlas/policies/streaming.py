"""`streaming`: the first tokens (attention sinks) and the most recent ones stay (StreamingLLM)."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Tensor, int_param


@dataclass(frozen=True)
class Streaming(CompressingPolicy):
    """Attention sinks and recency: score(t) is infinite for the first `sinks` tokens, else the position of t.

    Source: arXiv 2309.17453, section 3.2. The sinks are the first tokens of the prompt: as published, with
    `keep_prompt: false`, only they stay of it. With the prompt kept the policy keeps the same tokens as `window`. The
    paper counts positions within the cache; here tokens keep their true ones, as under every policy. Its rolling cache
    of fixed size is replaced by kv_budget, ratio and local_window; ratio 0 leaves the window alone, so a ratio must
    leave room for the sinks. `streaming@dynts-paper` has 10 of them.

    sinks: the number of initial tokens that stay.
    """

    sinks: int = int_param(4, 0)

    name = "streaming"
    summary = "keeps the first tokens (attention sinks) and the most recent ones"
    paper = "StreamingLLM, arXiv 2309.17453"
    published = {"sinks": "4", "keep_prompt": "false"}

    def score(self, cached: CacheView) -> Tensor:
        return cached.positions.double().masked_fill(cached.positions < self.sinks, float("inf"))

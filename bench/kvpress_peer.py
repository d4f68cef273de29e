"""kvpress' decoding press at one batch size and cache length, for bench/decode.py, which calls it.

It runs in an environment of its own, because kvpress needs another transformers than kvatlas;
`python -m tests.conformance.environment` makes one:

    ENV/bin/python bench/kvpress_peer.py MODEL BATCH TOKENS KEPT CYCLE STEPS ROUNDS

StreamingLLM's rule chooses, as the nearest to a window; a compression every CYCLE steps leaves KEPT tokens. Steps are
measured at TOKENS cached tokens, a compression by itself. Prints one JSON document.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import transformers
from kvpress import DecodingPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

torch.set_num_threads(1)


class Peer:
    def __init__(self, folder: str, batch: int, tokens: int, kept: int, cycle: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.batch, self.tokens, self.cycle = batch, tokens, cycle
        self.press = DecodingPress(
            StreamingLLMPress(n_sink=4), compression_interval=cycle, target_size=kept, hidden_states_buffer_size=0
        )
        config = self.model.config
        self.shape = (batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
        self.layers = config.num_hidden_layers

    def cache(self) -> DynamicCache:
        result = DynamicCache(config=self.model.config)
        for layer in range(self.layers):
            result.update(torch.randn(self.shape), torch.randn(self.shape), layer)
        return result

    def steps(self, count: int, done: int = 0) -> float:
        """Seconds of so many steps from a full cache, as if `done` steps had passed since the last compression."""
        cache = self.cache()
        ids = torch.full((self.batch, 1), 7)
        with torch.inference_mode(), self.press(self.model):
            self.press.layer_step_counts.update(dict.fromkeys(range(self.layers), done))
            began = time.thread_time()
            for step in range(count):
                at = torch.full((self.batch, 1), self.tokens + step)
                output = self.model(
                    input_ids=ids,
                    position_ids=at,
                    cache_position=torch.tensor([self.tokens + step]),
                    past_key_values=cache,
                    use_cache=True,
                )
                ids = output.logits[:, -1:].argmax(-1)
            return time.thread_time() - began


def main() -> None:
    folder, (batch, tokens, kept, cycle, steps, rounds) = sys.argv[1], map(int, sys.argv[2:8])
    peer = Peer(folder, batch, tokens, min(kept, tokens - 1), cycle)
    peer.steps(1)
    taken = statistics.median(peer.steps(steps) / steps for _ in range(rounds))
    compressing = statistics.median(peer.steps(1, cycle - 1) for _ in range(rounds))
    spread = max(0.0, compressing - taken) / cycle
    print(
        json.dumps(
            {
                "transformers": transformers.__version__,
                "step_ms": round(1000 * taken, 2),
                "compression_ms_per_step": round(1000 * spread, 3),
                "tokens_per_second": round(batch / (taken + spread), 1),
            }
        )
    )


if __name__ == "__main__":
    main()

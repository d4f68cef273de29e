"""One cycle of kvpress' DecodingPress: CPU seconds of `generate` from one compression to the next, as JSON.

    ENV/bin/python bench/kvpress_cycle.py MODEL POLICY BATCH KEPT EVERY

Called by `peers.py` in an environment of kvpress, where kvatlas is not installed. The cache is filled by hand with KEPT
random tokens a sequence; EVERY tokens are sampled, and the last of them compresses back to KEPT.
"""

import json
import sys
import time

import torch
from kvpress import DecodingPress, RandomPress, SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache

#: The queries of snapkv.
QUERIES = 32


def main() -> None:
    folder, policy = sys.argv[1:3]
    batch, kept, every = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    size = (batch, config.num_key_value_heads, kept, config.hidden_size // config.num_attention_heads)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(size), torch.randn(size), layer)
    press = DecodingPress(
        base_press=SnapKVPress(window_size=QUERIES) if policy == "snapkv" else RandomPress(),
        compression_interval=every,
        target_size=kept,
        hidden_states_buffer_size=256,
    )
    ids = torch.full((batch, kept + 1), 7)
    # The first call of a process takes longer.
    model.generate(ids[:, :2], max_new_tokens=2)
    began = time.thread_time()
    with torch.inference_mode(), press(model):
        # Without an end token every sequence goes on.
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=every,
            do_sample=True,
            temperature=0.6,
            top_k=20,
            top_p=0.95,
            eos_token_id=None,
            pad_token_id=0,
        )
    seconds = time.thread_time() - began
    assert cache.get_seq_length() == kept, "the cycle does not end with a compression"
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()

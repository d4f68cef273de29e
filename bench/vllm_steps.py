"""vLLM's part of engines.py, run by the Python of vLLM's environment: CPU seconds of decoding steps and of prompts.

    VLLM_CPU_KVCACHE_SPACE=4 python bench/vllm_steps.py FOLDER float32 eager 16 4352

The last two words are the most sequences and the most tokens of each, for which the space in GB has to suffice.

Each line of the standard input is a case, [batch, context, steps]; with 0 steps the prompts are read, otherwise the
cache holds random numbers, by vLLM's own connector for that purpose. The answer is a line of seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    # In this process, so that its processor time is that of the engine.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams, __version__
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

READ = "read"
#: Answers alone go to the standard output; what libraries print there goes to the standard error.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


class Filled(DecodeBenchConnector):
    """The connector by which prompts count as cached, except for requests whose prompts are to be read."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id.startswith(READ):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class Engine:
    """vLLM with room for so many sequences of so many tokens."""

    def __init__(self, folder: str, dtype: str, eager: bool, rows: int, room: int) -> None:
        transfer = {
            "kv_connector": "Filled",
            "kv_role": "kv_both",
            "kv_connector_module_path": "vllm_steps",
            "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 1.0, "startup_fill": True},
        }
        self.engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=eager,
            max_num_seqs=rows,
            max_model_len=room,
            enable_prefix_caching=False,
            kv_transfer_config=transfer,
            disable_log_stats=True,
            generation_config="vllm",
        ).llm_engine
        self.number = 0

    def seconds(self, batch: int, context: int, steps: int) -> float:
        """CPU seconds of so many steps behind `context` cached tokens, or, with 0 steps, of reading such prompts."""
        names = []
        for row in range(batch):
            self.number += 1
            names.append(f"{'case' if steps else READ}-{self.number}")
            prompt = [5 + (row + i * i) % 4000 for i in range(context)]
            sampling = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True, detokenize=False)
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling)
        written = dict.fromkeys(names, 0)
        if steps:
            # The first step makes room for the sequences; one more, so that all are at work.
            self.step(written, 2)
        began = time.process_time()
        self.step(written, 2 + steps if steps else 1)
        taken = time.process_time() - began
        if steps and max(written.values()) > min(written.values()) + 1:
            raise SystemExit(f"{batch} sequences of {context} tokens were not decoded together; give vLLM more space.")
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return taken

    def step(self, written: dict[str, int], least: int) -> None:
        """Step until each request has so many new tokens."""
        while min(written.values()) < least:
            for output in self.engine.step():
                written[output.request_id] = len(output.outputs[0].token_ids)


def main() -> None:
    folder, dtype, mode, rows, room = sys.argv[1:]
    began = time.perf_counter()
    engine = Engine(folder, dtype, mode == "eager", int(rows), int(room))
    print(json.dumps({"version": __version__, "start": round(time.perf_counter() - began, 1)}), file=ANSWERS)
    for line in sys.stdin:
        print(json.dumps(engine.seconds(*json.loads(line))), file=ANSWERS)


if __name__ == "__main__":
    main()

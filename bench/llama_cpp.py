"""Measure llama.cpp on one thread with the prompts of `short_weights.py`: new tokens per CPU second, greedily.

    python bench/llama_cpp.py prompts MODEL.gguf MATH500@panel.jsonl --out prompts.json           # with kvatlas
    OTHER/bin/python bench/llama_cpp.py run MODEL.gguf prompts.json --requantize MODEL-q8.gguf    # with llama.cpp
    python bench/llama_cpp.py compare --ours OURS.json ... --peer PEER.json ... --out bench/results/llama_cpp.json

`compare` puts the documents of `short_weights.py --weights int8 --rounds 1` and of `run --rounds 1`, which took turns,
into one: medians and best turns of both, and the medians over turns of our speed over llama.cpp's.

The second line runs in an environment of its own after `pip install numpy cffi; pip install --no-deps llama-cpp-cffi`,
a wheel that holds the library for processors with AVX2. With `--requantize` the weights are first written in 8 bits
(Q8_0) to that file. Prompts and new tokens count as in `short_weights.py`: CPU seconds from the prompts on, of the
whole process. Prints one JSON document as its last line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

#: llama.cpp's number of the type Q8_0 for whole files.
ALL_Q8_0 = 7


def write_prompts(options: argparse.Namespace) -> None:
    """Write the token ids of the prompts of a benchmark's first problems."""
    from kvatlas import models
    from kvatlas.benchmarks import find

    handle = models.find(options.model)
    benchmark = find(options.benchmark)
    prompts = [handle.encode(benchmark.prompt(problem)) for problem in benchmark.problems(options.problems)]
    options.out.write_text(json.dumps(prompts))


def load_library() -> tuple[Any, Any]:
    """Return llama.cpp's functions and their types, without the rest of the package."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import find_spec, module_from_spec, spec_from_loader

    package = find_spec("llama")
    if package is None or package.origin is None:
        raise SystemExit("llama.cpp is not installed here: pip install --no-deps llama-cpp-cffi")
    (path,) = Path(package.origin).parent.glob("_llama_cpp_cpu*.so")
    loader = ExtensionFileLoader("_llama_cpp_cpu", str(path))
    spec = spec_from_loader("_llama_cpp_cpu", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module.ffi, module.lib


class Peer:
    """A model in llama.cpp with room for so many sequences."""

    def __init__(self, model: str, sequences: int, length: int) -> None:
        self.ffi, self.library = load_library()
        self.library.llama_backend_init()
        self.model = self.library.llama_model_load_from_file(model.encode(), self.library.llama_model_default_params())
        parameters = self.library.llama_context_default_params()
        parameters.n_ctx = sequences * length
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = 1
        self.context = self.library.llama_init_from_model(self.model, parameters)
        self.vocabulary = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens, given as token, position, sequence and True for those whose logits are needed."""
        batch = self.library.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, is_needed) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = is_needed
        if self.library.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode a batch.")
        self.library.llama_batch_free(batch)

    def _likeliest(self, index: int) -> int:
        import numpy

        logits = self.library.llama_get_logits_ith(self.context, index)
        return int(numpy.frombuffer(self.ffi.buffer(logits, 4 * self.vocabulary), dtype=numpy.float32).argmax())

    def speed(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Return new tokens per CPU second for prompts that are decoded together."""
        self.library.llama_kv_self_clear(self.context)
        began = time.process_time()
        newest = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            self._decode([(token, index, sequence, index == last) for index, token in enumerate(prompt)])
            newest.append(self._likeliest(last))
        for step in range(new_tokens - 1):
            self._decode([(token, len(prompts[row]) + step, row, True) for row, token in enumerate(newest)])
            newest = [self._likeliest(row) for row in range(len(prompts))]
        return len(prompts) * new_tokens / (time.process_time() - began)


def run(options: argparse.Namespace) -> None:
    """Measure the batches in turns, and print the document."""
    from importlib.metadata import version

    ffi, library = load_library()
    model = options.model
    if options.requantize:
        if not options.requantize.exists():
            parameters = ffi.new("llama_model_quantize_params *", library.llama_model_quantize_default_params())
            parameters.ftype = ALL_Q8_0
            parameters.nthread = 1
            parameters.allow_requantize = True
            library.llama_model_quantize(str(model).encode(), str(options.requantize).encode(), parameters)
        model = options.requantize

    prompts = json.loads(Path(options.prompts).read_text())
    length = max(map(len, prompts)) + options.new_tokens
    peer = Peer(str(model), max(options.batches), length)
    speeds: dict[int, list[float]] = {batch: [] for batch in options.batches}
    for _ in range(options.rounds):
        for batch, own in speeds.items():
            own.append(peer.speed(prompts[:batch], options.new_tokens))
        print(speeds, flush=True)
    document = {
        "bench": "llama_cpp",
        "version": version("llama-cpp-cffi"),
        "system": ffi.string(library.llama_print_system_info()).decode(),
        "model_bytes": Path(model).stat().st_size,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "tokens_per_second": {batch: round(median(own), 2) for batch, own in speeds.items()},
        "best": {batch: round(max(own), 2) for batch, own in speeds.items()},
    }
    text = json.dumps(document)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


def compare(options: argparse.Namespace) -> None:
    """Print one document of the turns of both."""
    ours = [json.loads(path.read_text()) for path in options.ours]
    peers = [json.loads(path.read_text()) for path in options.peer]
    speeds = {
        "kvatlas, int8": [document["tokens_per_second"]["int8"] for document in ours],
        "llama.cpp, Q8_0": [document["tokens_per_second"] for document in peers],
    }
    batches = list(peers[0]["tokens_per_second"])
    ratios = {
        batch: median(own[batch] / other[batch] for own, other in zip(*speeds.values(), strict=True))
        for batch in batches
    }
    medians = {}
    best = {}
    for name, turns in speeds.items():
        medians[name] = {batch: median(turn[batch] for turn in turns) for batch in batches}
        best[name] = {batch: max(turn[batch] for turn in turns) for batch in batches}
    document = {
        "bench": "llama_cpp",
        "machine": ours[0]["machine"],
        "model": ours[0]["options"]["model"],
        **{name: peers[0][name] for name in ("version", "system", "model_bytes", "new_tokens")},
        "turns": speeds,
        "tokens_per_second": medians,
        "best": best,
        "speed_against_llama_cpp": {batch: round(ratio, 2) for batch, ratio in ratios.items()},
    }
    text = json.dumps(document)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    prompts = commands.add_parser("prompts")
    prompts.add_argument("model")
    prompts.add_argument("benchmark")
    prompts.add_argument("--problems", type=int, default=16)
    prompts.add_argument("--out", type=Path, required=True)
    prompts.set_defaults(call=write_prompts)
    runs = commands.add_parser("run")
    runs.add_argument("model", type=Path)
    runs.add_argument("prompts", type=Path)
    runs.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    runs.add_argument("--new-tokens", type=int, default=100)
    runs.add_argument("--rounds", type=int, default=3)
    runs.add_argument("--requantize", type=Path)
    runs.add_argument("--out", type=Path)
    runs.set_defaults(call=run)
    both = commands.add_parser("compare")
    both.add_argument("--ours", type=Path, nargs="+", required=True)
    both.add_argument("--peer", type=Path, nargs="+", required=True)
    both.add_argument("--out", type=Path)
    both.set_defaults(call=compare)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()

"""Greedy texts of vLLM beside kvatlas's, token by token: docs/findings/vllm.md.

    python recipes/engines/merged.py runs/smollm2-think
    python bench/vllm_equality.py --python build/engines/vllm/bin/python --out bench/results/vllm_equality.json

Both engines decode the same prompts, as token ids, in float32: with the full cache, and with sliding windows in all
layers. A window is written into the config of a copy of the model; a Llama, whose config knows no window, is copied as
a Mistral, which computes the same. Settings that are in the document are not decoded again.

Where two texts part, transformers in float64 reads what both have in common, and gives the logits of the two tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from common import arguments, keep
from kvatlas import benchmarks, models, policies
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engines.command import Command
from kvatlas.engines.server import Server
from outcomes import Json

PAGES = ("docs/findings/vllm.md",)
#: Name: model, benchmark, how many problems, and new tokens at most.
CASES = {
    "tiny-llama": ("embedded:tiny-llama", "LEDGER20-28", 100, 700),
    "tiny-qwen": ("embedded:tiny-qwen", "LEDGER20-28", 100, 700),
    "SmolLM2-think": ("runs/smollm2-think", "WORDS13-14", 40, 300),
}
#: The number of the first problem: no run had decoded those from here on.
FIRST = 5000
#: Sliding windows; 0 is the full cache.
WINDOWS = [0, 512, 384, 256]
ROWS = 16
CONTEXT = 1024
SERVE = (
    f"{{python}} -m vllm.entrypoints.openai.api_server --model {{model}} --host {{{{host}}}} --port {{{{port}}}} "
    f"--max-model-len {CONTEXT} --max-num-seqs {ROWS} --dtype float32 --enforce-eager --generation-config vllm"
)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def copy_with_window(source: Path, window: int, folder: Path) -> Path:
    """Write a copy of a model whose layers all have a sliding window (0: none), and return its folder."""
    folder.mkdir()
    for file in filter(Path.is_file, source.iterdir()):
        shutil.copyfile(file, folder / file.name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if window:
        config["sliding_window"] = window
        if config["model_type"] == "llama":
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        else:
            kinds = ["sliding_attention"] * config["num_hidden_layers"]
            config |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": kinds}
        path.write_text(json.dumps(config))
    return folder


def tokens_of_kvatlas(model: Path, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Return the new tokens of the full cache's greedy texts."""
    handle = models.find(str(model), dtype="float32", device="cpu")
    full = policies.from_setting(Setting.from_parameters("full"))
    engine = Engine(handle, handle.load(), [full], Sampling(temperature=0, max_new_tokens=most), ROWS)
    requests = [Request(number, tuple(prompt), number, (full,)) for number, prompt in enumerate(prompts)]
    tokens = {generation.key: list(generation.tokens) for generation in engine.run(requests)}
    return [tokens[number] for number in range(len(prompts))]


def tokens_of_vllm(
    python: Path, model: Path, prompts: Sequence[Sequence[int]], most: int, folder: Path
) -> tuple[list[list[int]], str]:
    """Return the new tokens of vLLM's greedy texts, and its version."""
    served = {"serve_cmd": SERVE.format(python=shlex.quote(str(python)), model=model), "env": ENVIRONMENT}
    command = Command.layered(served).render({})
    with Server(command, folder / "servers", "vllm", folder) as server:

        def ask(prompt: Sequence[int]) -> list[int]:
            request = {"model": server.endpoint.model, "prompt": list(prompt), "temperature": 0, "max_tokens": most}
            answer = httpx.post(
                f"{server.endpoint.url}/completions", json=request | {"return_token_ids": True}, timeout=1800
            )
            (choice,) = answer.json()["choices"]
            ids: list[int] = choice["token_ids"]
            return ids

        with ThreadPoolExecutor(ROWS) as pool:
            return list(pool.map(ask, prompts)), server.session["version"]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if the texts are equal."""
    for index, (first, second) in enumerate(itertools.zip_longest(one, other)):
        if first != second:
            return index
    return None


@torch.inference_mode()
def logits_after(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of the next token in float64, by transformers."""
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    logits: torch.Tensor = exact(torch.tensor([list(tokens)])).logits[0, -1]
    return logits


def departure(model: Path, prompt: Sequence[int], own: Sequence[int], peer: Sequence[int], at: int) -> Json:
    """Return where two texts part, both tokens, and their logits in float64 with their ranks (the highest is 0)."""
    logits = logits_after(model, [*prompt, *own[:at]])
    pair = {"kvatlas": own[at : at + 1], "vllm": peer[at : at + 1]}
    tokens = {engine: rest[0] if rest else None for engine, rest in pair.items()}
    values = {engine: None if token is None else float(logits[token]) for engine, token in tokens.items()}
    ranks = {engine: None if value is None else int((logits > value).sum()) for engine, value in values.items()}
    return {"at": at, "tokens": tokens, "logits": values, "ranks": ranks}


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def outcome_of(name: str, window: int, python: Path) -> Json:
    """Decode a case with both engines, and return the digests of all texts and what the departures are."""
    address, benchmark_name, count, most = CASES[name]
    benchmark = benchmarks.find(benchmark_name)
    problems = benchmark.problems(FIRST + count)[FIRST:]
    handle = models.find(address)
    prompts = [handle.encode(benchmark.prompt(problem)) for problem in problems]
    with tempfile.TemporaryDirectory() as scratch:
        # Weights that kvatlas packs for the copy go with it.
        os.environ["KVATLAS_CACHE"] = str(Path(scratch) / "cache")
        model = copy_with_window(handle.folder, window, Path(scratch) / "model")
        own = tokens_of_kvatlas(model, prompts, most)
        peer, version = tokens_of_vllm(python, model, prompts, most, Path(scratch))
        departures = {}
        for problem, prompt, ours, theirs in zip(problems, prompts, own, peer, strict=True):
            at = first_difference(ours, theirs)
            if at is not None:
                departures[problem.id] = departure(model, prompt, ours, theirs, at)
    return {
        "model": name,
        "benchmark": benchmark_name,
        "window": window,
        "vllm": version,
        "problems": [problem.id for problem in problems],
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "kvatlas": [{"tokens": len(text), "digest": digest(text)} for text in own],
        "vllm_texts": [{"tokens": len(text), "digest": digest(text)} for text in peer],
        "departures": departures,
    }


def equal_texts(texts: Sequence[Json], others: Sequence[Json]) -> int:
    return sum(one["digest"] == other["digest"] for one, other in zip(texts, others, strict=True))


def numbers_of(outcomes: list[Json]) -> Json:
    """Return equal texts, and how far apart the two tokens are where texts part, of each model and window."""
    full = {entry["model"]: entry for entry in outcomes if not entry["window"]}
    rows = []
    for entry in outcomes:
        own = entry["kvatlas"]
        lengths = [prompt + text["tokens"] for prompt, text in zip(entry["prompt_tokens"], own, strict=True)]
        gaps = [
            abs(one["logits"]["kvatlas"] - one["logits"]["vllm"])
            for one in entry["departures"].values()
            if None not in one["logits"].values()
        ]
        row = {
            "model": entry["model"],
            "window": entry["window"],
            "texts": len(own),
            "equal": equal_texts(own, entry["vllm_texts"]),
            "departures": len(entry["departures"]),
            "largest_gap": max(gaps, default=None),
            "tokens": sum(text["tokens"] for text in own),
            "longer": sum(length > entry["window"] for length in lengths),
            "changed": len(own) - equal_texts(own, full[entry["model"]]["kvatlas"]),
        }
        rows.append(row)
    equal = sum(row["equal"] for row in rows)
    return {"settings": rows, "texts": sum(row["texts"] for row in rows), "equal": equal}


def lines(numbers: Json) -> list[str]:
    """Return the rows of the page's table."""
    rows = []
    for row in numbers["settings"]:
        cells = [
            row["model"],
            str(row["window"] or "full cache"),
            f"{row['equal']} of {row['texts']}",
            f"{row['tokens']:,}",
        ]
        if row["window"]:
            cells += [str(row["longer"]), str(row["changed"])]
        else:
            cells += ["–", "–"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def decode(options: argparse.Namespace) -> list[Json]:
    """Decode what the document lacks, and keep the document after each setting."""
    outcomes: list[Json] = []
    if options.out and options.out.exists():
        outcomes = json.loads(options.out.read_text())["outcomes"]
    done = {(entry["model"], entry["window"]) for entry in outcomes}
    for name in options.cases:
        for window in options.windows:
            if (name, window) not in done:
                outcomes.append(outcome_of(name, window, options.python))
                keep(options, outcomes=outcomes)
    return outcomes


def main() -> None:
    torch.set_num_threads(1)
    options = arguments(__doc__, python=Path("python"), cases=list(CASES), windows=WINDOWS)
    outcomes = decode(options)
    keep(options, outcomes=outcomes, numbers=numbers_of(outcomes))


if __name__ == "__main__":
    main()

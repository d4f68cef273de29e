"""Measure the cost of serving: tokens per second of `kvatlas serve` with streaming clients against the engine alone.

    python bench/serving.py --out bench/results/serving.json

Both decode the same requests with the same seeds on the same machine, turn by turn (engine, server, engine, ...), so
that a machine that is busy with other things slows both; the ratio is of the medians. Beside the wall clock stands the
processor's time of the process that decodes, which other programs on the machine do not lengthen: the server's is that
of its decoding thread and its event loop together, which take turns. The server is `kvatlas serve` in
a process of its own, asked by `--clients` clients that stream chat completions one after the other, from a third one.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx
import torch

from common import arguments, keep, processor_seconds
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import Sampling
from kvatlas.engine import Engine, Request
from kvatlas.models import find
from kvatlas.serve.service import find_policy, stream_of

MODEL = "embedded:tiny-llama"
SETTING = {"kv_budget": 224, "local_window": 32, "ratio": 0.3, "ratio_over": "thinking"}
SEED = 1


def questions(count: int) -> list[str]:
    """As many prompts of our chains as are asked for."""
    benchmark_ = benchmark("CHAIN9")
    return [benchmark_.prompt(problem) for problem in benchmark_.problems(count)]


class Offline:
    """The engine on the requests, without a server."""

    def __init__(self, rows: int) -> None:
        self.model = find(MODEL)
        self.policy = find_policy(self.model, "dynts", SETTING)
        self.engine = Engine(self.model, self.model.load(), [self.policy], Sampling(), rows)

    def turn(self, texts: list[str], most: int) -> tuple[int, float, float]:
        """(tokens, seconds, processor seconds) of one pass over the requests."""
        sampling = Sampling(max_new_tokens=most)
        work = []
        for number, text in enumerate(texts):
            prompt = self.model.encode(text)
            stream = stream_of(SEED, prompt, 0)
            work.append(Request(number, prompt, stream, (self.policy,), sampling=sampling))
        began, busy = time.perf_counter(), time.process_time()
        tokens = sum(len(generation.tokens) for generation in self.engine.run(work))
        return tokens, time.perf_counter() - began, time.process_time() - busy


async def asked(url: str, texts: list[str], clients: int, most: int) -> tuple[int, float, list[float]]:
    """(tokens, seconds, seconds to each first piece) of clients that take the next text when they have an answer."""
    waiting, tokens, firsts = iter(texts), 0, []

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        for text in waiting:
            body = {"messages": [{"role": "user", "content": text}], "seed": SEED, "max_tokens": most}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            began, events, last = time.perf_counter(), 0, b""
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for part in answer.aiter_bytes():
                    events += 1
                    if events == 2:
                        firsts.append(time.perf_counter() - began)
                    last = (last + part)[-2000:]
            (count,) = re.findall(rb'"completion_tokens":(\d+)', last)
            tokens += int(count)

    # A pool of many connections costs its client more per request than the server: each has one of its own.
    async with contextlib.AsyncExitStack() as stack:
        own = [httpx.AsyncClient(base_url=url, timeout=600, verify=False) for _ in range(clients)]
        for http in own:
            await stack.enter_async_context(http)
        began = time.perf_counter()
        await asyncio.gather(*map(client, own))
        return tokens, time.perf_counter() - began, firsts


def clients_in_a_process(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One pass over the requests by clients in a process of their own."""
    words = ["--asks", url, *(f"--{name}={getattr(options, name)}" for name in ("clients", "requests", "tokens"))]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def serve(rows: int) -> tuple[subprocess.Popen[str], str]:
    """The server's process and its address."""
    setting = [f"--{name.replace('_', '-')}={value}" for name, value in SETTING.items() if name != "ratio_over"]
    words = ["--policy", "dynts", *setting, "--set", "ratio_over=thinking", "--port", "0", "--batch-size", str(rows)]
    command = [sys.executable, "-m", "kvatlas", "serve", MODEL, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match_ = re.search(r"http://\S+?:\d+", process.stdout.readline())
    assert match_, "the server did not start"
    return process, match_[0]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both arms, turn by turn, after one turn of each that does not count."""
    torch.set_num_threads(1)
    texts, offline = questions(options.requests), Offline(options.clients)
    process, url = serve(options.clients)
    engine, server, firsts, count = [], [], [], 0
    busy_engine, busy_server = [], []
    try:
        for turn in range(options.turns + 1):
            tokens, seconds, busy = offline.turn(texts, options.tokens)
            before = processor_seconds(process.pid)
            result = clients_in_a_process(url, options)
            busy_there = processor_seconds(process.pid) - before
            assert result["tokens"] == tokens, "the server wrote other answers than the engine"
            if turn:
                engine.append(tokens / seconds)
                server.append(tokens / result["seconds"])
                firsts += result["firsts"]
                busy_engine.append(tokens / busy)
                busy_server.append(tokens / busy_there)
                count = tokens
    finally:
        process.terminate()
        process.wait(60)
    return {
        "model": MODEL,
        "setting": {"policy": "dynts", **SETTING},
        "hardware": f"{platform.processor() or platform.machine()}, one thread decodes",
        "clients": options.clients,
        "requests": options.requests,
        "tokens": count,
        "turns": options.turns,
        "engine_tokens_per_second": [round(rate) for rate in engine],
        "server_tokens_per_second": [round(rate) for rate in server],
        "ratio": round(statistics.median(server) / statistics.median(engine), 3),
        "engine_tokens_per_processor_second": [round(rate) for rate in busy_engine],
        "server_tokens_per_processor_second": [round(rate) for rate in busy_server],
        "processor_ratio": round(statistics.median(busy_server) / statistics.median(busy_engine), 3),
        "first_piece_seconds_median": round(statistics.median(firsts), 3),
    }


def main() -> None:
    options = arguments(__doc__, clients=32, requests=96, tokens=300, turns=5, asks=str)
    if options.asks:
        tokens, seconds, firsts = asyncio.run(
            asked(options.asks, questions(options.requests), options.clients, options.tokens)
        )
        print(json.dumps({"tokens": tokens, "seconds": seconds, "firsts": firsts}))
        return
    keep(options, **measure(options))


if __name__ == "__main__":
    main()

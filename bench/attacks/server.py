"""A real `kvatlas serve`: malformed requests, connections that say nothing, and clients that do as they like."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

WORDS = ("embedded:tiny-llama", "--policy", "window", "--kv-budget", "224", "--local-window", "32", "--ratio", "0.3")
PROMPT = "a = 1 ; b = 2 ; c = a + b ? c"


@contextmanager
def serving(source: Path | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The server in a process of its own, of another source tree if one is given; its address, and what it says."""
    environment = {**os.environ, **({"PYTHONPATH": str(source)} if source else {})}
    command = [sys.executable, "-m", "kvatlas", "serve", *WORDS, "--port", "0"]
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "said"
        with said.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while not (match_ := re.search(r"http://\S+?:\d+", said.read_text())):
                assert process.poll() is None, said.read_text()
                time.sleep(0.1)
            yield process, match_[0], said
        finally:
            process.terminate()
            process.wait(60)


def malformed(count: int) -> Iterator[tuple[str, bytes]]:
    """Whole requests as bytes: bodies that are wrong in one way each, then bytes at random."""

    def post(body: bytes, path: str = "/v1/completions", **headers: str) -> bytes:
        lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        return f"POST {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + body

    bodies: dict[str, Any] = {
        "5,000 prompts of 128 answers": {"prompt": ["a"] * 5000, "n": 128},
        "messages of 3.5 MB": {"messages": [{"role": "user", "content": "a " * 1_750_000}]},
        "n of 10^30": {"prompt": "a", "n": 10**30},
        "tokens below 0": {"prompt": [-1]},
        "tokens of 10^30": {"prompt": [10**30]},
        "temperature below 0": {"prompt": "a", "temperature": -1},
        "max_tokens of 10^9": {"prompt": "a", "max_tokens": 10**9},
        "a stop of 10^6 characters": {"prompt": "a", "stop": "x" * 10**6},
        "no prompt": {"prompt": []},
        "lists of lists": {"prompt": [[["a"]]]},
        "an unknown key": {"prompt": "a", "tool": 1},
        "a null character": {"prompt": "\0" * 100, "max_tokens": "x"},
    }
    for name, body in bodies.items():
        yield name, post(json.dumps(body).encode(), "/v1/chat/completions" if "messages" in body else "/v1/completions")
    yield "deep JSON", post(b'{"prompt": ' + b"[" * 100_000)
    yield "nan", post(b'{"prompt": "a", "temperature": NaN}')
    yield "a surrogate", post(b'{"prompt": "\\ud800", "n": 0}')
    yield "5 MB", post(b" " * (5 * 2**20))
    yield "a length of 5,000 digits", post(b"{}", Content_Length="9" * 5000)
    yield "another host", post(b'{"prompt": "a"}', Host="evil.example")
    yield "headers of 1 MB", post(b"{}", X="y" * 10**6)
    rng = random.Random(0)
    whole = post(json.dumps({"prompt": "a", "max_tokens": 0}).encode())
    for number in range(count):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield f"random {number}", bytes(data)


def requests(count: int) -> Iterator[tuple[str, str]]:
    """What each malformed request is answered: 4xx, or the connection's end, soon; the server goes on."""
    with serving() as (process, url, _):
        host, port = url.removeprefix("http://").split(":")
        for name, data in malformed(count):
            began, said = time.perf_counter(), b""
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while piece := connection.recv(2**16):
                        said += piece
                except (ConnectionError, BrokenPipeError):
                    pass
                except TimeoutError:
                    said = b"no answer"
            seconds = time.perf_counter() - began
            status = said.partition(b"\r\n")[0].decode(errors="replace")
            fault = (
                status if not re.match(r"HTTP/1.1 [24]\d\d|$", status) else f"{seconds:.1f} s" if seconds > 3 else ""
            )
            yield name, fault if process.poll() is None else "the server ended"
        with httpx.Client(base_url=url, timeout=60) as http:
            answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "seed": 1})
            yield "a good request after all of them", "" if answer.status_code == 200 else answer.text[:100]


def half_open(count: int) -> Iterator[tuple[str, str]]:
    """Whether a client is answered while so many connections have sent half a request."""
    with serving() as (process, url, said):
        host, port = url.removeprefix("http://").split(":")
        stored = []
        try:
            for number in range(count):
                stored.append(socket.create_connection((host, int(port)), timeout=20))
                stored[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n" * (number % 2))
            answer = httpx.get(f"{url}/health", timeout=20)
            fault = "" if answer.status_code == 200 else answer.text[:100]
        except (OSError, httpx.HTTPError) as error:
            fault = f"{type(error).__name__} after {len(stored)}, server {process.poll()}: {said.read_text()[-200:]}"
        finally:
            for item in stored:
                item.close()
        yield f"{count} half-open requests", fault


async def _first(http: httpx.AsyncClient, tokens: int = 24, n: int = 1) -> float | None:
    """Seconds to the first token; None where the server refused."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "seed": 1, "n": n}
    began = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return None
            async for _ in answer.aiter_bytes():
                return time.perf_counter() - began
    except httpx.HTTPError:
        return None
    return None


def _percentiles(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"answered": 0}
    ranked = sorted(seconds)
    return {
        "answered": len(ranked),
        "p50": round(statistics.median(ranked), 3),
        "p99": round(ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))], 3),
    }


async def _idle(url: str, clients: int, asks: int) -> dict[str, Any]:
    """Seconds to the first token of so many clients that ask at once, each a few times, read to the end."""
    results: list[float] = []

    async def client() -> None:
        # A pool of many connections costs its client more per request than the server: each has one of its own.
        async with httpx.AsyncClient(base_url=url, timeout=600, verify=False) as http:
            await ask(http)

    async def ask(http: httpx.AsyncClient) -> None:
        for _ in range(asks):
            body = {"prompt": PROMPT, "max_tokens": 24, "stream": True, "seed": 1}
            began, first = time.perf_counter(), None
            try:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        first = first or time.perf_counter() - began
            except httpx.TransportError:  # a connection that was kept alive ended just now
                continue
            if first is not None:
                results.append(first)

    await asyncio.gather(*(client() for _ in range(clients)))
    return _percentiles(results)


async def _unfair(url: str) -> float | None:
    """Seconds to the first token of one answer behind two requests of 128."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        many = [asyncio.ensure_future(_hold(http)) for _ in range(2)]
        await asyncio.sleep(1)
        waited = await _first(http)
        for item in many:
            item.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        return waited


async def _hold(http: httpx.AsyncClient) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "n": 128, "seed": 1}
    await http.post("/v1/completions", json=body)


async def _chaos(url: str, clients: int, seconds: float) -> dict[str, Any]:
    """Clients that stream, go away in the middle, ask for nonsense or for much; one that behaves is timed."""
    end, rng = time.monotonic() + seconds, random.Random(0)
    counts = {"asked": 0, "refused": 0, "errors": 0, "connections_lost": 0}

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=seconds + 60, verify=False) as http:
            await ask(http)

    async def ask(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            counts["asked"] += 1
            body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": rng.choice([1, 24, 200]), "stream": True}
            body |= rng.choice([{}, {}, {"n": 8}, {"n": 10**6}, {"prompt": ["a"] * 300}, {"temperature": "hot"}])
            leave = rng.choice([None, 0, 0, 3])
            try:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    counts["refused"] += answer.status_code in (400, 413, 429)
                    counts["errors"] += answer.status_code >= 500
                    pieces = 0
                    async for _ in answer.aiter_bytes():
                        pieces += 1
                        if leave is not None and pieces > leave:
                            break
            except httpx.HTTPError:
                counts["connections_lost"] += time.monotonic() < end
            await asyncio.sleep(rng.random() / 4)

    results: list[float] = []
    others = [asyncio.ensure_future(client()) for _ in range(clients)]
    async with httpx.AsyncClient(base_url=url, timeout=seconds + 60) as own:
        while time.monotonic() < end:
            waited = await _first(own)
            if waited is not None:
                results.append(waited)
            await asyncio.sleep(0.2)
    for item in others:
        item.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return {**counts, "one_client_that_behaves": _percentiles(results)}


def idle(source: Path | None, clients: tuple[int, ...]) -> dict[str, Any]:
    """Latency of a server that has nothing else to do, by the number of clients that ask at once."""
    with serving(source) as (_, url, _):
        asyncio.run(_idle(url, 1, 2))
        return {str(client): asyncio.run(_idle(url, client, max(2, 64 // client))) for client in clients}


def crowded(source: Path | None, clients: int, seconds: float) -> dict[str, Any]:
    """Latency behind two large requests and among chaotic clients; afterwards nothing may be left behind."""
    with serving(source) as (process, url, said):
        asyncio.run(_idle(url, 1, 2))
        by_name: dict[str, Any] = {"behind_two_of_128": asyncio.run(_unfair(url))}
        by_name["chaos"] = asyncio.run(_chaos(url, clients, seconds))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            state = httpx.get(f"{url}/health", timeout=60).json()
            if not state["waiting"] and not state["decoding"]:
                break
            time.sleep(0.2)
        by_name["tracebacks"] = said.read_text().count("Traceback") + said.read_text().count("never retrieved")
        by_name["left_behind"] = state["waiting"] + state["decoding"]
        by_name["resident_mb"] = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 // 2**20
    return by_name

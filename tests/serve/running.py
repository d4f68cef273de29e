"""Real servers for tests: `kvatlas serve` in a process of its own, and its application in a thread."""

import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

import httpx
import uvicorn

from kvatlas.core import Sampling
from kvatlas.models import ModelHandle
from kvatlas.serve.app import application
from kvatlas.serve.service import Service, find_policy
from tests.command_line import run_command


def health(url: str) -> dict[str, Any]:
    """Return the facts that the server tells of itself."""
    state: dict[str, Any] = httpx.get(f"{url}/health").json()
    return state


@contextmanager
def serving(*words: str) -> Iterator[tuple[BaseProcess, TextIO, str]]:
    """`kvatlas serve` with these arguments on a free port, ended with the block: process, output and address.

    The process is a fork of this one: a new one would spend seconds on importing torch.
    """
    ours, theirs = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=run_command, args=(["serve", *words, "--port", "0"], theirs)
    )
    process.start()
    os.close(theirs)
    with os.fdopen(ours) as output:
        try:
            # Whatever else it says first, until it ends: a line that was not waited for must not block this.
            said = []
            for line in output:
                said.append(line)
                if match_ := re.search(r"http://\S+?:\d+", line):
                    break
            else:
                raise AssertionError("".join(said))
            yield process, output, match_[0]
        finally:
            process.terminate()
            process.join(60)


@contextmanager
def served(model: ModelHandle, policy: str = "full", server_seed: int | None = None, **values: Any) -> Iterator[str]:
    """The application over this model under a setting, in a thread: its address."""
    setting = find_policy(model, policy, values)
    service = Service(model, setting, Sampling(), batch_size=16, seed=server_seed).start()
    config = uvicorn.Config(application(service, "tiny"), port=0, log_level="warning")
    socket = config.bind_socket()
    # Whoever connects before the thread has begun waits for it.
    socket.listen()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        service.close()

"""The life of a server: started by its command, watched, stopped with all its processes.

    for sentence in end_orphans(run / "servers"):
        print(sentence)
    with Server(command, run / "servers", "fp8", spec_folder) as server:
        ask(server.url, server.api_key, server.model)
        if not server.is_alive():
            raise server.failure()

A rendered `Command` with `serve_cmd` is started in a process group of its own; one with `endpoint` alone is only asked.
Each start has a folder `NNN-NAME` with its files, its log and, while it lives, `live.json`. Secrets are in none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import httpx

from kvatlas.core import KvatlasError, reason
from kvatlas.engines import guard
from kvatlas.engines.command import Command, Launch, Secrets
from kvatlas.text import duration_text

HOST = "127.0.0.1"
#: Seconds after which a server must be ready, and in which an endpoint that runs must answer.
READY_SECONDS = 1_800.0
ENDPOINT_SECONDS = 30.0
#: Seconds between a server's SIGTERM and the end of its group by SIGKILL, and until its GPUs' memory is free.
STOP_SECONDS = 30.0
MEMORY_SECONDS = 60.0
#: The first and the last bytes of a log that are kept.
LOG_BYTES = 5_000_000
#: Ports below those that systems give to clients.
PORTS = range(20_000, 32_000)
LIVE = "live.json"
LOG = "server.log"
_LISTENING = "0A"


class ServerError(KvatlasError):
    """A server that did not start, is not the one that was started, or ended; with the last lines of its log."""


class Server:
    """One start of a command, from `with` to its end. `name` is that of its setting, `index` its place among servers.

    Within `with`: `url` (with /v1), `api_key`, `model` (its name in requests), and `session`, plain data of this start:
    number, started, node, gpu, port, version, model and max_model_len.
    """

    def __init__(
        self,
        command: Command,
        folder: Path,
        name: str,
        spec_folder: Path,
        *,
        index: int = 0,
        ready_timeout: float = READY_SECONDS,
    ) -> None:
        self.command = command
        self.folder = folder
        self.name = name
        self.spec_folder = spec_folder
        self.index = index
        self.ready_timeout = ready_timeout
        self.model = ""
        self.session: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException:
            with contextlib.suppress(ServerError):
                self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # -- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the process, its log and its guard."""
        number, self.start_folder = _new_folder(self.folder, self.name)
        self.port = free_port()
        self.names = {
            "port": str(self.port),
            "host": HOST,
            "index": str(self.index),
            "folder": str(self.start_folder.absolute()),
            "spec_folder": str(self.spec_folder.absolute()),
            "name": f"kvatlas-{self.start_folder.name}-{os.urandom(4).hex()}",
        }
        self.launch = self.command.launch(self.names, os.environ)
        self.api_key = self.launch.api_key
        endpoint = self.launch.endpoint or f"http://{HOST}:{self.port}"
        self.url = endpoint.rstrip("/").removesuffix("/v1") + "/v1"
        self._memory_before = _gpu_column("memory.used")
        self.session = {
            "number": number,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "node": socket.gethostname(),
            "gpu": ", ".join(dict.fromkeys(_gpu_column("name"))),
        }
        for name, text in self.launch.files.items():
            path = self.start_folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        if not self.launch.arguments:
            return

        self.session["port"] = self.port
        # First the guard, so that the server is never without one.
        self._guard = _start_guard(self.launch)
        try:
            self._process = subprocess.Popen(
                self.launch.arguments,
                env=self.launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(
                f"{self.name}: {self.launch.arguments[0]!r} cannot be started ({reason(error)})."
            ) from error
        self._tell_guard()
        self._write_live()
        assert self._process.stdout is not None
        log = _Log(self._process.stdout, self.start_folder / LOG, self.launch.secrets)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (log.copy, self._watch)]
        for thread in self._threads:
            thread.start()

    def _tell_guard(self) -> None:
        """Tell the guard which group it ends."""
        assert self._guard is not None and self._guard.stdin is not None and self._process is not None
        record = {"group": self._process.pid, "stop_arguments": self.launch.stop_arguments}
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(record).encode() + b"\n")
            self._guard.stdin.flush()

    def _write_live(self) -> None:
        """Note what the next sweep must end if this driver and the guard are killed."""
        assert self._process is not None
        record = {
            "group": self._process.pid,
            "processes": guard.members(self._process.pid),
            "driver": {os.getpid(): guard.members(os.getpgid(0)).get(os.getpid(), 0)},
            "boot": _boot(),
            "names": self.names,
            "stop_cmd": self.command.stop_cmd,
            "env": dict(self.command.env),
        }
        partial = self.start_folder / f"{LIVE}.part"
        partial.write_text(json.dumps(record, indent=1), "utf-8")
        partial.replace(self.start_folder / LIVE)

    def _watch(self) -> None:
        """End the rest of the group once its first process ends; start the guard again where it was killed."""
        assert self._process is not None
        while not self._stopping.wait(0.1):
            if self._process.poll() is not None:
                guard.end_group(self._process.pid)
                return
            if self._guard is not None and self._guard.poll() is not None:
                self._guard = _start_guard(self.launch)
                self._tell_guard()

    # -- ready --------------------------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> None:
        """Wait until the server that was started lists a model. Raises ServerError if it never does."""
        seconds = self.ready_timeout if self._process else min(ENDPOINT_SECONDS, self.ready_timeout)
        until = time.monotonic() + seconds
        while True:
            failure = self.failure()
            if failure is not None:
                raise failure
            why_not = self._not_ready()
            if not why_not:
                break
            if time.monotonic() > until:
                raise self._error(f"was not ready after {duration_text(seconds)}: {why_not}")
            time.sleep(0.1)
        if self._process is not None:
            # By now it has its other processes.
            self._write_live()
        self.session["version"] = str(self._ask("version").get("version", ""))

    def _not_ready(self) -> str:
        """Return why the server is not ready, "" if it is. Raises ServerError if another one has its port."""
        is_local = self._process is not None and not self.launch.stop_arguments and not self.launch.endpoint
        if is_local and guard.has_proc():
            listening = _listening(self.port)
            if listening - _sockets(self._process.pid):  # type: ignore[union-attr]
                raise self._error(
                    f"is not what listens on its port {self.port}: a process outside its group does. A server that "
                    "leaves the group of its command needs stop_cmd"
                )
            if not listening:
                return f"nothing listens on port {self.port}"

        if self.command.ready_path:
            answer = self._ask(f"/{self.command.ready_path.lstrip('/')}")
            if "fault" in answer:
                return f"{self.command.ready_path}: {answer['fault']}"
        answer = self._ask("models")
        if "fault" in answer:
            return f"{self.url}/models: {answer['fault']}"
        listed = answer.get("data")
        if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
            return f"{self.url}/models lists no model"
        self.model = str(listed[0]["id"])
        self.session |= {"model": self.model, "max_model_len": listed[0].get("max_model_len")}
        return ""

    def _ask(self, path: str) -> dict[str, Any]:
        """Return the JSON at a path under /v1, or with a slash under the root; `fault` says why there is none."""
        base = self.url if path == "models" else self.url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = httpx.get(f"{base}/{path.lstrip('/')}", headers=headers, timeout=20, trust_env=False)
        except httpx.HTTPError as error:
            return {"fault": reason(error)}
        if answer.status_code != 200:
            return {"fault": f"status {answer.status_code}"}
        with contextlib.suppress(ValueError):
            body = answer.json()
            return body if isinstance(body, dict) else {}
        return {}

    # -- life ---------------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Return whether its first process lives; of an endpoint that was not started, True."""
        return self._process is None or self._process.poll() is None

    def failure(self) -> ServerError | None:
        """Return the error of a server that ended by itself, None while it lives."""
        if self.is_alive() or self._process is None:
            return None
        # The rest of the group holds the log open until it is ended.
        for thread in self._threads:
            thread.join(5)
        code = self._process.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return self._error(f"ended {how}")

    def _error(self, clause: str) -> ServerError:
        """Return an error with the last lines of the log, without secrets."""
        sentence = f"The server of {self.name} {clause}."
        log = self.start_folder / LOG
        if log.is_file():
            lines = [line[:300] for line in log.read_text("utf-8", "replace")[-8_000:].splitlines() if line.strip()]
            sentence += f" {log}" + (" ends with:\n" + "\n".join(lines[-8:]) if lines else " is empty.")
        return ServerError(self.launch.secrets.mask(sentence))

    # -- stop ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the server, wait until all its processes are gone and their GPU memory is free.

        Raises ServerError if something still answers on its port: a server that left its group.
        """
        if self._stopping.is_set() or self._process is None:
            self._end_guard()
            return
        self._stopping.set()
        group = self._process.pid
        try:
            if self.launch.stop_arguments:
                guard.run_stop_command(list(self.launch.stop_arguments), dict(self.launch.environment))
            elif self.is_alive():
                self._process.terminate()
            self._wait_for_group(STOP_SECONDS)
        finally:
            # Also after a second Ctrl-C.
            is_ended = guard.end_group(group)
            self._process.wait(5)
            self._end_guard()
        for thread in self._threads:
            thread.join(5)
        if not is_ended:
            raise self._error("cannot be ended: a process of its group is left")
        if not self.launch.endpoint and _is_answered(self.port):
            raise self._error(f"still holds its port {self.port}: it left its group; name a stop_cmd that ends it")
        (self.start_folder / LIVE).unlink(missing_ok=True)
        self._wait_for_memory()

    def _wait_for_group(self, seconds: float) -> None:
        """Wait until the group is empty; its first process has to be waited for as well."""
        assert self._process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None and not guard.members(self._process.pid):
                return
            time.sleep(0.05)

    def _end_guard(self) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(b"done\n")
            self._guard.stdin.close()
        self._guard.wait(5)

    def _wait_for_memory(self) -> None:
        """Wait until each GPU has about the free memory that it had before the start."""
        until = time.monotonic() + MEMORY_SECONDS
        while time.monotonic() < until:
            pairs = zip(_gpu_column("memory.used"), self._memory_before, strict=False)
            if all(int(now) < int(before) + 500 for now, before in pairs):
                return
            time.sleep(0.5)


def end_orphans(folder: Path) -> list[str]:
    """End servers that a killed driver and its killed guard left in `folder`; return sentences on them.

    To be called while the run's lock is held. Raises ServerError if their driver lives.
    """
    sentences = []
    for file in sorted(folder.glob(f"*/{LIVE}")):
        try:
            record = json.loads(file.read_text("utf-8"))
        except ValueError:
            continue
        name = file.parent.name
        if record["boot"] != _boot() or not guard.has_proc():
            sentences.append(f"The server {name} was not stopped; it ran on another machine or before this boot.")
            file.unlink()
            continue
        if _lives(record["driver"]):
            raise ServerError(f"The server {name} belongs to process {next(iter(record['driver']))}, which runs.")
        if record["stop_cmd"]:
            command = Command(stop_cmd=record["stop_cmd"], env=record["env"])
            launch = command.launch(record["names"], os.environ)
            guard.run_stop_command(list(launch.stop_arguments), dict(launch.environment))
        if _lives(record["processes"]):
            guard.end_group(record["group"])
            sentences.append(f"The server {name} of a killed sweep still ran, and was ended.")
        file.unlink()
    return sentences


def _lives(processes: Mapping[str, int]) -> bool:
    """Return whether one of these processes, by number and start time, still lives."""
    for process, start in processes.items():
        with contextlib.suppress(ProcessLookupError):
            if guard.members(os.getpgid(int(process))).get(int(process)) == start:
                return True
    return False


class _Log:
    """The log of a server: its first and last bytes, without secrets."""

    def __init__(self, source: IO[bytes], path: Path, secrets: Secrets) -> None:
        self.source = source
        self.path = path
        self.secrets = secrets

    def copy(self) -> None:
        """Copy until all processes closed the source. A full disk ends the log, never the server."""
        rest = b""
        with self.path.open("w+b", buffering=0) as file:
            while data := os.read(self.source.fileno(), 1 << 16):
                rest += data
                # A secret may be cut in two, a line is not.
                end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
                if not end and len(rest) > 1 << 16:
                    end = len(rest) - 4_096
                self._write(file, rest[:end])
                rest = rest[end:]
            self._write(file, rest)

    def _write(self, file: IO[bytes], data: bytes) -> None:
        text = self.secrets.mask(data.decode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError):
            file.write(text.encode("utf-8", "surrogateescape"))
            size = file.tell()
            if size <= 3 * LOG_BYTES:
                return
            file.seek(size - LOG_BYTES)
            last = file.read()
            file.seek(LOG_BYTES)
            file.truncate()
            file.write(b"\n[...]\n" + last)


def _start_guard(launch: Launch) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-I", "-S", guard.__file__]
    return subprocess.Popen(program, env=launch.environment, stdin=subprocess.PIPE, start_new_session=True)


def _new_folder(folder: Path, name: str) -> tuple[int, Path]:
    """Make the folder of the next start, and return it with its number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(one.name[:3]) for one in folder.glob("[0-9][0-9][0-9]-*")), default=0)
    start_folder = folder / f"{number:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}"
    start_folder.mkdir()
    return number, start_folder


def free_port() -> int:
    """Return a port that no process has bound, on any address."""
    for port in random.SystemRandom().sample(PORTS, 200):
        # Without SO_REUSEADDR a port that somebody holds without listening is refused as well.
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise ServerError(f"No port from {PORTS[0]} to {PORTS[-1]} is free.")


def _is_answered(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def _listening(port: int) -> set[str]:
    """Return the sockets that listen on a port, on any address."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _sockets(group: int) -> set[str]:
    """Return the sockets of all processes of a group."""
    found = set()
    for process in guard.members(group):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def _boot() -> str:
    """Return what tells this machine and boot from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _gpu_column(column: str) -> list[str]:
    """Return a column of all GPUs; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
        return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return []

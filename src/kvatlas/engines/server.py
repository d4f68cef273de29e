"""The life of a server: started by its command, watched, and stopped with all its processes.

    for sentence in end_orphans(run / "servers"):
        print(sentence)
    with Server(command, run / "servers", "fp8", spec_folder) as server:
        server.endpoint.ask(question, sampling, seed, server.ended)
        failure = server.failure()

A rendered `Command` with `serve_cmd` is started in a process group of its own; one with `endpoint` alone is only asked.
Each start has a folder `NNN-NAME` with its files, its log and, while it lives, `live.json`. No secret is in any of them
that comes from the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from kvatlas.core import KvatlasError, reason
from kvatlas.engines import guard
from kvatlas.engines.client import Endpoint
from kvatlas.engines.command import Command, Launch
from kvatlas.text import duration_text

HOST = "127.0.0.1"
#: Seconds within which a server must be ready, and an endpoint that runs must answer.
READY_SECONDS = 1_800.0
ENDPOINT_SECONDS = 30.0
#: Seconds from SIGTERM to the end of the first process, of the others after it, and until GPUs' memory is free.
STOP_SECONDS = 30.0
REST_SECONDS = 10.0
MEMORY_SECONDS = 60.0
#: Seconds for the rest of a log that a process outside the group holds open.
LOG_SECONDS = 2.0
#: The first and the last bytes of a log that are kept.
LOG_BYTES = 5_000_000
#: Ports below those that systems give to clients.
PORTS = range(20_000, 32_000)
LIVE = "live.json"
LOG = "server.log"


class ServerError(KvatlasError):
    """A server that did not start, is not the one that was started, or ended; with the last lines of its log."""


@dataclass(eq=False)
class Server:
    """One start of a command. `name` is that of its setting, `model` the one to ask for if it lists several.

    Within `with` it has `endpoint`, whose model is known, and `session`, plain data: number, started, node, gpu, port,
    version, model, max_model_len, and `port_checked` where the listening socket was found to be its own: on Linux,
    without stop_cmd and endpoint. `ended` is set once its first process ended by itself.
    """

    command: Command
    folder: Path
    name: str
    spec_folder: Path
    model: str = ""
    ready_timeout: float = READY_SECONDS
    ended: threading.Event = field(default_factory=threading.Event, init=False)
    session: dict[str, Any] = field(default_factory=dict, init=False)
    _group: _Group | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_until_ready()
        except BaseException as error:
            # What made it fail is told, not that its end failed as well.
            with contextlib.suppress(ServerError):
                self.stop()
            if isinstance(error, OSError | KvatlasError) and not isinstance(error, ServerError):
                raise ServerError(f"The server of {self.name} cannot be started ({reason(error)}).") from error
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        start_number, self.start_folder = _new_folder(self.folder, self.name)
        self.port = free_port()
        self.names = {
            "port": str(self.port),
            "host": HOST,
            "index": "0",
            "folder": str(self.start_folder.absolute()),
            "spec_folder": str(self.spec_folder.absolute()),
            "name": f"kvatlas-{self.start_folder.name}-{os.urandom(4).hex()}",
        }
        self.launch = self.command.launch(self.names, os.environ)
        self.endpoint = Endpoint(self.launch.endpoint or f"http://{HOST}:{self.port}", key=self.launch.api_key)
        self._memory_before = _gpu_column("memory.used")
        self.session = {
            "number": start_number,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "node": socket.gethostname(),
            "gpu": ", ".join(dict.fromkeys(_gpu_column("name"))),
        }
        if not self.launch.arguments:
            return
        if os.name == "nt":
            raise ServerError("Servers are started on Linux and macOS alone; name the endpoint of one that runs.")

        for file, text in self.launch.files.items():
            path = self.start_folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        self.session["port"] = self.port
        # What the next sweep must end if driver and guard are killed; secrets by their names. Until the group is noted,
        # its processes are found by the name of the start in their environment.
        record: dict[str, Any] = {
            "driver": [os.getpid(), guard.start_time(os.getpid())],
            "boot": _boot(),
            "names": self.names,
            "stop_cmd": self.command.stop_cmd,
            "env": dict(self.command.env),
        }
        self._write_live(record)
        launch = replace(self.launch, environment={**self.launch.environment, guard.START: self.names["name"]})
        try:
            self._group = _Group(launch, self.start_folder / LOG, self.ended)
        except BaseException:
            # Interrupted while it starts.
            for group in guard.groups_of_start(self.names["name"]):
                guard.end_group(group)
            (self.start_folder / LIVE).unlink()
            raise
        self._write_live({**record, "group": self._group.id, "start_time": guard.start_time(self._group.id)})

    def _write_live(self, record: Mapping[str, Any]) -> None:
        partial = self.start_folder / f"{LIVE}.part"
        partial.write_text(json.dumps(record), "utf-8")
        partial.replace(self.start_folder / LIVE)

    # -- ready --------------------------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> None:
        seconds = self.ready_timeout if self._group else min(ENDPOINT_SECONDS, self.ready_timeout)
        until = time.monotonic() + seconds
        while True:
            try:
                return self._check_ready()
            except ServerError:
                raise
            except KvatlasError as error:
                why_not = str(error)
            failure = self.failure()
            if failure is not None:
                raise failure
            if time.monotonic() > until:
                raise self._error(f"was not ready after {duration_text(seconds)}: {why_not}")
            time.sleep(0.1)

    def _check_ready(self) -> None:
        """Find the server's model and version. Raises KvatlasError while it is not ready.

        Raises ServerError if another server answers in its place, if it refuses the key, and for several models.
        """
        self._check_port()
        if self.command.ready_path:
            self._look(self.command.ready_path)
        by_name = self.endpoint.models(200, self._look("v1/models"))
        _, version = self.endpoint.look("version")
        # Another one may have come to the port just before it answered.
        self._check_port()
        if not by_name:
            raise KvatlasError(f"{self.endpoint.url}/models lists no model")

        model = self.model if self.model in by_name else next(iter(by_name))
        if model != self.model and len(by_name) > 1:
            names = ", ".join(by_name)
            raise self._error(f"has several models; name the model of the spec as one of them: {names}")
        self.endpoint.model = model
        # A model may be served under the path of its folder, and no path of a machine is stored.
        self._note("model", Path(model).name if Path(model).is_absolute() else model)
        self._note("version", str(version.get("version", "")) if isinstance(version, dict) else "")
        self.session["max_model_len"] = by_name[model].get("max_model_len")

    def _note(self, name: str, text: str) -> None:
        """Note words of the server in the session, without secrets."""
        self.session[name] = self.endpoint.short_text(self.launch.mask(text))

    def _look(self, path: str) -> Any:
        status, body = self.endpoint.look(path)
        if status in (401, 403):
            raise self._error("asks for another key: write --api-key $NAME into serve_cmd, or set KVATLAS_API_KEY")
        if status != 200:
            raise KvatlasError(f"{path} answers with status {status}")
        return body

    def _check_port(self) -> None:
        """Check that the group listens on its port, as far as it can be known.

        Raises KvatlasError if nothing listens there, ServerError if a process outside the group does.
        """
        # The socket of a container, or on another machine, belongs to no process of the group.
        is_elsewhere = self.launch.stop_arguments or self.launch.endpoint
        if self._group is None or is_elsewhere or not guard.HAS_PROC:
            return
        listening = _listening(self.port)
        if not listening:
            raise KvatlasError(f"nothing listens on port {self.port}")
        if listening - _open_files(self._group.id):
            raise self._error(
                f"has lost its port {self.port}: a process outside its group listens there. (A server that leaves the "
                "group of its command needs stop_cmd)"
            )
        self.session["port_checked"] = True

    # -- life and end -------------------------------------------------------------------------------------------------

    def failure(self) -> ServerError | None:
        """Return the error of a server that ended by itself, None while it lives."""
        if self._group is None or self._group.ending.is_set() or self._group.process.poll() is None:
            return None
        # The rest of the group is ended first: it holds the log open.
        self._group.join()
        code = self._group.process.returncode
        return self._error(f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")

    def _error(self, clause: str) -> ServerError:
        """Return an error: a line that says what happened, and the last lines of the log."""
        sentence = f"The server of {self.name} {clause}."
        log = self.start_folder / LOG
        if log.is_file():
            text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", "replace")[-8_000:])
            lines = [line[:300] for line in text.splitlines() if line.strip()]
            sentence += f"\nIts log {str(log)!r} " + ("ends with:" if lines else "is empty.")
            sentence = "\n".join([sentence, *lines[-8:]])
        return ServerError(self.launch.mask(sentence))

    def stop(self) -> None:
        """End the server; wait until all its processes are gone and the memory of its GPUs is free.

        Raises ServerError if a process is left, or something still answers at its port: a server that left its group.
        """
        if self._group is None or self._group.ending.is_set():
            return
        if not self._group.end():
            raise self._error("cannot be ended: a process of its group is left")
        if not self.launch.endpoint and _is_answered(self.port):
            raise self._error(f"still holds its port {self.port}: it left its group; name a stop_cmd that ends it")
        (self.start_folder / LIVE).unlink(missing_ok=True)

        until = time.monotonic() + MEMORY_SECONDS
        while time.monotonic() < until:
            used = zip(_gpu_column("memory.used"), self._memory_before, strict=False)
            if all(int(now) < int(before) + 500 for now, before in used):
                break
            time.sleep(0.5)


class _Group:
    """The processes of one start, with their log and their guard; `id` is the number of the first."""

    def __init__(self, launch: Launch, log_file: Path, ended: threading.Event) -> None:
        self.launch = launch
        self.log_file = log_file
        self.ended = ended
        # First the guard: until it is told of a group, it ends what has the name of the start.
        self.guard = self._start_guard()
        try:
            self.process = subprocess.Popen(
                launch.arguments,
                env=launch.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            self.guard.communicate()
            raise
        self.id = self.process.pid
        self.record = json.dumps({"group": self.id, "stop_arguments": launch.stop_arguments})
        self._write_to_guard(self.record)
        #: Set once `end` is called.
        self.ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._logging = threading.Thread(target=self._copy_log, daemon=True)
        self._watching.start()
        self._logging.start()

    def _start_guard(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            env=self.launch.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write_to_guard(self, line: str) -> None:
        assert self.guard.stdin is not None
        # The guard may have been killed.
        with contextlib.suppress(BrokenPipeError):
            self.guard.stdin.write(f"{line}\n".encode())
            self.guard.stdin.flush()

    def _watch(self) -> None:
        """End the others once the first process ends; start the guard again if it is killed."""
        while not self.ending.wait(0.1):
            if self.process.poll() is not None:
                self.ended.set()
                guard.end_group(self.id)
                return
            if self.guard.poll() is not None:
                self.guard = self._start_guard()
                self._write_to_guard(self.record)

    def _copy_log(self) -> None:
        """Copy what the processes write, without secrets, until all have closed it."""
        assert self.process.stdout is not None
        text = b""
        with self.process.stdout as source, self.log_file.open("w+b", buffering=0) as log:
            while data := os.read(source.fileno(), 1 << 16):
                text += data
                # Only whole lines, since a secret may arrive in two pieces.
                end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
                if not end and len(text) > 1 << 16:
                    end = len(text) - 4_096
                _append(log, text[:end], self.launch)
                text = text[end:]
            _append(log, text, self.launch)

    def join(self) -> None:
        """Wait until the others are ended and the log is whole, unless a process outside the group holds it open."""
        self._watching.join()
        self._logging.join(LOG_SECONDS)

    def end(self) -> bool:
        """End all processes, and return whether none is left."""
        self.ending.set()
        try:
            self._watching.join()
            if self.launch.stop_arguments:
                guard.run_stop_command(self.launch.stop_arguments, self.launch.environment)
            else:
                self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
                # Its workers may not notice that it is gone.
                guard.terminate_group(self.id)
                guard.wait_until_empty(self.id, REST_SECONDS)
        finally:
            # Also after a second Ctrl-C.
            is_ended = guard.end_group(self.id)
            self._write_to_guard("done")
            self.guard.communicate()
        self.process.wait()
        self.join()
        return is_ended


def _append(log: IO[bytes], data: bytes, launch: Launch) -> None:
    """Append to a log, of which the middle is left out once it is long. A full disk ends the log, never the server."""
    text = launch.mask(data.decode("utf-8", "surrogateescape"))
    with contextlib.suppress(OSError):
        log.write(text.encode("utf-8", "surrogateescape"))
        size = log.tell()
        if size > 3 * LOG_BYTES:
            log.seek(size - LOG_BYTES)
            last = log.read()
            log.seek(LOG_BYTES)
            log.truncate()
            log.write(b"\n[...]\n" + last)


def end_orphans(folder: Path) -> list[str]:
    """End the servers that a killed driver and its killed guard left in `folder`; return sentences on them.

    Processes of other start times are not touched. To be called while the run's lock is held. Raises ServerError if a
    driver still lives, as on a file system without locks.
    """
    sentences = []
    for file in sorted(folder.glob(f"*/{LIVE}")):
        name = file.parent.name
        try:
            record = json.loads(file.read_text("utf-8"))
        except ValueError:
            # As after a loss of power, which ends servers, too.
            sentences.append(f"The note of the server {name} cannot be read; see that it does not run.")
            file.unlink()
            continue
        if record["boot"] != _boot():
            sentences.append(f"The server {name} was not stopped; it ran on another machine, or before this boot.")
            file.unlink()
            continue
        driver, driver_start = record["driver"]
        if driver_start and guard.start_time(driver) == driver_start:
            raise ServerError(f"The server {name} belongs to the process {driver}, which still runs.")

        command = Command(stop_cmd=record["stop_cmd"], env=record["env"])
        launch = command.launch(record["names"], os.environ)
        guard.run_stop_command(launch.stop_arguments, launch.environment)
        # The others may outlive the first process: no new one gets its number while its group has a process.
        group = record.get("group")
        groups = {group} if group else guard.groups_of_start(record["names"]["name"])
        is_same = not group or guard.start_time(group) in (0, record["start_time"])
        living = [one for one in groups if is_same and guard.HAS_PROC and guard.members(one)]
        for one in living:
            guard.end_group(one)
        if living:
            sentences.append(f"The server {name} of a killed sweep still ran; it is ended now.")
        file.unlink()
    return sentences


def _new_folder(folder: Path, name: str) -> tuple[int, Path]:
    """Make the folder of the next start, and return it with its number."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(one.name.partition("-")[0]) for one in folder.glob("[0-9]*-*")]
    start_number = 1 + max(numbers, default=0)
    start_folder = folder / f"{start_number:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}"
    start_folder.mkdir()
    return start_number, start_folder


def free_port() -> int:
    """Return a port that no process holds at any address."""
    for port in random.SystemRandom().sample(PORTS, 200):
        # Without SO_REUSEADDR a port that is held without listening is refused as well.
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise ServerError(f"No port from {PORTS[0]} to {PORTS[-1]} is free.")


def _is_answered(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def _listening(port: int) -> set[str]:
    """Return the sockets that listen at a port, of any address."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                # 0A is a socket that listens.
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _open_files(group: int) -> set[str]:
    """Return what all processes of a group have open, also sockets."""
    found = set()
    for process in guard.members(group):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(descriptor.readlink()))
    return found


def _boot() -> str:
    """Return what tells this boot of this machine from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _gpu_column(column: str) -> list[str]:
    """Return a column of all GPUs; none without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()
    return []

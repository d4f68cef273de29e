"""The life of servers, with a real one that has faults: no process is left, no port is held, errors are sentences."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvatlas.core import KvatlasError
from kvatlas.engines import guard, server
from kvatlas.engines.command import Command
from kvatlas.engines.server import LIVE, LOG, Server, ServerError, end_orphans, free_port

FAKE = Path(__file__).parent / "fake_server.py"
#: In the environment of all processes of a test.
MARK = "KVATLAS_TEST_FOLDER"


def processes_of(folder: Path) -> dict[int, str]:
    """Return the living processes that a test started, with their commands."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0") and state != "Z":
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(server, "REST_SECONDS", 0.3)
    monkeypatch.setattr(server, "STOP_SECONDS", 1)
    yield
    wait_until(lambda: not processes_of(tmp_path), lambda: f"left: {processes_of(tmp_path)}")


def wait_until(holds: Callable[[], bool], say: Callable[[], str], seconds: float = 8) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, say()
        time.sleep(0.02)


def fake(*arguments: str, program: str = f"{sys.executable} -S {FAKE}", **layer: object) -> Command:
    return Command.layered({"serve_cmd": f"{program} --port {{port}} {shlex.join(arguments)}"}, layer).render({})


def modes(*names: str) -> Command:
    return fake(*(argument for name in names for argument in ("--mode", name)))


def start(command: Command, folder: Path, ready_timeout: float = 5) -> Server:
    return Server(command, folder / "servers", "fp8", folder, ready_timeout=ready_timeout)


def group_of(one: Server) -> server._Group:
    assert one._group is not None
    return one._group


def ask(one: Server, question: str = "what") -> httpx.Response:
    body = {"messages": [{"role": "user", "content": question}], "seed": 7}
    headers = {"Authorization": f"Bearer {one.endpoint.key}"}
    return httpx.post(f"{one.endpoint.url}/chat/completions", json=body, headers=headers, timeout=5, trust_env=False)


def assert_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


# -- a server that works ----------------------------------------------------------------------------------------------


def test_a_server_lives_within_its_block(tmp_path: Path) -> None:
    with start(fake("--kv-cache-dtype", "fp8", files={"a/engine.yaml": "port: {port}"}), tmp_path) as one:
        assert ask(one).json()["choices"][0]["message"]["content"] == "WHAT 7 fp8"
        assert (not one.ended.is_set(), one.failure(), one.endpoint.model) == (True, None, "fake")
        assert (one.start_folder / "a" / "engine.yaml").read_text() == f"port: {one.port}"
        assert (one.start_folder / LIVE).is_file()
        session = dict(one.session)
    assert_free(one.port)
    assert not (one.start_folder / LIVE).exists()
    expected = {
        "number": 1,
        "version": "1.2.3",
        "max_model_len": 4096,
        "model": "fake",
        "port": one.port,
        "port_checked": True,
    }
    assert session.items() >= expected.items()
    assert str(Path.cwd()) not in json.dumps(session)
    with start(fake("--model", "/home/me/model"), tmp_path) as other:
        assert (other.session["number"], other.start_folder.name) == (2, "002-fp8")
        # Requests name the path, and what is stored does not.
        assert (other.endpoint.model, other.session["model"]) == ("/home/me/model", "model")


def test_an_endpoint_is_only_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(fake(), tmp_path) as one:
        for address in (one.endpoint.url, one.endpoint.url.removesuffix("/v1"), f"{one.endpoint.url}/"):
            with start(Command(endpoint=address), tmp_path) as other:
                assert (other.endpoint.url, other.endpoint.model, other.session["version"]) == (
                    one.endpoint.url,
                    "fake",
                    "1.2.3",
                )
                assert not other.ended.is_set()
        assert not one.ended.is_set()
    monkeypatch.setattr(server, "ENDPOINT_SECONDS", 0.2)
    with (
        pytest.raises(ServerError, match=r"not ready after .*refused"),
        start(Command(endpoint=one.endpoint.url), tmp_path),
    ):
        pass


def test_a_path_of_readiness_is_asked_before_the_models(tmp_path: Path) -> None:
    with start(fake(ready_path="/health"), tmp_path) as one:
        assert one.endpoint.model == "fake"
    with pytest.raises(ServerError, match="/other answers with status 404"):
        start(fake(ready_path="/other"), tmp_path, ready_timeout=0.5).__enter__()


# -- servers that do not start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (fake(program="no-such-engine"), "The server of fp8 cannot be started .*no-such-engine"),
        (modes("ends-at-once"), r"ended with code 2\..*ends with:\nValueError: fp9 is no dtype$"),
        (modes("never-ready", "forks"), "was not ready after .*status 503"),
        (modes("no-model"), "was not ready after .*lists no model"),
        (fake("--seconds", "60"), "was not ready after .*nothing listens on port"),
        (fake("--api-key", "$UNKNOWN"), "the variable UNKNOWN of the environment is not set"),
    ],
    ids=["missing", "ends-at-once", "never-ready", "no-model", "loads", "variable"],
)
def test_a_server_that_does_not_start(command: Command, sentence: str, tmp_path: Path) -> None:
    one = start(command, tmp_path, ready_timeout=1)
    began = time.monotonic()
    with pytest.raises(KvatlasError, match=f"(?s){sentence}"), one:
        pass
    assert time.monotonic() - began < 5
    assert processes_of(tmp_path) == {}
    assert not list(tmp_path.rglob(LIVE))
    assert_free(one.port)


def test_an_end_while_it_loads_is_seen_at_once(tmp_path: Path) -> None:
    """An hour of waiting for a server that is dead is what other tools had."""
    one = start(fake("--seconds", "60", "--mode", "forks"), tmp_path, ready_timeout=3_600)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(one.__enter__)
        wait_until(lambda: one._group is not None, lambda: "not started")
        os.kill(group_of(one).id, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended by SIGKILL"):
            starting.result(8)
    assert processes_of(tmp_path) == {}


def test_a_key_that_is_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "sk-12345678")
    with start(fake("--api-key", "$MINE"), tmp_path) as one:
        assert ask(one).status_code == 200
        with (
            pytest.raises(ServerError, match="asks for another key"),
            start(Command(endpoint=one.endpoint.url), tmp_path),
        ):
            pass
        monkeypatch.setenv("KVATLAS_API_KEY", "sk-12345678")
        with start(Command(endpoint=one.endpoint.url), tmp_path) as other:
            assert other.endpoint.model == "fake"


# -- servers that fail while they answer ------------------------------------------------------------------------------


def test_a_server_that_answers_500_lives(tmp_path: Path) -> None:
    with start(modes("then-500"), tmp_path) as one:
        assert ask(one).status_code == 500
        assert one.failure() is None


def test_a_server_that_dies_is_told_and_starts_again(tmp_path: Path) -> None:
    """Three times, as a sweep tries it; each death with the reason, and without the processes that it leaves."""
    command = fake("--answers", "2", "--mode", "forks")
    for number in (1, 2, 3):
        with start(command, tmp_path) as one:
            assert [ask(one).status_code for _ in range(2)] == [200, 200]
            with pytest.raises(httpx.HTTPError):
                ask(one)
            wait_until(lambda one=one: one.failure() is not None, lambda: "it lives")  # type: ignore[misc]
            assert "ended with code 9" in str(one.failure())
            assert str(one.failure()).endswith("\nthe engine died")
            assert "time.sleep" not in " ".join(processes_of(tmp_path).values())
            assert one.session["number"] == number


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("ignores-sigterm",), ("forks",), ("ignores-sigterm", "forks")], ids="+".join)
def test_all_processes_are_ended(names: tuple[str, ...], tmp_path: Path) -> None:
    with start(modes(*names), tmp_path) as one:
        assert len(guard.members(group_of(one).id)) == 1 + ("forks" in names)
    assert processes_of(tmp_path) == {}
    assert_free(one.port)


def test_workers_that_outlive_the_first_process_are_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not waited for until they are killed."""
    monkeypatch.setattr(server, "REST_SECONDS", 30)
    with start(modes("forks"), tmp_path):
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_a_server_that_leaves_its_group_needs_a_command_that_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(server, "LOG_SECONDS", 0.2)
    with pytest.raises(ServerError, match=r"has lost its port .*needs stop_cmd"), start(modes("forks-out"), tmp_path):
        pass
    (escaped,) = processes_of(tmp_path)
    os.kill(escaped, signal.SIGKILL)

    arguments = ("--mode", "forks-out", "--pid-file", "{folder}/pid")
    with start(fake(*arguments, stop_cmd="bash -c 'kill $(cat {folder}/pid)'"), tmp_path) as one:
        assert ask(one).status_code == 200
    assert_free(one.port)
    assert processes_of(tmp_path) == {}

    with pytest.raises(ServerError, match="still holds its port"), start(fake(*arguments, stop_cmd="true"), tmp_path):
        pass
    (escaped,) = processes_of(tmp_path)
    os.kill(escaped, signal.SIGKILL)


# -- the wrong server answers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def stranger(port: int, *arguments: str) -> Iterator[None]:
    """Another server on this port, which answers as ours would."""
    program = [sys.executable, "-S", str(FAKE), "--port", str(port), "--model", "stranger", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield
        finally:
            process.kill()


def test_a_port_that_somebody_holds_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is bound with SO_REUSEADDR and does not listen, as that of a server that loads."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        monkeypatch.setattr(server, "PORTS", range(port, port + 1))
        monkeypatch.setattr("random.SystemRandom.sample", lambda _, ports, __: list(ports))
        with pytest.raises(ServerError, match=f"No port from {port} to {port} is free"):
            free_port()
    assert free_port() == port


def is_held(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def test_a_port_that_is_taken_while_the_server_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours holds it without listening, as vLLM does: the answers would be the stranger's."""
    port = free_port()
    monkeypatch.setattr(server, "free_port", lambda: port)
    one = start(fake("--mode", "holds-port", "--seconds", "60"), tmp_path, ready_timeout=60)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(one.__enter__)
        wait_until(lambda: is_held(port), lambda: "not held")
        with stranger(port), pytest.raises(ServerError, match=f"has lost its port {port}"):
            starting.result(8)
    assert one.endpoint.model == ""


def test_a_port_that_two_servers_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would get a part of the questions."""
    port = free_port()
    monkeypatch.setattr(server, "free_port", lambda: port)
    one = start(fake("--mode", "reuse-port", "--mode", "never-ready"), tmp_path)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(one.__enter__)
        wait_until(lambda: bool(server._listening(port)), lambda: "does not listen")
        with stranger(port, "--mode", "reuse-port"), pytest.raises(ServerError, match=f"has lost its port {port}"):
            starting.result(8)


# -- kill -9, Ctrl-C --------------------------------------------------------------------------------------------------

DRIVER = """
    import sys, time
    from pathlib import Path
    from kvatlas.engines.command import Command
    from kvatlas.engines import server
    from kvatlas.engines.server import Server, end_orphans
    server.REST_SECONDS = 0.3
    folder = Path(sys.argv[1])
    command = Command(serve_cmd=sys.argv[2], stop_cmd=sys.argv[3])
    end_orphans(folder / "servers")
    with Server(command, folder / "servers", "fp8", folder, ready_timeout=20) as one:
        print(one.port, one._group.id, one._group.guard.pid, flush=True)
        time.sleep(600)
"""


def start_driver(folder: Path, command: Command) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", textwrap.dedent(DRIVER), str(folder), command.serve_cmd, command.stop_cmd]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def numbers_of(driver: subprocess.Popen[str]) -> list[int]:
    assert driver.stdout is not None
    return [int(number) for number in driver.stdout.readline().split()]


def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    """Its guard ends the group, also one that ignores SIGTERM, and runs the command that stops it."""
    command = fake("--mode", "forks", "--mode", "ignores-sigterm", stop_cmd="touch {folder}/stopped")
    driver = start_driver(tmp_path, command)
    port, *_ = numbers_of(driver)
    assert len(processes_of(tmp_path)) == 4
    driver.kill()
    driver.communicate()
    wait_until(lambda: not processes_of(tmp_path), lambda: str(processes_of(tmp_path)))
    assert_free(port)
    assert (tmp_path / "servers" / "001-fp8" / "stopped").exists()


def test_a_driver_killed_while_its_server_loads_leaves_nothing(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, fake("--seconds", "60"))
    wait_until(lambda: bool(list(tmp_path.rglob(LIVE))), lambda: "not started")
    driver.kill()
    driver.communicate()


def test_a_killed_guard_is_replaced(tmp_path: Path) -> None:
    with start(modes("forks"), tmp_path) as one:
        first = group_of(one).guard
        first.kill()
        wait_until(lambda: group_of(one).guard is not first, lambda: "no other guard")
        assert ask(one).status_code == 200
        # Killed just before the end, it is not missed.
        group_of(one).guard.kill()


def test_a_guard_that_was_replaced_guards(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, modes("forks"))
    *_, guard_process = numbers_of(driver)
    os.kill(guard_process, signal.SIGKILL)
    wait_until(lambda: sum("guard.py" in command for command in processes_of(tmp_path).values()) == 1, lambda: "none")
    time.sleep(0.3)
    driver.kill()
    driver.communicate()


def test_what_both_killed_leave_is_ended_by_the_next_start(tmp_path: Path) -> None:
    driver = start_driver(tmp_path, fake("--mode", "forks", stop_cmd="touch {folder}/stopped"))
    port, _, guard_process = numbers_of(driver)
    os.kill(driver.pid, signal.SIGSTOP)
    os.kill(guard_process, signal.SIGKILL)
    driver.kill()
    driver.communicate()
    wait_until(lambda: len(processes_of(tmp_path)) == 2, lambda: str(processes_of(tmp_path)))

    assert end_orphans(tmp_path / "servers") == ["The server 001-fp8 of a killed sweep still ran; it is ended now."]
    assert processes_of(tmp_path) == {}
    assert_free(port)
    assert (tmp_path / "servers" / "001-fp8" / "stopped").exists()
    assert end_orphans(tmp_path / "servers") == []


def test_processes_that_outlive_the_first_one_are_orphans_too(tmp_path: Path) -> None:
    """A server that loads may end by itself once its log is not read any more, and leave those that it started."""
    driver = start_driver(tmp_path, fake("--mode", "forks", "--seconds", "60"))
    wait_until(lambda: len(processes_of(tmp_path)) == 4, lambda: str(processes_of(tmp_path)))
    (live,) = tmp_path.rglob(LIVE)
    group = json.loads(live.read_text())["group"]
    os.kill(driver.pid, signal.SIGSTOP)
    for process, command in processes_of(tmp_path).items():
        if "guard.py" in command or process == group:
            os.kill(process, signal.SIGKILL)
    driver.kill()
    driver.communicate()
    wait_until(lambda: len(processes_of(tmp_path)) == 1, lambda: str(processes_of(tmp_path)))
    assert len(end_orphans(tmp_path / "servers")) == 1
    assert processes_of(tmp_path) == {}


def test_what_is_left_before_its_group_was_noted_is_ended_by_its_name(tmp_path: Path) -> None:
    """Driver and guard may be killed between the start of a server and the second note."""
    driver = start_driver(tmp_path, fake("--mode", "forks"))
    _, _, guard_process = numbers_of(driver)
    os.kill(driver.pid, signal.SIGSTOP)
    os.kill(guard_process, signal.SIGKILL)
    driver.kill()
    driver.communicate()
    (live,) = tmp_path.rglob(LIVE)
    record = json.loads(live.read_text())
    del record["group"], record["start_time"]
    live.write_text(json.dumps(record))
    assert end_orphans(tmp_path / "servers") == ["The server 001-fp8 of a killed sweep still ran; it is ended now."]
    assert processes_of(tmp_path) == {}


def test_a_note_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """As after a loss of power."""
    live = tmp_path / "001-fp8" / LIVE
    live.parent.mkdir()
    live.touch()
    assert "cannot be read" in end_orphans(tmp_path)[0]
    assert end_orphans(tmp_path) == []


def test_others_are_not_taken_for_orphans(tmp_path: Path) -> None:
    """A process with the number of an orphan, and another start time, lives on; so does a server whose driver lives."""
    with start(fake(), tmp_path) as one:
        with pytest.raises(ServerError, match=f"belongs to the process {os.getpid()}, which still runs"):
            end_orphans(tmp_path / "servers")
        live = one.start_folder / LIVE
        record = json.loads(live.read_text())
        record["driver"] = [os.getpid(), 1]
        live.write_text(json.dumps({**record, "start_time": 1}))
        assert end_orphans(tmp_path / "servers") == []
        live.write_text(json.dumps({**record, "boot": "another", "stop_cmd": "touch {folder}/stopped"}))
        assert "another machine, or before this boot" in end_orphans(tmp_path / "servers")[0]
        assert not (one.start_folder / "stopped").exists()
        assert not one.ended.is_set()


def test_the_rest_of_a_killed_first_process_is_ended(tmp_path: Path) -> None:
    with start(modes("forks"), tmp_path) as one:
        os.kill(group_of(one).id, signal.SIGKILL)
        wait_until(lambda: not guard.members(group_of(one).id), lambda: str(processes_of(tmp_path)), 2)
        assert "ended by SIGKILL" in str(one.failure())


@pytest.mark.parametrize("seconds", [60, 0], ids=["starting", "asking"])
def test_ctrl_c_ends_the_server(seconds: int, tmp_path: Path) -> None:
    driver = start_driver(tmp_path, fake("--seconds", str(seconds), "--mode", "forks"))
    wait_until(lambda: bool(list(tmp_path.rglob(LIVE))), lambda: "not started")
    if not seconds:
        numbers_of(driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=20)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert processes_of(tmp_path) == {}
    assert not list(tmp_path.rglob(LIVE))


# -- logs and secrets -------------------------------------------------------------------------------------------------


def test_a_log_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In little room at any time: a server that writes without end must not fill the disk."""
    monkeypatch.setattr(server, "LOG_BYTES", 100_000)
    with start(fake("--say", "the beginning", "--log-bytes", "20000000", "--answers", "0"), tmp_path) as one:
        with pytest.raises(httpx.HTTPError):
            ask(one)
        wait_until(lambda: one.failure() is not None, lambda: "it lives")
    text = (one.start_folder / LOG).read_text()
    assert 200_000 <= len(text) <= 400_000
    assert text.startswith("the beginning\n")
    assert text.count("[...]") == 1
    assert text.endswith("x\nlistens\nthe engine died\n")


def test_a_full_disk_ends_the_log_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_folder(folder: Path, name: str) -> tuple[int, Path]:
        start_folder = tmp_path / "001-fp8"
        start_folder.mkdir()
        (start_folder / LOG).symlink_to("/dev/full")
        return 1, start_folder

    monkeypatch.setattr(server, "_new_folder", new_folder)
    with start(fake("--log-bytes", "1000000"), tmp_path) as one:
        assert ask(one).status_code == 200


def test_no_secret_is_in_a_file_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that writes its key and its token, also in two pieces, and dies."""
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    program = "import os, sys, time; w = os.write; w(1, b'key sk-012'); time.sleep(.2); w(1, b'3456789 end\\n')"
    script = f"{program}; print(sys.argv, os.environ['TOKEN'], flush=True); sys.exit('bad hf_0123456789')"
    layer = {
        "serve_cmd": f"{sys.executable} -S -c {shlex.quote(script)} --port {{port}} --api-key $MY_KEY",
        "env": {"TOKEN": "$MY_KEY"},
        "stop_cmd": "echo $MY_KEY",
    }
    with pytest.raises(ServerError) as error, start(Command.layered(layer).render({}), tmp_path):
        pass
    texts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any("key $MY_KEY end" in text for text in texts)
    assert "bad $HF_TOKEN" in str(error.value)
    for text in (*texts, str(error.value), repr(error.value)):
        assert "0123456789" not in text


def test_a_note_of_a_server_that_lives_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    with start(fake("--api-key", "$MY_KEY", env={"A_TOKEN": "$MY_KEY"}, stop_cmd="true $MY_KEY"), tmp_path) as one:
        assert "0123456789" not in (one.start_folder / LIVE).read_text()
        guards = [command for command in processes_of(tmp_path).values() if "guard.py" in command]
        assert "0123456789" not in guards[0]
        one.command = Command()
        os.kill(group_of(one).id, signal.SIGKILL)

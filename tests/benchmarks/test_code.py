"""Programs are graded by running them, and hostile ones are contained: graded wrong, nothing left."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from kvatlas.benchmarks import find, sandbox
from kvatlas.benchmarks.sandbox import End, run
from kvatlas.core import KvatlasError, Status

pytestmark = pytest.mark.skipif(bool(sandbox.why_not()), reason=sandbox.why_not() or "programs can be contained")


def block(program: str) -> str:
    return f"I would write this.\n\n```python\n{program}\n```\nDone."


def processes(word: str) -> int:
    result = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                result += word.encode() in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    return result


def test_the_solutions_pass_and_what_is_wrong_does_not() -> None:
    benchmark = find("CODE")
    problems = benchmark.problems()
    assert len(problems) == 12
    # The last block is the answer.
    assert benchmark.grade(problems[1], block("x") + block(problems[1].answer)).correct
    grade = benchmark.grade(problems[0], block('print("yes")'))
    assert (grade.correct, grade.progress, grade.status) == (False, 0.4, Status.OK)
    assert benchmark.grade(problems[0], "print('yes')").status is Status.NO_ANSWER
    assert problems[0].about["tests"][0][1] in benchmark.prompt(problems[0])


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    tests = [{"input": "2 3", "output": "5\n", "testtype": "stdin"}]
    path.write_text(json.dumps({"question_content": "Add.", "public_test_cases": json.dumps(tests)}))
    benchmark = find(f"CODE@{path}")
    (problem,) = benchmark.problems()
    assert benchmark.grade(problem, block("print(sum(map(int, input().split())))")).correct
    path.write_text(
        json.dumps({"question": "Add.", "tests": [{"input": "1", "output": "1", "testtype": "functional"}]})
    )
    with pytest.raises(KvatlasError, match="has tests that are no inputs with their outputs"):
        find(f"CODE@{path}").problems()


HOSTILE = {
    "fork bomb": """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(100)  # HOSTILE-MARK
""",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "memory": "x = bytearray(2**32)",
    "a large file": "with open('/tmp/x', 'wb') as f:\n    while True: f.write(bytes(2**20))",
    "many files": "for i in range(10**6): open(f'/tmp/{i}', 'w').close()",
    "endless output": "while True: print('x' * 1000)",
    "endless loop": "while True: pass",
    "writing to the system": "open('/usr/lib/x', 'w')",
    "killing": "import os\nos.kill(1, 9)\nos.kill(-1, 9)",
    "mounting": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_contained_and_leave_nothing(name: str) -> None:
    began = time.monotonic()
    result = run(HOSTILE[name], "", seconds=2)
    assert result.end is not End.DONE
    assert (result.end is End.OUTPUT) == (name == "endless output")
    assert time.monotonic() - began < 20
    assert len(result.output) <= sandbox.OUTPUT
    assert processes("HOSTILE-MARK") == 0
    assert "kvatlas-sandbox" not in Path("/proc/self/mounts").read_text()


def test_nothing_of_the_user_is_seen_and_nothing_written_stays(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    paths = [str(secret), __file__, "/etc/passwd", "/proc/self/environ", str(Path.home() / ".ssh")]
    seen = run(f"import os\nprint([os.path.exists(p) for p in {paths!r}], sorted(os.environ))", "")
    assert seen.output.strip() == f"{[False] * len(paths)} ['HOME', 'LC_CTYPE', 'PATH']"
    assert run("open('/tmp/left-behind', 'w').write('x')\nprint('written')", "").output == "written\n"
    assert not Path("/tmp/left-behind").exists()
    assert run("import os\nprint(os.path.exists('/tmp/left-behind'))", "").output == "False\n"


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 3)", "")
    assert result.end is End.FAILED


def test_a_hostile_answer_is_wrong() -> None:
    benchmark = find("CODE")
    problem = benchmark.problems()[0]
    grade = benchmark.grade(problem, block("while True:\n    print('yes' * 1000)"))
    assert (grade.correct, grade.progress, grade.status) == (False, 0.0, Status.OK)
    assert not benchmark.grade(problem, block("x" * 200_000)).correct


def test_where_programs_cannot_be_contained_the_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    sandbox.why_not.cache_clear()
    try:
        with pytest.raises(KvatlasError, match="cannot be contained on this machine: unshare of util-linux is missing"):
            find("CODE")
    finally:
        sandbox.why_not.cache_clear()

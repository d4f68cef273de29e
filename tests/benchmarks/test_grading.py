"""Grading: answers found in texts, equal answers, the processes that do the algebra, and other graders beside ours."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.answers import judges
from kvatlas.answers.finding import bare_last_line, chosen_letter, last_box, stated_answer
from kvatlas.answers.judges import ComparisonProcess, Equality
from kvatlas.benchmarks import find, identity
from kvatlas.benchmarks.public import Questions
from kvatlas.core import Grade, KvatlasError, Problem, Status
from kvatlas.sweeps import parse_spec

HOSTILE: list[tuple[str, str, bool]] = [
    ("7", r"\boxed{" + "{" * 200 + "7" + "}" * 200 + "}", True),
    ("7", r"\boxed{" * 5000, False),
    ("7", "{" * 50_000 + r"\boxed{7}", True),
    ("7", r"\boxed{" + "7" * 100_000 + "}", False),
    ("7", "x" * 100_000 + r"\boxed{7}", True),
    ("7", "The answer is " * 8000 + "7.", True),
    ("7", "answer:" * 15_000, False),
    ("3", "\\boxed{\ud83d\ude00}", False),
    ("3", r"\boxed{" + ",".join(["3"] * 400) + "}", False),
    ("3", r"\boxed{" + "-" * 600 + "3}", False),
]
#: A sum that takes longer than any limit on a comparison.
ENDLESS = r"\sum_{k=1}^{10^7} \frac{1}{k}"
DATA = Path(__file__).parent
#: Answers with the verdict that a careful person gives: (reference, what the model wrote after thinking, correct).
ALL = [
    *(
        (row["reference"], row["text"], row["correct"])
        for row in map(json.loads, (DATA / "verdicts.jsonl").read_text("utf-8").split("\n")[:-1])
    ),
    *HOSTILE,
]


def extractions(kind: str) -> list[tuple[str, str | None]]:
    """Texts with the answer that is found in them, None for none."""
    rows = map(json.loads, (DATA / "extractions.jsonl").read_text("utf-8").splitlines())
    return [(row["text"], row["answer"]) for row in rows if row["kind"] == kind]


CHOICES = ("3 eV", "10^{-4} eV", "a photon", "none of these")


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """Hostile answers are given up sooner than in a sweep."""
    judges._process = ComparisonProcess(seconds=2)
    yield
    judges._process.close()
    judges._process = None


def grade(reference: str, answer: str, choices: tuple[str, ...] = (), grader: str = "kvatlas") -> Grade:
    about = {"choices": list(choices)} if choices else {}
    return Questions("T", file="unused", grader=grader).grade(Problem("p", "q", reference, about), answer)


@pytest.mark.parametrize(
    ("reference", "answer", "correct"), ALL, ids=[f"{i}-{ref[:12]}" for i, (ref, _, _) in enumerate(ALL)]
)
def test_verdicts(reference: str, answer: str, correct: bool) -> None:
    assert grade(reference, answer).correct is correct


PAIRS = [
    DATA / "answer_pairs.txt",
    DATA.parent / "data" / "answer_kinds.txt",
    DATA.parent / "data" / "answer_kinds_blind.txt",
]


def pairs(path: Path) -> list[tuple[str, str, bool]]:
    """Reference, a model's text, and whether it is right."""
    kind, result = "", []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("# "):
            kind = line[2:]
        elif line.startswith(("= ", "! ")):
            reference, answer = line[2:].split(" :: ")
            text = answer.replace(r"\n", "\n") if kind.startswith("texts") else rf"\boxed{{{answer}}}"
            result.append((reference, text, line[0] == "="))
    return result


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_answers_of_all_kinds_are_judged_as_a_person_judges_them(path: Path) -> None:
    everything = pairs(path)
    assert len(everything) > 380
    wrong = [pair for pair in everything if grade(*pair[:2]).correct is not pair[2]]
    assert len(wrong) <= 0.01 * len(everything), wrong
    assert not [pair for pair in wrong if not pair[2]]


def statements(path: Path) -> list[tuple[str, str, tuple[str, ...], bool]]:
    """Reference, a model's text, the choices, and the verdict of a careful person."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return [(row["reference"], row["text"], tuple(row["choices"]), row["correct"]) for row in rows]


@pytest.mark.parametrize("path", [DATA.parent / "data" / "answers.jsonl", DATA / "statements.jsonl"])
def test_what_a_text_states_is_its_answer(path: Path) -> None:
    everything = statements(path)
    wrong = [row for row in everything if grade(*row[:3]).correct is not row[3]]
    assert len(wrong) <= 0.02 * len(everything), wrong
    assert not [row for row in wrong if not row[3]]


def test_no_answer_is_told_from_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "ANSWER_SECONDS", 0.4)
    assert grade("7", "I do not know.").status is Status.NO_ANSWER
    assert grade("7", r"\boxed{8}") == Grade(False, 0.0, "8", Status.OK)
    assert grade("7", r"\boxed{7}") == Grade(True, 1.0, "7", Status.OK)
    assert grade("3", rf"\boxed{{{ENDLESS}}}").status is Status.GRADER_TIMEOUT


@pytest.mark.parametrize(("text", "answer"), extractions("bare"))
def test_a_bare_last_line_is_an_answer_where_nobody_told_how_to_end(text: str, answer: str | None) -> None:
    assert bare_last_line(text) == answer
    problem = Problem("p", "q", "0", {})
    assert Questions("T", file="unused", prompt_format="plain").grade(problem, text).answer == answer
    assert grade("0", text).answer is None


def test_a_bare_last_line_may_be_wrong_or_a_letter() -> None:
    plain = Questions("T", file="unused", prompt_format="plain")
    assert plain.grade(Problem("p", "q", "7"), "so\n#### 7").correct
    assert not plain.grade(Problem("p", "q", "8"), "so\n#### 7").correct
    assert plain.grade(Problem("p", "q", "7"), "so\n#### 8, no: \\boxed{7}").answer == "7"
    chosen = plain.grade(Problem("p", "q", "C", {"choices": list(CHOICES)}), "so\n#### C")
    assert (chosen.answer, chosen.correct) == ("C", True)


@pytest.mark.parametrize(("answer", "chosen"), extractions("letter"))
def test_letters(answer: str, chosen: str | None) -> None:
    assert chosen_letter(answer, CHOICES) == chosen
    graded = grade("C", answer, CHOICES)
    assert graded.correct is (chosen == "C")
    assert graded.status is (Status.NO_ANSWER if chosen is None else Status.OK)


def test_extraction_alone() -> None:
    assert last_box(r"\boxed{\frac{1}{2}} \boxed{}") == r"\frac{1}{2}"
    assert last_box("no box, no boxed either") is None
    assert stated_answer("The answer is 5, so we are done.") == "5"
    assert stated_answer("answers vary") is None
    began = time.process_time()
    last_box(r"\boxed{" * 20_000 + "}" * 10_000)
    stated_answer("the answer is " * 50_000)
    chosen_letter("answer is (" * 50_000, CHOICES)
    assert time.process_time() - began < 30


def test_algebra_runs_in_threads_and_a_killed_process_is_replaced() -> None:
    judge = ComparisonProcess(seconds=20)
    results: list[Equality] = []
    threads = [threading.Thread(target=lambda: results.append(judge.ask("(x+1)^2", "x^2+2x+1"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [Equality.EQUAL] * 6
    judge.process.kill()
    judge.process.wait()
    assert judge.ask("(x+1)^2", "x^2+2x") is Equality.UNEQUAL
    judge.close()
    assert judge.ask("2x", "x+x") is Equality.EQUAL
    judge.close()


def test_time_and_memory_are_limited() -> None:
    judge = ComparisonProcess(seconds=0.4)
    began = time.perf_counter()
    assert judge.ask(ENDLESS, "3") is Equality.TIMEOUT
    assert time.perf_counter() - began < 60
    assert judge.process is None
    assert judge.ask("2x", "x+x") is Equality.EQUAL
    process = judge.process
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert f"Max address space         {judges.MEMORY_BYTES}" in limits
    judge.close()
    assert process.poll() is not None


@pytest.fixture(scope="module")
def judge() -> Iterator[ComparisonProcess]:
    """A process that compares for a second at most; one that fills its memory is replaced."""
    process = ComparisonProcess(seconds=1)
    yield process
    process.close()


@pytest.mark.parametrize(
    "answer",
    [
        *("9^{9^{9^9}}", "2^{-10^9}", "0.1^{10^9}", r"\sqrt{2}^{10^{12}}", "(2x)^{10^9}", "2^2^2^2^2^2^2"),
        *("(10^6)!", "10!!!", r"\binom{10^9}{10^8}", r"\cos(10^{10^6})"),
    ],
)
def test_numbers_that_would_fill_the_memory_are_not_computed(judge: ComparisonProcess, answer: str) -> None:
    assert judge.ask("7", answer) is Equality.UNEQUAL


def test_the_parts_of_one_answer_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison is within its own limit; together they take more than ten seconds."""
    monkeypatch.setattr(judges, "ANSWER_SECONDS", 0.4)
    first, second = (", ".join(rf"(x+{n})^{{{200 + n}}}{rest}" for n in range(12)) for rest in ("+1", "+2"))
    assert grade(first, rf"\boxed{{{second}}}").status is Status.GRADER_TIMEOUT


def test_a_busy_machine_changes_no_grade() -> None:
    """Time limits are those of the CPU: a process that waits for three times its limit still replies."""
    judge = ComparisonProcess(seconds=1)
    assert judge.ask("2x", "x+x") is Equality.EQUAL
    os.kill(judge.process.pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, [judge.process.pid, signal.SIGCONT]).start()
    began = time.perf_counter()
    assert judge.ask("(x+1)^2", "x^2+2x+1") is Equality.EQUAL
    assert time.perf_counter() - began > 2.5
    judge.close()


def test_an_interrupted_comparison_leaves_no_reply_behind() -> None:
    judge = ComparisonProcess(seconds=20)
    assert judge.ask("2x", "x+x") is Equality.EQUAL
    process = judge.process
    interrupt = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        judge.ask(ENDLESS, "3")
    interrupt.join()
    pairs = [("x+1", "1+x", True), ("x+1", "x+2", False)] * 3
    assert [judge.ask(first, second) for first, second, _ in pairs] == [Equality(same) for *_, same in pairs]
    assert process.poll() is not None
    judge.close()


def test_files_of_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("math_verify", "sympy", "random"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    judge = ComparisonProcess(seconds=20)
    assert judge.ask("x+1", "1+x") is Equality.EQUAL
    judge.close()
    assert not list(tmp_path.glob("ran-*"))


#: A cell that is stopped while it compares, and the same comparisons in the next cell.
CELLS = (
    """
import os, signal, threading
from kvatlas.answers import equality
equality.same("x+1", "1+x")
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
equality.same("(x+1)^{400}", "(x+1)^{399}(x+2)")
""",
    """print([equality.same(a, b).value for a, b in [("x+1", "1+x"), ("x+1", "x+2"), ("2y", "y+y"), ("y", "z+1")]])""",
)


def test_a_notebook_that_was_interrupted_judges_on_rightly() -> None:
    """In a kernel of Jupyter, which lives on after an interrupt."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True).execute()
    assert notebook.cells[0].outputs[-1].ename == "KeyboardInterrupt"
    assert notebook.cells[1].outputs[0].text.strip() == "[True, False, True, False]"


def test_no_process_outlives_its_parent() -> None:
    code = (
        "import os, signal\nfrom kvatlas.answers import judges\njudges.compare_expressions('x+x', '2x')\n"
        "print(judges._process.process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        if not _alive(pid):
            break
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


#: Reference, answer, our verdict, and that of DynTS's code.
CASES = [
    ("7", r"So \boxed{7}.", True, True),
    ("7", r"First \boxed{7}, then \boxed{8}.", False, False),
    ("1234", "We add them and get 1,234", False, True),
    ("7", "It is 7, since 2 + 5 are 7, as there are 3 of them", False, False),
    ("7", "The answer is 7.", True, True),
    ("0.5", r"\boxed{50\%}", True, True),
    ("1000", r"\boxed{1000.05}", False, True),
    ("1000", r"\boxed{1001}", False, False),
    (r"\frac{1}{2}x+1", r"\boxed{1+\frac{x}{2}}", True, True),
]


@pytest.mark.parametrize(("reference", "answer", "ours", "theirs"), CASES)
def test_short_answers_beside_the_grader_of_dynts(reference: str, answer: str, ours: bool, theirs: bool) -> None:
    assert grade(reference, answer).correct is ours
    assert grade(reference, answer, grader="dynts").correct is theirs


@pytest.mark.parametrize(("answer", "found"), extractions("dynts letter"))
def test_choices_as_dynts_finds_them(answer: str, found: str | None) -> None:
    graded = grade("C", answer, CHOICES, "dynts")
    assert (graded.correct, graded.answer) == (found == "C", found)


def test_math_verify_alone() -> None:
    assert grade("7", r"So \boxed{7}.", grader="math-verify").correct
    assert not grade("7", r"So \boxed{8}.", grader="math-verify").correct
    assert grade("C", r"So \boxed{C}.", CHOICES, "math-verify").correct


def test_a_spec_names_prompt_and_grader_and_both_are_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps([{"question": "What?", "answer": "7"}]))
    entries = [{}, {"prompt": "dynts"}, {"prompt": "dynts", "grader": "dynts"}, {"grader": "math-verify"}]
    results = [
        parse_spec({"models": ["embedded:tiny-llama"], "benchmarks": [{"name": "ONE", "file": str(path), **entry}]})
        .benchmarks[0]
        .find()
        for entry in entries
    ]
    assert len({json.dumps(identity(benchmark)) for benchmark in results}) == len(entries)
    assert results[1].prompt(results[1].problems()[0]) == "What?"
    with pytest.raises(KvatlasError, match="Unknown grader 'mine'; expected kvatlas, dynts, math-verify"):
        find(f"file:{path}", grader="mine")

"""seqBench: mazes with tunable depth (arXiv 2509.16866), as benchmarks named by their difficulty.

A name is `SEQBENCH-WxH` and then any of `-L<actions>`, `-B<locked doors>`, `-N<noise ratio>`, `-S<shuffle ratio>`,
the places of keys, `-Konway` or `-Kdetour`, and a prompt format, `-facts` or `-full`: `SEQBENCH-40x40-L100-B2-N0.5-S1`.
Omitted parts have the grid's default:

| grid | L | B | N | S | K | prompt |
|---|---|---|---|---|---|---|
| up to 6x6 | any | 0 | 1 | 1 | detour | `facts`: the facts alone, one a line, for models without tokens for more |
| larger | any | 0 | 0 | 0 | onway, as published | `full`: task, guidance, three worked examples, facts |

A model that can read the task gets `full` for small mazes, too, unless the name says `-facts`.
Names with the same problems and prompt are one benchmark under its shortest name.

`SEQBENCH@FILE` stands for the mazes of a copy of the published data set (emnlp-submission/seqBench, CC-BY-4.0), with
the prompt `full`. The file is JSON lines, compressed or not, as `seqBench_compact.jsonl.gz`. Its rows have
`instance_id`, `context` (the facts), `completion` (the reference plan), `complexity_parameters` (`logical_depth_L`,
`backtracking_count_B`, `noise_ratio_N`) and `instance_metadata` (with the names of agent and target). Facts and plan
are translated into our wording and names, so that one prompt and one grader serve all mazes.
"""

import contextlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.benchmarks.base import Benchmark
from kvatlas.benchmarks.problem_files import Row, read_rows
from kvatlas.benchmarks.seqbench import plans
from kvatlas.benchmarks.seqbench.mazes import DETOUR, ON_WAY, SMALL, MazeShape, draw
from kvatlas.benchmarks.seqbench.plans import follow, format_plan, judge, parse_plan, read_maze
from kvatlas.core import Grade, KvatlasError, Problem, Status

STANDARD_PROBLEMS = 300
KEYS = {"onway": ON_WAY, "detour": DETOUR}
_EXAMPLES = "SEQBENCH-5x5, SEQBENCH-6x6-B1, SEQBENCH-40x40-L100-B2-N0.5-S1"
_NAME = re.compile(
    r"-(?P<W>\d{1,3})x(?P<H>\d{1,3})"
    r"(?:-L(?P<L>\d{1,6})|-B(?P<B>\d{1,4})|-N(?P<N>\d{1,3}(?:\.\d{1,3})?)|-S(?P<S>\d(?:\.\d{1,3})?)"
    r"|-K(?P<K>onway|detour)|-(?P<F>facts|full))*",
    re.ASCII,
)
_ROOM = r"[A-Z]+\d+"
#: A published fact, with any names of agent and target; some texts have "Door between" for "The locked door between".
_FACT = re.compile(
    rf"Room {_ROOM} and {_ROOM} are connected by (?:an open|a closed and locked) door\."
    rf"|(?:The locked door|Door) between {_ROOM} and {_ROOM} requires key \d+\."
    rf"|Key \d+ is in room {_ROOM}\."
    rf"|[A-Z][A-Za-z_-]* is in room {_ROOM}\."
)
#: The part before the facts in the prompt `full`: task, guidance and worked examples.
TEMPLATE = (files("kvatlas.benchmarks.seqbench") / "seqbench-v1.txt").read_text(encoding="utf-8")


class _MazeGrading:
    """The prompt and the grading of every maze."""

    def prompt(self, problem: Problem) -> str:
        return f"{TEMPLATE}{problem.question}\n\nPlan:"

    def grade(self, problem: Problem, answer: str) -> Grade:
        plan = parse_plan(answer)
        reference = parse_plan(problem.answer)
        assert reference is not None, "a reference answer is a plan"
        grade = judge(read_maze(problem.question.splitlines()), reference, plan or ())
        if plan is None:
            return Grade(False, 0.0, None, Status.NO_ANSWER, {**grade.metrics, "first_error": "no_answer"})
        return grade


@dataclass(frozen=True)
class SeqBench(_MazeGrading):
    """The benchmark of one shape of maze, in one prompt format: `facts`, `full`, or "" for the default.

    `full`: the model can read the task, so that this is the default for small mazes, too.
    """

    shape: MazeShape
    prompt_format: str = ""
    full: bool = False
    version: ClassVar[int] = 1
    about: ClassVar[str] = "mazes with locked doors, to be solved by a plan of chosen depth (generated)"
    examples: ClassVar[str] = _EXAMPLES

    @classmethod
    def named(cls, rest: str, file: str = "") -> Benchmark:
        """Return the benchmark with this name behind SEQBENCH, or of a `file` of the published data set.

        Raises KvatlasError for an unknown name.
        """
        if file and rest:
            raise KvatlasError(f"A file of mazes says itself how hard they are; name it as 'SEQBENCH@{file}'.")
        if file:
            return Published(file)

        match = _NAME.fullmatch(rest)
        parts = re.findall(r"-([A-Za-z])[^-]*", rest)
        if match is None or len(parts) != len(set(parts)):
            raise KvatlasError(
                f"Unknown benchmark 'SEQBENCH{rest}'; expected names like {_EXAMPLES}: the grid, then, each once, any "
                "of L (actions of the plan), B (locked doors), N (noise ratio), S (shuffle ratio), Konway or Kdetour "
                "(where keys lie), and facts or full."
            )

        common = _default_shape(int(match["W"]), int(match["H"]))
        shape = replace(
            common,
            length=int(match["L"]) if match["L"] else None,
            doors=int(match["B"] or 0),
            noise=float(match["N"] or common.noise),
            shuffle=float(match["S"] or common.shuffle),
            keys=KEYS.get(match["K"], common.keys),
        )
        prompt_format = match["F"] or ""
        return cls(shape, "" if prompt_format == "full" and not shape.small else prompt_format)

    @property
    def name(self) -> str:
        return f"{self._maze_name}-{self.prompt_format}".removesuffix("-")

    @property
    def _maze_name(self) -> str:
        """The name without the prompt format."""
        shape = self.shape
        common = _default_shape(shape.columns, shape.rows)
        keys = next(word for word, keys in KEYS.items() if keys == shape.keys)
        parts = (
            f"SEQBENCH-{shape.columns}x{shape.rows}",
            f"L{shape.length}" if shape.length is not None else "",
            f"B{shape.doors}" if shape.doors else "",
            f"N{shape.noise:g}" if shape.noise != common.noise else "",
            f"S{shape.shuffle:g}" if shape.shuffle != common.shuffle else "",
            f"K{keys}" if shape.doors and shape.keys != common.keys else "",
        )
        return "-".join(filter(None, parts))

    def for_model(self, reads: Callable[[str], bool]) -> Benchmark:
        """Return the same benchmark with the full prompt as default if the model can read it."""
        return replace(self, full=reads(TEMPLATE))

    @property
    def identity(self) -> list[Any]:
        """Keys on the way, which names do not always tell."""
        return [self.shape.keys] if self.shape.doors and self.shape.keys == ON_WAY else []

    @property
    def typical_output_tokens(self) -> int:
        """A plan of L actions is about 12 L tokens, and models think at least as much again."""
        shape = self.shape
        return 24 * (shape.length or 2 + 5 * shape.doors + (shape.columns + shape.rows) * (shape.doors + 1))

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """Return problems generated from (shape, index) alone, the same in every prompt format."""
        return [self.problem(i) for i in range(STANDARD_PROBLEMS if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        """Return the problem of that index: `question` holds the facts, `about` the depth of the maze."""
        instance = draw(self.shape, random.Random(f"kvatlas seqbench {self._maze_name} test {index}"))
        doors, moves = plans.count_doors_and_moves(instance.plan)
        about = {
            "L": len(instance.plan),
            "B": doors,
            "N": self.shape.noise,
            "S": self.shape.shuffle,
            "moves": moves,
            "grid": f"{self.shape.columns}x{self.shape.rows}",
        }
        return Problem(f"{self.name}-{index:04d}", "\n".join(instance.facts), format_plan(instance.plan), about)

    def prompt(self, problem: Problem) -> str:
        default = "full" if self.full or not self.shape.small else "facts"
        return problem.question if (self.prompt_format or default) == "facts" else super().prompt(problem)


def _default_shape(columns: int, rows: int) -> MazeShape:
    small = max(columns, rows) <= SMALL
    return MazeShape(columns, rows, noise=float(small), shuffle=float(small), keys=DETOUR if small else ON_WAY)


@dataclass(frozen=True)
class Published(_MazeGrading):
    """The mazes of one file of the published data set, in the file's order."""

    file: str
    version: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return f"SEQBENCH@{self.file}"

    @property
    def typical_output_tokens(self) -> int:
        return 24 * sum(int(problem.about["L"]) for problem in self._problems) // len(self._problems)

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """Return the first `limit` mazes. Raises KvatlasError with the number of a line that holds no maze."""
        return self._problems[:limit]

    @cached_property
    def _problems(self) -> Sequence[Problem]:
        rows = read_rows(Path(self.file).expanduser())
        problems = [_published_problem(row, f"Line {line} of {self.file!r}") for line, row in enumerate(rows, 1)]
        if len({problem.id for problem in problems}) < len(problems):
            raise KvatlasError(f"The seqBench file {self.file!r} has an instance_id twice.")
        return problems


def _published_problem(row: Row, where: str) -> Problem:
    if not {"instance_id", "context", "completion"} <= row.keys():
        raise KvatlasError(f"{where} is no seqBench maze: it lacks instance_id, context or completion.")
    # A text, or a list of pairs.
    plan = parse_plan(str(row["completion"]))
    if not plan or plan[-1][0] != "rescue":
        raise KvatlasError(f"{where} has a completion that is no plan ending in a rescue.")

    # The sentences in our names and words.
    agent = str(_json_object(row.get("instance_metadata")).get("agent_name", plans.AGENT))
    names = {agent: plans.AGENT, plan[-1][1]: plans.TARGET}
    sentences = []
    for sentence in _FACT.findall(str(row["context"])):
        name, _, room = sentence.partition(" is in room ")
        renamed = f"{names[name]} is in room {room}" if name in names else sentence
        sentences.append(renamed.replace("Door between", "The locked door between"))
    try:
        maze = read_maze(sentences)
    except KvatlasError as error:
        raise KvatlasError(f"{where} is no seqBench maze: {error}") from error

    plan = (*plan[:-1], ("rescue", plans.TARGET))
    done, error_class = follow(maze, plan)
    if error_class != plans.NO_ERROR:
        raise KvatlasError(f"{where} has a completion that fails at action {done + 1} ({error_class}).")

    stated = _json_object(row.get("complexity_parameters"))
    doors, moves = plans.count_doors_and_moves(plan)
    about = {"L": len(plan), "B": int(stated.get("backtracking_count_B", doors)), "moves": moves}
    about |= {"N": stated["noise_ratio_N"]} if "noise_ratio_N" in stated else {}
    return Problem(str(row["instance_id"]), "\n".join(sentences), format_plan(plan), about)


def _json_object(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, given as such or as text; empty for anything else."""
    with contextlib.suppress(ValueError):
        value = json.loads(value) if isinstance(value, str) else value
    return value if isinstance(value, dict) else {}

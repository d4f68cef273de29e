"""The published data set (emnlp-submission/seqBench, CC-BY-4.0), from the user's copy: `SEQBENCH@FILE`.

A file is JSON lines, compressed or not, as `seqBench_compact.jsonl.gz`. Its rows have `instance_id`, `context` (the
facts), `completion` (the reference plan), `complexity_parameters` (`logical_depth_L`, `backtracking_count_B`,
`noise_ratio_N`) and `instance_metadata` (with the names of agent and target). Facts and plan are taken over in our
wording and with our names, so that one prompt and one grader serve all mazes.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.benchmarks.seqbench.facts import AGENT, TARGET, read_maze
from kvatlas.benchmarks.seqbench.grading import grade, prompt
from kvatlas.benchmarks.seqbench.plans import NO_ERROR, Plan, follow, format_plan, parse_plan
from kvatlas.benchmarks.tables import json_lines
from kvatlas.core import Grade, KvatlasError, Problem, digest

_ROOM = r"[A-Z]+\d+"
#: A fact, whichever the names of agent and target; some texts have "Door between" for "The locked door between".
_FACT = re.compile(
    rf"Room {_ROOM} and {_ROOM} are connected by (?:an open|a closed and locked) door\."
    rf"|(?:The locked door|Door) between {_ROOM} and {_ROOM} requires key \d+\."
    rf"|Key \d+ is in room {_ROOM}\."
    rf"|[A-Z][A-Za-z_-]* is in room {_ROOM}\."
)


@dataclass(frozen=True)
class Published:
    """The mazes of one file, in the file's order."""

    file: str
    version: ClassVar[int] = 1
    rules_identity: ClassVar[tuple[()]] = ()

    @property
    def name(self) -> str:
        return f"SEQBENCH@{self.file}"

    @property
    def typical_output_tokens(self) -> int:
        lengths = [int(problem.about["L"]) for problem in self._problems]
        return 24 * sum(lengths) // len(lengths)

    @property
    def identity(self) -> list[Any]:
        """What the file holds, so that a copy elsewhere is the same benchmark."""
        return [digest([[problem.id, problem.question, problem.answer] for problem in self._problems])]

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """The first `limit` mazes; KvatlasError says which line of the file is no maze."""
        return self._problems[:limit]

    def prompt(self, problem: Problem) -> str:
        return prompt("seqbench/v1", problem)

    def grade(self, problem: Problem, answer: str) -> Grade:
        """As for generated mazes."""
        return grade(problem, answer)

    @cached_property
    def _problems(self) -> Sequence[Problem]:
        path = Path(self.file).expanduser()
        problems = [_problem(row, f"Line {number} of {self.file!r}") for number, row in enumerate(_rows(path), 1)]
        if not problems:
            raise KvatlasError(f"The seqBench file {self.file!r} holds no mazes.")
        if len({problem.id for problem in problems}) < len(problems):
            raise KvatlasError(f"The seqBench file {self.file!r} has an instance_id twice.")
        return problems


def _rows(path: Path) -> list[Any]:
    """JSON lines, compressed or not."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json_lines(data.decode("utf-8-sig"))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise KvatlasError(
            f"The seqBench file {str(path)!r} cannot be read ({error}); valid is JSON lines, also compressed with gzip."
        ) from error


def _problem(row: Any, where: str) -> Problem:
    if not isinstance(row, dict) or not {"instance_id", "context", "completion"} <= row.keys():
        raise KvatlasError(f"{where} is no seqBench maze: it lacks instance_id, context or completion.")
    plan = _plan(row["completion"])
    if not plan or plan[-1][0] != "rescue":
        raise KvatlasError(f"{where} has a completion that is no plan ending in a rescue.")
    names = _data(row.get("instance_metadata"))
    agent, target = str(names.get("agent_name", AGENT)), plan[-1][1]
    sentences = []
    for sentence in _FACT.findall(str(row["context"])):
        who, _, rest = sentence.partition(" is in room ")
        ours = {agent: AGENT, target: TARGET}.get(who)
        sentences.append(
            f"{ours} is in room {rest}" if ours else sentence.replace("Door between", "The locked door between")
        )
    try:
        maze = read_maze(sentences)
    except KvatlasError as error:
        raise KvatlasError(f"{where} is no seqBench maze: {error}") from error
    plan = (*plan[:-1], ("rescue", TARGET))
    done, error_class = follow(maze, plan)
    if error_class != NO_ERROR:
        raise KvatlasError(f"{where} has a completion that fails at action {done + 1} ({error_class}).")
    depth = _data(row.get("complexity_parameters"))
    about = {
        "L": len(plan),
        "B": int(depth.get("backtracking_count_B", sum(name == "use_key" for name, _ in plan))),
        "moves": sum(name == "move_to" for name, _ in plan),
    }
    if "noise_ratio_N" in depth:
        about["N"] = depth["noise_ratio_N"]
    return Problem(str(row["instance_id"]), "\n".join(sentences), format_plan(plan), about)


def _plan(completion: Any) -> Plan | None:
    """A plan written as text, as a list of pairs, or as a list of "action: argument"."""
    if isinstance(completion, list):
        completion = [item.split(":", 1) if isinstance(item, str) else item for item in completion]
        if not all(isinstance(item, list) and len(item) == 2 for item in completion):
            return None
        return tuple((str(name).strip(), str(argument).strip()) for name, argument in completion)
    return parse_plan(str(completion))


def _data(value: Any) -> Mapping[str, Any]:
    """An object, or an object written as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}

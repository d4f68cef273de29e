"""SEQBENCH-...: the mazes as benchmarks, by names that say their difficulty.

A name is `SEQBENCH-WxH` and then any of `-L<actions>`, `-B<locked doors>`, `-N<noise ratio>`, `-S<shuffle ratio>`,
where keys lie, `-Konway` or `-Kdetour`, and a prompt format, `-facts` or `-full`: `SEQBENCH-40x40-L100-B2-N0.5-S1`.
What is left out has the grid's default:

| grid | L | B | N | S | K | prompt |
|---|---|---|---|---|---|---|
| up to 6x6 | any | 0 | 1 | 1 | detour | `facts/v1`, the facts alone, one a line, for models without tokens for more |
| larger | any | 0 | 0 | 0 | onway, as published | `seqbench/v1`: task, guidance, three worked examples, facts |

`SEQBENCH@FILE` stands for the mazes of a copy of the published data set, asked with `seqbench/v1`.

All other models are asked small mazes with `seqbench/v1`, too, unless the name says `-facts`.
Names that mean the same problems and prompt are one benchmark under its shortest name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvatlas.benchmarks.base import Benchmark
from kvatlas.benchmarks.seqbench.grading import grade, prompt, template
from kvatlas.benchmarks.seqbench.mazes import DETOUR, ON_WAY, SMALL, Shape, draw, facts
from kvatlas.benchmarks.seqbench.plans import format_plan
from kvatlas.core import Grade, KvatlasError, Problem

STANDARD_PROBLEMS = 300
FORMATS = {"facts": "facts/v1", "full": "seqbench/v1"}
KEYS = {"onway": ON_WAY, "detour": DETOUR}
_EXAMPLES = "SEQBENCH-5x5, SEQBENCH-6x6-B1, SEQBENCH-40x40-L100-B2-N0.5-S1"


@dataclass(frozen=True)
class SeqBench:
    """The benchmark of one shape of maze, asked in one prompt format: `facts/v1`, `seqbench/v1`, or "" for the default.

    `told`: a model that can read the task is told it, in small mazes, too.
    """

    shape: Shape
    prompt_format: str = ""
    told: bool = False
    version: ClassVar[int] = 1
    about: ClassVar[str] = "mazes with locked doors, to be solved by a plan of chosen depth (generated)"
    examples: ClassVar[str] = _EXAMPLES

    @classmethod
    def named(cls, rest: str, file: str = "") -> Benchmark:
        """The benchmark from what follows SEQBENCH, or of a `file` of the published data set.

        KvatlasError says which names are valid.
        """
        if file and rest:
            raise KvatlasError(f"A file of mazes says itself how hard they are; name it as 'SEQBENCH@{file}'.")
        if file:
            from kvatlas.benchmarks.seqbench.published import Published

            return Published(file)
        match = re.fullmatch(
            r"-(?P<W>\d{1,3})x(?P<H>\d{1,3})"
            r"(?:-L(?P<L>\d{1,6})|-B(?P<B>\d{1,4})|-N(?P<N>\d{1,3}(?:\.\d{1,3})?)|-S(?P<S>\d(?:\.\d{1,3})?)"
            r"|-K(?P<K>onway|detour)|-(?P<F>facts|full))*",
            rest,
            re.ASCII,
        )
        parts = re.findall(r"-([A-Za-z])[^-]*", rest)
        if match is None or len(parts) != len(set(parts)):
            raise KvatlasError(
                f"Unknown benchmark 'SEQBENCH{rest}'; valid are names like {_EXAMPLES}: the grid, then, each once, any "
                "of L (actions of the plan), B (locked doors), N (noise ratio), S (shuffle ratio), Konway or Kdetour "
                "(where keys lie), and facts or full."
            )
        columns, rows = int(match["W"]), int(match["H"])
        common = _default(columns, rows)
        shape = Shape(
            columns,
            rows,
            int(match["L"]) if match["L"] else None,
            int(match["B"] or 0),
            float(match["N"]) if match["N"] else common.noise,
            float(match["S"]) if match["S"] else common.shuffle,
            KEYS[match["K"]] if match["K"] else common.keys,
        )
        named = FORMATS[match["F"]] if match["F"] else ""
        return cls(shape, "" if named == FORMATS["full"] and not _is_small(columns, rows) else named)

    @property
    def name(self) -> str:
        return _shape_name(self.shape) + next((f"-{k}" for k, v in FORMATS.items() if v == self.prompt_format), "")

    def asked_of(self, reads: Callable[[str], bool]) -> Benchmark:
        """The same for a model: one that `reads` the task is told it, unless the name says how to ask."""
        return replace(self, told=reads(template()))

    @property
    def identity(self) -> list[Any]:
        """Keys on the way: names without a word about keys once stood for detours in all grids."""
        return [self.shape.keys] if self.shape.doors and self.shape.keys == ON_WAY else []

    @property
    def typical_output_tokens(self) -> int:
        """A plan of L actions is about 12 L tokens, and models think at least as much again."""
        shape = self.shape
        return 24 * (shape.length or 2 + 5 * shape.doors + (shape.columns + shape.rows) * (shape.doors + 1))

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """Drawn from (shape, index) alone: the same on every machine and in every prompt format."""
        return [self.problem(i) for i in range(STANDARD_PROBLEMS if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        """The problem of that index; `question` holds the facts, `about` the depth that it came out with."""
        instance = draw(self.shape, random.Random(f"kvatlas seqbench {_shape_name(self.shape)} test {index}"))
        about = {
            "L": len(instance.plan),
            "B": instance.doors,
            "N": self.shape.noise,
            "S": self.shape.shuffle,
            "moves": instance.moves,
            "grid": f"{self.shape.columns}x{self.shape.rows}",
        }
        return Problem(f"{self.name}-{index:04d}", facts(instance), format_plan(instance.plan), about)

    def prompt(self, problem: Problem) -> str:
        common = FORMATS["full" if self.told or not _is_small(self.shape.columns, self.shape.rows) else "facts"]
        return prompt(self.prompt_format or common, problem)

    def grade(self, problem: Problem, answer: str) -> Grade:
        """The last plan in the answer against the reference and against the maze."""
        return grade(problem, answer)


def _default(columns: int, rows: int) -> Shape:
    small = _is_small(columns, rows)
    return Shape(columns, rows, noise=float(small), shuffle=float(small), keys=DETOUR if small else ON_WAY)


def _is_small(columns: int, rows: int) -> bool:
    return max(columns, rows) <= SMALL


def _shape_name(shape: Shape) -> str:
    common = _default(shape.columns, shape.rows)
    name = f"SEQBENCH-{shape.columns}x{shape.rows}"
    name += f"-L{shape.length}" if shape.length is not None else ""
    name += f"-B{shape.doors}" if shape.doors else ""
    name += f"-N{shape.noise:g}" if shape.noise != common.noise else ""
    name += f"-S{shape.shuffle:g}" if shape.shuffle != common.shuffle else ""
    other = shape.doors and shape.keys != common.keys
    return name + (f"-K{next(word for word, keys in KEYS.items() if keys == shape.keys)}" if other else "")

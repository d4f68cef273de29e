"""seqBench: mazes with tunable depth (arXiv 2509.16866), their plans and how plans are measured."""

from kvatlas.benchmarks.seqbench.family import SeqBench
from kvatlas.benchmarks.seqbench.mazes import Instance, MazeShape, draw, facts
from kvatlas.benchmarks.seqbench.plans import (
    Maze,
    Plan,
    PlanGrade,
    follow,
    format_plan,
    judge,
    parse_plan,
    read_maze,
)

__all__ = [
    "Instance",
    "Maze",
    "MazeShape",
    "Plan",
    "PlanGrade",
    "SeqBench",
    "draw",
    "facts",
    "follow",
    "format_plan",
    "judge",
    "parse_plan",
    "read_maze",
]

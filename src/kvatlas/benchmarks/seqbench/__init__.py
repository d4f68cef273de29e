"""seqBench: mazes with tunable depth (arXiv 2509.16866), their plans and how plans are measured."""

from kvatlas.benchmarks.seqbench.facts import Maze, read_maze
from kvatlas.benchmarks.seqbench.family import SeqBench
from kvatlas.benchmarks.seqbench.mazes import Instance, Shape, draw, facts
from kvatlas.benchmarks.seqbench.plans import Plan, Verdict, follow, format_plan, judge, parse_plan

__all__ = [
    "Instance",
    "Maze",
    "Plan",
    "SeqBench",
    "Shape",
    "Verdict",
    "draw",
    "facts",
    "follow",
    "format_plan",
    "judge",
    "parse_plan",
    "read_maze",
]

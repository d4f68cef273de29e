"""`kvatlas.gate`: open two sides, pair their answers, judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import Claim, KvatlasError
from kvatlas.gates.endpoints import Asking, sides_of, sides_with_run
from kvatlas.gates.gate_result import Judged
from kvatlas.gates.judgement import judge
from kvatlas.gates.outcomes import Choice, Side
from kvatlas.gates.pairing import pair
from kvatlas.gates.sides import is_address, open_side
from kvatlas.stats.run_data import margin_from_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The words for a claim, `auto` for the one that the samples allow.
CLAIMS = ("auto", *(claim.value for claim in Claim))


class Gate(Judged):
    """A judged change; `str` gives its text, notebooks show it."""

    def figure(self) -> Figure:
        """Return the figure of lost and gained problems."""
        from kvatlas.gates.gate_figure import gate_figure

        return gate_figure(self)

    def write(self, path: str | Path) -> Path:
        """Write the page (HTML) or the figure (PNG, SVG, PDF) and return its path."""
        from kvatlas.gates.gate_page import write

        return write(self, Path(path))

    def __str__(self) -> str:
        from kvatlas.gates.sentences import as_markdown

        return as_markdown(self)

    _repr_markdown_ = __str__


def gate(
    before: str | Path,
    after: str | Path,
    *,
    lose_at_most: float = 3.0,
    claim: str = "auto",
    metric: str = "",
    filter: str = "",  # noqa: A002
    tasks: Sequence[str] = (),
    allow: Sequence[str] = (),
    asking: Asking | None = None,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> Gate:
    """Judge whether a change cost at most `lose_at_most` points of right answers.

    Each side is a folder or file of lm-eval's samples, a log of Inspect, a cell of a run (`RUN@CELL`), a file of
    answers, or the address of an endpoint; two endpoints are asked as `asking` says. `claim` is `these_problems`,
    `problems_like_these` or `auto`; `metric`, `filter` and `tasks` choose among what the logs hold; `allow` accepts
    differences (`prompts`, `version`, `grading`, `missing`). Raises KvatlasError for sides that cannot be compared.
    """
    if claim not in CLAIMS:
        raise KvatlasError(f"claim: expected {', '.join(CLAIMS)}, got {claim!r}.")
    margin = margin_from_points(lose_at_most)
    choice = Choice(metric, filter, tuple(tasks))
    first, second = _open(str(before), str(after), asking or Asking(), choice, on_trace)
    if first.identity and first.identity == second.identity:
        raise KvatlasError(
            f"{first.name!r} and {second.name!r} are the same answers, so there is nothing to compare; two runs of one "
            "model with other seeds tell how far chance alone moves the score."
        )
    pairs = pair(first, second, allow)
    independent = None if None in (first.independent, second.independent) else first.independent and second.independent
    if False in (first.independent, second.independent):
        independent = False
    chosen = None if claim == "auto" else Claim(claim)
    return Gate(first, second, pairs, judge(pairs, margin, chosen, independent, (first.may_copy, second.may_copy)))


def _open(
    before: str, after: str, asking: Asking, choice: Choice, on_trace: Callable[[int, int], None]
) -> tuple[Side, Side]:
    """Return both sides; endpoints are asked first."""
    addresses = [is_address(before), is_address(after)]
    if all(addresses):
        first, second = sides_of([before, after], asking, choice, on_trace)
        return first, second
    if asking.benchmarks:
        raise KvatlasError(
            f"A benchmark ({asking.benchmarks[0]}) is asked of two endpoints; logs and runs have their questions."
        )
    if addresses[1]:
        return sides_with_run(before, after, asking, choice, on_trace)
    if addresses[0]:
        second, first = sides_with_run(after, before, asking, choice, on_trace)
        return first, second
    return open_side(before, choice), open_side(after, choice)

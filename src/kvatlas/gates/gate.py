"""`kvatlas.gate`: open two sides, each by the reader of its kind, pair their answers, judge them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import Claim, KvatlasError
from kvatlas.core.basics import has_problem_suffix
from kvatlas.gates import lm_eval_logs
from kvatlas.gates.answer_files import side_of_answer_file
from kvatlas.gates.endpoints import Asking, endpoint_sides, run_and_endpoint_sides
from kvatlas.gates.gate_result import JudgedChange
from kvatlas.gates.judgement import judge_pairs
from kvatlas.gates.outcomes import Side, SideOptions
from kvatlas.gates.pairing import pair_answers
from kvatlas.gates.runs import side_of_inspect_logs, side_of_run
from kvatlas.results.store import FILE
from kvatlas.stats.run_data import margin_from_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The words for a claim, `auto` for the one that the samples allow.
CLAIMS = ("auto", *(claim.value for claim in Claim))
_EXPECTED = (
    "expected a folder or file of lm-eval's samples (--log_samples), a log of Inspect, a run (RUN@CELL), a file of "
    "answers with the columns problem and correct, or the address of an endpoint"
)


class GateResult(JudgedChange):
    """A judged change as a figure and as a page."""

    def figure(self) -> Figure:
        """Return the figure of lost and gained problems."""
        from kvatlas.gates.gate_page import gate_figure

        return gate_figure(self)

    def write(self, path: str | Path) -> Path:
        """Write the page (HTML) or the figure (PNG, SVG, PDF) and return its path."""
        from kvatlas.gates.gate_page import write_gate

        return write_gate(self, Path(path))


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
) -> GateResult:
    """Judge whether a change cost at most `lose_at_most` points of right answers.

    Each side is a folder or file of lm-eval's samples, a log of Inspect, a cell of a run (`RUN@CELL`), a file of
    answers, or the address of an endpoint; two endpoints are asked as `asking` says. `claim` is `these_problems`,
    `problems_like_these` or `auto`; `metric`, `filter` and `tasks` choose among what the logs hold; `allow` accepts
    differences (`prompts`, `version`, `grading`, `missing`). Raises KvatlasError for sides that cannot be compared.
    """
    if claim not in CLAIMS:
        raise KvatlasError(f"claim: expected {', '.join(CLAIMS)}, got {claim!r}.")
    margin = margin_from_points(lose_at_most)
    options = SideOptions(metric, filter, tuple(tasks))
    first, second = _open_sides(str(before), str(after), asking or Asking(), options, on_trace)
    if first.identity and first.identity == second.identity:
        raise KvatlasError(
            f"{first.name!r} and {second.name!r} are the same answers, so there is nothing to compare; two runs of one "
            "model with other seeds tell how far chance alone moves the score."
        )
    pairs = pair_answers(first, second, allow)

    # Samples are independent if those of both sides are; a side without draws decides before an unknown one.
    independents = (first.independent, second.independent)
    independent: bool | None = True
    if False in independents:
        independent = False
    elif None in independents:
        independent = None
    chosen = None if claim == "auto" else Claim(claim)
    judgement = judge_pairs(pairs, margin, chosen, independent, (first.may_copy, second.may_copy))
    return GateResult(first, second, pairs, judgement)


def _open_sides(
    before: str, after: str, asking: Asking, options: SideOptions, on_trace: Callable[[int, int], None]
) -> tuple[Side, Side]:
    """Return both sides; endpoints are asked first."""
    before_is_address = before.startswith(("http://", "https://"))
    after_is_address = after.startswith(("http://", "https://"))
    if before_is_address and after_is_address:
        return endpoint_sides(before, after, asking, options, on_trace)
    if asking.benchmarks:
        raise KvatlasError(
            f"A benchmark ({asking.benchmarks[0]}) is asked of two endpoints; logs and runs have their questions."
        )

    if after_is_address:
        return run_and_endpoint_sides(before, after, asking, options, on_trace)
    if before_is_address:
        second, first = run_and_endpoint_sides(after, before, asking, options, on_trace)
        return first, second
    return _side_at_path(before, options), _side_at_path(after, options)


def _side_at_path(name: str, options: SideOptions) -> Side:
    """Return the side at a path. Raises KvatlasError if nothing there can be compared."""
    path = Path(name)
    folder, _, cell = name.partition("@")
    if not path.exists() and cell and (Path(folder) / FILE).is_file():
        return side_of_run(Path(folder), cell, name, options)
    if not path.exists():
        raise KvatlasError(f"{name!r} is not there; {_EXPECTED}.")
    if not path.is_dir():
        return _side_of_file(path, name, options)

    if (path / FILE).is_file():
        return side_of_run(path, "", name, options)
    samples = lm_eval_logs.files_in(path)
    inspect_logs = sorted(path.rglob("*.eval"))
    if samples and inspect_logs:
        raise KvatlasError(f"{name!r} holds logs of lm-eval and of Inspect; name one of them.")
    if samples:
        return lm_eval_logs.side_of_samples(path, name, options)
    if inspect_logs:
        return side_of_inspect_logs(inspect_logs, name, options)
    if any(path.rglob("results_*.json")):
        raise KvatlasError(f"{name!r} holds results of lm-eval without samples; run it with --log_samples.")
    raise KvatlasError(f"{name!r} is a folder without answers; {_EXPECTED}.")


def _side_of_file(path: Path, name: str, options: SideOptions) -> Side:
    """Return the side of a file, whose reader is found by its suffix and its first row."""
    if path.suffix == ".eval":
        return side_of_inspect_logs([path], name, options)
    if path.name == FILE:
        return side_of_run(path.parent, "", name, options)
    if not has_problem_suffix(path.name):
        raise KvatlasError(f"{name!r} has a suffix that no log and no file of answers has; {_EXPECTED}.")

    with path.open("rb") as file:
        head = file.read(2**20).decode("utf-8-sig", "replace").lstrip()
    if path.suffix == ".json" and head.startswith("{"):
        if '"eval"' not in head and path.name.startswith("results"):
            raise KvatlasError(f"{name!r} holds results, not samples; run lm-eval with --log_samples.")
        return side_of_inspect_logs([path], name, options)
    if path.suffix == ".jsonl":
        line = head.partition("\n")[0]
        try:
            is_sample = lm_eval_logs.is_row(json.loads(line))
        except (ValueError, RecursionError):
            # A first row of over a million bytes, as of prompts of many examples.
            is_sample = line.startswith('{"doc_id"')
        if is_sample:
            return lm_eval_logs.side_of_samples(path, name, options)
    return side_of_answer_file(path, name, options)

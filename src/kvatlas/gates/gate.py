"""`kvatlas.gate`: open two sides, each by the reader of its kind, pair their answers, judge them."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.benchmarks.problem_files import open_text
from kvatlas.core import Claim, KvatlasError, grouped, has_problem_suffix, refusal
from kvatlas.gates import lm_eval_logs
from kvatlas.gates.endpoints import Asking, endpoint_sides
from kvatlas.gates.gate_result import JudgedChange
from kvatlas.gates.judgement import judge_pairs
from kvatlas.gates.outcomes import Side, SideOptions
from kvatlas.gates.pairing import pair_answers
from kvatlas.gates.runs import side_of_answer_file, side_of_inspect_logs, side_of_run
from kvatlas.results.store import FILE
from kvatlas.stats.run_data import margin_from_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The words for a claim, `auto` for the one that the samples allow.
CLAIMS = ("auto", *(claim.value for claim in Claim))
#: The characters by which a log that is cut off is known.
_HEAD = 2**20
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
    strict: bool = False,
    asking: Asking | None = None,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> GateResult:
    """Judge whether a change cost at most `lose_at_most` points of right answers.

    Each side is a folder or file of lm-eval's samples, a log of Inspect, a cell of a run (`RUN@CELL`), a file of
    answers, or the address of an endpoint; two endpoints are asked as `asking` says. `claim` is `these_problems`,
    `problems_like_these` or `auto`; `metric`, `filter` and `tasks` choose among what the logs hold; `allow` accepts
    differences (`prompts`, `version`, `grading`, `missing`), `strict` refuses other sampling. Raises KvatlasError for
    sides that cannot be compared.
    """
    if claim not in CLAIMS:
        raise KvatlasError(f"claim: expected {', '.join(CLAIMS)}, got {claim!r}.")
    for name, side in (("before", before), ("after", after)):
        if not isinstance(side, str | Path):
            raise KvatlasError(
                f"{name} is an object of {type(side).__name__}; expected a path, RUN@CELL or an address."
            )
        if re.fullmatch(r"[\w.-]+:\d+(/\S*)?", str(side)) and not Path(side).exists():
            raise KvatlasError(f"{name}: {str(side)!r} lacks http:// to be an address; expected http://HOST:PORT/v1.")
    margin = margin_from_points(lose_at_most)
    chosen = None if claim == "auto" else Claim(claim)
    options = SideOptions(metric, filter, tuple(tasks), tuple(allow))
    first, second = _open_sides(str(before), str(after), asking, options, on_trace)
    _check_options(options, first, second)

    pairs = pair_answers(first, second, allow)
    if strict:
        # Sampling that one side alone names counts, too.
        unknown = [item for item in pairs.unknown if item.condition == "sampling" and item.before != item.after]
        for row in (*pairs.sampling, *unknown):
            raise KvatlasError(f"--strict: {row.name} is {row.before} before and {row.after} after.")
    return GateResult(pairs, judge_pairs(pairs, margin, chosen))


def _check_options(options: SideOptions, before: Side, after: Side) -> None:
    """Raise KvatlasError for sides that read one file or cell, and for an option that no side has a use for."""
    if before.sources & after.sources:
        raise KvatlasError(
            f"{before.name!r} and {after.name!r} are the same answers, so there is nothing to compare; two runs of one "
            "model with other seeds tell how far chance alone moves the score."
        )
    if options.filter and "lm-eval" not in (before.kind, after.kind):
        raise KvatlasError(f"--filter {options.filter}: {before.kind!r} has no filters; lm-eval's samples have.")


def _open_sides(
    before: str, after: str, asking: Asking | None, options: SideOptions, on_trace: Callable[[int, int], None]
) -> tuple[Side, Side]:
    """Return both sides; endpoints are asked first."""
    addresses = [side for side in (before, after) if _is_address(side)]
    if len(addresses) == 2:
        return endpoint_sides(before, after, asking or Asking(), options, on_trace)
    questions = asking.benchmarks if asking is not None else ()
    if addresses and any(map(_is_address, questions)):
        ordered = sorted((before, after, *questions), key=_is_address, reverse=True)
        raise KvatlasError(f"The addresses come first: kvatlas gate {' '.join(ordered)}.")
    if addresses:
        other = after if addresses == [before] else before
        raise KvatlasError(
            f"{addresses[0]} is an endpoint and {other!r} is not; name a second endpoint, or compare it with a run: "
            f"kvatlas deploy verify {addresses[0]} --against RUN."
        )
    if asking is not None:
        named = f"A benchmark ({asking.benchmarks[0]})" if asking.benchmarks else "An option of endpoints"
        way_out = ""
        if asking.benchmarks:
            way_out = f"; leave it out, or choose a task of theirs, as by --task {asking.benchmarks[0]}"
        raise KvatlasError(f"{named} is asked of two endpoints; logs and runs have their questions{way_out}.")
    return _side_at_path(before, options), _side_at_path(after, options)


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


# -- logs --------------------------------------------------------------------------------------------------------------


def _side_at_path(name: str, options: SideOptions) -> Side:
    """Return the side at a path. Raises KvatlasError if nothing there can be compared."""
    path = Path(name)
    folder, _, cell = name.partition("@")
    if not path.exists() and cell and (Path(folder) / FILE).is_file():
        return side_of_run(Path(folder), cell, name, options)
    if not path.exists():
        raise KvatlasError(f"{name!r} is not there; {_EXPECTED}.")
    run = path if path.is_dir() else path.parent
    if (run / FILE).is_file() and (path.is_dir() or path.name == FILE):
        return side_of_run(run, "", name, options)

    # The files by what they hold; of a folder those that are no logs do not count.
    candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = grouped(filter(Path.is_file, candidates), _kind_of_file)
    samples = files.get("samples", [])
    inspect_logs = files.get("Inspect log", [])
    if samples and inspect_logs:
        raise KvatlasError(f"{name!r} holds logs of lm-eval and of Inspect; name one of them.")
    if samples:
        return lm_eval_logs.side_of_samples(samples, name, options)
    if inspect_logs:
        return side_of_inspect_logs(inspect_logs, name, options)
    if "results" in files:
        samples = list(path.parent.glob("samples_*.jsonl")) if path.is_file() else []
        way_out = f"name the folder {str(path.parent)!r}, which has them" if samples else "run it with --log_samples"
        raise KvatlasError(f"{name!r} holds results of lm-eval without samples; {way_out}.")
    if path.is_dir():
        others = [file for file in files.get("", ()) if has_problem_suffix(file.name)]
        found = f"whose {others[0].name} is no sample of lm-eval; name the file" if others else "without answers"
        raise KvatlasError(f"{name!r} is a folder {found}; {_EXPECTED}.")
    if not has_problem_suffix(path.name):
        raise KvatlasError(f"{name!r} has a suffix that no log and no file of answers has; {_EXPECTED}.")
    return side_of_answer_file(path, name, options)


def _kind_of_file(path: Path) -> str:
    """Return what a file holds: `samples` or `results` of lm-eval, an `Inspect log`, or "" for anything else."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".eval"):
        return "Inspect log"
    if not name.endswith((".jsonl", ".json")):
        return ""
    # The first row, or the whole document.
    is_rows = name.endswith(".jsonl")
    faults = (OSError, EOFError, UnicodeDecodeError, zlib.error)
    with refusal(f"{str(path)!r} cannot be read", *faults), open_text(path) as file:
        text = next((line for line in file if line.strip()), "") if is_rows else file.read()

    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        # A log that is cut off is refused by its reader.
        if text.startswith('{"doc_id"'):
            return "samples"
        return "Inspect log" if '"eval"' in text[:_HEAD] and not is_rows else ""
    if is_rows:
        return "samples" if lm_eval_logs.is_row(document) else ""
    if not isinstance(document, dict):
        return ""
    if {"eval", "status"} <= document.keys():
        return "Inspect log"
    return "results" if {"results", "versions", "n-shot", "configs"} & document.keys() else ""

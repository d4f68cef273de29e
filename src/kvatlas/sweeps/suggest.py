"""A first grid for a model and problems: a few traces of the full cache decide budget, windows and ratios."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvatlas.core import KvatlasError, Setting, Trace
from kvatlas.results import Store
from kvatlas.sweeps.plan import Plan, make_plan
from kvatlas.sweeps.run import sweep
from kvatlas.sweeps.spec import parse_spec, setting_spec

#: Problems that are decoded, and the share of them that the full cache should solve.
TRIED = 5
LEAST_SOLVED = 0.4
MOST_SOLVED = 0.9
#: Problems of the suggested grid. With nothing lost they prove 3 points in each of two chains.
PROBLEMS = 122
#: The shortest thinking of which a part can be forgotten, in tokens.
SHORTEST = 48
RATIOS = (0.3, 0.5, 0.7)


def suggest(
    model: str,
    benchmark: Mapping[str, Any],
    *,
    model_options: Mapping[str, Any] | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, str]:
    """Decode five problems with the full cache, and return the plan of a grid, and its spec as YAML.

    Its settings compress in most traces; comments above the spec explain it. `benchmark` is an entry of a spec: `name`,
    and `prompt` or `columns` where they are needed. Raises KvatlasError for a model or problems that cannot be used,
    and for thinking that is too short to forget a part of it.
    """
    full = Setting.from_parameters("full")
    spec = setting_spec(model, [dict(benchmark)], full, sampling={}, model_options=model_options or {}, problems=TRIED)
    first = make_plan(parse_spec(spec, "the options"))
    with tempfile.TemporaryDirectory(prefix="kvatlas-") as scratch:
        sweep(first, Path(scratch), on_message=on_message, on_start=on_message)
        with Store.open(Path(scratch)) as store:
            traces = [trace for _, trace in store.traces(texts=False)]

    lengths = sorted(thinking_tokens(trace) for trace in traces)
    # At half of the second shortest trace four of five compress, the longer ones several times.
    budget = _multiple_of_4(lengths[min(1, len(lengths) - 1)] / 2)
    if budget * 2 < SHORTEST:
        raise KvatlasError(
            f"The full cache thinks for {lengths[0]} to {lengths[-1]} tokens on these problems; expected at least "
            f"{SHORTEST}, so that a part of them can be forgotten. Take problems that need longer thinking."
        )

    data = {
        "models": spec["models"],
        "benchmarks": spec["benchmarks"],
        "problems": PROBLEMS,
        "settings": [
            {"policy": policy, "kv_budget": budget, "budget_over": "thinking"} for policy in ("rkv", "random")
        ],
        "controls": ["random"],
        "axes": {"local_window": [_multiple_of_4(budget / 8), _multiple_of_4(budget / 3)], "ratio": list(RATIOS)},
    }

    compressed = sum(length > budget for length in lengths)
    length_sentence = (
        f"It thinks for {lengths[0]} to {lengths[-1]} tokens; {compressed} of {len(lengths)} traces are longer than "
        f"the budget of {budget} tokens beside the prompt."
    )
    comments = f"# {_solved_sentence(traces)}\n# {length_sentence}\n"
    text = comments + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    return make_plan(parse_spec(data, "the suggested spec")), text


def thinking_tokens(trace: Trace) -> int:
    """Return the tokens of a trace that compete for the cache: of a model without think tags, all new ones."""
    return trace.usage.thinking_tokens or trace.usage.output_tokens or 0


def _multiple_of_4(tokens: float) -> int:
    """Return the nearest multiple of 4, at least 4."""
    return max(4, round(tokens / 4) * 4)


def _solved_sentence(traces: list[Trace]) -> str:
    solved = sum(trace.grade.correct for trace in traces)
    cut = sum(not trace.grade.status.answered for trace in traces)
    sentence = f"The full cache solves {solved} of {len(traces)} problems"
    if cut:
        sentence += f" ({cut} without an answer)"
    share = solved / len(traces)
    if share < LEAST_SOLVED:
        return f"{sentence}: too few, since what is not solved cannot be lost. Take easier problems."
    if share > MOST_SOLVED:
        return f"{sentence}. Harder ones, of which it solves 40 to 90 %, show losses earlier."
    return f"{sentence}, so there is something to lose and something to keep."

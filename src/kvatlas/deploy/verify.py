"""The questions of a measured cell to an endpoint, and its greedy texts read under the cell.

Answers at temperature 0 are read here token by token, to find tokens that the cell would not write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas import __version__, policies
from kvatlas.answers.reading import JOINED, read_text
from kvatlas.benchmarks import problems_of, prompt_of
from kvatlas.core import KvatlasError, Sampling, Trace
from kvatlas.deploy.engine_config import MeasuredCell
from kvatlas.engines.asking import AskedAnswers, AskedCell, ask_in_folder, served_setting
from kvatlas.engines.client import Endpoint
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.results import Manifest, Store
from kvatlas.stats.numerics.texts import NEAR, Departures
from kvatlas.sweeps.plan import run_key
from kvatlas.sweeps.spec import parse_spec

if TYPE_CHECKING:
    from torch import Tensor

#: Texts that are read together.
BATCH_SIZE = 8
#: A number of new tokens that no text reaches.
_NEVER = 2**31 - 1


def ask_measured(
    endpoint: Endpoint,
    reference: MeasuredCell,
    folder: Path,
    *,
    problems: int | None = None,
    concurrency: int = 8,
    again: bool = False,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[AskedAnswers, list[Trace]]:
    """Ask an endpoint the questions of a measured cell with its sampling, as `ask_in_folder` does.

    `problems` limits each benchmark to its first problems.
    """
    endpoint.check_model()
    by_name = reference.benchmarks()
    measured = reference.run.manifest
    setting = served_setting(endpoint)
    cells = []
    for cell in reference.cells:
        benchmark = by_name[cell.benchmark]
        ids = cell.problems[:problems]
        chosen = set(ids)
        questions = [each for each in problems_of(benchmark, measured.spec["problems"]) if each.id in chosen]
        expected = replace(cell, setting=setting, problems=ids, baseline=True)
        cells.append(AskedCell(endpoint, expected, benchmark, questions, reference.sampling, measured.spec["seed"]))

    verified = {"against": str(reference.setting), "model": reference.model, "server": dict(endpoint.about)}
    manifest = Manifest(
        axes=(),
        expected=(),
        spec={"lose_at_most": 100 * reference.run.margin, "claim": reference.run.stored_claim.value},
        provenance={"kvatlas": __version__, "verified": verified},
        about=measured.about,
        contents=measured.contents,
    )
    return ask_in_folder(folder, manifest, cells, again=again, concurrency=concurrency, on_trace=on_trace)


def read_texts(
    endpoint: Endpoint,
    reference: MeasuredCell,
    folder: Path,
    problems: int,
    *,
    concurrency: int = 8,
    again: bool = False,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> list[Departures]:
    """Ask for so many answers at temperature 0, store them as a run in `folder`, and read them here under the cell.

    Raises KvatlasError before the first request if the model of the run is not available here, if no trace of the
    cell was compressed, or if the choices of the policy depend on more than the text.
    """
    model, policy = _model_and_policy(reference)
    greedy = _greedy_cell(reference, policy, problems)
    if not greedy.cells:
        raise KvatlasError(
            f"The texts of {reference.setting} cannot be compared: no trace of the run was compressed under it; leave "
            "out --texts, or name a cell with a smaller budget."
        )
    ask_measured(endpoint, greedy, folder, concurrency=concurrency, again=again, on_trace=on_trace)

    by_name = reference.benchmarks()
    opening = "" if model.opens_thinking else model.thinking.open
    setting = served_setting(endpoint)
    with Store.open(folder) as store:
        traces = [trace for _, trace in store.traces() if trace.setting == setting]
    written = {(trace.benchmark, trace.problem): trace.text for trace in traces}
    texts = []
    for cell in greedy.cells:
        benchmark = by_name[cell.benchmark]
        for problem in problems_of(benchmark, reference.run.manifest.spec["problems"]):
            if problem.id in cell.problems:
                text = written[cell.benchmark, problem.id]
                thinking = read_text(text, JOINED).thinking
                prompt = model.encode(prompt_of(benchmark, problem))
                texts.append((prompt, f"{opening}{thinking}" if thinking else text))
    return read_under_policy(model, policy, texts)


def read_under_policy(
    model: ModelHandle, policy: Policy, texts: Sequence[tuple[tuple[int, ...], str]]
) -> list[Departures]:
    """Compare each token of the texts (prompt tokens, text) with the policy's greedy choice after the same tokens.

    As many tokens are read after the first compression as before it; texts that end before it are left out, and so are
    the first and the last token, where servers strip blanks.
    """
    import torch

    from kvatlas.engine import Engine, Request

    torch.set_num_threads(1)
    sampling = Sampling(0.0, 0, 1.0, _NEVER)
    notes = []
    requests = []
    for prompt, text in texts:
        first = _uncompressed(policy, len(prompt))
        script = model.tokens(text)[:-1][: 2 * first]
        if len(script) > first:
            notes.append(_ScriptReader(model, len(prompt), script, first))
            length = replace(sampling, max_new_tokens=len(script))
            requests.append(Request(len(notes), prompt, 0, (policy,), sampling=length, logits_processor=notes[-1]))
    if requests:
        for _ in Engine(model, model.load(), [policy], sampling, min(BATCH_SIZE, len(requests))).run(requests):
            pass
    return [note.departures for note in notes]


def _uncompressed(policy: Policy, prompt: int) -> int:
    """Return the number of new tokens before the first compression, or `_NEVER`."""
    return _NEVER if policy.budget is None else policy.budget.first(prompt) - prompt + 1


class _ScriptReader:
    """A logits processor that makes a generation follow a script, and counts tokens other than the likeliest."""

    def __init__(self, model: ModelHandle, prompt: int, script: tuple[int, ...], first: int) -> None:
        self.model = model
        self.prompt = prompt
        self.script = script
        self.first = first
        self.departures = Departures([first - 1, len(script) - first])

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Return logits [vocabulary] that allow only the script's token."""
        at = len(tokens) - self.prompt
        written = self.script[at]
        side = int(at >= self.first)
        counts = self.departures
        top = logits.float().topk(2)
        most, second = top.values.tolist()
        likeliest = int(top.indices[0])
        if at:
            counts.near[side] += most - second < NEAR
            if likeliest != written and not self._same_text(at, likeliest):
                gap = most - float(logits[written])
                counts.other[side] += 1
                counts.far[side] += gap > NEAR
                counts.gap[side] = max(counts.gap[side], gap)

        forced = logits.new_full(logits.shape, float("-inf"))
        forced[written] = 0
        return forced

    def _same_text(self, at: int, likeliest: int) -> bool:
        """Return True if the text goes on with the text of that token, and was only tokenized differently here."""
        decode = self.model.tokenizer.decode
        ahead = str(decode(list(self.script[at - 1 : at + 16]), skip_special_tokens=False))
        return ahead.startswith(str(decode([self.script[at - 1], likeliest], skip_special_tokens=False)))


def _model_and_policy(reference: MeasuredCell) -> tuple[ModelHandle, Policy]:
    """Return the model of the run with its data type, and the policy of the cell; KvatlasError if one is missing."""
    spec = parse_spec(dict(reference.run.manifest.spec))
    policy = policies.of_engine(reference.setting)
    fault = "" if isinstance(policy, CompressingPolicy) else "it never compresses"
    if policy.random:
        fault = f"the choice of {policy.setting_name!r} depends on more than the text (random numbers)"
    if fault:
        raise KvatlasError(f"The texts of {reference.setting} cannot be compared: {fault}.")

    cell = reference.cells[0]
    benchmark = next(candidate for entry in spec.benchmarks if (candidate := entry.find()).name == cell.benchmark)
    for model in (model for entry in spec.models if (model := entry.find()).name == reference.model):
        model.check()
        for dtype in dict.fromkeys((model.dtype, "float32", "bfloat16", "float16")):
            typed = replace(model, options=replace(model.options, dtype=dtype))
            if run_key(spec, typed, benchmark, policy) == cell.run_key:
                return typed, policy.bind(typed)
    raise KvatlasError(
        f"The texts of {reference.model!r} cannot be compared: its weights, tokenizer or template, or the policy, "
        "differ here from those of the run."
    )


def _greedy_cell(reference: MeasuredCell, policy: Policy, problems: int) -> MeasuredCell:
    """Return the cell at temperature 0 on so many problems with compressed traces, divided among the benchmarks.

    Each problem has one answer, limited to the length that is read.
    """
    traces = reference.traces(reference.setting)
    prompts = {key[:2]: trace.usage.prompt_tokens or 0 for key, trace in traces.items() if trace.usage.compressions}
    most = 2 * max((_uncompressed(policy, prompt) for prompt in prompts.values()), default=0) + 1
    share = -(-problems // len(reference.cells))
    cells = []
    for cell in reference.cells:
        compressed = tuple(id_ for id_ in cell.problems if (cell.benchmark, id_) in prompts)[:share]
        if compressed:
            cells.append(replace(cell, problems=compressed, samples=1))

    limit = min(most, int(reference.sampling["max_new_tokens"]))
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": limit}
    return replace(reference, sampling=sampling, cells=tuple(cells))

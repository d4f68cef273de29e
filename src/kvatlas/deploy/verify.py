"""Comparison of an endpoint's answers with a cell and the full cache, as data and as sentences.

Answers at temperature 0 are read here under the cell, token by token, to find tokens that the cell would not write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import __version__, policies
from kvatlas.answers.reading import JOINED, read_text
from kvatlas.core import Claim, KvatlasError, Sampling, Trace, grouped, is_reference, percent, reference_words
from kvatlas.deploy.engine_config import MeasuredCell
from kvatlas.engines.asking import (
    AskedAnswers,
    AskedCell,
    ask_in_folder,
    finish_faults,
    other_models,
    served_setting,
)
from kvatlas.engines.client import Endpoint
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.results import Manifest, Store
from kvatlas.stats.numerics.texts import NEAR, Departures, departure_p, most_unseen
from kvatlas.stats.paired import Equivalence, length_shift, paired_difference, problems_to_decide, standing
from kvatlas.stats.run_data import LONG_TEXT, MOST_COPIED
from kvatlas.stats.table import ProblemKey
from kvatlas.sweeps.plan import run_key
from kvatlas.sweeps.spec import parse_spec
from kvatlas.text import counted

if TYPE_CHECKING:
    from torch import Tensor

#: Traces by benchmark, problem and sample.
Traces = Mapping[tuple[str, str, int], Trace]
#: Below this p-value lengths differ; together with Pass@1, a correct endpoint fails in less than 5 % of checks.
LENGTH_P = 0.005
#: Below this p-value texts depart at the first compression.
TEXT_P = 0.01
#: A share of tokens far from the likeliest that is larger than numerical noise.
MANY = 0.01
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
    samples: int | None = None,
    concurrency: int = 8,
    again: bool = False,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[AskedAnswers, list[Trace]]:
    """Ask an endpoint the questions of a measured cell with its sampling, as `ask_in_folder` does.

    `problems` limits each benchmark to its first problems, `samples` each problem to its first samples.
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
        questions = [each for each in benchmark.problems(measured.spec["problems"]) if each.id in chosen]
        count = min(samples or cell.samples, cell.samples)
        expected = replace(cell, setting=setting, problems=ids, samples=count, baseline=True)
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


def by_sample(traces: Iterable[Trace]) -> dict[tuple[str, str, int], Trace]:
    """Return traces by benchmark, problem and sample."""
    return {(trace.benchmark, trace.problem, trace.sample): trace for trace in traces}


def report(
    reference: MeasuredCell, served: Traces, margin: float, texts: Sequence[Departures] | None = None
) -> dict[str, Any]:
    """Compare an endpoint's answers with the run; losses in percent. `texts` are the result of `read_texts`.

    Losses are by the claim of the run, with `limits` by each claim. Each of the `checks` has a `name`, `good` and a
    `sentence`. If `alarmed`, the endpoint does not serve that cell.
    """
    refused = reference.run.refused or _equal_texts(served)
    claim = Claim.LIKE if refused else reference.run.claim
    cell = reference.traces(reference.setting)
    references = [cell.setting for cell in reference.run.manifest.expected if is_reference(cell.setting)]
    full = {}
    if references and not is_reference(reference.setting):
        full = reference.traces(references[0])
    most = int(reference.sampling["max_new_tokens"])
    checks = [_prompt_check(cell, served), _finish_check(served, most)]
    checks += [*_model_check(served), *_length_check(cell, served, most)]
    checks += [] if texts is None else text_checks(texts)

    clusters = reference.run.manifest.clusters
    against = _loss_against(cell, served, margin, claim, refused, clusters)
    return {
        "model": reference.model,
        "against": str(reference.setting),
        "margin": 100 * margin,
        "alarmed": against["verdict"] in (Equivalence.WORSE, Equivalence.BETTER)
        or not all(item["good"] for item in checks),
        "cell": against,
        "full": _loss_against(full, served, margin, claim, refused, clusters) if full else None,
        "reference": reference_words(references),
        "checks": checks,
        "texts": None if texts is None else [vars(text) for text in texts],
    }


def verification_text(report: dict[str, Any], name: str) -> str:
    """Return the report as sentences; `name` is that of the endpoint."""
    points = f"{report['margin']:g} points"
    verdicts = {
        Equivalence.EQUIVALENT: f"equivalent within {points}",
        Equivalence.WORSE: f"worse by more than {points}",
        Equivalence.BETTER: f"better by more than {points}, so not that setting",
        Equivalence.UNDECIDED: "not decided",
    }

    lines = []
    for other, loss in ((report["against"], report["cell"]), (report["reference"], report["full"])):
        if loss is not None:
            claims = [Claim(loss["claim"]), *(claim for claim in Claim if claim.value != loss["claim"])]
            clauses = []
            for claim in claims:
                limits = loss["limits"][claim.value]
                if "refused" in limits:
                    clauses.append(f"nothing is said of these problems sampled anew: {limits['refused']}")
                    continue
                on = "on these problems" if claim is Claim.THESE else "for problems like these"
                interval = f"{-limits['loses_high']:+.1f} to {-limits['loses_low']:+.1f}"
                clauses.append(f"{on} {verdicts[Equivalence(limits['verdict'])]} (95 % CI {interval})")
            if loss["needed"]:
                clauses.append(f"about {loss['needed']:,} problems would decide it for problems like these")
            counts = f"{counted(loss['problems'], 'problem')}, {counted(loss['pairs'], 'pair')}"
            lines.append(f"{name} against {other}: {-loss['loses']:+.1f} points on {counts}; {'; '.join(clauses)}.")
    lines += [f"{'ok' if check['good'] else 'NOT AS IN THE RUN'}: {check['sentence']}" for check in report["checks"]]
    return "\n".join(lines)


def _equal_texts(served: Traces) -> str:
    """Return as a clause that the endpoint gave equal long texts for two seeds of too many problems, or ""."""
    by_problem = grouped(served.items(), lambda item: item[0][:2]).values()
    has_equal = []
    for of_problem in by_problem:
        traces = [trace for _, trace in of_problem]
        if len(traces) > 1 and all((trace.usage.output_tokens or 0) >= LONG_TEXT for trace in traces):
            has_equal.append(len({trace.token_digest for trace in traces}) < len(traces))
    is_copying = bool(has_equal) and sum(has_equal) > MOST_COPIED * len(has_equal)
    return "the endpoint writes equal texts for two seeds" if is_copying else ""


def _loss_against(
    reference: Traces,
    served: Traces,
    margin: float,
    claim: Claim,
    refused: str,
    clusters: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    grades = [_values_by_problem(traces, lambda trace: float(trace.grade.correct)) for traces in (reference, served)]
    for benchmark, problem, sample in served:
        # An answer to a trace that the run lacks is a missing pair.
        grades[0].setdefault((benchmark, problem), {}).setdefault(sample, math.nan)
    claims = [Claim.LIKE] if refused else list(Claim)
    loss = paired_difference(grades[0], grades[1], claim, claims, clusters)

    limits: dict[str, Any] = {one.value: {"refused": refused} for one in Claim}
    for name, of_claim in loss.claims.items():
        ends = {"loses_low": percent(of_claim.low), "loses_high": percent(of_claim.high)}
        limits[name] = {"verdict": standing(of_claim, margin).value, **ends}
    return {
        "claim": claim.value,
        "verdict": standing(loss, margin).value,
        **loss.in_percent("loses", "loses_low", "loses_high"),
        "limits": limits,
        "problems": loss.problems,
        "pairs": loss.pairs,
        "needed": problems_to_decide(grades[0], grades[1], loss, margin, clusters),
    }


def _values_by_problem(traces: Traces, value: Callable[[Trace], float]) -> dict[ProblemKey, dict[int, float]]:
    values: dict[ProblemKey, dict[int, float]] = {}
    for (benchmark, problem, sample), trace in traces.items():
        values.setdefault((benchmark, problem), {})[sample] = value(trace)
    return values


def _deploy_check(name: str, good: bool, sentence: str) -> dict[str, Any]:
    return {"name": name, "good": good, "sentence": sentence}


def _prompt_check(cell: Traces, served: Traces) -> dict[str, Any]:
    """Compare the lengths of prompts, which differ with another template or tokenizer."""
    pairs = [(cell[key].usage.prompt_tokens, trace.usage.prompt_tokens) for key, trace in served.items() if key in cell]
    differences = [theirs - mine for mine, theirs in pairs if mine is not None and theirs is not None]
    if not differences:
        return _deploy_check(
            "usage", False, "The endpoint does not report the lengths of its prompts (usage.prompt_tokens)."
        )

    shifts = Counter(difference for difference in differences if difference)
    if not shifts:
        return _deploy_check("prompts", True, f"All {len(differences):,} prompts are as long as in the run.")
    ((shift, count),) = shifts.most_common(1)
    counts = f"{shifts.total():,} of {len(differences):,} prompts are not as long as in the run, {count:,} of them by"
    return _deploy_check(
        "prompts", False, f"{counts} {shift:+d} tokens: another chat template, system prompt or tokenizer."
    )


def _model_check(served: Traces) -> list[dict[str, Any]]:
    sentence = other_models(served.values())
    return [_deploy_check("model", False, sentence)] if sentence else []


def _finish_check(served: Traces, most: int) -> dict[str, Any]:
    """Compare finish reasons and lengths with the limit of `most` tokens."""
    faults = finish_faults(served.values(), most)
    if faults:
        return _deploy_check("finish", False, faults)
    finishes = sorted(Counter(str(trace.grade.metrics.get("finish")) for trace in served.values()).items())
    return _deploy_check(
        "finish", True, f"Finish reasons: {', '.join(f'{name} {count:,}' for name, count in finishes)}."
    )


def _length_check(cell: Traces, served: Traces, most: int) -> list[dict[str, Any]]:
    if any(trace.usage.output_tokens is None for trace in served.values()):
        return []
    mine, theirs = (
        _values_by_problem(traces, lambda trace: min(1.0, (trace.usage.output_tokens or 0) / most))
        for traces in (cell, served)
    )
    shift = length_shift(mine, theirs)
    good = shift.p >= LENGTH_P
    end = ", which chance explains" if good else ": it does not write as that cell does"
    text = f"Answers are {most * shift.value:+,.0f} tokens longer on average than in the run (p {shift.p:.2g}){end}."
    return [_deploy_check("lengths", good, text)]


def text_checks(texts: Sequence[Departures]) -> list[dict[str, Any]]:
    """Check answers at temperature 0: the same model before the first compression, the same cache after it."""
    if not texts:
        return [
            _deploy_check("texts", True, "No text has two tokens after a first compression, so texts prove nothing.")
        ]

    # Other weights show before the first compression.
    tokens = sum(text.tokens[0] for text in texts)
    other = sum(text.other[0] for text in texts)
    far = sum(text.far[0] for text in texts)
    good = far <= MANY * tokens
    sentence = f"Of {len(texts):,} texts at temperature 0, before the first compression {_departed(other, tokens)}"
    if not good:
        sentence += f", {far:,} by more than {NEAR:g} nats: other weights, or not greedy"
    before = _deploy_check("texts before", good, f"{sentence}.")

    # Another cache shows after it.
    tokens = sum(text.tokens[1] for text in texts)
    other = sum(text.other[1] for text in texts)
    parted = sum(text.other[1] > 0 for text in texts)
    gap_before = max(text.gap[0] for text in texts)
    gap_after = max(text.gap[1] for text in texts)
    p = departure_p(texts)
    sentence = f"After it {_departed(other, tokens)}, in {parted:,} texts, by up to {gap_after:.2g} nats"
    sentence += f" (before by {gap_before:.2g}; p {p:.2g})"
    if p < TEXT_P:
        sentence += ": its cache differs from the first compression on"
    elif not parted:
        sentence += f": most likely fewer than {100 * most_unseen(len(texts)):.2g} % of problems depart"
    return [before, _deploy_check("texts after", p >= TEXT_P, f"{sentence}.")]


def _departed(other: int, tokens: int) -> str:
    return f"{other:,} of {tokens:,} tokens are not the likeliest of the cell"


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

    Raises KvatlasError before the first request if the model of the run is not available here, or if the choices of
    the policy depend on more than the text.
    """
    model, policy = _model_and_policy(reference)
    greedy = _greedy_cell(reference, policy, problems)
    if not greedy.cells:
        return []
    options: dict[str, Any] = {"concurrency": concurrency, "again": again, "on_trace": on_trace}
    ask_measured(endpoint, greedy, folder, samples=1, **options)

    by_name = reference.benchmarks()
    opening = "" if model.opens_thinking else model.thinking.open
    setting = served_setting(endpoint)
    with Store.open(folder) as store:
        answers = by_sample(trace for _, trace in store.traces() if trace.setting == setting)
    texts = []
    for cell in greedy.cells:
        benchmark = by_name[cell.benchmark]
        for problem in benchmark.problems(reference.run.manifest.spec["problems"]):
            if problem.id in cell.problems:
                text = answers[cell.benchmark, problem.id, 0].text
                thinking = read_text(text, JOINED).thinking
                texts.append((model.encode(benchmark.prompt(problem)), f"{opening}{thinking}" if thinking else text))
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
    return [note.departures() for note in notes]


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
        # Each list holds a count before the first compression and one after it.
        self.near = [0, 0]
        self.other = [0, 0]
        self.far = [0, 0]
        self.gap = [0.0, 0.0]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Return logits [vocabulary] that allow only the script's token."""
        at = len(tokens) - self.prompt
        written = self.script[at]
        side = int(at >= self.first)
        top = logits.float().topk(2)
        most, second = top.values.tolist()
        likeliest = int(top.indices[0])
        if at:
            self.near[side] += most - second < NEAR
            if likeliest != written and not self._same_text(at, likeliest):
                gap = most - float(logits[written])
                self.other[side] += 1
                self.far[side] += gap > NEAR
                self.gap[side] = max(self.gap[side], gap)

        forced = logits.new_full(logits.shape, float("-inf"))
        forced[written] = 0
        return forced

    def _same_text(self, at: int, likeliest: int) -> bool:
        """Return True if the text goes on with the text of that token, and was only tokenized differently here."""
        decode = self.model.tokenizer.decode
        ahead = str(decode(list(self.script[at - 1 : at + 16]), skip_special_tokens=False))
        return ahead.startswith(str(decode([self.script[at - 1], likeliest], skip_special_tokens=False)))

    def departures(self) -> Departures:
        """Return the counts before and after the first compression."""
        tokens = (self.first - 1, len(self.script) - self.first)
        return Departures(tokens, tuple(self.near), tuple(self.other), tuple(self.far), tuple(self.gap))


def _model_and_policy(reference: MeasuredCell) -> tuple[ModelHandle, Policy]:
    """Return the model of the run with its data type, and the policy of the cell; KvatlasError if one is missing."""
    spec = parse_spec(dict(reference.run.manifest.spec))
    policy = policies.of_engine(reference.setting)
    fault = "" if isinstance(policy, CompressingPolicy) else "it never compresses"
    if policy.random:
        fault = f"the choice of {policy.name!r} depends on more than the text (random numbers)"
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

    Answers are limited to the length that is read.
    """
    traces = reference.traces(reference.setting)
    prompts = {key[:2]: trace.usage.prompt_tokens or 0 for key, trace in traces.items() if trace.usage.compressions}
    most = 2 * max((_uncompressed(policy, prompt) for prompt in prompts.values()), default=0) + 1
    share = -(-problems // len(reference.cells))
    cells = []
    for cell in reference.cells:
        compressed = tuple(id_ for id_ in cell.problems if (cell.benchmark, id_) in prompts)[:share]
        cells += [replace(cell, problems=compressed)] if compressed else []
    limit = min(most, int(reference.sampling["max_new_tokens"]))
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": limit}
    return replace(reference, sampling=sampling, cells=tuple(cells))

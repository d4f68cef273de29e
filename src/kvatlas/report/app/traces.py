"""One trace as the app shows it: its tokens, when each left the cache, and where it departs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.benchmarks import Benchmark, for_model
from kvatlas.core import EvictionTrace, KvatlasError, Problem, Status, Trace
from kvatlas.models import ModelHandle
from kvatlas.results import Manifest
from kvatlas.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens and characters of one trace that a page holds at most.
TOKEN_LIMIT, TEXT_LIMIT = 8_000, 48_000
#: Bytes of a model whose attention is measured, at most.
BYTES_LIMIT = 1 << 30
#: Evicted tokens that are named for a departure.
NAMED = 8


@dataclass(frozen=True)
class Sources:
    """Models by name, benchmarks by name with their problems by id, as far as they can still be found."""

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    problems: Mapping[str, Mapping[str, Problem]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Sources:
        """Find the models and problems of the run's spec; nothing for a spec that cannot be read."""
        from kvatlas.sweeps.spec import parse_spec

        models: dict[str, ModelHandle] = {}
        benchmarks: dict[str, Benchmark] = {}
        problems: dict[str, dict[str, Problem]] = {}
        try:
            spec = parse_spec(dict(manifest.spec))
        except KvatlasError:
            return cls()
        for entry in spec.models:
            with suppress(KvatlasError):
                model = entry.find()
                models[model.name] = model
        for benchmark_spec in spec.benchmarks:
            with suppress(KvatlasError):
                benchmark = benchmark_spec.find()
                problems[benchmark.name] = {
                    problem.id: problem
                    for problem in benchmark.problems(spec.problems)
                    if manifest.has_problem(benchmark.name, problem)
                }
                benchmarks[benchmark.name] = benchmark
        return cls(models, benchmarks, problems)

    def problem(self, trace: Trace) -> Problem | None:
        """Return the question of a trace."""
        return self.problems.get(trace.benchmark, {}).get(trace.problem)

    def prompt(self, trace: Trace) -> tuple[int, ...] | None:
        """Return the token ids of a trace's prompt; None where model or question are gone or have changed."""
        model, problem = self.models.get(trace.model), self.problem(trace)
        if model is None or problem is None:
            return None
        try:
            ids = model.encode(for_model(self.benchmarks[trace.benchmark], model.reads).prompt(problem))
        except KvatlasError:
            return None
        return ids if len(ids) == trace.usage.prompt_tokens else None

    def pieces(self, model_name: str, tokens: tuple[int, ...]) -> list[str] | None:
        """Return the text of each token, which joined are the whole text; None without the tokenizer."""
        model = self.models.get(model_name)
        if model is None:
            return None
        try:
            return token_texts(_tokenizer(model.folder) or model.tokenizer, tokens)
        except KvatlasError:
            return None


@lru_cache(maxsize=16)
def _tokenizer(folder: Path) -> Any:
    """Load a tokenizer without transformers, which takes seconds and 300 MB; None where only transformers can."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    # The library raises nothing narrower.
    try:
        return Tokenizer.from_file(str(path))
    except Exception:
        return None


def token_texts(tokenizer: Any, tokens: tuple[int, ...]) -> list[str]:
    """Return the text that each token adds; a character of several tokens comes with the last of them."""

    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    whole = decode(tokens)
    alone = {token: decode((token,)) for token in set(tokens)}
    for joint in ("", " "):
        if joint.join(alone[token] for token in tokens) == whole:
            return [alone[token] if i == 0 else joint + alone[token] for i, token in enumerate(tokens)]
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(tokens) + 1):
        before, now = decode(tokens[start:read]), decode(tokens[start:end])
        if now.endswith("\ufffd") and end < len(tokens):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        # A few tokens of context are enough for spaces; decoding all of them each time would be quadratic.
        start, read = max(0, end - 4), end
    return texts


def trace_document(trace: Trace, sources: Sources, whole: bool = False) -> dict[str, Any]:
    """Return a trace, cut into tokens with the time of each one's eviction (see `evictions_of`).

    As much of it as a page holds, or the `whole` of it.
    """
    problem = sources.problem(trace)
    most, characters = (None, None) if whole else (TOKEN_LIMIT, TEXT_LIMIT)
    tokens = trace.tokens[:most]
    pieces = sources.pieces(trace.model, tokens)
    if pieces is not None and characters is not None and sum(map(len, pieces)) > characters:
        pieces = None
    text = "".join(pieces) if pieces is not None else trace.text[:characters]
    verdict = "right" if trace.grade.correct else "wrong"
    if trace.grade.status is not Status.OK:
        verdict = f"wrong ({trace.grade.status.value.replace('_', ' ')})"
    document = {
        "problem": trace.problem,
        "sample": trace.sample,
        "verdict": verdict,
        "right": verdict == "right",
        "answer": trace.grade.answer if trace.grade.answer is None else trace.grade.answer[:2_000],
        "progress": round(trace.grade.progress, 4),
        "reference": None if problem is None else problem.answer[:2_000],
        "question": None if problem is None else problem.question[:6_000],
        "tokens": trace.usage.output_tokens,
        "thinking": trace.usage.thinking_tokens,
        "prompt": trace.usage.prompt_tokens,
        "peak": trace.usage.peak_kv_tokens,
        "compressions": trace.usage.compressions,
        "text": text,
        "more": len(trace.tokens) - len(tokens) if pieces is not None else len(trace.text) - len(text),
    }
    if pieces is not None:
        # Scripts count UTF-16 units, in text whose hidden characters were made visible.
        units = [len(visible(piece).encode("utf-16-le", "surrogatepass")) // 2 for piece in pieces]
        document["lengths"] = units
        if trace.eviction_trace is not None and trace.usage.prompt_tokens is not None:
            window = dict(trace.setting.parameters).get("local_window")
            document |= evictions_of(trace.eviction_trace, trace.usage.prompt_tokens, len(tokens), window)
    return document


def evictions_of(eviction_trace: EvictionTrace, prompt: int, new: int, window: int | None) -> dict[str, Any]:
    """Return when tokens were evicted: of the prompt (counts), and of the first `new` new tokens.

    `steps` are the steps at which tokens left; `left` has for each token the number of its step from 1, 0 for never;
    `held` the percent of the holders that had it at the end, where a policy chooses more than once; `prompt_left`
    has for each step the number of prompt tokens that left; `judged` is the number of new tokens that a compression has
    seen outside its window.
    """
    left = eviction_trace.left[prompt : prompt + new]
    steps = sorted(set(eviction_trace.left) - {0})
    number = {step: index for index, step in enumerate([0, *steps])}
    prompt_left = Counter(eviction_trace.left[:prompt])
    document: dict[str, Any] = {
        "steps": steps,
        "left": [number[step] for step in left],
        "judged": max(0, steps[-1] - 1 - (window or 0)) if steps else 0,
        "prompt_left": [prompt_left[step] for step in steps],
    }
    if eviction_trace.holders > 1:
        kept = eviction_trace.held[prompt : prompt + new]
        document["holders"] = eviction_trace.holders
        document["held"] = [round(100 * count / eviction_trace.holders) for count in kept]
    return document


def departures(
    pairs: Sequence[tuple[Trace, Trace | None]], sources: Sources, limit: int
) -> list[dict[str, Any] | None]:
    """Return what the departing step missed, for the first `limit` traces that depart from the full cache's.

    Each pair is a trace and the full cache's trace of the same sample. None for a trace whose model or question is
    gone, and for models larger than `BYTES_LIMIT`.
    """
    weights: dict[str, PreTrainedModel | None] = {}
    results: list[dict[str, Any] | None] = []
    for trace, full in pairs:
        prompt = sources.prompt(trace) if full is not None and limit > 0 else None
        if full is None or prompt is None:
            results.append(None)
            continue
        if trace.model not in weights:
            weights[trace.model] = _load(sources.models[trace.model])
        model = weights[trace.model]
        results.append(None if model is None else _departure(model, prompt, trace, full))
        limit -= results[-1] is not None
    return results


def _load(handle: ModelHandle) -> PreTrainedModel | None:
    try:
        small = sum(path.stat().st_size for path in handle.folder.glob("*.safetensors")) <= BYTES_LIMIT
        return handle.load() if small else None
    except KvatlasError:
        return None


def _departure(model: PreTrainedModel, prompt: tuple[int, ...], trace: Trace, full: Trace) -> dict[str, Any] | None:
    """The first difference from the full cache's trace, and the evicted tokens to which the full cache attends there.

    `at` is the number of new tokens that both have in common. `share` is the part of the attention of the step that
    writes the next one, mean over layers and heads of the full cache, on tokens that no layer and no head had any more;
    `missed` lists the new tokens among them with the largest parts as (number, part), `prompt` the part on evicted
    tokens of the prompt.
    """
    from kvatlas.predictor.labels import answer_attention

    pairs = enumerate(zip(trace.tokens, full.tokens, strict=False))
    at = next((index for index, (own, other) in pairs if own != other), None)
    if not at or trace.eviction_trace is None:
        return None
    query = len(prompt) + at - 1
    gone = [position for position, left in enumerate(trace.eviction_trace.left[:query]) if 0 < left <= at]
    if not gone:
        return None
    attention, _ = answer_attention(model, [*prompt, *trace.tokens[:at]], query)
    part = {position: float(attention[position]) for position in gone}
    largest = sorted((position for position in gone if position >= len(prompt)), key=lambda position: -part[position])
    return {
        "at": at,
        "share": round(sum(part.values()), 4),
        "prompt": round(sum(part[position] for position in gone if position < len(prompt)), 4),
        "missed": [[position - len(prompt), round(part[position], 4)] for position in largest[:NAMED]],
    }

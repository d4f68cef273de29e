"""What a run was made with, found again where it is still there: tokenizers, questions, reference answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvatlas.benchmarks import Benchmark, asked_of
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.models import ModelHandle
from kvatlas.results.manifest import Manifest


@dataclass(frozen=True)
class Sources:
    """Models by name, benchmarks by name with their problems by id; what is not there any more is missing."""

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    problems: Mapping[str, Mapping[str, Problem]] = field(default_factory=dict)
    _prompts: dict[tuple[str, str, str], tuple[int, ...] | None] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, manifest: Manifest) -> Sources:
        """Found by the run's own spec. Never an error: a page without a question is still a page."""
        from kvatlas.sweeps.spec import parse_spec

        models: dict[str, ModelHandle] = {}
        benchmarks: dict[str, Benchmark] = {}
        problems: dict[str, dict[str, Problem]] = {}
        try:
            spec = parse_spec(dict(manifest.spec))
        except KvatlasError:
            return cls()
        for entry in spec.models:
            try:
                model = entry.find()
                models[model.name] = model
            except KvatlasError:
                continue
        for benchmark_spec in spec.benchmarks:
            try:
                benchmark = benchmark_spec.find()
                problems[benchmark.name] = {problem.id: problem for problem in benchmark.problems(spec.problems)}
                benchmarks[benchmark.name] = benchmark
            except KvatlasError:
                continue
        return cls(models, benchmarks, problems)

    def problem(self, trace: Trace) -> Problem | None:
        """The question that a trace answers."""
        return self.problems.get(trace.benchmark, {}).get(trace.problem)

    def prompt(self, trace: Trace) -> tuple[int, ...] | None:
        """Token ids of a trace's prompt; None where model or question are gone, or where they changed since."""
        key = trace.model, trace.benchmark, trace.problem
        if key not in self._prompts:
            self._prompts[key] = self._prompt(*key)
        ids = self._prompts[key]
        return ids if ids is not None and len(ids) == trace.usage.prompt_tokens else None

    def _prompt(self, model_name: str, benchmark: str, problem_id: str) -> tuple[int, ...] | None:
        model, problem = self.models.get(model_name), self.problems.get(benchmark, {}).get(problem_id)
        if model is None or problem is None:
            return None
        try:
            return model.encode(asked_of(self.benchmarks[benchmark], model.reads).prompt(problem))
        except KvatlasError:
            return None

    def pieces(self, model_name: str, tokens: tuple[int, ...]) -> list[str] | None:
        """The text of each token; joined they are the text of all. None without the tokenizer."""
        model = self.models.get(model_name)
        if model is None:
            return None
        try:
            return token_texts(_tokenizer(model.folder) or model.tokenizer, tokens)
        except KvatlasError:
            return None


@lru_cache(maxsize=16)
def _tokenizer(folder: Path) -> Any:
    """What decodes tokens, without transformers, which take seconds and 300 MB; None where only they can."""
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
    """The text that each token adds; a character of several tokens comes with the last of them."""

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
        # A few tokens of context are enough for spaces; decoding all of them again each time would be quadratic.
        start, read = max(0, end - 4), end
    return texts

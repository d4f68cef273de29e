"""The materials of a run as far as they can still be found: models, benchmarks and questions; tokens as texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvatlas.benchmarks import Benchmark, for_model
from kvatlas.core import KvatlasError, Problem, Trace
from kvatlas.models import ModelHandle
from kvatlas.results import Manifest


@dataclass(frozen=True)
class RunMaterials:
    """Models by name, benchmarks by name with their problems by id, as far as they can still be found."""

    models: Mapping[str, ModelHandle] = field(default_factory=dict)
    benchmarks: Mapping[str, Benchmark] = field(default_factory=dict)
    problems: Mapping[str, Mapping[str, Problem]] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> RunMaterials:
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
        model = self.models.get(trace.model)
        problem = self.problem(trace)
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
    # Most tokenizers write each token alone as in a text; some put a space between words.
    for joint in ("", " "):
        pieces = [alone[token] for token in tokens]
        if joint.join(pieces) == whole:
            return [*pieces[:1], *(joint + piece for piece in pieces[1:])]
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(tokens) + 1):
        before = decode(tokens[start:read])
        now = decode(tokens[start:end])
        if now.endswith("\ufffd") and end < len(tokens):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        # A few tokens of context are enough for spaces; decoding all of them each time would be quadratic.
        start = max(0, end - 4)
        read = end
    return texts

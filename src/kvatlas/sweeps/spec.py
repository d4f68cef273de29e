"""The sweep spec: a YAML file, read strictly, and the grid of settings that it stands for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from kvatlas import benchmarks, models
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Sampling, Setting, canonical, reason
from kvatlas.models import ModelHandle
from kvatlas.stats.run_data import LOSE_AT_MOST
from kvatlas.sweeps.spec_file import MOST_CHARACTERS, load

Value = int | float | str | bool
#: More than any sweep has, and few enough to be planned: problems of a benchmark, samples, settings, traces of all.
MOST_PROBLEMS, MOST_SAMPLES, MOST_SETTINGS, MOST_TRACES = 100_000, 10_000, 10_000, 100_000_000


class SamplingSpec(BaseModel):
    """How tokens are drawn; the defaults are the published ones (arXiv 2601.18383)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: float = Field(default=0.6, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=20, ge=0, lt=2**31)
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_new_tokens: int = Field(default=16_384, ge=1, lt=2**31)

    def sampling(self) -> Sampling:
        """The same as core data."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens)


class SettingSpec(BaseModel):
    """A policy with its fixed parameters; what these may be, the policy checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    policy: str

    @property
    def own(self) -> dict[str, Any]:
        """Its own values, which axes do not change; None leaves a parameter to the policy."""
        return self.model_extra or {}

    def setting(self, **axes: Value) -> Setting:
        """The setting at one point of the grid."""
        values = {**axes, **self.own}
        return Setting.of(self.policy, **{name: value for name, value in values.items() if value is not None})


class ModelSpec(BaseModel):
    """A model with options: `model` is its address, `name` what figures call it; the rest is `models.Options`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    name: str = ""

    def find(self) -> ModelHandle:
        """The model, its weights not loaded."""
        return models.find(self.model, self.name, **(self.model_extra or {}))


class BenchmarkSpec(BaseModel):
    """A benchmark with options: a file of problems, a prompt format, names of columns, another grader."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    file: str = ""
    prompt: str = ""
    columns: dict[str, str] = {}
    grader: str = ""

    def find(self) -> Benchmark:
        """The benchmark, its problems not read."""
        options = {"file": self.file, "prompt": self.prompt, "columns": self.columns, "grader": self.grader}
        return benchmarks.find(self.name, **{name: value for name, value in options.items() if value})


class Allocation(BaseModel):
    """Which settings get which problems: all of them (`full`), or what the question still needs (`adaptive`).

    The question is which is the cheapest setting that loses at most `lose_at_most` points against the full cache.
    Problems come in `blocks`, in an order drawn from the seed; `token_budget` ends the sweep once the traces of a model
    hold that many output tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["full", "adaptive"] = "full"
    token_budget: int | None = Field(default=None, ge=1, strict=True)
    blocks: int = Field(default=20, ge=2, le=100, strict=True)


class Spec(BaseModel):
    """What a sweep runs: every model on every benchmark under every setting.

    Models and benchmarks are texts (their address or name) or mappings with options.

    `settings` are crossed with the `axes` for which they have no value of their own; `baseline` settings run once,
    outside the grid. `problems` limits each benchmark to its first problems. `expected_output_tokens` is what `plan`
    reckons with where the benchmark's own guess is off. `allocate` is `full` (all settings get all problems) or
    `adaptive` (see `Allocation`). `strict_budget` makes the budgets of all settings strict (docs/policies.md).
    `lose_at_most` points against the full cache may be lost by a setting that is recommended.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: list[ModelSpec] = Field(min_length=1)
    benchmarks: list[BenchmarkSpec] = Field(min_length=1)
    problems: int | None = Field(default=None, ge=1, le=MOST_PROBLEMS, strict=True)
    samples: int = Field(default=5, ge=1, le=MOST_SAMPLES, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)
    sampling: SamplingSpec = SamplingSpec()
    baseline: list[SettingSpec] = [SettingSpec(policy="full")]
    settings: list[SettingSpec] = []
    axes: dict[str, list[Value]] = {}
    expected_output_tokens: int | None = Field(default=None, ge=1, lt=2**31, strict=True)
    allocate: Allocation = Allocation()
    strict_budget: bool = False
    lose_at_most: float = Field(default=LOSE_AT_MOST, gt=0, lt=100, strict=True)

    @field_validator("allocate", mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("settings", "baseline", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("models", "benchmarks", mode="before")
    @classmethod
    def _texts_are_names(cls, value: Any, info: ValidationInfo) -> Any:
        key = "model" if info.field_name == "models" else "name"
        return (
            [{key: entry} if isinstance(entry, str) else entry for entry in value] if isinstance(value, list) else value
        )

    @field_validator("models", "benchmarks", "axes")
    @classmethod
    def _no_repeats(cls, value: Any) -> Any:
        for name, values in value.items() if isinstance(value, dict) else [("", value)]:
            if not values:
                raise ValueError(f"{name} has no values")
            plain = [entry.model_dump() if isinstance(entry, BaseModel) else entry for entry in values]
            if len({canonical(entry) for entry in plain}) < len(plain):
                raise ValueError(f"{name} {plain} names a value twice".strip())
        return value

    @model_validator(mode="after")
    def _something_to_run(self) -> Spec:
        if not self.baseline and not self.settings:
            raise ValueError("neither settings nor baseline name a policy")
        if self.axes and not self.settings:
            raise ValueError("axes need settings to vary")
        grid = sum(math.prod(map(len, self._crossed(spec).values())) for spec in self.settings)
        if grid > MOST_SETTINGS:
            raise ValueError(f"the axes make {grid:,} settings, valid are up to {MOST_SETTINGS:,}")
        cells = (grid + len(self.baseline)) * len(self.models) * len(self.benchmarks)
        traces = cells * self.samples * (self.problems or 1)
        if traces > MOST_TRACES:
            raise ValueError(f"it asks for {traces:,} traces, valid are up to {MOST_TRACES:,}")
        if self.allocate.kind == "adaptive" and sum(not baseline for _, baseline in self.cells()) < 2:
            raise ValueError("allocate: adaptive needs at least two settings besides the baselines")
        if self.allocate.kind == "adaptive" and all(baseline.policy != "full" for baseline in self.baseline):
            raise ValueError("allocate: adaptive needs the full cache as a baseline, {policy: full}")
        return self

    def cells(self) -> list[tuple[Setting, bool]]:
        """All settings in order, each with whether it is a baseline; the grid first."""
        grid = [
            spec.setting(**dict(zip(self._crossed(spec), values, strict=True)))
            for spec in self.settings
            for values in itertools.product(*self._crossed(spec).values())
        ]
        return [(setting, False) for setting in grid] + [(spec.setting(), True) for spec in self.baseline]

    def _crossed(self, spec: SettingSpec) -> dict[str, list[Value]]:
        return {name: values for name, values in self.axes.items() if name not in spec.own}


def read_spec(path: Path) -> Spec:
    """Read a spec file; KvatlasError in one sentence for anything wrong with it."""
    try:
        with path.open(encoding="utf-8") as file:
            data = load(file.read(MOST_CHARACTERS + 1))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise KvatlasError(f"The spec {str(path)!r} is not valid YAML{where}.") from error
    except (KvatlasError, OSError, ValueError, RecursionError) as error:
        # ValueError: numbers of thousands of digits, dates that no calendar has, bytes that are no UTF-8.
        raise KvatlasError(f"The spec {str(path)!r} cannot be read ({reason(error).rstrip('.')}).") from error
    if not isinstance(data, dict):
        raise KvatlasError(f"The spec {str(path)!r} is no mapping; valid keys are {', '.join(Spec.model_fields)}.")
    return parse_spec(data, str(path))


def parse_spec(data: dict[str, Any], source: str = "spec") -> Spec:
    """The spec in plain data; `source` is what an error sentence calls it."""
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        raise KvatlasError(_sentence(error, source)) from error


def setting_spec(
    model: str,
    benchmarks: Sequence[str | Mapping[str, Any]],
    setting: Setting,
    *,
    problems: int | None,
    samples: int,
    seed: int,
    temperature: float,
    max_new_tokens: int | None,
    model_options: Mapping[str, Any],
    strict_budget: bool,
) -> dict[str, Any]:
    """The spec, as data, of a sweep with one setting; new tokens are at most 16,384, or what the model has room for."""
    room = models.find(model, **model_options).positions or 16_384 + 4096
    return {
        "models": [{"model": model, **model_options}],
        "benchmarks": list(benchmarks),
        "problems": problems,
        "samples": samples,
        "seed": seed,
        "sampling": {"temperature": temperature, "max_new_tokens": max_new_tokens or min(16_384, room // 4 * 3)},
        "baseline": [{"policy": setting.policy, **setting.values}],
        "strict_budget": strict_budget,
    }


def _sentence(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden" and where == "replay":
        return f"The key 'replay' in {source} has no meaning any more: every token is decoded; leave it out."
    if first["type"] == "extra_forbidden":
        inner: dict[str, type[BaseModel]] = {
            "sampling": SamplingSpec,
            "benchmarks": BenchmarkSpec,
            "allocate": Allocation,
        }
        model = inner.get(where.partition(".")[0], Spec) if "." in where else Spec
        return f"Unknown key {where!r} in {source}; valid are {', '.join(model.model_fields)}."
    if first["type"] == "missing":
        return f"The key {where!r} is missing in {source}."
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "value_error" else f", given {first['input']!r}"
    return f"Wrong value in {source}, {where or 'as a whole'}: {message[0].lower()}{message[1:]}{given}."

"""The sweep spec: a YAML file, read strictly, and the grid of settings that it stands for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.functional_validators import BeforeValidator, field_validator, model_validator

from kvatlas import benchmarks, models
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Sampling, Setting, canonical, reason
from kvatlas.models import ModelHandle
from kvatlas.policies import policies
from kvatlas.stats.run_data import LOSE_AT_MOST
from kvatlas.text import number, read_value

Value = int | float | str | bool
#: Limits of a sweep: problems of a benchmark, samples, settings, traces of all.
MAX_PROBLEMS, MAX_SAMPLES, MAX_SETTINGS, MAX_TRACES = 100_000, 10_000, 10_000, 100_000_000
#: Limits of a spec file: its characters, and its values with each alias counted as what it stands for.
MAX_CHARACTERS, MAX_VALUES = 100_000, 100_000
#: The validation context of a file, all of whose scalars are texts; data from Python has its types already.
_FILE = "file"


def _numeral(value: Any, info: ValidationInfo) -> Any:
    return number(value) if info.context == _FILE and isinstance(value, str) else value


Integer = Annotated[int, Field(strict=True), BeforeValidator(_numeral)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_numeral)]


def _parameter(policy_names: Sequence[str], name: str, value: Any) -> Any:
    """The value that a file spells for a parameter, by the type that the first policy with this parameter declares."""
    if isinstance(value, list):
        return [_parameter(policy_names, name, item) for item in value]
    owners = [owner for owner in map(policies.get, policy_names) if name in getattr(owner, "__dataclass_fields__", ())]
    return read_value(owners[0], name, value) if owners and isinstance(value, str) else value


class SamplingSpec(BaseModel):
    """The sampling of tokens; the defaults are the published ones (arXiv 2601.18383)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Number = Field(default=0.6, ge=0)
    top_k: Integer = Field(default=20, ge=0, lt=2**31)
    top_p: Number = Field(default=0.95, gt=0, le=1)
    max_new_tokens: Integer = Field(default=16_384, ge=1, lt=2**31)

    def sampling(self) -> Sampling:
        """The same as core data."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens)


class SettingSpec(BaseModel):
    """A policy with its fixed parameters; what these may be, the policy checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    policy: str

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context != _FILE or not isinstance(data, dict) or not isinstance(data.get("policy"), str):
            return data
        return {name: _parameter([data["policy"]], name, value) for name, value in data.items()}

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
        return models.find(**self.model_dump())


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
        return benchmarks.find(**self.model_dump())


class Allocation(BaseModel):
    """Which settings get which problems: all of them (`full`), or what the question still needs (`adaptive`).

    The question is which is the cheapest setting that loses at most `lose_at_most` points against the full cache.
    Problems come in `blocks`, in an order drawn from the seed; `token_budget` ends the sweep once the traces of a model
    hold that many output tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["full", "adaptive"] = "full"
    token_budget: Integer | None = Field(default=None, ge=1)
    blocks: Integer = Field(default=20, ge=2, le=100)


class Spec(BaseModel):
    """A sweep: every model on every benchmark under every setting.

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
    problems: Integer | None = Field(default=None, ge=1, le=MAX_PROBLEMS)
    samples: Integer = Field(default=5, ge=1, le=MAX_SAMPLES)
    seed: Integer = Field(default=0, ge=0, lt=2**63)
    sampling: SamplingSpec = SamplingSpec()
    baseline: list[SettingSpec] = [SettingSpec(policy="full")]
    settings: list[SettingSpec] = []
    axes: dict[str, list[Value]] = {}
    expected_output_tokens: Integer | None = Field(default=None, ge=1, lt=2**31)
    allocate: Allocation = Allocation()
    strict_budget: bool = False
    lose_at_most: Number = Field(default=LOSE_AT_MOST, gt=0, lt=100)

    @field_validator("allocate", "settings", "baseline", "models", "benchmarks", mode="before")
    @classmethod
    def _shorthands(cls, value: Any, info: ValidationInfo) -> Any:
        """The kind of allocation alone, one setting that is no list, models and benchmarks by their names alone."""
        if info.field_name == "allocate":
            return {"kind": value} if isinstance(value, str) else value
        if info.field_name in ("settings", "baseline"):
            return [value] if isinstance(value, dict) else value
        key = "model" if info.field_name == "models" else "name"
        entries = value if isinstance(value, list) else []
        return [{key: entry} if isinstance(entry, str) else entry for entry in entries] or value

    @field_validator("axes", mode="before")
    @classmethod
    def _typed_axes(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context != _FILE or not isinstance(value, dict):
            return value
        named = [entry.policy for key in ("settings", "baseline") for entry in info.data.get(key, ())]
        return {name: _parameter(named, name, values) for name, values in value.items()}

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
    def _sensible(self) -> Spec:
        """Refuse a spec without anything to run, with more than can be planned, or that cannot be adaptive."""
        settings = sum(math.prod(map(len, self._crossed(spec).values())) for spec in self.settings)
        cells = (settings + len(self.baseline)) * len(self.models) * len(self.benchmarks)
        traces = cells * self.samples * (self.problems or 1)
        adaptive = self.allocate.kind == "adaptive"
        for wrong, sentence in (
            (not cells, "neither settings nor baseline name a policy"),
            (self.axes and not self.settings, "axes need settings to vary"),
            (settings > MAX_SETTINGS, f"the axes make {settings:,} settings, expected at most {MAX_SETTINGS:,}"),
            (traces > MAX_TRACES, f"it asks for {traces:,} traces, expected at most {MAX_TRACES:,}"),
            (adaptive and settings < 2, "allocate: adaptive needs at least two settings besides the baselines"),
            (
                adaptive and all(entry.policy != "full" for entry in self.baseline),
                "allocate: adaptive needs the full cache as a baseline, {policy: full}",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
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


def recipes() -> dict[str, str]:
    """Return the texts of the specs that come with the package, by name."""
    paths = sorted(Path(str(files("kvatlas.sweeps"))).glob("*.yaml"))
    return {path.stem: path.read_text("utf-8") for path in paths}


def read_spec(path: Path, strict_budget: bool = False) -> Spec:
    """Read a spec file, `strict_budget` whatever it says of that; KvatlasError in one sentence for anything wrong."""
    try:
        with path.open(encoding="utf-8") as file:
            data = _load(file.read(MAX_CHARACTERS + 1))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise KvatlasError(f"The spec {str(path)!r} is not valid YAML{where}.") from error
    except (KvatlasError, OSError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no UTF-8.
        raise KvatlasError(f"The spec {str(path)!r} cannot be read ({reason(error).rstrip('.')}).") from error
    if not isinstance(data, dict):
        raise KvatlasError(f"The spec {str(path)!r} is no mapping; valid keys are {', '.join(Spec.model_fields)}.")
    spec = parse_spec(data, str(path), _FILE)
    return spec.model_copy(update={"strict_budget": True}) if strict_budget else spec


def parse_spec(data: dict[str, Any], source: str = "spec", context: str | None = None) -> Spec:
    """The spec in plain data; `source` is what an error sentence calls it, `context` that of the validators."""
    try:
        return Spec.model_validate(data, context=context)
    except ValidationError as error:
        raise KvatlasError(_sentence(error, source)) from error


def setting_spec(
    model: str,
    benchmarks: Sequence[str | Mapping[str, Any]],
    setting: Setting,
    *,
    temperature: float,
    max_new_tokens: int | None,
    model_options: Mapping[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """The spec, as data, of a sweep with one setting; new tokens are at most 16,384, or what the model has room for.

    `others` are further keys of a spec.
    """
    room = models.find(model, **model_options).positions or 16_384 + 4096
    return {
        "models": [{"model": model, **model_options}],
        "benchmarks": list(benchmarks),
        "sampling": {"temperature": temperature, "max_new_tokens": max_new_tokens or min(16_384, room // 4 * 3)},
        "baseline": [{"policy": setting.policy, **setting.values}],
        **others,
    }


class _Loader(yaml.SafeLoader):
    """YAML whose scalars stay the texts that stand there; only nothing (`null`, `~`) is None."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _load(text: str) -> Any:
    """The data of a spec file in texts.

    Raises yaml.YAMLError for what is no YAML, KvatlasError for a key that stands twice and for what is too long
    or, with its aliases written out, too much.
    """
    if len(text) > MAX_CHARACTERS:
        raise KvatlasError(f"It is longer than {MAX_CHARACTERS:,} characters.")
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _count(root, {})
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """The number of values of a node with its aliases written out; `counts` are those of nodes seen before."""
    if id(node) not in counts:
        # An alias of a node within itself has no end.
        counts[id(node)] = MAX_VALUES + 1
        inner: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        if isinstance(node, yaml.MappingNode):
            keys: dict[str, yaml.Node] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if keys.setdefault(key.value, key) is not key:
                    raise KvatlasError(f"The key {key.value!r} stands twice, again in line {key.start_mark.line + 1}.")
            inner = [child for pair in node.value for child in pair]
        counts[id(node)] = 1 + sum(_count(child, counts) for child in inner)
    if counts[id(node)] > MAX_VALUES:
        raise KvatlasError(f"It stands for more than {MAX_VALUES:,} values with its aliases written out.")
    return counts[id(node)]


def _sentence(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        inner: dict[str, Any] = {"sampling": SamplingSpec, "benchmarks": BenchmarkSpec, "allocate": Allocation}
        model = inner.get(where.partition(".")[0], Spec) if "." in where else Spec
        return f"Unknown key {where!r} in {source}; expected {', '.join(model.model_fields)}."
    if first["type"] == "missing":
        return f"The key {where!r} is missing in {source}."
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "value_error" else f", given {first['input']!r}"
    return f"Wrong value in {source}, {where or 'as a whole'}: {message[0].lower()}{message[1:]}{given}."

"""The sweep spec: strict reading of a YAML file, and the grid of settings that it names."""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo
from pydantic.functional_validators import AfterValidator, BeforeValidator, field_validator, model_validator

from kvatlas import benchmarks, models
from kvatlas.benchmarks import Benchmark
from kvatlas.core import (
    LOSE_AT_MOST,
    MOST_LOOKS,
    KvatlasError,
    Sampling,
    Setting,
    python_number,
    reason,
    refuse_problem_file,
)
from kvatlas.models import ModelHandle
from kvatlas.policies import parameters, permit, policies, read_parameter, with_class
from kvatlas.policies.budget_rule import RULE_PARAMETERS
from kvatlas.results.manifest import MOST_FULL_SAMPLES
from kvatlas.results.records import MAX_SAMPLES
from kvatlas.text import closest_name, did_you_mean, margin_question, number, scalar

Value = Annotated[int | float | str | bool, BeforeValidator(python_number)]
#: Limits of a sweep.
MAX_PROBLEMS = 100_000
MAX_SETTINGS = 10_000
MAX_TRACES = 100_000_000
#: The most characters of a spec file.
MAX_CHARACTERS = 100_000
#: The most values of a spec file with aliases written out.
MAX_VALUES = 100_000
#: The policy of a setting that is a command of a server.
SERVED = "served"
#: Keys of a model, the reference or a setting that make the command of a server (`kvatlas.engines.command`).
SERVER_KEYS = ("serve_cmd", "options", "env", "files", "stop_cmd", "endpoint", "ready_path")
#: What else a served model and a served setting may name.
SERVED_MODEL_KEYS = (*SERVER_KEYS, "server_ready_timeout", "kv_bytes")
SERVED_SETTING_KEYS = (*SERVER_KEYS, "control", "kv_bytes")
#: The validation context of a file, whose scalars are all texts; data from Python is typed.
_FILE = "file"


def _numeral(value: Any, info: ValidationInfo) -> Any:
    return number(value) if info.context == _FILE and isinstance(value, str) else python_number(value)


Integer = Annotated[int, Field(strict=True), BeforeValidator(_numeral)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_numeral)]
#: True or false as settings have them: YAML's words, and no numbers.
Flag = Annotated[bool, Field(strict=True), BeforeValidator(scalar)]


def _typed_value(policy_names: Sequence[str], name: str, value: Any) -> Any:
    """Return the value of a parameter in a file, by the type that the first policy with this parameter declares."""
    if isinstance(value, list):
        return [_typed_value(policy_names, name, item) for item in value]
    if SERVED in policy_names:
        return _served_value(value)
    for policy in map(policies.get, policy_names):
        if isinstance(value, str) and name in [parameter.name for parameter in parameters(policy)]:
            return read_parameter(policy, name, value)
    return value


def _served_value(value: Any) -> Any:
    """Return the value of a server's parameter in a file: numbers, `true`, `false`, mappings as JSON, else texts.

    YAML's other words for true, as `on`, are values that servers know.
    """
    if isinstance(value, Mapping):
        return json.dumps({name: _served_value(inner) for name, inner in value.items()})
    if value in ("true", "false"):
        return value == "true"
    return number(value) if isinstance(value, str) else value


class SamplingSpec(BaseModel, extra="forbid", frozen=True):
    """The sampling of tokens; the defaults are the published ones (arXiv 2601.18383).

    `max_new_tokens` is by default three quarters of the model's positions, at most `MAX_NEW_TOKENS`; a plan sets it.
    """

    temperature: Number = Field(default=0.6, ge=0)
    top_k: Integer = Field(default=20, ge=0, lt=2**31)
    top_p: Number = Field(default=0.95, gt=0, le=1)
    max_new_tokens: Integer = Field(default=0, ge=1, lt=2**31)

    def sampling(self) -> Sampling:
        """Return the sampling as core data."""
        return Sampling(**self.model_dump())


class SettingSpec(BaseModel, extra="allow", frozen=True):
    """A policy with its fixed parameters, which the policy checks."""

    policy: Annotated[str, AfterValidator(with_class)]

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context != _FILE and isinstance(data, dict):
            return {name: python_number(value) for name, value in data.items()}
        if not isinstance(data, dict) or not isinstance(data.get("policy"), str):
            return data
        kept = SERVED_SETTING_KEYS if data["policy"] == SERVED else ()
        typed = {name: _typed_value([data["policy"]], name, value) for name, value in data.items() if name not in kept}
        return {**data, **typed}

    @property
    def fixed_values(self) -> dict[str, Any]:
        """The fixed parameters, which axes do not change; None leaves a parameter to the policy."""
        return self.model_extra or {}

    def setting(self, /, **axes: Value) -> Setting:
        """Return the setting at one point of the grid."""
        values = {name: value for name, value in {**axes, **self.fixed_values}.items() if value is not None}
        return Setting.from_parameters(self.policy, **values)


class ModelSpec(BaseModel, extra="allow", frozen=True):
    """A model with options: `model` is its address, `name` its label in figures; other keys are `models.Options`.

    One with `serve_cmd` or `endpoint` is asked of a server, and need not name `model`; its keys are
    `SERVED_MODEL_KEYS`.
    """

    model: str
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, dict) and data.keys() & {"serve_cmd", "endpoint"}:
            expected = ("model", "name", *SERVED_MODEL_KEYS)
            unknown = [name for name in data if name not in expected]
            if unknown:
                guess = did_you_mean(unknown[0], SERVED_MODEL_KEYS)
                if unknown[0] in Spec.model_fields:
                    guess = f" It is a key of the spec, beside models: {unknown[0]}: ..."
                raise ValueError(f"a served model has no key {unknown[0]!r}; expected {', '.join(expected)}.{guess}")
            return {"model": "", **data}
        values = data.get("template_values") if isinstance(data, dict) else None
        if info.context != _FILE or not isinstance(values, dict):
            return data
        return {**data, "template_values": {name: scalar(value) for name, value in values.items()}}

    @property
    def is_served(self) -> bool:
        """True for a model that a server has."""
        return bool((self.model_extra or {}).keys() & {"serve_cmd", "endpoint"})

    def find(self) -> ModelHandle:
        """Return the model without loading weights."""
        return models.find(**self.model_dump())


class BenchmarkSpec(BaseModel, extra="forbid", frozen=True):
    """A benchmark with options: problem file, prompt format, column names, grader."""

    name: str
    file: str = ""
    prompt: str = ""
    columns: dict[str, str] = {}
    grader: str = ""

    def find(self) -> Benchmark:
        """Return the benchmark without reading problems."""
        return benchmarks.find(**self.model_dump())


class Spec(BaseModel, extra="forbid", frozen=True):
    """A sweep: every model on every benchmark under every setting.

    Models and benchmarks are texts (address or name) or mappings with options. `settings` are crossed with the `axes`
    for which they have no fixed value; `baseline` settings run once, outside the grid. `problems` limits each benchmark
    to its first problems. `expected_output_tokens` replaces the benchmark's typical length in estimates.
    `strict_budget` makes the budgets of all settings strict (docs/policies.md). A recommended setting may lose
    `lose_at_most` points against the full cache. `claim` says what the numbers speak of: `these_problems`,
    `problems_like_these`, or `auto`, which a plan resolves. `looks` are numbers of samples after which the run may be
    read. `full_samples` are those of the full cache, one to four times `samples`; left to the plan they are twice as
    many on GPUs. `controls` are policies of which nothing is claimed but that they lose; without the key `random` and
    `window` beside another policy. `measures` are numbers of each trace that the run stores (docs/api.md).

    Of served models (docs/engines.md): `reference` are keys of a server for the reference alone. `serve_params` is a
    file of `vllm bench sweep serve` in place of axes. `concurrency` questions are open at a time. `tests` are Holm's,
    or `in_order`, from gentle to harsh as the spec names them.
    """

    models: list[ModelSpec] = Field(min_length=1)
    benchmarks: list[BenchmarkSpec] = Field(min_length=1)
    problems: Integer | None = Field(default=None, ge=1, le=MAX_PROBLEMS)
    samples: Integer = Field(default=1, ge=1, le=MAX_SAMPLES)
    seed: Integer = Field(default=0, ge=0, lt=2**63)
    sampling: SamplingSpec = SamplingSpec()
    baseline: list[SettingSpec] = [SettingSpec(policy="full")]
    settings: list[SettingSpec] = []
    axes: dict[str, list[Value]] = {}
    expected_output_tokens: Integer | None = Field(default=None, ge=1, lt=2**31)
    strict_budget: Flag = False
    lose_at_most: Number = Field(default=LOSE_AT_MOST, gt=0, lt=100)
    claim: Literal["auto", "these_problems", "problems_like_these"] = "auto"
    looks: list[Integer] = Field(default=[], max_length=MOST_LOOKS)
    full_samples: Integer | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    controls: list[str] | None = None
    reference: dict[str, Any] = {}
    serve_params: str = ""
    concurrency: Integer = Field(default=32, ge=1, le=4096)
    tests: Literal["each", "in_order"] = "each"
    measures: list[str] = []

    @field_validator("settings", "baseline", "models", "benchmarks", mode="before")
    @classmethod
    def _shorthands(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept one setting without a list, and names of models and benchmarks."""
        if info.field_name in ("settings", "baseline"):
            is_one = isinstance(value, dict) or (isinstance(value, str) and info.field_name == "settings")
            return [value] if is_one else value
        key = "model" if info.field_name == "models" else "name"
        entries = value if isinstance(value, list) else []
        return [{key: str(entry)} if isinstance(entry, str | Path) else entry for entry in entries] or value

    @field_validator("axes", mode="before")
    @classmethod
    def _typed_axes(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context != _FILE or not isinstance(value, dict):
            return value
        entries = (*info.data.get("settings", ()), *info.data.get("baseline", ()))
        policy_names = [entry.policy for entry in entries]
        return {name: _typed_value(policy_names, name, values) for name, values in value.items()}

    @field_validator("models", "benchmarks", "axes")
    @classmethod
    def _no_repeats(cls, value: Any) -> Any:
        for name, values in value.items() if isinstance(value, dict) else [("", value)]:
            if not values:
                raise ValueError(f"{name} has no values")
            seen: list[Any] = []
            for entry in values:
                given = entry.model_dump(exclude_defaults=True) if isinstance(entry, BaseModel) else entry
                if given in seen:
                    repeated = next(iter(given.values())) if isinstance(given, dict) and len(given) == 1 else given
                    raise ValueError(f"{name} {repeated!r} is named twice; name it once".strip())
                seen.append(given)
        return value

    @model_validator(mode="after")
    def _no_misspelt_nulls(self) -> Spec:
        """Refuse null for a name that is neither an axis nor a parameter: it is left out before the policy checks."""
        for entry in (*self.settings, *self.baseline):
            nulls = [name for name, value in entry.fixed_values.items() if value is None and name not in self.axes]
            if not nulls:
                continue
            try:
                names = [item.name for item in parameters(policies.get(entry.policy))]
            except KvatlasError:
                # The policies of a run's spec may be unknown here, or files that may not be loaded.
                continue
            unknown = next((name for name in nulls if name not in names), None)
            if unknown is not None:
                guess = did_you_mean(unknown, [*names, *self.axes])
                raise ValueError(f"{unknown!r} is no parameter of the policy {entry.policy!r} and no axis{guess}")
        return self

    @model_validator(mode="after")
    def _sensible(self) -> Spec:
        """Refuse a spec without settings, beyond the limits, or with keys of servers in the wrong place."""
        settings = sum(math.prod(map(len, self.crossed(entry).values())) for entry in self.settings)
        cells = (settings + len(self.baseline)) * len(self.models) * len(self.benchmarks)
        traces = cells * self.samples * (self.problems or 1)
        greedy = not self.sampling.temperature
        these = self.claim == "these_problems"
        looks = self.looks or [self.samples]
        full_samples = self.full_samples or self.samples
        named = {entry.policy for entry in (*self.settings, *self.baseline)}
        policy_names = ", ".join(sorted(named))
        unknown = [name for name in self.controls or () if name not in named]
        guess = did_you_mean("".join(unknown[:1]), named)

        example = "{policy: served}" if self.is_served else "{policy: rkv, kv_budget: 512}"
        faults: dict[str, object] = {
            "neither settings nor baseline name a policy": not cells,
            f"axes need settings to vary, as settings: {example}": self.axes and not self.settings,
            f"the axes make {settings:,} settings, expected at most {MAX_SETTINGS:,}": settings > MAX_SETTINGS,
            f"it asks for {traces:,} traces, expected at most {MAX_TRACES:,}": traces > MAX_TRACES,
            f"at temperature 0 nothing is drawn, so {self.samples} samples would be copies; take one sample, or "
            "another temperature": greedy and self.samples > 1,
            "claim: these_problems needs a temperature above 0, since at 0 nothing is drawn": greedy and these,
            f"looks are rising numbers of samples, {looks} was given": looks != sorted(set(looks)) or looks[0] < 1,
            f"looks end at {looks[-1:]} samples, and the sweep has {self.samples}": self.samples > looks[-1],
            f"full_samples are one to {MOST_FULL_SAMPLES} times the {self.samples} samples of a setting, "
            f"{full_samples} was given": not self.samples <= full_samples <= MOST_FULL_SAMPLES * self.samples,
            "at temperature 0 nothing is drawn, so more samples of the full cache would be copies": (
                greedy and full_samples > 1
            ),
            f"controls: expected policies of the settings ({policy_names}), {', '.join(unknown)} was given.{guess}": (
                unknown
            ),
        }
        faults |= self._faults_of_servers()
        for sentence, is_wrong in faults.items():
            if is_wrong:
                raise ValueError(sentence)
        return self

    def _faults_of_servers(self) -> dict[str, object]:
        """Return sentences on keys of servers beside models that kvatlas decodes, and the other way round."""
        served = [entry.is_served for entry in self.models]
        is_served = any(served)
        policies_ = {entry.policy for entry in self.settings}
        own_keys = ("reference", "serve_params", "concurrency", "tests")
        # A run's own spec names all keys.
        keys = (*own_keys, "baseline")
        changed = [name for name in keys if getattr(self, name) != type(self).model_fields[name].default]
        without_server = [] if is_served else [name for name in own_keys if name in changed]
        unknown = [name for name in self.reference if name not in SERVED_SETTING_KEYS]
        ours = sorted(policies_ - {SERVED})

        return {
            "some models are served and some are not; make a run of each kind": is_served and not all(served),
            f"{', '.join(without_server)}: only for models with serve_cmd or endpoint": without_server,
            f"policy {SERVED} needs models with serve_cmd or endpoint": not is_served and SERVED in policies_,
            f"settings of served models are {{policy: {SERVED}}}; {', '.join(ours)} is a policy of kvatlas's "
            "own engine": is_served and ours,
            "served models have reference in place of baseline": is_served and "baseline" in changed,
            f"reference has no key {', '.join(unknown)}; expected {', '.join(SERVED_SETTING_KEYS)}": unknown,
            "serve_params takes the place of axes; name one of them": self.serve_params and self.axes,
        }

    @property
    def is_served(self) -> bool:
        """True if the models are asked of servers."""
        return self.models[0].is_served

    def cells(self) -> list[tuple[Setting, bool]]:
        """Return all settings, the grid first, each with True if it is a baseline."""
        cells = []
        for entry in self.settings:
            cells += [(entry.setting(**point), False) for point in self.points(entry)]
        return [*cells, *((entry.setting(), True) for entry in self.baseline)]

    @property
    def notes(self) -> list[str]:
        """Values of the spec that its author may have meant otherwise, as sentences."""
        found = []
        if question := margin_question(self.lose_at_most):
            found.append(question)
        ratios = [*self.axes.get("ratio", ()), *(entry.fixed_values.get("ratio") for entry in self.settings)]
        if 1 in ratios:
            found.append("ratio is the share that a compression keeps: at 1 nothing is evicted.")
        for entry in self.settings:
            fixed = [name for name in self.axes if name in entry.fixed_values]
            if fixed:
                found.append(f"A setting of {entry.policy} fixes {', '.join(fixed)}, so that no axis varies it.")
        if self.looks and self.samples < self.looks[0]:
            found.append(f"looks begin at {self.looks[0]} samples, and the sweep has {self.samples}: raise samples.")
        return found

    def crossed(self, entry: SettingSpec) -> dict[str, list[Value]]:
        """Return the axes that a setting is crossed with."""
        return {name: values for name, values in self.axes.items() if name not in entry.fixed_values}

    def points(self, entry: SettingSpec) -> Iterator[dict[str, Value]]:
        """Yield the values of the axes at each point of a setting's grid."""
        axes = self.crossed(entry)
        for values in itertools.product(*axes.values()):
            yield dict(zip(axes, values, strict=True))


def recipes() -> dict[str, str]:
    """Return the texts of the specs that come with the package, by name."""
    paths = sorted(Path(str(files("kvatlas.sweeps"))).glob("*.yaml"))
    return {path.stem: path.read_text("utf-8") for path in paths}


def read_spec(path: Path, changes: Mapping[str, str] | None = None) -> Spec:
    """Read a spec file or a recipe by its name; KvatlasError for every fault.

    `changes` are values in YAML by their keys, those of inner mappings with dots: `{"sampling.temperature": "0"}`.
    """
    try:
        # A folder of that name hides no recipe.
        if not path.is_file() and str(path) in recipes():
            data = _load_yaml(recipes()[str(path)])
        else:
            with path.open(encoding="utf-8") as file:
                data = _load_yaml(file.read(MAX_CHARACTERS + 1))
    except FileNotFoundError as error:
        guess = did_you_mean(str(path).removesuffix(".yaml"), recipes())
        raise KvatlasError(
            f"There is no spec {str(path)!r}, and no recipe of that name; recipes are {', '.join(recipes())}.{guess} "
            "`kvatlas plan --suggest MODEL PROBLEMS` proposes a spec."
        ) from error
    except (yaml.YAMLError, KvatlasError, OSError, ValueError, RecursionError) as error:
        # Bytes that are not UTF-8 raise ValueError.
        _refuse_other_file(path)
        fault = f"cannot be read ({reason(error).rstrip('.')})"
        if isinstance(error, yaml.YAMLError):
            mark = getattr(error, "problem_mark", None)
            where = f" in line {mark.line + 1}" if mark else ""
            why = getattr(error, "problem", None) or reason(error)
            way_out = "; indent with spaces" if r"'\t'" in why else ""
            begun = getattr(error, "context_mark", None)
            if begun and "parsing a flow" in getattr(error, "context", ""):
                way_out = f"; the bracket of line {begun.line + 1} is not closed before"
            fault = f"is not valid YAML{where} ({why}{way_out})"
        raise KvatlasError(f"The spec {str(path)!r} {fault}.") from error
    if not isinstance(data, dict) or not data.keys() & Spec.model_fields.keys():
        # A problem of JSON lines is a mapping, too.
        _refuse_other_file(path)
    if not isinstance(data, dict):
        raise KvatlasError(f"The spec {str(path)!r}: expected a mapping with the keys {', '.join(Spec.model_fields)}.")

    for key, text in (changes or {}).items():
        _set_key(data, key, text)
    # A user who names a spec also names the files of its policies and benchmarks.
    permit(*named_classes(data))
    spec = parse_spec(data, str(path), _FILE)
    # Specs of grids that were added up do have such axes: there each setting is a cell.
    idle = set(spec.axes).intersection(*(setting.fixed_values for setting in spec.settings)) if spec.settings else set()
    if idle:
        raise KvatlasError(
            f"Wrong value in {path}: axes {', '.join(sorted(idle))}: each setting fixes a value of its own, so that "
            "nothing varies; take it out of axes, or of the settings."
        )
    return spec


def _refuse_other_file(path: Path) -> None:
    way_out = f"`kvatlas run MODEL {path}` runs it, `kvatlas plan --suggest MODEL {path}` proposes a spec for it."
    refuse_problem_file(path, "a spec", way_out)
    if path.suffix == ".toml":
        raise KvatlasError(f"The spec {str(path)!r} is TOML; expected YAML or JSON, as models: [embedded:tiny-llama].")
    if path.is_dir():
        raise KvatlasError(
            f"{str(path)!r} is a folder; expected a spec or a recipe. `kvatlas describe {path}` reads a run."
        )


def named_classes(data: Mapping[str, Any]) -> list[str]:
    """Return the policies, benchmarks and measures that a spec names, as data that is not yet checked."""
    names: list[Any] = []
    for key, name_key in (("settings", "policy"), ("baseline", "policy"), ("benchmarks", "name"), ("measures", "")):
        value = data.get(key) or []
        entries = value if isinstance(value, list | tuple) else [value]
        names += [entry.get(name_key) if isinstance(entry, Mapping) else entry for entry in entries]
    return [str(name) for name in names if isinstance(name, str | Path)]


def _set_key(data: dict[str, Any], key: str, text: str) -> None:
    """Set the value of a key, with dots for inner mappings, to a text in YAML."""
    *outer, last = key.split(".")
    target: Any = data
    for name in outer:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise KvatlasError(f"--set {key}={text}: {name} is {target!r} in the spec, and no mapping.")

    try:
        target[last] = _load_yaml(text)
    except (yaml.YAMLError, KvatlasError) as error:
        raise KvatlasError(f"--set {key}={text}: expected a value in YAML ({reason(error)}).") from error


def parse_spec(data: dict[str, Any], source: str = "spec", context: str | None = None) -> Spec:
    """Return the spec in plain data; `source` names it in error sentences, `context` is that of the validators.

    The data may be that of a run, so files of its policies and benchmarks are not permitted by this.
    """
    try:
        return Spec.model_validate(data, context=context)
    except ValidationError as error:
        raise KvatlasError(_sentence_on(error, source)) from error


def setting_spec(
    model: str,
    benchmarks: Sequence[str | Mapping[str, Any]],
    setting: Setting,
    *,
    sampling: Mapping[str, Any],
    model_options: Mapping[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """Return the spec, as data, of a sweep with one setting; `others` are further keys of a spec.

    Values of `sampling` that are None are the defaults. The user named the policy and the benchmarks, so their files
    are permitted.
    """
    data = {
        "models": [{"model": model, **model_options}],
        "benchmarks": list(benchmarks),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "baseline": [{"policy": setting.policy, **setting.values}],
        **others,
    }
    permit(*named_classes(data))
    return data


class _Loader(yaml.SafeLoader):
    """A loader of YAML whose scalars stay texts, except null."""


_Loader.yaml_implicit_resolvers = {}
for _first, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _null_and_merge = [(tag, pattern) for tag, pattern in _resolvers if tag.endswith((":null", ":merge"))]
    _Loader.yaml_implicit_resolvers[_first] = _null_and_merge


def _load_yaml(text: str) -> Any:
    """Return the data of a spec file in texts.

    Raises yaml.YAMLError for text that is not YAML, KvatlasError for a repeated key and for a file beyond the limits.
    """
    if len(text) > MAX_CHARACTERS:
        raise KvatlasError(f"It is longer than {MAX_CHARACTERS:,} characters.")
    root = yaml.compose(text, _Loader)
    if root is not None:
        _count_values(root, {})
    return yaml.load(text, _Loader)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values of a node with its aliases written out; `counts` holds those of earlier nodes.

    Raises KvatlasError for a repeated key, and for more than `MAX_VALUES` values.
    """
    if id(node) not in counts:
        # An alias of a node within itself never ends.
        counts[id(node)] = MAX_VALUES + 1

        children: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        if isinstance(node, yaml.MappingNode):
            keys: dict[str, yaml.Node] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and keys.setdefault(key.value, key) is not key:
                    raise KvatlasError(f"The key {key.value!r} is repeated in line {key.start_mark.line + 1}.")
            children = list(itertools.chain(*node.value))
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)

    if counts[id(node)] > MAX_VALUES:
        raise KvatlasError(f"It has more than {MAX_VALUES:,} values with its aliases written out.")
    return counts[id(node)]


@cache
def _fault_words() -> dict[str, dict[str, str]]:
    """Return examples, other keys, expected values and remarks of `spec_faults.toml`."""
    words = tomllib.loads((files("kvatlas.sweeps") / "spec_faults.toml").read_text("utf-8"))
    for key in SERVED_MODEL_KEYS:
        words["instead"][key] = f"{key!r} of a model (as models: [{{name: NAME, {key}: ...}}])"
    return words


def _sentence_on(error: ValidationError, source: str) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return _unknown_key(where, source)
    if first["type"] == "missing":
        unknown = [str(other["loc"][-1]) for other in error.errors() if other["type"] == "extra_forbidden"]
        # The keys of the entry of a list that lacks one.
        given_keys = list(map(str, first["input"])) if "." in where else []
        return _missing_key(where, source, given_keys, unknown)

    words = _fault_words()
    message = first["msg"].removeprefix("Value error, ")
    given = ""
    if first["type"] != "value_error":
        given = f", given {first['input']!r}"
        if where in words["remarks"]:
            given += f"; {words['remarks'][where]}"
    if first["type"] in words["expected"]:
        message = f"expected {words['expected'][first['type']]}".format(**first.get("ctx", {}))
        example = _example(where.partition(".")[0], first["type"], str(first["input"]))
        message += f", as {example}" if example else ""
    if first["type"] == "literal_error":
        guess = did_you_mean(str(first["input"]), re.findall(r"'(\w+)'", first["ctx"]["expected"]))
        given += f".{guess}" if guess else ""
    sentence = f"Wrong value in {source}{', ' if where else ''}{where}: {message[0].lower()}{message[1:]}{given}"
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def _unknown_key(where: str, source: str) -> str:
    """Return a sentence on an unknown key, with the key that was meant if one is near."""
    outer, _, key = where.rpartition(".")
    parts: dict[str, type[BaseModel]] = {"sampling": SamplingSpec, "benchmarks": BenchmarkSpec}
    names = list(parts.get(where.partition(".")[0], Spec).model_fields)
    instead = _fault_words()["instead"]
    other_key = closest_name(where, instead)
    guess = did_you_mean(key, names)
    if where.partition(".")[0] == "allocate":
        guess = " Every setting gets all problems; declare looks to read a run early."
    if where in RULE_PARAMETERS:
        guess = f" It is a parameter of policies: axes.{where} in --set, a key of settings or of axes in a spec."
    elif outer and key in Spec.model_fields:
        guess = f" Did you mean {key!r} at the top of the spec?"
    elif other_key == where or (other_key and not guess):
        guess = f" Did you mean {instead[other_key]}?"
    return f"Unknown key {where!r} in {source}; expected {', '.join(names)}.{guess}"


def _missing_key(where: str, source: str, given: Sequence[str], unknown: Sequence[str]) -> str:
    """Return a sentence on a key that a spec, or an entry with the `given` keys, lacks, beside `unknown` keys."""
    if where.startswith("models."):
        for word in given:
            close = get_close_matches(word, ("serve_cmd", "endpoint"), n=1)
            if close:
                return f"Unknown key {word!r} of a model in {source}. Did you mean {close[0]!r}?"
    misplaced = [word for word in unknown if word in SERVED_MODEL_KEYS]
    if misplaced:
        return f"Wrong key {misplaced[0]!r} in {source}: expected {_fault_words()['instead'][misplaced[0]]}."

    instead = ""
    near = get_close_matches(where, unknown, n=1)
    if given:
        instead = f", which has {', '.join(given)} there"
        if re.match(r"settings[.][1-9]", where):
            instead += " with a dash of its own; beside the policy before it, it takes none"
    elif near:
        instead = f"; there is {near[0]!r}, which is no key"
    name = where.rpartition(".")[2]
    examples = _fault_words()["examples"]
    example = f"; write it as {name}: {examples[name]}" if name in examples else ""
    return f"The key {where!r} is missing in {source}{instead}{example}."


def _example(field: str, kind: str, given: str) -> str:
    """Return an example of the list or the mapping that a field of the spec has in place of a value, or ""."""
    if kind == "list_type":
        return _fault_words()["lists"].get(field, f"[{given}]")
    if kind not in ("model_type", "dict_type"):
        return ""
    if given == SERVED:
        return f"{{policy: {SERVED}}}"
    return f"{{endpoint: {given}}}" if "://" in given else _fault_words()["examples"].get(field, "")

"""Policies, which decide the tokens that stay: one file per method, found by name; presets are data.

The author of a method reads `cache_view`, `contract` and `parameter_types`. Others read `budget_rule` and `precision`,
the parts that any policy takes, and `selection`, from scores to the slots that stay.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvatlas.class_files import absolute_name, class_file, load_named, permit
from kvatlas.columns import CELL_COLUMNS
from kvatlas.core import BITS, KvatlasError, Setting, reason, refusal
from kvatlas.core.settings import CAP, CAP_COLUMN, UNNAMED
from kvatlas.policies.budget_rule import RULE_PARAMETERS, BudgetRule
from kvatlas.policies.cache_view import CacheView, Signal, Step, Tensor
from kvatlas.policies.contract import (
    AUTHORED,
    CompressingPolicy,
    Policy,
    own_parameters,
    parameters,
    read_parameter,
    usual_values,
)
from kvatlas.policies.parameter_types import (
    Scope,
    choice_param,
    flag_param,
    float_param,
    int_param,
    scope_param,
    value_fault,
)
from kvatlas.policies.precision import PRECISION_PARAMETERS
from kvatlas.policies.selection import select_tokens
from kvatlas.registry import Registry
from kvatlas.text import closest_name, did_you_mean

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle


@dataclass(frozen=True)
class Preset:
    """A method as published code ran it, if that differs from the method's own paper.

    values: fixed parameters of `policy`; the others are the user's.
    paper: the paper of that code.
    source: the files of that code, in a repository at a commit.
    says: the behaviour of that code.
    """

    policy: str
    values: Mapping[str, Any]
    paper: str
    source: str
    says: str

    @property
    def summary(self) -> str:
        return f"{self.policy} with {self.fixed}"

    @property
    def fixed(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.values.items())


#: By name, METHOD@PAPER, which stands wherever a policy does.
PRESETS: Mapping[str, Preset] = {
    name: Preset(**entry)
    for name, entry in json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8")).items()
}


#: Methods of papers that are settings of a policy here, by their names in small letters without marks.
OTHER_NAMES: dict[str, tuple[str, str]] = {
    "streamingllm": ("StreamingLLM", "streaming"),
    "heavyhitter": ("Heavy Hitter Oracle", "h2o"),
}


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_names(value: object) -> bool:
    names = value if isinstance(value, tuple) else (None,)
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def _is_signals(value: object) -> bool:
    return isinstance(value, set | frozenset) and all(isinstance(signal, Signal) for signal in value)


def _is_rule(value: object) -> bool:
    return isinstance(value, Mapping) and {*value} <= {*RULE_PARAMETERS}


#: Attributes of a class of policies with the test of their values, and what to expect.
_ATTRIBUTES: dict[str, tuple[Callable[[object], bool], str]] = {
    "version": (_is_length, "an integer >= 0"),
    "scope": (lambda value: isinstance(value, Scope), f"a kvatlas.policies.Scope: {', '.join(Scope.__members__)}"),
    "observes": (_is_signals, f"a set of kvatlas.policies.Signal: {', '.join(Signal.__members__)}"),
    "queries": (_is_length, "an integer >= 0"),
    "columns": (_is_names, "a tuple of different texts"),
    "random": (lambda value: isinstance(value, bool), "true or false"),
    "published": (lambda value: isinstance(value, Mapping), "texts by names of parameters"),
    "unnamed": (lambda value: isinstance(value, Mapping), "values by names of parameters"),
    "rule_defaults": (_is_rule, f"values by names of {', '.join(RULE_PARAMETERS)}"),
    "paper": (lambda value: isinstance(value, str), "a text"),
}
#: Attributes whose values are members of an enumeration.
_MEMBERS: dict[str, type[Scope] | type[Signal]] = {"scope": Scope, "observes": Signal}
#: What `kvatlas.run` takes beside parameters of policies, and no column has as its name.
_OF_RUN = {"out", "replace", "allow_code", "seed", "temperature", "max_new_tokens"}
_OF_RUN |= {"model_options", "workers", "batch_size"}
#: Attributes that are methods or properties.
_COMPUTED = (*AUTHORED, "from_setting", "setting", "storage", "observer")


def _plugin_fault(name: str, value: object) -> str:
    """Return why a plug-in's object cannot be a policy; empty if it can."""
    if not (isinstance(value, type) and issubclass(value, Policy)):
        return f"it is {value!r}; expected subclasses of kvatlas.policies.CompressingPolicy"
    own_name = getattr(value, "name", None)
    if not (isinstance(own_name, str) and own_name):
        return f"its name is {own_name!r}; expected a text in the class, as in name = 'mine'"
    if own_name != name:
        return f"its name is {own_name!r}; expected that of its entry point, {name!r}"
    if not isinstance(getattr(value, "summary", None), str):
        return "it has no summary; expected a text"
    shared = {*RULE_PARAMETERS, *PRECISION_PARAMETERS, CAP, "budget", "precision", "preset", "policy"}
    taken = shared & {*vars(value), *vars(value).get("__annotations__", ())}
    if taken:
        return f"its {min(taken)} is a part of every policy; expected another name, or a default in rule_defaults"
    return _attribute_fault(value) or _method_fault(value) or _parameter_fault(value)


def _attribute_fault(policy: type[Policy]) -> str:
    """Return which attribute of a plug-in's class has a wrong value; empty if none has."""
    for attribute, (accepts, expected) in _ATTRIBUTES.items():
        found = inspect.getattr_static(policy, attribute)
        is_value = attribute in _MEMBERS or not hasattr(found, "__get__")
        if is_value and not accepts(found):
            way_out = _members_meant(_MEMBERS.get(attribute), found)
            if attribute == "columns" and isinstance(found, str):
                way_out = f"; write columns = ({found!r},)"
            return f"its {attribute} is {found!r}; expected {expected}{way_out}"
    for attribute in _COMPUTED:
        found = inspect.getattr_static(policy, attribute, None)
        if hasattr(policy, attribute) and not hasattr(found, "__get__"):
            return f"its {attribute} is {found!r}; expected a method or a property"
    return ""


def _method_fault(policy: type[Policy]) -> str:
    """Return which method of a plug-in's class is missing, misspelt or takes other arguments; empty if none is."""
    methods = [name for name, member in vars(policy).items() if callable(member) and not name.startswith("_")]
    for name in ("score", "observe"):
        meant = get_close_matches(name, [one.lower() for one in methods], n=1, cutoff=0.8)
        is_needed = name == "score" or policy.observes
        if is_needed and getattr(policy, name) is getattr(Policy, name) and meant:
            written = next(one for one in methods if one.lower() == meant[0])
            return f"it has {written}, and no {name}, which was perhaps meant"
    if not policy.compresses and policy.score is not Policy.score:
        return f"its base is Policy, which never compresses; expected class {policy.__name__}(CompressingPolicy)"
    if policy.compresses and policy.score is Policy.score:
        return "it has no score; expected def score(self, cached), which returns a number for each cached token"

    watched = policy.observes & {Signal.HIDDEN, Signal.ATTENTION}
    if policy.observe is not Policy.observe and not policy.observes:
        return (
            "it has observe, and observes no signal; expected those that it reads: observes = "
            "frozenset({Signal.ATTENTION}) for step.attention, Signal.HIDDEN for step.hidden"
        )
    if policy.observe is Policy.observe and policy.columns and watched:
        return f"it has the columns {policy.columns}, and no observe; expected def observe(self, step), to fill them"

    for name in AUTHORED:
        method = getattr(policy, name)
        arguments = inspect.signature(getattr(CompressingPolicy, name)).parameters
        try:
            # A class method has its class.
            inspect.signature(method).bind(*list(arguments)[inspect.ismethod(method) :])
        except TypeError as error:
            found = "a property" if isinstance(method, property) else reason(error)
            return f"its {name}: {found}; expected def {name}({', '.join(arguments)})"
    return ""


def _parameter_fault(policy: type[Policy]) -> str:
    """Return what is wrong with the parameters of a plug-in's class; empty if nothing is."""
    if "precision" not in inspect.signature(policy.__init__).parameters:
        return "it has an __init__ of its own; expected none, and @dataclass(frozen=True) before the class"
    if "__dataclass_fields__" not in vars(policy):
        typed = [name for name, kind in inspect.get_annotations(policy).items() if "ClassVar" not in str(kind)]
        ours = inspect.get_annotations(Policy)
        if undecorated := [name for name in typed if name not in ours]:
            name = undecorated[0]
            return f"its {name} is no parameter before the class is decorated; write @dataclass(frozen=True) above it"
    parameters_of_class = own_parameters(policy)
    columns = {"model", "benchmark", "baseline", CAP_COLUMN, *(column.key for column in CELL_COLUMNS)}
    columns |= {column.name for column in CELL_COLUMNS}
    for item in parameters_of_class:
        if item.name in inspect.get_annotations(Policy):
            return f"its {item.name} has a type, and would be a parameter; expected {item.name} = ..., without a type"
        if item.name in columns:
            return f"its {item.name} is a column of tables; expected another name"
        if item.name in _OF_RUN:
            return f"its {item.name} is an argument of kvatlas.run; expected another name"
        default = item.default if item.default_factory is MISSING else item.default_factory()
        fault = "" if default is MISSING else value_fault(item, default)
        if fault:
            return f"the default of its {fault}; a constant stands above the class"
    is_fixed = "queries" not in [item.name for item in parameters_of_class]
    if is_fixed and (policy.queries > 0) != (Signal.QUERIES in policy.observes):
        return (
            f"its queries is {policy.queries}, and it observes {sorted(map(str, policy.observes))}; expected both, as "
            "in observes = frozenset({Signal.QUERIES}) and queries = 8, or none"
        )
    return ""


def _members_meant(kind: type[Scope] | type[Signal] | None, value: object) -> str:
    """Return, as a clause, the members of an enumeration that a value spells; empty for what spells none."""
    texts = value if isinstance(value, set | frozenset | tuple | list) else [value]
    words = [re.sub(r"^per[ _-]", "", str(text)) for text in texts]
    names = sorted(closest_name(word, kind.__members__) for word in words) if kind else []
    if kind is None or not all(names):
        return ""
    members = ", ".join(f"{kind.__name__}.{name}" for name in names)
    return f"; write {members}" if kind is Scope else f"; write frozenset({{{members}}})"


class Policies(Registry[type[Policy]]):
    """Policies by name; METHOD@PAPER is a preset of a policy, FILE.py:CLASS a class in a file."""

    def get(self, name: str) -> type[Policy]:
        if class_file(name) is not None:
            # The folder of the process may have changed since another file of this name was loaded.
            return _class_in_file(absolute_name(name))
        if "@" in name and name not in PRESETS:
            raise KvatlasError(f"Unknown preset {name!r}; expected: {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}")
        if name in PRESETS or name in self.names():
            return super().get(PRESETS[name].policy if name in PRESETS else name)

        # Papers write R-KV and Streaming-LLM.
        plain = name.lower().replace("-", "").replace("_", "")
        here = {policy.replace("-", "").replace("_", ""): ("it", policy) for policy in self.names()} | OTHER_NAMES
        if plain in here:
            method, policy = here[plain]
            raise KvatlasError(f"Unknown policy {name!r}; {method} is here {policy!r}.")
        if plain in ("serve", "server", "served"):
            raise KvatlasError(
                f"{name!r} is no policy of kvatlas's own engine. {{policy: served}} is a setting of a server, beside "
                "serve_cmd or endpoint: it is a command of its own, with nothing to decode or to export here."
            )
        file = re.split("[.:]", name)[0] + ".py"
        if Path(file).is_file():
            raise KvatlasError(f"Unknown policy {name!r}; a policy of a file is FILE.py or FILE.py:CLASS, as {file}.")
        return super().get(name)


def _is_policy(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Policy)


def names_policy(name: str) -> bool:
    """Return whether a name stands for a class of policies in a permitted file, which is run, right or wrong."""
    try:
        return class_file(name) is not None and _is_policy(load_named(name, "policy", _is_policy)[0])
    except KvatlasError:
        return False


@cache
def _class_in_file(name: str) -> type[Policy]:
    """Return the class of a policy in a permitted file, which is run once; KvatlasError if it is not a policy."""
    policy, _ = load_named(name, "policy", _is_policy)
    fault = _plugin_fault(getattr(policy, "name", ""), policy)
    if fault:
        raise KvatlasError(f"The policy {name} cannot be used ({fault}).")
    return cast(type[Policy], policy)


def with_class(name: str) -> str:
    """Return a policy FILE.py as FILE.py:CLASS, which needs the permission for the file; other names unchanged."""
    return f"{name}:{policies.get(name).__name__}" if name.endswith(".py") else name


def register(policy: type[Policy]) -> type[Policy]:
    """Make a policy known by its `name` in this process and its workers; also a decorator.

    Workers import the class by its module, so a class of a notebook needs `workers=1`. Raises KvatlasError for a class
    that is not a policy, and for a name that is taken.
    """
    policies.add(getattr(policy, "name", str(policy)), policy)
    return policy


#: The addresses of our policies, MODULE:CLASS, by name; a class is imported when it is used.
_OURS = {
    "full": "kvatlas.policies.contract:Full",
    "window": "kvatlas.policies.window:Window",
    "random": "kvatlas.policies.random:Random",
    "dynts": "kvatlas.policies.dynts:DynTS",
    "dynts-random": "kvatlas.policies.dynts:DynTSRandom",
    "dynts-bottom": "kvatlas.policies.dynts:DynTSBottom",
    "dynts-noprompt": "kvatlas.policies.dynts:DynTSNoPrompt",
    "streaming": "kvatlas.policies.streaming:Streaming",
    "sepllm": "kvatlas.policies.sepllm:SepLLM",
    "h2o": "kvatlas.policies.h2o:H2O",
    "snapkv": "kvatlas.policies.snapkv:SnapKV",
    "rkv": "kvatlas.policies.rkv:RKV",
    "tova": "kvatlas.policies.tova:TOVA",
    "keydiff": "kvatlas.policies.keydiff:KeyDiff",
    "knorm": "kvatlas.policies.knorm:KNorm",
    "lagkv": "kvatlas.policies.lagkv:LagKV",
    "lazyeviction": "kvatlas.policies.lazyeviction:LazyEviction",
    "vase": "kvatlas.policies.vase:VaSE",
    "triattention": "kvatlas.policies.triattention:TriAttention",
    "expected_attention": "kvatlas.policies.expected_attention:ExpectedAttention",
    "caote": "kvatlas.policies.caote:CAOTE",
    "dropkv": "kvatlas.policies.caote:DropKV",
    "learned": "kvatlas.policies.learned:Learned",
}
policies = Policies("policy", "kvatlas.policies", _OURS, _plugin_fault)


def from_setting(setting: Setting) -> Policy:
    """Return the policy of a setting. Raises KvatlasError for wrong parameters, and other values than a preset's."""
    setting = replace(setting, policy=with_class(setting.policy))
    kind = policies.get(setting.policy)
    preset = PRESETS.get(setting.policy)
    if preset is None:
        with refusal(f"The policy {setting.policy!r} cannot be made"):
            return kind.from_setting(setting, setting.policy if class_file(setting.policy) is not None else "")

    for name, value in setting.values.items():
        if name in preset.values and value != preset.values[name]:
            raise KvatlasError(
                f"The preset {setting.policy!r} fixes {name} = {preset.values[name]}, {value!r} was asked for; leave "
                f"it out, or take the policy {preset.policy!r}."
            )
    values = {**setting.values, **preset.values}
    return kind.from_setting(Setting.from_parameters(preset.policy, **values), setting.policy)


def fit_policy(policy: Policy, model: "ModelHandle", prompt: int | None = None, where: str = "") -> Policy:
    """Return the policy for a model, which it suits. Reads no weights.

    Raises KvatlasError, with the setting and the model, if it cannot work there, or on prompts of `prompt` tokens,
    which are described by `where`.
    """
    try:
        policy.precision.check(model)
        if policy.cap is not None and not model.closing_tokens:
            raise KvatlasError(
                f"thinking_tokens is {policy.cap}, and the model has no think tags, so that no thinking can be ended; "
                "leave it out, or name the text that ends its thinking with think_close."
            )
        policy.check(model)
        bound = policy.bind(model)
        if prompt is not None and isinstance(bound, CompressingPolicy):
            bound.check_prompt(prompt, where)
    except KvatlasError as error:
        raise KvatlasError(f"The setting {policy.setting} does not fit the model {model.name!r}: {error}") from error
    return bound


def all_values(setting: Setting) -> dict[str, Any]:
    """Return the parameters of a setting, with the usual values of those that it does not name.

    Of policies that are not known, and of a file, which is not run, those are the values that all policies share.
    """
    usual: Mapping[str, Any] = UNNAMED
    if "kv_budget" not in setting.values:
        usual = {name: UNNAMED[name] for name in ("kv_bits", CAP)}
    if class_file(setting.policy) is None:
        with suppress(KvatlasError):
            usual = usual_values(policies.get(setting.policy))

    values = {**usual, **setting.values}
    # Equal bits of keys and values are named as one.
    for name in BITS:
        if name in values:
            values[name] = values[name] or values["kv_bits"]
    return values


def of_engine(setting: Setting) -> Policy:
    """Return the policy of a run's setting for another engine, which has none of a file: such a file is not run."""
    if class_file(setting.policy) is not None:
        raise KvatlasError(f"No other engine has the policy {setting.policy!r}, which is code of a file.")
    return from_setting(setting)


def describe_policy(name: str) -> dict[str, Any]:
    """Return a policy or a preset as plain data; `published` are the values of parameters in its paper."""
    policy = policies.get(name)
    preset = PRESETS.get(name)
    values = {item.name: "required" if item.default is MISSING else item.default for item in parameters(policy)}
    fixed = dict(preset.values) if preset else {}
    return {
        "name": name,
        "summary": preset.summary if preset else policy.summary,
        "paper": f"as run for {preset.paper}" if preset else policy.paper,
        "scope": str(fixed.get("scope", policy.scope)),
        "observes": sorted(signal.value for signal in policy.observes),
        "parameters": values | fixed,
        "published": {} if preset else dict(policy.published),
        "preset": {"policy": preset.policy, "values": fixed, "source": preset.source} if preset else None,
        "description": f"{preset.says}\n\nSource: {preset.source}." if preset else inspect.getdoc(policy),
    }


#: What authors of policies and other rooms take from the files of this one.
__all__ = [
    "BudgetRule",
    "CacheView",
    "CompressingPolicy",
    "Policy",
    "Scope",
    "Signal",
    "Step",
    "Tensor",
    "choice_param",
    "flag_param",
    "float_param",
    "int_param",
    "parameters",
    "permit",
    "read_parameter",
    "scope_param",
    "select_tokens",
]

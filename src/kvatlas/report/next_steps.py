"""Next steps after a run: changed specs to copy, from what is proven and from the problems that are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Claim, KvatlasError
from kvatlas.stats.choice import Choice
from kvatlas.stats.run_data import setting_words
from kvatlas.text import margin_text, model_name

if TYPE_CHECKING:
    from kvatlas.report.result import Result

#: The share of the KV budget by which the next one is larger, and the tokens to whose multiples it is rounded.
_LARGER = 1.25
_STEP = 16
#: The most problems of a benchmark, and samples of a problem, that a next step asks for.
_MOST_PROBLEMS = 2000
_MOST_SAMPLES = 64
#: The highest ratio that leaves something to choose.
_HIGHEST_RATIO = 0.9

Json = dict[str, Any]


@dataclass(frozen=True)
class NextStep:
    """A step with its `reason` in a sentence, the changed `spec` as YAML, and the `command` that runs it.

    The name is that of the spec's file.
    """

    name: str
    title: str
    reason: str
    spec: str
    command: str


def next_steps(result: Result) -> list[NextStep]:
    """Return the next steps after a run that proved no setting: more traces, a larger budget, higher ratios.

    There are none of several sources, of runs that were not made by a spec, and of traces that cannot show a
    difference.
    """
    from kvatlas.sweeps.spec import parse_spec

    if len(result.sources) != 1 or not result.opened_runs:
        return []
    run = result.opened_runs[0]
    spec = dict(run.manifest.spec)
    if isinstance(spec.get("settings"), Mapping):
        # A single one needs no list.
        spec["settings"] = [spec["settings"]]
    try:
        parse_spec(spec)
    except KvatlasError:
        return []

    unproven = [choice for choice in result.choices if choice.losses and choice.vacuous is None and not choice.shown]
    steps: dict[str, NextStep] = {}
    for choice in unproven:
        spec_changes = [*_more_traces(choice), *_higher_ratio(choice, spec), *_larger_budget(spec)]
        for name, title, reason, changes in spec_changes:
            if name not in steps:
                command = f"kvatlas sweep {name}.yaml --out {run.folder or 'RUN'}"
                steps[name] = NextStep(name, title, reason, spec_text({**spec, **changes}), command)
    return list(steps.values())


def spec_text(spec: Mapping[str, Any]) -> str:
    """Return a spec as YAML, without the keys that have their default values."""
    import yaml

    from kvatlas.sweeps.spec import Spec

    plain: Json = Spec.model_validate(dict(spec)).model_dump(exclude_defaults=True)
    margin = plain.get("lose_at_most")
    if margin is not None:
        plain["lose_at_most"] = int(margin) if margin == int(margin) else margin
    # Names alone are written as in a spec by hand.
    for key, name in (("models", "model"), ("benchmarks", "name")):
        plain[key] = [entry[name] if set(entry) == {name} else entry for entry in plain.get(key, ())]
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True)


#: Name, title and reason of a step, and the keys of the spec that it changes.
_SpecChange = tuple[str, str, str, Json]


def _more_traces(choice: Choice) -> Iterator[_SpecChange]:
    """Yield the samples, and the problems, that would prove the setting at which testing stopped, if it did."""
    required = choice.required
    if required is None:
        return
    setting = setting_words(required.setting, list(choice.settings.values()))
    model = model_name(choice.model)
    again = "Traces that are there are not decoded again; limits then allow for a second look."

    is_of_these = choice.family.claim is Claim.THESE
    samples = required.samples
    if is_of_these and samples is not None and required.samples_now < samples <= _MOST_SAMPLES:
        reason = (
            f"About {samples} samples would prove {setting} on {model}, on these problems and if that is its loss. "
            f"{again}"
        )
        # Left to the plan, the samples of the full cache grow with those of the settings.
        changed = {"samples": samples, "looks": [], "full_samples": None}
        yield "more-samples", f"{samples} samples of each problem", reason, changed

    sizes = np.bincount(choice.family.paired.strata).tolist()
    if required.problems is None or not sizes:
        return
    # All benchmarks grow in their proportions, so the largest one decides the limit of the spec.
    problems = math.ceil(required.problems * max(sizes) / sum(choice.family.sizes))
    if max(sizes) < problems <= _MOST_PROBLEMS:
        reason = (
            f"About {required.problems:,} {choice.family.unit}s in all would prove {setting} on {model} for problems "
            f"like these, if that is its loss. A file with fewer needs further ones. {again}"
        )
        yield "more-problems", f"{problems:,} problems of each benchmark", reason, {"problems": problems}


def _larger_budget(spec: Json) -> Iterator[_SpecChange]:
    """Yield larger KV budgets, where all settings name one in tokens."""
    settings = [dict(entry) for entry in spec.get("settings", ())]
    budgets = [entry["kv_budget"] for entry in settings if isinstance(entry.get("kv_budget"), int)]
    if not budgets or len(budgets) < len(settings):
        return
    for entry in settings:
        entry["kv_budget"] = math.ceil(entry["kv_budget"] * _LARGER / _STEP) * _STEP
    largest = max(entry["kv_budget"] for entry in settings)
    reason = f"Settings compress later and keep more, so they lose less than with {max(budgets):,}."
    yield "larger-budget", f"a KV budget of {largest:,}", reason, {"settings": settings}


def _higher_ratio(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
    """Yield ratios above the highest one of the run."""
    ratios = sorted(value for value in spec.get("axes", {}).get("ratio", ()) if isinstance(value, int | float))
    if not ratios or ratios[-1] >= _HIGHEST_RATIO:
        return
    higher = dict.fromkeys([round((ratios[-1] + _HIGHEST_RATIO) / 2, 2), _HIGHEST_RATIO])
    reason = (
        f"The highest ratio of this run is {ratios[-1]:g}, and no setting of "
        f"{model_name(choice.model)} is proven within {margin_text(choice.margin)}."
    )
    axes = {**spec["axes"], "ratio": [*ratios, *higher]}
    yield "higher-ratio", f"ratios up to {_HIGHEST_RATIO:g}", reason, {"axes": axes}

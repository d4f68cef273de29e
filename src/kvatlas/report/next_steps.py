"""Next steps after a run: changed specs to copy, from what is proven and from the problems that are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kvatlas.class_files import class_file
from kvatlas.core import Claim, KvatlasError, Setting
from kvatlas.policies import from_setting
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import Required
from kvatlas.stats.orders import kept_by_rule
from kvatlas.stats.run_data import RunData, setting_words
from kvatlas.stats.windows_at_memory import RATIO, WINDOW, EqualMemory
from kvatlas.text import margin_text, model_name

#: The share of the KV budget by which the next one is larger, and the tokens to whose multiples it is rounded.
_LARGER = 1.25
_STEP = 16
#: The most problems of a benchmark, and samples of a problem, that a next step asks for.
_MOST_PROBLEMS = 2000
_MOST_SAMPLES = 64
#: The highest ratio that leaves something to choose.
_HIGHEST_RATIO = 0.9
#: The windows of a grid of equal memory: shares of the tokens that stay beside the prompt.
_SHARES = ("10%", "25%", "50%", "75%")
#: Parameters of a setting that this grid replaces, and those beside which it has another meaning.
_REPLACED = ("kv_budget", WINDOW, RATIO, "ratio_over", "budget_over")
_OTHER_RULE = ("every", "every_from", "strict_budget")

#: The name of the step to a grid of equal memory.
_EQUAL_MEMORY = "equal-memory"

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

    def to_dict(self) -> Json:
        """Return plain data."""
        return dict(vars(self))


def next_steps(run: RunData, choices: Sequence[Choice], memories: Sequence[EqualMemory] = ()) -> list[NextStep]:
    """Return the next steps of a run: more problems or samples, a larger budget, higher or finer ratios, and a grid of
    equal memory.

    `memories` are the windows of its maps at equal memory.
    None of runs that were not made by a spec. Choices without a full cache, and
    those of traces that cannot show a difference, have none, except easier problems where the full cache solves next to
    none.
    """
    from kvatlas.sweeps.spec import parse_spec

    spec = dict(run.manifest.spec)
    try:
        parse_spec(spec)
    except KvatlasError:
        return []

    judged = [choice for choice in choices if choice.losses and (choice.vacuous is None or choice.family.is_floor)]
    changed = list(chain.from_iterable(_changes_for(choice, spec) for choice in judged))
    changed += _equal_memory_grid(run, spec, memories)
    folder = run.folder or Path("RUN")
    steps: dict[str, NextStep] = {}
    for name, title, reason, changes in changed:
        if name not in steps:
            # A grid of other axes is another run.
            out = f"{folder}-{name}" if name == _EQUAL_MEMORY else folder
            command = f"kvatlas sweep {name}.yaml --out {out}"
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


def _changes_for(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
    """Yield what to try next for a model, by what is proven of it."""
    if choice.family.is_floor:
        yield from _easier_problems(choice, spec)
        return
    if choice.shown:
        yield from _finer_ratios(choice, spec)
    elif choice.required is not None:
        yield from _more_traces(choice, choice.required)
    if not choice.shown:
        yield from _higher_ratio(choice, spec)
        yield from _larger_budget(choice, spec)


def _easier_problems(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
    """Yield chains of fewer steps, in place of those of which the full cache solves next to none."""
    easier = []
    for entry in spec.get("benchmarks", ()):
        name = entry["name"] if isinstance(entry, dict) else entry
        match = re.fullmatch(r"(CHAIN|WORDS)(\d+)", name)
        if match is None or int(match[2]) < 4:
            return
        easier.append(f"{match[1]}{int(match[2]) // 2}")
    # CHAIN4 and CHAIN5 have one easier problem.
    easier = list(dict.fromkeys(easier))
    reason = f"On {model_name(choice.model)} {choice.vacuous}. Easier problems can show a loss."
    yield "easier-problems", ", ".join(easier), reason, {"benchmarks": easier}


def _more_traces(choice: Choice, required: Required) -> Iterator[_SpecChange]:
    """Yield the samples, and the problems, that would prove the setting at which testing stopped."""
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

    sizes = choice.family.sizes
    if required.problems is None or not sizes:
        return
    # All benchmarks grow in their proportions, so the largest one decides the limit of the spec.
    problems = math.ceil(required.problems * max(sizes) / sum(sizes))
    if max(sizes) < problems <= _MOST_PROBLEMS:
        reason = (
            f"About {required.problems:,} problems in all would prove {setting} on {model} for problems like these, "
            f"if that is its loss. {again}"
        )
        yield "more-problems", f"{problems:,} problems of each benchmark", reason, {"problems": problems}


def _larger_budget(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
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


def _ratios_of(spec: Json) -> list[float]:
    return sorted(value for value in spec.get("axes", {}).get("ratio", ()) if isinstance(value, int | float))


def _higher_ratio(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
    """Yield ratios above the highest one of the run."""
    ratios = _ratios_of(spec)
    if not ratios or ratios[-1] >= _HIGHEST_RATIO:
        return
    middle = round((ratios[-1] + _HIGHEST_RATIO) / 2, 2)
    higher = list(dict.fromkeys([middle, _HIGHEST_RATIO]))
    reason = (
        f"The highest ratio of this run is {ratios[-1]:g}, and no setting of "
        f"{model_name(choice.model)} is proven within {margin_text(choice.margin)}."
    )
    axes = {**spec["axes"], "ratio": [*ratios, *higher]}
    yield "higher-ratio", f"ratios up to {_HIGHEST_RATIO:g}", reason, {"axes": axes}


def _finer_ratios(choice: Choice, spec: Json) -> Iterator[_SpecChange]:
    """Yield a ratio between the cheapest proven one and the next lower one."""
    chosen = None if choice.by_memory is None else choice.by_memory.setting
    ratio = None if chosen is None else chosen.values.get("ratio")
    ratios = _ratios_of(spec)
    if chosen is None or ratio is None:
        return
    lower = [value for value in ratios if value < ratio]
    if not lower:
        return

    lower_setting = Setting.from_parameters(chosen.policy, **{**chosen.values, "ratio": lower[-1]})
    loss = choice.losses.get(lower_setting.id)
    # Under a lower ratio texts may become longer, so that the cheapest setting is not that of the lowest proven ratio.
    if loss is None or loss.is_kept:
        return

    # A ratio between is tested only if nothing that keeps more by its own numbers ends the tests before it.
    between = round((lower[-1] + ratio) / 2, 3)
    between_setting = Setting.from_parameters(chosen.policy, **{**chosen.values, "ratio": between})
    end = choice.untested.get(lower_setting.id)
    kept_between = kept_by_rule(between_setting)
    kept_at_end = None if end is None else kept_by_rule(end)
    if kept_between is not None and kept_at_end is not None and kept_at_end >= kept_between:
        return

    reason = (
        f"On {model_name(choice.model)} {setting_words(chosen, list(choice.settings.values()))} is proven within "
        f"{margin_text(choice.margin)}, ratio {lower[-1]:g} is not."
    )
    axes = {**spec["axes"], "ratio": sorted([*ratios, between])}
    yield "between", f"ratio {between:g}", reason, {"axes": axes}


def _equal_memory_grid(run: RunData, spec: Json, memories: Sequence[EqualMemory]) -> Iterator[_SpecChange]:
    """Yield a grid whose windows all keep the same number of tokens.

    Budgets span the tokens that the windows of this run have in common, those of the thinking alone. None where a
    window is proven better at equal memory already, and for runs that are no grid of windows and ratios.
    """
    if not memories or any(memory.best is not None for memory in memories):
        return
    if set(spec.get("axes", {})) != {WINDOW, RATIO} or spec.get("strict_budget"):
        return
    prompts: dict[str, Mapping[str, int]] = {cell.benchmark: cell.prompts for cell in run.cells}
    if not prompts or not all(prompts.values()):
        return
    mean_prompt = fmean(fmean(lengths.values()) for lengths in prompts.values())
    budgets = _common_budgets(memories, mean_prompt)

    # The new tokens between two compressions of a setting in the middle of the run, rounded.
    kept = [cell.stays for cell in run.cells if cell.stays is not None and cell.stays.share > 0]
    rooms = [stays.tokens / stays.share - stays.tokens for stays in kept]
    between = max(_STEP, math.ceil((float(np.median(rooms)) if rooms else 0.0) / _STEP) * _STEP)

    # The settings of the spec by this rule; those of another rule make another grid. A single one needs no list.
    entries = spec.get("settings", ())
    entries = [entries] if isinstance(entries, Mapping) else entries
    settings = []
    for entry in entries:
        if any(entry.get(name) for name in _OTHER_RULE) or entry.get("keep_prompt") is False:
            return
        others = {name: value for name, value in entry.items() if name not in _REPLACED}
        settings.append({**others, "budget_over": "thinking", "every": between})
    changes = {"settings": settings, "axes": {"kv_budget": budgets, WINDOW: list(_SHARES)}}
    if len(budgets) < 2 or not settings or not _can_be_run({**spec, **changes}):
        return

    reason = (
        "A wider window keeps more tokens here, and no window is proven better at equal memory. In this grid all "
        "windows of a KV budget keep the same number of tokens: a token more of window is a chosen one less."
    )
    yield _EQUAL_MEMORY, "a grid of equal memory", reason, changes


def _common_budgets(memories: Sequence[EqualMemory], prompt: float) -> list[int]:
    """Return three numbers of tokens beside the prompt, from the fewest to the most that all windows keep."""
    lowest = []
    highest = []
    for memory in memories:
        by_window = [memory.tokens[memory.window == index] for index in range(len(memory.windows))]
        low = max(tokens.min() for tokens in by_window)
        high = min(tokens.max() for tokens in by_window)
        # Windows without memory in common say where they end.
        lowest.append(min(low, high))
        highest.append(max(low, high))
    ends = np.linspace(fmean(lowest), fmean(highest), 3) - prompt
    return sorted({max(_STEP, round(tokens / _STEP) * _STEP) for tokens in ends.tolist()})


def _can_be_run(spec: Json) -> bool:
    """Return whether a spec can be run, as far as its settings say; code of files is not run."""
    from kvatlas.sweeps.spec import parse_spec

    try:
        for setting, _ in parse_spec(spec).cells():
            if class_file(setting.policy) is None:
                from_setting(setting)
    except KvatlasError:
        return False
    return True

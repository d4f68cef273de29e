"""Export of a run's cell as the configuration of another serving engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from kvatlas import benchmarks, models, policies
from kvatlas.benchmarks import Benchmark
from kvatlas.class_files import permit
from kvatlas.core import KvatlasError, Setting, Trace, floor_ratio
from kvatlas.core.settings import CAP
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, parameters
from kvatlas.policies.triattention import TriAttention, load_statistics
from kvatlas.results import Expected
from kvatlas.results.store import check_new_folder
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, names_to_choose, systems_of
from kvatlas.stats.table import select
from kvatlas.sweeps.spec import BenchmarkSpec, named_classes


@dataclass(frozen=True)
class MeasuredCell:
    """A model and a setting of a run, with the cells that hold its problems, and their sampling."""

    run: RunData
    model: str
    setting: Setting
    cells: tuple[Expected, ...]
    sampling: Mapping[str, Any]

    @classmethod
    def from_run(cls, folder: Path, name: str = "", allow_code: bool = False) -> MeasuredCell:
        """Return the cell that `name` stands for (words as `compare` takes), else the recommended one.

        With `allow_code` the code of files that the run names may run. Raises KvatlasError if there is not exactly one
        such cell, or if the run is not a sweep.
        """
        run = RunData.open(folder)
        if "models" not in run.manifest.spec:
            raise KvatlasError(f"{str(folder)!r} is not a sweep, so the prompts of its problems are unknown.")
        if allow_code:
            permit(*named_classes(run.manifest.spec))
        systems = systems_of([run], "pass@1")
        if name or not systems:
            (system,) = choose(systems, [name])
            model = system.model
            setting = system.setting
        else:
            from kvatlas.stats.choice import choices
            from kvatlas.stats.losses import losses_of

            # Without a name only what is proven for problems like these, too, may be served.
            found_choices = choices(run, losses_of(run))
            proven = [(choice.model, choice.deployable) for choice in found_choices if choice.deployable]
            if len(proven) != 1:
                found = "; ".join(f"{model} {cell.setting}" for model, cell in proven) or "none"
                raise KvatlasError(
                    f"Expected one setting proven for problems like these, the run has: {found}. Name a cell with "
                    f"--policy: {names_to_choose(systems)}."
                )
            model, recommended = proven[0]
            setting = recommended.setting
        cells = tuple(cell for cell in run.manifest.expected if (cell.model, cell.setting) == (model, setting))
        return cls(run, model, setting, cells, run.manifest.spec["sampling"])

    def traces(self, setting: Setting) -> dict[tuple[str, str, int], Trace]:
        """Return the traces of a setting by benchmark, problem and sample."""
        cells = select(self.run.cells, model=self.model, setting=setting)
        with self.run.store() as store:
            keys = sorted(itertools.chain.from_iterable(cell.stored_keys() for cell in cells))
            return {key[2:]: store.trace(key) for key in keys}

    def handle(self) -> ModelHandle | None:
        """Return the model, or None if it is not available here."""
        return models.available(self.run.manifest.spec["models"]).get(self.model)

    def benchmarks(self) -> dict[str, Benchmark]:
        """Return the benchmarks of the run; KvatlasError if they have other problems, prompts or grades now."""
        manifest = self.run.manifest
        recorded = {entry[0]: list(entry) for entry in manifest.provenance.get("benchmarks", ())}

        by_name = {}
        model = self.handle()
        for entry in manifest.spec["benchmarks"]:
            benchmark = BenchmarkSpec(**entry).find()
            if benchmark.name in recorded and list(benchmarks.identity(benchmark)) != recorded[benchmark.name]:
                raise KvatlasError(f"{benchmark.name} has other prompts or grades here than in the run; sweep again.")
            problems = benchmarks.problems_of(benchmark, manifest.spec["problems"])
            changed = manifest.changed_problems(benchmark.name, problems)
            if changed:
                raise KvatlasError(f"The run has {changed} that its file lacks or changes; put back the file.")
            by_name[benchmark.name] = benchmarks.for_model(benchmark, model.reads if model else lambda _: True)
        return by_name


@dataclass(frozen=True)
class Target:
    """An engine: what it can express, and its configuration.

    policies: the names of the policies that it has.
    takes: the parameters that its configuration sets; others must have the value in `only` or the policy's default.
    text: the configuration, a template that is filled with the parameters.
    source: the document or code that defines the format.
    only: parameters that have one fixed value there.
    suffix: that of the file.
    remark: how the engine differs with every policy.
    limits: the cards, types and models for which it works, and those with which its authors tested it.
    remarks: how it differs with one policy, by the policy's name.
    windows: by policy, the parameter that is the local window there, or its length.
    presses: by policy, the class of kvpress with its arguments, a template.
    scopes: the engine's word for each scope that it has, for those that have several.
    cap: what follows the configuration of a setting with a cap on thinking, a template.
    at_most: by policy, parameters that can be no greater than another one.
    runs_ours: it runs kvatlas's own policies, and takes the parameters of a setting as they are.
    """

    policies: tuple[str, ...]
    takes: tuple[str, ...]
    text: str
    source: str
    only: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ".sh"
    remark: str = ""
    limits: str = ""
    remarks: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, str | int] = field(default_factory=dict)
    presses: Mapping[str, str] = field(default_factory=dict)
    scopes: Mapping[str, str] = field(default_factory=dict)
    cap: str = ""
    at_most: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    runs_ours: bool = False


TARGETS = {
    name: Target(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("targets.yaml").read_text("utf-8")).items()
}


#: Engines that are no target, because they keep all tokens.
_STOCK = ("vllm", "sglang", "transformers", "llama.cpp")


class Exported(NamedTuple):
    """The configuration, the exported setting, and its differences from the setting of the run."""

    text: str
    setting: Setting
    changed: tuple[str, ...]


class OpenedThinking(NamedTuple):
    """The think tags of a model, and the tokens of its prompts behind the opening tag: vLLM counts these as thinking.

    Source: vLLM's pull request 46727, vllm/v1/worker/gpu/sample/thinking_budget.py.
    """

    open: str = "<think>"
    close: str = "</think>"
    tokens: int = 0

    @classmethod
    def of(cls, model: ModelHandle) -> OpenedThinking:
        """Return those of a model."""
        tokens = 0
        prompt = model.prompt("x")
        before, opening, _ = prompt.rpartition(model.tags.open)
        if model.opens_thinking and opening:
            tokens = len(model.tokens(prompt)) - len(model.tokens(before + opening))
        return cls(model.tags.open, model.tags.close, tokens)

    def budget(self, cap: int) -> int:
        """Return the `thinking_token_budget` of vLLM that ends thinking at a cap."""
        return cap + self.tokens


def check_engine(name: str) -> str:
    """Return the name of a target; KvatlasError for an unknown one."""
    if name not in TARGETS:
        remark = " It evicts nothing by itself; a target is an engine or a plug-in that does." if name in _STOCK else ""
        raise KvatlasError(f"Unknown target {name!r}; expected: {', '.join(TARGETS)}.{remark}")
    return name


def export_setting(
    setting: Setting,
    name: str,
    prompt: int | None = None,
    nearest: bool = False,
    statistics: str = "stats.pt",
    thinking: OpenedThinking | None = None,
) -> Exported:
    """Return the setting as the configuration of a target.

    `prompt` is the typical length of a prompt, for budgets that count it; `statistics` is the file that the
    configuration names, `thinking` says how prompts open thinking. Raises KvatlasError for an unknown target or policy
    and, unless `nearest`, for each parameter that the target cannot express.
    """
    target = TARGETS[check_engine(name)]
    thinking = thinking or OpenedThinking()
    policy = policies.of_engine(setting)
    if not isinstance(policy, CompressingPolicy):
        cap = "" if policy.cap is None else f" vLLM has its cap as thinking_token_budget={thinking.budget(policy.cap)}."
        raise KvatlasError(f"{setting} never compresses, so {name} needs no configuration.{cap}")
    # A variant is a policy with other defaults.
    base = policy.setting_name.partition("@")[0]
    if base not in target.policies:
        raise KvatlasError(f"{name} has no policy {base!r}; it has {', '.join(target.policies)}. Make a map of those.")

    if target.runs_ours:
        lacking = {"thinking_tokens": policy.cap is not None, "keys and values of few bits": policy.storage.packed}
        needs = ", ".join(what for what, is_needed in lacking.items() if is_needed)
        if needs:
            raise KvatlasError(f"{setting} needs {needs}, which {name} does not have.")
        values = {"policy": setting.policy, **setting.values}
        return Exported(target.text.format(setting=json.dumps(values)), setting, ())

    values, changed = _values_with_every(policy, target.only.get("budget_over"), prompt)
    expressible = _expressible_values(target, policy, base, values)
    if base in target.windows:
        # The engine keeps its own window anyway.
        values["local_window"] = max(values["local_window"], expressible["local_window"])
    for parameter, value in values.items():
        if value != expressible[parameter]:
            changed.append(f"{parameter} is {value} and can be {expressible[parameter]}")
    if changed and not nearest:
        raise KvatlasError(f"{name} cannot express {setting}: {'; '.join(changed)}. --nearest writes that.")
    exported = {parameter: expressible[parameter] for parameter in values}
    if "scope" in exported:
        exported["scope"] = str(exported["scope"])

    # The fields of the template; configurations write true and false.
    press = target.presses.get(base, "")
    buffer = max(256, 2 * exported.get("queries", 0))
    if base == "expected_attention":
        # Its statistics are those of the whole buffer, to which the newest step is added.
        buffer = exported["queries"] - 1
    fields: dict[str, Any] = {}
    for parameter, value in exported.items():
        fields[parameter] = str(value).lower() if isinstance(value, bool) else value
    text = target.text.format(
        **fields,
        file=statistics,
        prompt_counts=str(exported["budget_over"] == "cache").lower(),
        press=press.format(**exported),
        kind=press.partition("(")[0],
        buffer=buffer,
        mode=target.scopes.get(exported.get("scope", ""), ""),
    )
    if policy.cap is not None and exported["thinking_tokens"] == policy.cap:
        text += target.cap.format(budget=thinking.budget(policy.cap), open=thinking.open, close=thinking.close)
    exported_policy = policies.from_setting(Setting.from_parameters(base, **exported))
    return Exported(text, exported_policy.setting, tuple(changed))


def _expressible_values(
    target: Target, policy: CompressingPolicy, base: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values nearest to the given ones that the target can express."""
    expressible = {field.name: target.only.get(field.name, field.default) for field in parameters(type(policy))}
    expressible |= {parameter: values[parameter] for parameter in target.takes if parameter in values}
    if values.get("scope") in target.scopes:
        expressible["scope"] = values["scope"]
    for parameter, limit in target.at_most.get(base, {}).items():
        expressible[parameter] = min(values[parameter], values[limit])
    if base in target.windows:
        window = target.windows[base]
        expressible["local_window"] = expressible[window] if isinstance(window, str) else window
    return expressible


def _values_with_every(
    policy: CompressingPolicy, only: str | None, prompt: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters without `ratio`, and the changes that this means.

    `kv_budget` becomes the tokens that a compression keeps, `every` those until the next one, as engines count. This is
    exact if the ratio counts the same tokens as the target's budget; otherwise a typical prompt is assumed. `only` is
    the target's one way of counting its budget, None if it takes both.
    """
    values = policy.parameter_values()
    del values["ratio"], values["ratio_over"]
    # Raises KvatlasError for a budget in bytes, whose tokens are known only with the model.
    budget = policy.budget.tokens
    values["local_window"] = policy.budget.window
    if policy.budget.every:
        return values, []

    # The target's budget counts the prompt, or the tokens of thinking alone.
    counted_over = (policy.budget.ratio_over, policy.budget.budget_over)
    excludes_prompt = "thinking" in (counted_over if only is None else (only,))
    # Ratio, budget and target all count the prompt, or none of them does.
    is_exact = {over == "thinking" for over in counted_over} == {excludes_prompt}
    if not is_exact and prompt is None:
        raise KvatlasError("The length of prompts is unknown: make a map with `every`, and without `ratio`.")
    assumed_prompt = 0 if is_exact else prompt or 0

    # The tokens at a compression with the prompt, and those that stay whatever the ratio is.
    total = budget
    if policy.budget.budget_over == "thinking":
        total += assumed_prompt
    always_kept = policy.budget.window
    if policy.budget.ratio_over == "thinking":
        always_kept += assumed_prompt
    kept = always_kept + floor_ratio(policy.budget.ratio, max(0, total - always_kept))

    kv_budget = kept - assumed_prompt if excludes_prompt else kept
    every = total - kept
    if kv_budget <= policy.budget.window or every < 1:
        raise KvatlasError(f"{kept} of {total} tokens stay, so there is nothing to choose and nothing to export.")

    changed = []
    if not is_exact:
        given = f"kv_budget {budget} with ratio {policy.budget.ratio}"
        counted = f"counts otherwise and is, with prompts of {prompt} tokens, kv_budget {kv_budget} and every {every}"
        changed.append(f"{given} {counted}")
    values["kv_budget"] = kv_budget
    values["every"] = every
    values["budget_over"] = "thinking" if excludes_prompt else "cache"
    return values, changed


def write_export(run: Path, cell: str, target: str, folder: Path, nearest: bool = False) -> list[Path]:
    """Write a cell of a run, named by words or the recommended one, for a target; return the files.

    The configuration begins with a comment: the cell with its values and intervals, and the changes.
    """
    check_new_folder(folder)
    reference = MeasuredCell.from_run(run, cell)
    usages = [trace.usage for trace in reference.traces(reference.setting).values()]
    prompts = [usage.prompt_tokens for usage in usages if usage.prompt_tokens is not None]
    typical_prompt = int(median(prompts)) if prompts else None
    statistics = folder.absolute() / "statistics.pt"
    thinking = OpenedThinking()
    if CAP in reference.setting.values and (model := reference.handle()) is not None:
        thinking = OpenedThinking.of(model)
    export = export_setting(reference.setting, target, typical_prompt, nearest, str(statistics), thinking)

    # The comment above the configuration: Pass@1 of the cell, the format, what differs, and how to check it.
    engine = TARGETS[target]
    lines = [f"{reference.model} under {reference.setting}"]
    for traces in reference.run.cells:
        if traces.expected in reference.cells:
            mean = traces.cell.estimate
            limits = ""
            if mean.low is not None and mean.high is not None:
                limits = f" (95 % CI {100 * mean.low:.1f} to {100 * mean.high:.1f})"
            lines.append(f"{traces.expected.benchmark}: Pass@1 {100 * mean.value:.1f} %{limits}, n = {traces.stored}")
    lines.append(f"Format: {engine.source}.")
    if export.changed:
        lines.append(f"This is not that cell but the nearest: {'; '.join(export.changed)}.")
        lines.append(f"In terms of kvatlas it is {export.setting}; make a map of it to see its loss.")
    remarks = (engine.remark, engine.remarks.get(export.setting.policy, ""))
    lines += [remark for remark in remarks if remark]
    if engine.limits:
        lines.append(f"Limits: {engine.limits}.")
    lines.append("Check it: kvatlas deploy verify URL --against RUN --out SERVED")

    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / f"{target}{engine.suffix}"
    configuration.write_text("".join(f"# {line}\n" for line in lines) + export.text, encoding="utf-8")
    policy = policies.from_setting(reference.setting)
    if not isinstance(policy, TriAttention):
        return [configuration]

    import torch

    model = reference.handle()
    if model is None:
        raise KvatlasError(f"The model {reference.model!r} is not available, so its statistics cannot be written.")
    policy.check(model)
    torch.save(_triattention_statistics(policy.file(model), model), statistics)
    return [configuration, statistics]


def _triattention_statistics(source: Path, model: ModelHandle) -> dict[str, Any]:
    """Return the query statistics in the form of the authors' calibration: `metadata`, and `stats` for each query head.

    `stats["layerLL_headHH"]` holds q_mean_real, q_mean_imag and q_abs_mean [planes] (github.com/WeianMao/triattention,
    docs/calibration.md and triattention/sglang/stats_loader.py at 6dfdd97).
    """
    ours = load_statistics(str(source))
    layers, heads, planes = ours["center_real"].shape
    names = {"q_mean_real": "center_real", "q_mean_imag": "center_imag", "q_abs_mean": "norm"}
    every_head = [[layer, head] for layer, head in itertools.product(range(layers), range(heads))]
    stats = {}
    for layer, head in every_head:
        values = {name: ours[source_name][layer, head].float().clone() for name, source_name in names.items()}
        stats[f"layer{layer:02d}_head{head:02d}"] = values

    metadata = {
        "num_traces": 1,
        "head_dim": 2 * planes,
        "num_attention_heads": heads,
        "num_key_value_heads": model.shape.kv_heads,
        "dtype": "float32",
        "rope_style": "half",
        "rope_type": "default",
        "sampled_heads": every_head,
    }
    return {"metadata": metadata, "stats": stats}

"""An exported setting as files: the configuration with its cell in a comment, and the calibration beside it."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from kvatlas import policies
from kvatlas.core import KvatlasError
from kvatlas.integrations.export_setting import TARGETS, Exported, export_setting, statistics_file
from kvatlas.integrations.verify import Reference
from kvatlas.policies.triattention import TriAttention
from kvatlas.sweeps.spec import ModelSpec


def write_export(run: Path, cell: str, target: str, folder: Path, nearest: bool = False) -> list[Path]:
    """Write a run's cell, by words or the recommended one, for a target; returns the files.

    KvatlasError for what the target cannot express, and for statistics that are not there.
    """
    reference = Reference.of(run, cell)
    prompts = [
        trace.usage.prompt_tokens
        for trace in reference.traces(reference.setting).values()
        if trace.usage.prompt_tokens is not None
    ]
    typical = int(median(prompts)) if prompts else None
    statistics = folder.absolute() / "statistics.pt"
    made = export_setting(reference.setting, target, typical, nearest, str(statistics))
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{target}{TARGETS[target].suffix}"]
    written[0].write_text(comment(reference, made) + made.text, encoding="utf-8")
    if made.target.calibrated:
        _write_statistics(reference, statistics)
        written.append(statistics)
    return written


def comment(reference: Reference, made: Exported) -> str:
    """What the configuration is of: the cell with its values and intervals, and what is not as it was on the map."""
    lines = [f"{reference.model} under {reference.setting}", *_values(reference), f"Format: {made.target.source}."]
    if made.changed:
        lines.append(f"Not that cell but the nearest: {'; '.join(made.changed)}.")
        lines.append(f"In kvatlas' terms it is {made.setting}; a map of it says what it loses.")
    if made.target.remark:
        lines.append(made.target.remark)
    lines.append("Prove it: kvatlas verify URL --against RUN --out SERVED")
    return "".join(f"# {line}\n" for line in lines)


def _values(reference: Reference) -> list[str]:
    values = []
    for cell in reference.run.cells:
        if (cell.expected.model, cell.expected.setting) == (reference.model, reference.setting):
            shown = cell.cell().estimate
            between = f" (95 % CI {100 * shown.low:.1f} to {100 * shown.high:.1f})" if shown.low is not None else ""  # type: ignore[operator]
            values.append(f"{cell.expected.benchmark}: Pass@1 {100 * shown.value:.1f} %{between}, n = {cell.stored}")
    return values


def _write_statistics(reference: Reference, path: Path) -> None:
    import torch

    policy = policies.of(reference.setting)
    models = [ModelSpec(**entry).find() for entry in reference.run.manifest.spec["models"]]
    model = next((candidate for candidate in models if candidate.name == reference.model), None)
    if model is None or not isinstance(policy, TriAttention):
        raise KvatlasError(f"The model {reference.model!r} is not here, so its statistics cannot be written.")
    policy.check(model)
    torch.save(statistics_file(policy.file(model), model), path)

"""The figures of docs/findings/bytes.md: Pass@1 of a run of bytes.yaml by bits, one panel for each number of bytes.

    python recipes/embedded/bytes.py RUN MODEL FIGURE.png "WHAT WAS FOUND"

Bytes of a setting are those of its KV budget, at two bytes for an unpacked number. Problems that all settings have
count. Intervals (95 %) are a bootstrap over problems; the printed differences to the full cache at 16 bits are paired
by problem.
"""

import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kvatlas import models, policies
from kvatlas.core import Setting
from kvatlas.results import Store

POLICIES = ("dynts", "rkv", "random", "window", "full")


def kib(model: str, settings: list[Setting]) -> dict[Setting, tuple[int, int]]:
    """Return the KiB of each setting's KV budget, those within 7 % as one number, and the tokens that it holds."""
    shape, found = models.find(model).shape, {}
    for setting in settings:
        token, beside = shape.kv_bytes(policies.from_setting(setting).storage, 2)
        found[setting] = (setting.values["kv_budget"] * token + beside) / 1024
    steps = sorted(set(found.values()), reverse=True)
    alike = {size: next(most for most in steps if size > 0.93 * most) for size in steps}
    return {setting: (round(alike[size]), setting.values["kv_budget"]) for setting, size in found.items()}


def main(run: str, model: str, figure: str, title: str) -> None:
    grades: dict[Setting, dict[tuple[str, str], bool]] = defaultdict(dict)
    longest: dict[Setting, int] = defaultdict(int)
    with Store.open(Path(run)) as store:
        for _, trace in store.traces():
            if trace.model == model:
                grades[trace.setting][trace.benchmark, trace.problem] = trace.grade.correct
                longest[trace.setting] = max(longest[trace.setting], trace.usage.peak_kv_tokens or 0)
    full = Setting.from_parameters("full")
    problems = sorted(set.intersection(*map(set, grades.values())))
    print(f"{len(problems)} problems")
    picks = np.random.default_rng(0).integers(0, len(problems), (10_000, len(problems)))
    table = {setting: 100.0 * np.array([own[problem] for problem in problems]) for setting, own in grades.items()}
    for setting, own in sorted(table.items(), key=lambda item: str(item[0])):
        low, high = np.quantile((own - table[full])[picks].mean(1), [0.025, 0.975])
        print(f"{own.mean():5.1f} {(own - table[full]).mean():6.1f} [{low:6.1f}, {high:6.1f}] {setting}")
    sizes = kib(model, [setting for setting in table if setting.policy != "full"])
    # A packed full cache stands in the least panel in which its longest trace fits.
    shape = models.find(model).shape
    for panel in sorted({size for size, _ in sizes.values()}):
        for setting in table:
            token, beside = shape.kv_bytes(policies.from_setting(setting).storage, 2)
            room = int((1024 * panel - beside) // token)
            if setting.policy == "full" and setting != full and setting not in sizes and longest[setting] <= room:
                sizes[setting] = (panel, room)
    panels = sorted({size for size, _ in sizes.values()})
    sheet, axes = plt.subplots(
        1, len(panels), figsize=(3.4 + 2.6 * len(panels), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        tokens = {setting.on_axes["kv_bits"]: count for setting, (size, count) in sizes.items() if size == panel}
        tokens = dict(sorted(tokens.items(), reverse=True))
        for shift, policy in enumerate(POLICIES):
            points = []
            for setting, (size, _) in sizes.items():
                if setting.policy == policy and size == panel:
                    at, own = [*tokens].index(setting.on_axes["kv_bits"]) + 0.06 * (shift - 1.5), table[setting]
                    points.append((at, own.mean(), *np.quantile(own[picks].mean(1), [0.025, 0.975])))
            if not points:
                continue
            at, y, low, high = np.array(sorted(points)).T
            axis.errorbar(at, y, [y - low, high - y], marker="o", ms=4, capsize=2, lw=1.2, label=policy)
        axis.axhline(table[full].mean(), color="black", lw=1, ls="--", label="full, 16 bits")
        names = [f"{bits} bits\n{count} tok." for bits, count in tokens.items()]
        axis.set_xticks(range(len(tokens)), names, fontsize=8)
        axis.set(title=f"{panel:,} KiB a sequence", xlim=(-0.4, len(tokens) - 0.6), ylim=(0, 100))
    axes[0, 0].set_ylabel("Pass@1 in %")
    handles = {name: handle for axis in axes[0] for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    sheet.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="outside right center")
    sheet.suptitle("\n".join(textwrap.wrap(f"{model}: {title}", 30 + 34 * len(panels))), fontsize=11)
    sheet.savefig(figure, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The figure of docs/bytes.md: Pass@1 of a run of bytes.yaml by bits, one panel for each number of bytes.

    python recipes/embedded/bytes.py RUN MODEL FIGURE.png

Settings with all of their problems are drawn. Intervals (95 %) are a
bootstrap over problems; the printed differences to the full cache at 16 bits are paired by problem.
"""

import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kvatlas.core import Setting
from kvatlas.results import Store

#: KiB of a setting by its bits and its KV budget in tokens.
PANELS = {
    160: {16: 160, 8: 256, 4: 460, 3: 576, 2: 768},
    256: {16: 256, 8: 426, 4: 768},
    96: {4: 256, 3: 320, 2: 426},
}
POLICIES = ("dynts", "rkv", "random", "window")


def main(run: str, model: str, figure: str) -> None:
    grades: dict[Setting, dict[tuple[str, str], bool]] = defaultdict(dict)
    with Store.open(Path(run)) as store:
        for _, trace in store.traces():
            if trace.model == model:
                grades[trace.setting][trace.benchmark, trace.problem] = trace.grade.correct
    full = Setting.of("full")
    most = max(map(len, grades.values()))
    grades = {setting: own for setting, own in grades.items() if len(own) == most}
    problems = sorted(grades[full])
    picks = np.random.default_rng(0).integers(0, len(problems), (10_000, len(problems)))
    table = {setting: 100.0 * np.array([own[problem] for problem in problems]) for setting, own in grades.items()}
    for setting, own in sorted(table.items(), key=lambda item: str(item[0])):
        low, high = np.quantile((own - table[full])[picks].mean(1), [0.025, 0.975])
        print(f"{own.mean():5.1f} {(own - table[full]).mean():6.1f} [{low:6.1f}, {high:6.1f}] {setting}")
    sheet, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, (kib, tokens) in zip(axes, sorted(PANELS.items()), strict=True):
        for shift, policy in enumerate(POLICIES):
            points = []
            for setting, own in table.items():
                bits = setting.on_axes["kv_bits"]
                if setting.policy == policy and setting.values["kv_budget"] == tokens.get(bits):
                    at = [*tokens].index(bits) + 0.06 * (shift - 1.5)
                    points.append((at, own.mean(), *np.quantile(own[picks].mean(1), [0.025, 0.975])))
            if not points:
                continue
            at, y, low, high = np.array(sorted(points)).T
            axis.errorbar(at, y, [y - low, high - y], marker="o", ms=4, capsize=2, lw=1.2, label=policy)
        axis.axhline(table[full].mean(), color="black", lw=1, ls="--", label="full, 16 bits")
        names = [f"{bits} bits\n{count} tok." for bits, count in tokens.items()]
        axis.set_xticks(range(len(tokens)), names, fontsize=8)
        axis.set(title=f"{kib} KiB a sequence", xlim=(-0.4, len(tokens) - 0.6), ylim=(0, 100))
    axes[0].set_ylabel("Pass@1 in %")
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    title = f"{model}: at equal memory many tokens of 4 bits lose fewer answers than few tokens of 16 bits"
    sheet.suptitle(title, fontsize=11)
    sheet.savefig(figure, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])

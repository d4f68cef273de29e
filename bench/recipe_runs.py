"""The numbers of docs/findings/bytes.md and real-model.md: recipes decoded on problems that no run had seen.

`losses` are Pass@1 of a setting minus the full cache's, in points, with limits that hold for all settings of a part at
once (Bonferroni). `comparisons` were chosen before decoding; their limits hold for all comparisons of a part at once,
and p-values are Holm's. All speak of problems like these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvatlas.stats.numerics.arrays import LEVEL, Floats, holm, normal_quantile, strata_of_sizes
from kvatlas.stats.numerics.bounded import mean_differences
from outcomes import Json, from_hex, mean_over_benchmarks

PAGES = ("docs/findings/bytes.md", "docs/findings/real-model.md")
FULL = "full"
#: The settings that are compared as one, by their mean: a policy's map.
MAP_OF = "map of "


#: Many tokens in few bits against few in many, at equal bytes, and what fewer bits than 4 bring.
BITS_OF_EMBEDDED = (
    ("dynts 460 tokens, 4 bits", "dynts 160 tokens"),
    ("dynts 460 tokens, 4 bits", "dynts 256 tokens, 8 bits"),
    ("dynts 460 tokens, 4 bits", "dynts 576 tokens, 3 bits"),
    ("dynts 460 tokens, 4 bits", "dynts 768 tokens, 2 bits"),
)
RIVALS = ("dynts", "window", "random", "snapkv", "h2o")
#: The comparisons of each part, and the name of its model.
COMPARISONS = {
    "bytes-tiny-llama": BITS_OF_EMBEDDED,
    "bytes-tiny-qwen": BITS_OF_EMBEDDED,
    "bytes-smollm": (("rkv 312 tokens, 8 bits", "rkv 192 tokens"),),
    "maps-smollm": (
        (f"{MAP_OF}rkv", f"{MAP_OF}dynts"),
        *(("rkv 64 0.3", f"{rival} 64 0.3") for rival in RIVALS),
    ),
}
MODELS = {name: "smollm2" if name.endswith("smollm") else name.removeprefix("bytes-") for name in COMPARISONS}


def numbers_of(outcomes: dict[str, Json]) -> Json:
    """Return Pass@1 of each setting in percent, and losses and comparisons in points."""
    return {name: numbers_of_part(COMPARISONS[name], of_part) for name, of_part in outcomes.items()}


def numbers_of_part(pairs: Sequence[tuple[str, str]], by_benchmark: Json) -> Json:
    names = list(next(iter(by_benchmark.values()))["right"])
    sizes = [len(found["problems"]) for found in by_benchmark.values()]
    tables = {name: right_of(by_benchmark, name) for name in names}
    for name in dict.fromkeys(name for pair in pairs for name in pair if name.startswith(MAP_OF)):
        policy = name.removeprefix(MAP_OF)
        tables[name] = np.mean([table for other, table in tables.items() if other.split()[0] == policy], axis=0)

    settings = [name for name in names if name != FULL]
    losses = limits_of([tables[name] - tables[FULL] for name in settings], sizes)
    comparisons = limits_of([tables[first] - tables[second] for first, second in pairs], sizes)
    return {
        "problems": sum(sizes),
        "value": {name: round(100 * mean_over_benchmarks(tables[name], sizes), 4) for name in tables},
        "compressed": {
            name: sum(sum(from_hex(found["compressed"][name])) for found in by_benchmark.values()) for name in settings
        },
        "losses": dict(zip(settings, losses, strict=True)),
        "comparisons": [
            {"first": first, "second": second, **limits}
            for (first, second), limits in zip(pairs, comparisons, strict=True)
        ],
    }


def limits_of(differences: Sequence[Floats], sizes: Sequence[int]) -> list[Json]:
    """Return values with limits for all of them at once, in points, and p-values after Holm."""
    z = normal_quantile(LEVEL / 2 / len(differences))
    contrasts = mean_differences(np.stack(differences), strata_of_sizes(sizes), z)
    adjusted = holm([contrast.p for contrast in contrasts])
    found = []
    for contrast, p in zip(contrasts, adjusted, strict=True):
        limits = {end: round(100 * getattr(contrast, end), 4) for end in ("value", "low", "high")}
        found.append({**limits, "adjusted_p": p})
    return found


def right_of(by_benchmark: Json, name: str) -> Floats:
    """Return 1 for each right answer of a setting, benchmark by benchmark."""
    return np.concatenate([np.array(from_hex(found["right"][name]), float) for found in by_benchmark.values()])


#: Bits of the table of bytes.md, and the tokens that 160 KiB of an embedded model hold in them; the same of SmolLM2.
EMBEDDED_BITS = (("16", "160", ""), ("8", "256", ", 8 bits"), ("4", "460", ", 4 bits"), ("3", "576", ", 3 bits"))
EMBEDDED_BITS += (("2", "768", ", 2 bits"),)
SMOLLM_BITS = (("16", "192", ""), ("8", "312", ", 8 bits"), ("4", "", ", 4 bits"), ("3", "", ", 3 bits"))
SMOLLM_BITS += (("2", "", ", 2 bits"),)


def lines(numbers: Json) -> list[str]:
    """Return the lines of the pages that hold the numbers."""
    rows = []
    embedded = [numbers[name] for name in ("bytes-tiny-llama", "bytes-tiny-qwen") if name in numbers]
    for bits, tokens, ending in EMBEDDED_BITS if embedded else ():
        cells = [bits, tokens]
        cells += [lost_text(found, f"dynts {tokens} tokens{ending}") for found in embedded]
        cells += [lost_text(found, FULL + ending) for found in embedded]
        rows.append(f"| {' | '.join(cells)} |")
    if "bytes-smollm" in numbers:
        found = numbers["bytes-smollm"]
        for bits, tokens, ending in SMOLLM_BITS:
            cells = [bits, tokens or "whole traces", lost_text(found, f"rkv {tokens} tokens{ending}")]
            rows.append(f"| {' | '.join([*cells, lost_text(found, FULL + ending)])} |")
    for name, found in numbers.items():
        for pair in found["comparisons"]:
            limits = f"{pair['value']:.1f} ({pair['low']:.1f} to {pair['high']:.1f}){mark_of(pair)}"
            rows.append(f"| {MODELS[name]} | {pair['first']} | {pair['second']} | {limits} |")
    if "maps-smollm" in numbers:
        found = numbers["maps-smollm"]
        for policy in ("rkv", "dynts"):
            for window in (160, 112, 64, 16):
                shares = [f"{found['value'][f'{policy} {window} 0.{tenth}']:.1f}" for tenth in range(1, 6)]
                rows.append(f"| {policy} | {window} | {' | '.join(shares)} |")
        of_maps = [limits for name, limits in found["losses"].items() if name.split()[0] in ("rkv", "dynts")]
        count = sum(-limits["high"] > 3 for limits in of_maps)
        every = len(found["losses"])
        rows.append(f"  By the limits for all {every} at once {count} of the {len(of_maps)} lose more than 3 points.")
        for policy in ("rkv", *RIVALS):
            name = f"{policy} 64 0.3"
            rows.append(f"| {policy} | {found['value'][name]:.1f} | {lost_text(found, name)} |")
    return rows


def mark_of(limits: Json) -> str:
    return "*" if limits["adjusted_p"] <= LEVEL else ""


def lost_text(found: Json, name: str) -> str:
    """Return the points that a setting loses, with its limits; nothing for one that is not there."""
    limits = found["losses"].get(name)
    if limits is None:
        return ""
    # Without a minus before a zero.
    lost, low, high = (round(-limits[end], 1) + 0 for end in ("value", "high", "low"))
    return f"{lost:.1f} ({low:.1f} to {high:.1f}){mark_of(limits)}"

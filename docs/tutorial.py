"""A run from decoding to a report, with nothing but the Python API. Run it in a folder of its own: it writes there."""

import kvatlas

# One setting: a full cache of 272 tokens, then 32 recent tokens and the most important 40 % of the older ones.
run = kvatlas.run(
    "embedded:tiny-qwen",
    "CHAIN9",
    problems=4,
    policy="dynts",
    kv_budget=272,
    local_window=32,
    ratio=0.4,
    out="one",
)
print(run.cells()[["benchmark", "value", "low", "high", "mean_kv_tokens"]])
trace = next(run.traces())
print(
    trace.problem, trace.grade.outcome, f"{trace.usage.output_tokens} tokens, {trace.usage.compressions} compressions"
)

# A grid, with the full cache as its baseline. Started again, it decodes only what is missing.
spec = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN11"],
    "problems": 4,
    "samples": 1,
    "sampling": {"temperature": 0.6, "max_new_tokens": 400},
    "baseline": {"policy": "full"},
    "settings": [
        {"policy": "dynts", "kv_budget": 272},
        {"policy": "random", "kv_budget": 272},
    ],
    "axes": {"local_window": [16, 64], "ratio": [0.1, 0.4]},
}
grid = kvatlas.sweep(spec, "grid", workers=1)

for one in grid.maps():
    best = one.cells[one.best]
    print(
        f"{one.policy}: {best.setting} {best.estimate.value:.2f} ({best.estimate.low:.2f} to {best.estimate.high:.2f})"
    )
    one.plot(f"{one.policy}.png")

for comparison in grid.compare("dynts", "random"):
    difference = comparison.difference
    print(f"{difference.value:+.2f} ({difference.low:+.2f} to {difference.high:+.2f}), p {difference.p:.3f}")

for choice in grid.recommend():
    print(choice.model, choice.by_memory.setting if choice.by_memory else choice.vacuous)

print(grid.describe())
print(grid.report("report.html"))

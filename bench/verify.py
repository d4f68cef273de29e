"""Does `kvatlas deploy verify` find a faulty endpoint, and leave a sound one alone?

    python bench/verify.py --folder build/verify --out bench/results/verify.json           # sweeps are resumed
    python bench/verify.py --folder build/verify --texts --out bench/results/verify.json

A cell of embedded:tiny-llama on CHAIN6-14 is decoded as it is, and by engines with one fault each: the budget ignored,
the local window one token too short, the newest token lost in each compression, another ratio or chat template. Each
simulated verification draws problems with replacement and a sample of each side from these answers, and is judged as
`verify` does, with and without prompt lengths. `--texts` measures `verify --texts` instead, beside what the file holds:
greedy answers of each engine, and of sound and faulty ones in bfloat16, are read under the cell once; simulated
verifications draw some of these texts. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, keep
from kvatlas import benchmarks, models, policies
from kvatlas.core import Setting, Trace
from kvatlas.deploy.verify import LENGTH_P, read_under_policy, text_checks
from kvatlas.engine import rows as engine_rows
from kvatlas.policies import CacheView, CompressingPolicy
from kvatlas.results import Store
from kvatlas.stats.numerics.texts import Departures
from kvatlas.stats.paired import Equivalence, length_shift, verified
from kvatlas.sweeps import make_plan, parse_spec, sweep

MODEL, BENCHMARK, MOST, MARGIN = "embedded:tiny-llama", "CHAIN6-14", 700, 0.05
CELL = {"policy": "window", "kv_budget": 288, "ratio_over": "thinking", "local_window": 32, "ratio": 0.5}
#: Settings of the engines.
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "sound": CELL,
    "budget ignored": {"policy": "full"},
    "wrong ratio": {**CELL, "ratio": 0.1},
    "window off by one": CELL,
    "newest token lost": CELL,
    "template changed": CELL,
}
#: Engines in bfloat16; the policy of the last two, and of the cell that they are read under, chooses by scores.
ROUNDED: Mapping[str, Mapping[str, Any]] = {
    "sound, bfloat16": CELL,
    "window off by one, bfloat16": CELL,
    "sound, snapkv, bfloat16": {**CELL, "policy": "snapkv"},
    "sound, rkv, bfloat16": {**CELL, "policy": "rkv"},
}
#: Tokens that a faulty compression loses, counted from the end: the oldest of the local window, the newest of all.
LOST = {"window off by one": CELL["local_window"], "newest token lost": 1}
#: Answers of an engine: correct, length as a share of the most, and prompt tokens, by problem and sample.
Pool = dict[str, list[tuple[float, float, int]]]


def other_template(folder: Path) -> str:
    """The model with a line more in its chat template, as `hf:` address."""
    target = folder / "tiny-llama"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(models.find(MODEL).folder, target)
    for path in target.glob("*"):
        if path.name in ("tokenizer_config.json", "chat_template.jinja"):
            text = path.read_text()
            path.write_text(re.sub(r"<\|assistant\|><think>", "<|assistant|>\\g<0>", text))
    return f"hf:{target}"


@contextmanager
def losing(fault: str) -> Iterator[None]:
    """Compressions lose the token of a fault, if it has one."""
    usual, lost = engine_rows.select_tokens, LOST.get(fault)

    def select(policy: CompressingPolicy, cached: CacheView) -> torch.Tensor:
        kept = usual(policy, cached)
        at = kept.shape[-1] - lost
        return torch.cat([kept[..., :at], kept[..., at + 1 :]], dim=-1)

    engine_rows.select_tokens = usual if lost is None else select
    try:
        yield
    finally:
        engine_rows.select_tokens = usual


def traces_of(name: str, folder: Path, **spec: Any) -> list[Trace]:
    """Return the traces of an engine."""
    folder = folder / name.replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    address = other_template(folder) if name == "template changed" else MODEL
    model = {"model": address, "name": "model", "dtype": "bfloat16" if name in ROUNDED else "float32"}
    engine = {**ENGINES, **ROUNDED}[name]
    with losing(name.removesuffix(", bfloat16")):
        plan = make_plan(parse_spec({"models": [model], "benchmarks": [BENCHMARK], "baseline": [engine], **spec}))
        sweep(plan, folder / "run", workers=1)
    with Store.open(folder / "run") as store:
        return sorted((trace for _, trace in store.traces()), key=lambda trace: (trace.problem, trace.sample))


def simulated(sound: Pool, served: Pool, problems: int, seed: int) -> dict[str, bool]:
    """One verification of so many problems: what it says."""
    draw = np.random.default_rng(seed)
    names = sorted(sound)
    grades: list[dict[Any, dict[int, float]]] = [{}, {}]
    lengths: list[dict[Any, dict[int, float]]] = [{}, {}]
    same = True
    for number, problem in enumerate(draw.choice(names, problems)):
        samples = draw.permutation(len(sound[problem]))[:2]
        rows = sound[problem][samples[0]], served[problem][samples[1]]
        for side, row in enumerate(rows):
            grades[side][BENCHMARK, str(number)] = {0: row[0]}
            lengths[side][BENCHMARK, str(number)] = {0: row[1]}
        same &= rows[0][2] == rows[1][2]
    standing = verified(grades[0], grades[1], MARGIN).standing
    apart = standing in (Equivalence.WORSE, Equivalence.BETTER)
    longer = length_shift(lengths[0], lengths[1]).p < LENGTH_P
    return {
        "alarm": apart or longer or not same,
        "alarm_without_prompt_lengths": apart or longer,
        "equivalent": standing is Equivalence.EQUIVALENT,
    }


def measure_grades(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Shares of simulated verifications with each outcome."""
    pools: dict[str, Pool] = {}
    for name in ENGINES:
        spec = {"problems": options.problems, "samples": options.samples, "sampling": {"max_new_tokens": MOST}}
        for trace in traces_of(name, folder, **spec):
            used = trace.usage
            row = (float(trace.grade.correct), used.output_tokens / MOST, used.prompt_tokens)
            pools.setdefault(name, {}).setdefault(trace.problem, []).append(row)
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for name, pool in pools.items():
        for size in options.sizes:
            runs = [simulated(pools["sound"], pool, size, seed) for seed in range(options.runs)]
            found = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
            shares.setdefault(name, {})[str(size)] = found
    correct = {name: [row[0] for rows in pool.values() for row in rows] for name, pool in pools.items()}
    return {
        "program": "verify",
        "cell": CELL,
        "benchmark": BENCHMARK,
        "margin_points": 100 * MARGIN,
        "runs": options.runs,
        "pass_at_1": {name: round(100 * float(np.mean(values)), 1) for name, values in correct.items()},
        "simulated": shares,
    }


def departures(name: str, problems: int, folder: Path) -> list[Departures]:
    """Greedy answers of an engine, read under the cell without its fault."""
    sampling = {"temperature": 0.0, "max_new_tokens": 2 * CELL["kv_budget"]}
    traces = traces_of(name, folder, problems=problems, samples=1, sampling=sampling)
    written = {trace.problem: trace.text.partition("</think>")[0] for trace in traces}
    model, benchmark = models.find(MODEL), benchmarks.find(BENCHMARK)
    values = dict(ROUNDED.get(name, CELL))
    cell = policies.from_setting(Setting.from_parameters(values.pop("policy"), **values))
    texts = [(model.encode(benchmark.prompt(problem)), written[problem.id]) for problem in benchmark.problems(problems)]
    return read_under_policy(model, cell, texts)


def texts_found(pool: list[Departures], size: int, runs: int) -> dict[str, float]:
    """The shares of simulated verifications, so many texts each, that the checks of texts fail in."""
    alarms = {"alarm": 0, "before": 0, "after": 0}
    for seed in range(runs):
        draw = np.random.default_rng(seed).choice(len(pool), min(size, len(pool)), replace=False)
        checks = text_checks([pool[i] for i in draw])
        bad = {check["name"].removeprefix("texts ") for check in checks if not check["good"]}
        for name in alarms:
            alarms[name] += name in bad or (name == "alarm" and bool(bad))
    return {name: count / runs for name, count in alarms.items()}


def measure_texts(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Power and false alarms of `verify --texts`."""
    names = [name for name in (*ENGINES, *ROUNDED) if name in (options.only or [name])]
    pools = {name: departures(name, options.text_problems, folder) for name in names}
    return {
        "read": {name: len(pool) for name, pool in pools.items()},
        "largest_gaps": {
            name: [round(max(item.gap[side] for item in pool), 3) for side in (0, 1)] for name, pool in pools.items()
        },
        "simulated": {
            name: {str(size): texts_found(pool, size, options.runs) for size in options.text_sizes}
            for name, pool in pools.items()
        },
    }


def main() -> None:
    """Decode where there are no answers yet, and simulate."""
    sizes: dict[str, Any] = {"sizes": [60, 240, 960], "text_sizes": [16, 32, 64], "text_problems": 120}
    folder, only = {"type": Path, "required": True}, {"nargs": "+"}
    options = arguments(__doc__, folder=folder, problems=60, samples=3, runs=200, texts=False, only=only, **sizes)
    there = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    there = {name: part for name, part in there.items() if name not in ("options", "torch", "machine")}
    if options.texts:
        there |= {"program": "verify", "texts": measure_texts(options.folder / "texts", options)}
    else:
        there |= measure_grades(options.folder / "grades", options)
    keep(options, **there)


if __name__ == "__main__":
    main()

"""Does `kvatlas verify` find a faulty endpoint, and leave a sound one alone?

    python bench/verify.py --folder build/verify                      # resumed where it was stopped
    python bench/verify.py --folder build/verify --real --out bench/results/verify.json

A cell of embedded:tiny-llama on CHAIN6-14 is decoded as it is, and by engines with one fault each: the budget ignored,
the local window one token too short, the newest token lost in each compression, another ratio or chat template. Each
simulated verification draws problems with replacement and a sample of each side from these answers, and is judged as
`verify` does, with and without what only some endpoints tell (compressions; prompt lengths). `--real` also starts
`kvatlas serve` with each fault and verifies it over HTTP, and a sound one.

    python bench/verify.py --folder build/verify --texts --real --out bench/results/verify.json

`--texts` measures `verify --texts` instead, beside what the file holds: greedy answers of each engine, and of sound and
faulty ones in bfloat16, are read under the cell once; simulated verifications draw some of these texts. With `--real`
each is served, and verified over HTTP against five runs. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keeping import keep
from kvatlas import benchmarks, models, policies
from kvatlas.core import Setting
from kvatlas.engine import compression
from kvatlas.integrations.served_texts import Text, read
from kvatlas.integrations.verification_report import LENGTH_P, text_checks
from kvatlas.policies import CacheView, CompressingPolicy
from kvatlas.results import Store
from kvatlas.stats.pairs.departures import Departures
from kvatlas.stats.pairs.verification import Standing, length_shift, verified
from kvatlas.sweeps import make_plan, parse_spec, sweep
from kvatlas.sweeps.plan import WorkItem

MODEL, BENCHMARK, MOST, MARGIN = "embedded:tiny-llama", "CHAIN6-14", 700, 0.05
CELL = {"policy": "window", "kv_budget": 288, "ratio_over": "thinking", "local_window": 32, "ratio": 0.5}
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "sound": CELL,
    "budget ignored": {"policy": "full"},
    "wrong ratio": {**CELL, "ratio": 0.1},
    "window off by one": CELL,
    "newest token lost": CELL,
    "template changed": CELL,
}
CELL_NAME = "window local_window=32 ratio=0.5"
#: Engines in bfloat16, by the fault that they have; and sound ones whose policy chooses by scores, instead of window.
ROUNDED = {"sound, bfloat16": "sound", "window off by one, bfloat16": "window off by one"}
SCORED = {"sound, snapkv, bfloat16": "snapkv", "sound, rkv, bfloat16": "rkv"}
#: The runs that endpoints are verified against for real: problems of about the same size.
RUNS = ("CHAIN6-14", "CHAIN6-13", "CHAIN6-15", "CHAIN7-14", "CHAIN7-15")
#: Answers of one fault: correct and output tokens by problem and sample, and tokens that prompts are longer.
Pool = dict[str, list[list[float]]]


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


#: Tokens that a faulty compression loses, counted from the end: the oldest of the local window, the newest of all.
LOST = {"window off by one": CELL["local_window"], "newest token lost": 1}


@contextmanager
def losing(fault: str) -> Iterator[None]:
    """Compressions lose the token of a fault, if it has one."""
    usual, lost = compression.select_tokens, LOST.get(fault)

    def select(policy: CompressingPolicy, cached: CacheView) -> torch.Tensor:
        kept = usual(policy, cached)
        at = kept.shape[-1] - lost
        return torch.cat([kept[..., :at], kept[..., at + 1 :]], dim=-1)

    compression.select_tokens = usual if lost is None else select
    try:
        yield
    finally:
        compression.select_tokens = usual


def decoded(settings: list[Mapping[str, Any]], model: str, problems: int, samples: int, folder: Path) -> list[Pool]:
    """The answers under each setting."""
    spec = {
        "models": [{"model": model, "name": "model"}],
        "benchmarks": [BENCHMARK],
        "problems": problems,
        "samples": samples,
        "sampling": {"max_new_tokens": MOST},
        "baseline": settings,
    }
    plan = make_plan(parse_spec(spec))
    sweep(plan, folder, workers=1)
    results: list[Pool] = []
    with Store.open(folder) as store:
        traces = [trace for _, trace in store.traces(texts=False)]
    for policy, _ in plan.policies:
        pool: Pool = {}
        for trace in sorted(
            (trace for trace in traces if trace.setting == policy.setting), key=lambda item: item.sample
        ):
            used = trace.usage
            row = [float(trace.grade.correct), used.output_tokens / MOST, float(used.prompt_tokens or 0)]
            pool.setdefault(trace.problem, []).append([float(value) for value in row])
        results.append(pool)
    return results


def pools(problems: int, samples: int, folder: Path) -> dict[str, Pool]:
    """The answers of all engines."""
    shared = [name for name in CHANGED if name not in (*LOST, "template changed")]
    settings = [CHANGED[name] for name in shared]
    by_name = dict(zip(shared, decoded(settings, MODEL, problems, samples, folder / "a"), strict=True))
    template = other_template(folder)
    (by_name["template changed"],) = decoded([CELL], template, problems, samples, folder / "b")
    for fault in LOST:
        with losing(fault):
            (by_name[fault],) = decoded([CELL], MODEL, problems, samples, folder / fault.replace(" ", "-"))
    return by_name


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
    apart = standing in (Standing.WORSE, Standing.BETTER)
    longer = length_shift(lengths[0], lengths[1]).p < LENGTH_P
    return {
        "alarm": apart or longer or not same,
        "alarm_without_prompt_lengths": apart or longer,
        "by_grades": apart,
        "by_lengths": longer,
        "equivalent": standing is Standing.EQUIVALENT,
        "not_decided": standing is Standing.UNDECIDED,
    }


@contextmanager
def served(fault: str, folder: Path, *more: str) -> Iterator[str]:
    """The address of `kvatlas serve` with a fault."""
    folder.mkdir(exist_ok=True)
    model = other_template(folder) if fault == "template changed" else MODEL
    setting = {name: value for name, value in CHANGED[fault].items() if name != "policy"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in setting.items() if name != "ratio_over"]
    over = ["--set", "ratio_over=thinking"] if setting else []
    policy = ["--policy", str(CHANGED[fault]["policy"])]
    serve = [sys.executable, __file__, "--serve", fault, model, *policy, *words, *over, *more, "--port", "0"]
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield next(match_[0] for line in process.stdout if (match_ := re.search(r"http://\S+?:\d+", line)))
    finally:
        process.terminate()
        process.wait(60)


def verified_by(url: str, fault: str, run: Path, out: Path, *more: str) -> dict[str, Any]:
    """What `kvatlas verify` says of an endpoint, one sample of each problem."""
    words = [url, "--against", str(run), "--cell", CELL_NAME, "--out", str(out), "--samples", "1", *more]
    verify = [sys.executable, "-m", "kvatlas", "verify", *words, "--lose-at-most", str(100 * MARGIN), "--json"]
    done = subprocess.run([*verify, "--quiet"], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    return {
        "fault": fault,
        "exit_code": done.returncode,
        "alarmed": said["alarmed"],
        "verdict": said["cell"]["verdict"],
        "points": -said["cell"]["loses"],
        "failed_checks": [check["name"] for check in said["checks"] if not check["good"]],
    }


def real(fault: str, folder: Path, run: Path, problems: int) -> dict[str, Any]:
    """`kvatlas verify` against `kvatlas serve` with a fault; what was found before is read."""
    if (folder / "found.json").is_file():
        document: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return document
    with served(fault, folder) as url:
        document = verified_by(url, fault, run, folder / "served", "--problems", str(problems))
    (folder / "found.json").write_text(json.dumps(document))
    return document


def texts(name: str, problems: int, folder: Path) -> list[Departures]:
    """Greedy answers of an engine, read under the cell without its fault; what was read before is taken."""
    kept = folder / "departures.json"
    if kept.is_file():
        return [Departures(**{key: tuple(pair) for key, pair in row.items()}) for row in json.loads(kept.read_text())]
    folder.mkdir(parents=True, exist_ok=True)
    fault = "sound" if name in SCORED else ROUNDED.get(name, name)
    policy = {"policy": SCORED[name]} if name in SCORED else {}
    address = other_template(folder) if fault == "template changed" else MODEL
    spec = {
        "models": [{"model": address, "name": "model", "dtype": "bfloat16" if "bfloat16" in name else "float32"}],
        "benchmarks": [BENCHMARK],
        "problems": problems,
        "samples": 1,
        "sampling": {"temperature": 0.0, "max_new_tokens": 2 * CELL["kv_budget"]},
        "baseline": [{**CHANGED[fault], **policy}],
    }
    with losing(fault):
        sweep(make_plan(parse_spec(spec)), folder / "answers", workers=1)
    with Store.open(folder / "answers") as store:
        written = {trace.problem: trace.text for _, trace in store.traces()}
    model, benchmark = models.find(MODEL), benchmarks.find(BENCHMARK)
    cell = policies.of(Setting.of(**{**CELL, **policy}))
    asked = [(WorkItem(BENCHMARK, problem, 0, (cell.setting,)), problem) for problem in benchmark.problems(problems)]
    result = read(
        model,
        cell,
        [
            Text(item, model.encode(benchmark.prompt(problem)), written[problem.id].partition("</think>")[0])
            for item, problem in asked
        ],
    )
    kept.write_text(json.dumps([vars(item) for item in result]))
    return result


def texts_found(pool: list[Departures], size: int, runs: int) -> dict[str, float]:
    """The shares of simulated verifications, so many texts each, that the checks of texts fail in."""
    alarms = {"alarm": 0, "before": 0, "after": 0}
    for seed in range(runs):
        draw = np.random.default_rng(seed).choice(len(pool), min(size, len(pool)), replace=False)
        bad = {check.name.removeprefix("texts ") for check in text_checks([pool[i] for i in draw]) if not check.good}
        for name in alarms:
            alarms[name] += name in bad or (name == "alarm" and bool(bad))
    return {name: count / runs for name, count in alarms.items()}


def real_texts(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """`kvatlas verify --texts` of an endpoint against each run; what was found before is read."""
    kept = folder / "found.json"
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.is_file() else []
    left = [benchmark for benchmark in RUNS[: options.real_runs] if benchmark not in {row["run"] for row in rows}]
    if not left:
        return rows
    more = ["--model-option", "dtype=bfloat16"] if name in ROUNDED else []
    with served(ROUNDED.get(name, name), folder, *more) as url:
        for benchmark in left:
            words = ["--problems", str(options.real_problems), "--texts", str(options.real_texts)]
            run, out = folder.parent / benchmark, folder / benchmark
            rows.append({"run": benchmark, **verified_by(url, name, run, out, *words)})
            kept.write_text(json.dumps(rows))
    return rows


def measure_texts(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Power and false alarms of `verify --texts`, simulated and for real."""
    names = [name for name in (*CHANGED, *ROUNDED, *SCORED) if name in (options.only or [name])]
    pools = {name: texts(name, options.text_problems, folder / _plain(name)) for name in names}
    by_name: dict[str, Any] = {
        "read": {name: len(pool) for name, pool in pools.items()},
        "largest_gaps": {
            name: [round(max(item.gap[side] for item in pool), 3) for side in (0, 1)] for name, pool in pools.items()
        },
        "simulated": {
            name: {str(size): texts_found(pool, size, options.runs) for size in options.text_sizes}
            for name, pool in pools.items()
        },
    }
    if options.real:
        for benchmark in RUNS[: options.real_runs]:
            spec = {
                "models": [{"model": MODEL, "name": "model"}],
                "benchmarks": [benchmark],
                "problems": options.text_problems // 2,
                "samples": 1,
                "sampling": {"max_new_tokens": MOST},
                "baseline": [CELL],
            }
            sweep(make_plan(parse_spec(spec)), folder / benchmark, workers=1)
        by_name["real"] = []
        for name in (name for name in names if name not in SCORED):
            by_name["real"] += real_texts(name, folder / f"real {_plain(name)}", options)
    return by_name


def _plain(name: str) -> str:
    return name.replace(",", "")


def serve(fault: str, words: list[str]) -> None:
    """`kvatlas serve` with a fault."""
    from kvatlas.cli import main as command

    sys.argv = ["kvatlas", "serve", *words]
    with losing(fault):
        command()


def main() -> None:
    """Decode where there are no answers yet, simulate, verify for real."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="Where answers are kept.")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[60, 240, 960])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--text-problems", type=int, default=120)
    parser.add_argument("--text-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--only", nargs="+", help="Some of the engines.")
    parser.add_argument("--real-problems", type=int, default=12)
    parser.add_argument("--real-texts", type=int, default=32)
    parser.add_argument("--real-runs", type=int, default=len(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder
    if options.texts:
        there = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
        keep({**there, "program": "verify", "texts": measure_texts(folder / "texts", options)}, options.out)
        return
    answers = pools(options.problems, options.samples, folder)
    simulations = folder / "simulated.json"
    made: dict[str, dict[str, Any]] = json.loads(simulations.read_text()) if simulations.is_file() else {}
    for name, pool in answers.items():
        for size in map(str, options.sizes):
            if size not in made.setdefault(name, {}):
                seeds = range(options.runs)
                made[name][size] = _shares([simulated(answers["sound"], pool, int(size), seed) for seed in seeds])
                simulations.write_text(json.dumps(made))
    by_name: dict[str, Any] = {
        "program": "verify",
        "cell": CELL,
        "benchmark": BENCHMARK,
        "margin_points": 100 * MARGIN,
        "runs": options.runs,
        "pass_at_1": {
            name: round(100 * float(np.mean([row[0] for rows in pool.values() for row in rows])), 1)
            for name, pool in answers.items()
        },
        "simulated": made,
    }
    if options.real:
        faults = [*(name for name in CHANGED if name != "sound"), "sound"]
        by_name["real"] = [
            real(fault, folder / f"real-{number}", folder / "a", options.problems)
            for number, fault in enumerate(faults)
        ]
    if options.out and options.out.is_file():
        by_name = {**json.loads(options.out.read_text()), **by_name}
    keep(by_name, options.out)


def _shares(runs: list[dict[str, bool]]) -> dict[str, float]:
    return {name: round(float(np.mean([run[name] for run in runs])), 4) for name in runs[0]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        main()

"""The numbers of docs/findings/vllm-plugin.md: the plug-in of plugins/vllm beside kvatlas's engine, in a stock vLLM.

    VLLM_PYTHON=build/engines/vllm/bin/python python bench/vllm_plugin.py --out bench/results/vllm_plugin.json

Each embedded model decodes ledgers under some settings, greedily, in kvatlas. vLLM then writes the same prompts, 16 at
a time: once with room for all, and in turns with a pool of so few blocks that requests are preempted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

Json = dict[str, Any]
PAGES = ("docs/findings/vllm-plugin.md",)
MODELS = ("tiny-qwen", "tiny-llama")
BENCHMARK = "LEDGER12-18"
MOST = 700
#: All choose one set of tokens for all layers and heads, but for the last one.
SETTINGS: list[Json] = [
    {"policy": "window", "local_window": 16},
    {"policy": "knorm", "local_window": 16, "scope": "global"},
    {"policy": "rkv", "local_window": 16, "scope": "global"},
    {"policy": "snapkv", "local_window": 16, "scope": "global"},
    {"policy": "dynts", "local_window": 16},
    {"policy": "snapkv", "local_window": 16, "scope": "head"},
]
AXES = {"kv_budget": [128], "ratio": [0.5]}
#: The policies that take turns with the full cache at a small pool.
IN_TURNS = ("window", "dynts")
#: The first problems, which these write.
IN_TURN = 32
#: Sizes of the small pool in blocks, with the rounds of turns at each.
POOLS = {64: 2, 40: 1}
BLOCK = 32


def decode_in_kvatlas(name: str, problems: int, folder: Path) -> Json:
    """Return the prompts, and for each setting its greedy tokens, right answers and compressions by problem."""
    from kvatlas import benchmarks, models, sweep
    from kvatlas.results import Store

    spec = {
        "models": [f"embedded:{name}"],
        "benchmarks": [BENCHMARK],
        "problems": problems,
        "sampling": {"temperature": 0, "max_new_tokens": MOST},
        "settings": SETTINGS,
        "axes": AXES,
    }
    sweep(spec, folder / name)
    model = models.find(f"embedded:{name}")
    benchmark = benchmarks.find(BENCHMARK)
    questions = benchmark.problems(problems)
    ids = [problem.id for problem in questions]
    settings = {}
    with Store.open(folder / name) as store:
        for _, trace in store.traces():
            entry = settings.setdefault(str(trace.setting), {"policy": trace.setting.policy, "traces": {}})
            entry["values"] = {"policy": trace.setting.policy, **trace.setting.values}
            entry["traces"][trace.problem] = trace
    return {
        "folder": str(model.folder),
        "prompts": [list(model.encode(benchmark.prompt(problem))) for problem in questions],
        "settings": {
            setting: {
                "values": None if entry["policy"] == "full" else entry["values"],
                "policy": entry["policy"],
                "tokens": [list(entry["traces"][problem].tokens) for problem in ids],
                "right": [entry["traces"][problem].grade.correct for problem in ids],
                "compressions": [entry["traces"][problem].usage.compressions for problem in ids],
            }
            for setting, entry in settings.items()
        },
    }


class MeasuredEngine:
    """A vLLM in this process, whose setting and pool change between two lists of requests."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM
        from vllm.v1.core.sched.scheduler import Scheduler

        import kvatlas_vllm

        kvatlas_vllm.register()
        self.folder = folder
        options = {"enforce_eager": True, "dtype": "float32", "generation_config": "vllm", "block_size": BLOCK}
        more = {"max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": False}
        self.llm = LLM(model=folder, **options, **more)
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.used: list[int] = []
        self.preemptions = 0

        step = self.llm.llm_engine.step

        def counting_step() -> Any:
            result = step()
            self.used.append(self.blocks - self.pool.get_num_free_blocks())
            return result

        preempt = Scheduler._preempt_request

        def counting_preempt(*arguments: Any, **named: Any) -> None:
            self.preemptions += 1
            preempt(*arguments, **named)

        self.llm.llm_engine.step = counting_step
        Scheduler._preempt_request = counting_preempt
        self.blocks = self.pool.get_num_free_blocks()

    def write(self, prompts: list[list[int]], values: Json | None, blocks: int | None = None) -> Json:
        """Write greedy answers under a setting, None for the full cache, in a pool of so many blocks."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        from kvatlas_vllm.compressor import Compressor

        context = self.runner.compilation_config.static_forward_context
        layers = [context[name] for name in self.runner.kv_cache_config.kv_cache_groups[0].layer_names]
        vars(self.runner).pop("kvatlas", None)
        for layer in layers:
            # The queries of an earlier setting were captured.
            vars(layer.impl).pop("forward", None)
        if values is not None:
            self.runner.kvatlas = Compressor(self.runner, self.folder, values, layers)

        taken = self.pool.get_new_blocks(self.blocks - blocks) if blocks else []
        everything = self.blocks
        self.blocks -= len(taken)
        self.used.clear()
        self.preemptions = 0
        began = time.process_time()
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        answers = self.llm.generate(requests, SamplingParams(temperature=0, max_tokens=MOST), use_tqdm=False)
        seconds = time.process_time() - began
        self.blocks = everything
        self.pool.free_blocks(reversed(taken))
        print(values, blocks, f"{seconds:.1f} s", file=sys.stderr, flush=True)
        return {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "most_blocks": max(self.used),
            "mean_blocks": sum(self.used) / len(self.used),
            "left_blocks": self.used[-1],
            "preemptions": self.preemptions,
            "cpu_seconds": seconds,
        }


def write_in_vllm(asked: Json) -> Json:
    """Return what vLLM writes for `asked`: the settings with room for all, then some in turns at a small pool."""
    import vllm

    engine = MeasuredEngine(asked["folder"])
    prompts = asked["prompts"]
    settings = asked["settings"]
    # The first requests of a process are slow.
    engine.write(prompts[:4], None)
    wide = {name: engine.write(prompts, entry["values"]) for name, entry in settings.items()}
    turns = []
    for blocks, rounds in POOLS.items():
        chosen = [name for name, entry in settings.items() if entry["policy"] in ("full", *IN_TURNS)]
        for name in chosen * rounds:
            answers = engine.write(prompts[:IN_TURN], settings[name]["values"], blocks)
            turns.append({"setting": name, "pool": blocks} | answers)
    return {"version": vllm.__version__, "wide": wide, "turns": turns}


def outcomes_of(decoded: Json, written: Json) -> Json:
    """Return by setting and problem which texts of vLLM are kvatlas's, with the blocks in use."""

    def entry(name: str, answers: Json) -> Json:
        expected = decoded["settings"][name]["tokens"]
        equal = [mine == theirs for mine, theirs in zip(expected, answers["tokens"], strict=False)]
        new_tokens = sum(map(len, answers["tokens"]))
        return {"setting": name, "equal": equal, "new_tokens": new_tokens} | {
            key: value for key, value in answers.items() if key not in ("tokens", "setting")
        }

    return {
        "vllm": written["version"],
        "kvatlas": {
            name: {key: each[key] for key in ("policy", "values", "right", "compressions")}
            for name, each in decoded["settings"].items()
        },
        "wide": [entry(name, answers) for name, answers in written["wide"].items()],
        "turns": [entry(answers["setting"], answers) for answers in written["turns"]],
    }


def numbers_of(outcomes: Json) -> Json:
    """Return the counts of equal texts, blocks in use, preemptions and tokens per CPU second."""
    numbers: Json = {}
    for model, found in outcomes.items():
        wide = []
        for row in found["wide"]:
            cell = found["kvatlas"][row["setting"]]
            wide.append(
                {
                    "setting": label(cell),
                    "equal": sum(row["equal"]),
                    "of": len(row["equal"]),
                    "right": sum(cell["right"]),
                    "compressions": sum(cell["compressions"]),
                    "most_blocks": row["most_blocks"],
                    "mean_blocks": row["mean_blocks"],
                    "left_blocks": row["left_blocks"],
                }
            )
        turns = []
        for name, blocks in dict.fromkeys((row["setting"], row["pool"]) for row in found["turns"]):
            rows = [row for row in found["turns"] if (row["setting"], row["pool"]) == (name, blocks)]
            turns.append(
                {
                    "pool": blocks,
                    "setting": label(found["kvatlas"][name]),
                    "equal": min(sum(row["equal"]) for row in rows),
                    "of": len(rows[0]["equal"]),
                    "preemptions": median(row["preemptions"] for row in rows),
                    "mean_blocks": median(row["mean_blocks"] for row in rows),
                    "tokens_per_second": median(row["new_tokens"] / row["cpu_seconds"] for row in rows),
                    "rounds": len(rows),
                }
            )
        wide.sort(key=lambda row: (row["setting"] != "full", row["setting"]))
        turns.sort(key=lambda row: (-row["pool"], row["setting"] != "full", row["setting"]))
        numbers[model] = {"wide": wide, "turns": turns}
    return numbers


def label(cell: Json) -> str:
    """Return the name of a setting for the page."""
    values = cell["values"] or {}
    return cell["policy"] if "scope" not in values else f"{cell['policy']}, scope {values['scope']}"


def lines(numbers: Json) -> list[str]:
    """Return the rows of the page's tables."""
    rows = []
    for model, found in numbers.items():
        for row in found["wide"]:
            blocks = f"{row['most_blocks']} | {row['mean_blocks']:.1f}"
            equal = f"{row['equal']} of {row['of']}"
            rows.append(f"| {model} | {row['setting']} | {equal} | {row['compressions']} | {row['right']} | {blocks} |")
    for model, found in numbers.items():
        for row in found["turns"]:
            speed = f"{row['preemptions']:g} | {row['mean_blocks']:.1f} | {row['tokens_per_second']:.0f}"
            equal = f"{row['equal']} of {row['of']}"
            rows.append(f"| {row['pool']} | {model} | {row['setting']} | {equal} | {speed} |")
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--in-vllm"]:
        asked, answered = map(Path, sys.argv[2:])
        answered.write_text(json.dumps(write_in_vllm(json.loads(asked.read_text()))))
        return

    # vLLM's environment has no packages of these.
    from common import arguments, keep

    options = arguments(__doc__, problems=60, folder=Path("build/vllm_plugin"))
    # One process, so that its blocks can be counted.
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    more = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | settings | more | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    outcomes = {}
    for model in MODELS:
        stored = options.folder / f"{model}.json"
        if not stored.is_file():
            asked = options.folder / "asked.json"
            answered = options.folder / "answered.json"
            decoded = decode_in_kvatlas(model, options.problems, options.folder)
            asked.write_text(json.dumps(decoded))
            command = [os.environ["VLLM_PYTHON"], __file__, "--in-vllm", str(asked), str(answered)]
            subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
            stored.write_text(json.dumps(outcomes_of(decoded, json.loads(answered.read_text()))))
        outcomes[model] = json.loads(stored.read_text())
    keep(options, outcomes=outcomes, numbers=numbers_of(outcomes))


if __name__ == "__main__":
    main()

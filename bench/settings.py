"""The speed of settings beside that of the first one, on traces of a model.

    python bench/settings.py --settings '{budgets: equal}' '{budgets: ada}' '{budgets: pyramid}'
    python bench/settings.py --policy rkv --settings '{refresh: 1}' '{refresh: 32}' --grid 16 64 112 160

`--settings` are parameters of `--policy`, beside those of `--common`, each as YAML. With `--grid` each is decoded at
all these local windows, whose time is added. The settings take turns in every round, one thread, a warm-up before that
does not count. `tokens_per_second` are decoded tokens per CPU second, compressions included, the median over rounds;
`ratio` is the median over rounds of the quotient with the first setting of the round. `peak_kv_tokens` is the greatest
mean over the heads, `pool_bytes` what the cache took. Prints one JSON document.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import yaml

from common import arguments, keep
from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import Policy

COMMON = "{kv_budget: 192, local_window: 64, ratio: 0.3, ratio_over: thinking, budget_over: thinking}"


def made(policy: str, *texts: str, **more: Any) -> Policy:
    values: dict[str, Any] = {}
    for text in texts:
        values |= yaml.safe_load(text)
    return policies.from_setting(Setting.from_parameters(policy, **{**values, **more}))


def decode(
    handle: ModelHandle, model: Any, options: Any, settings: Sequence[Policy], prompts: Sequence[tuple[int, ...]]
) -> dict[str, float]:
    """Decode the prompts under each of the settings, one engine for all; return its sums."""
    sampling = Sampling(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=options.new_tokens)
    engine = Engine(handle, model, settings, sampling, options.batch)
    work = []
    for number, prompt in enumerate(prompts):
        for policy in settings:
            stream = stream_key(0, handle.name, options.benchmark, str(number), 0)
            work.append(Request((number, policy), prompt, stream, (policy,)))
    began = time.process_time()
    peak = 0
    compressions = 0
    for generation in engine.run(work):
        peak = max(peak, generation.usage.peak_kv_tokens)
        compressions += generation.usage.compressions
    seconds = time.process_time() - began
    return {
        "tokens_per_second": engine.decoded_tokens / seconds,
        "compressions": compressions,
        "peak_kv_tokens": peak,
        "pool_bytes": engine.cache.bytes,
    }


def main() -> None:
    options = arguments(
        __doc__,
        model="smollm2-135m-think",
        benchmark="WORDS6-8",
        policy="snapkv",
        common=COMMON,
        settings=["{budgets: equal}", "{budgets: ada}", "{budgets: pyramid}"],
        grid={"nargs": "*", "type": int, "default": []},
        problems=2,
        new_tokens=400,
        batch=16,
        rounds=3,
        endless=False,
    )
    torch.set_num_threads(1)
    handle = models.find(options.model)
    if options.endless:
        handle = replace(handle, overrides=models.ENDLESS)
    model = handle.load()
    benchmark = find(options.benchmark)
    prompts = [handle.encode(benchmark.prompt(problem)) for problem in benchmark.problems(options.problems)]
    arms = []
    for text in options.settings:
        windows = [{"local_window": window} for window in options.grid] or [{}]
        arms.append([made(options.policy, options.common, text, **window) for window in windows])
    decode(handle, model, options, arms[0][:1], prompts[:1])

    def one_round() -> list[dict[str, float]]:
        return [decode(handle, model, options, arm, prompts) for arm in arms]

    rounds = [one_round() for _ in range(options.rounds)]
    results = []
    for number, arm in enumerate(arms):
        taken = [outcome[number] for outcome in rounds]
        ratios = [outcome[number]["tokens_per_second"] / outcome[0]["tokens_per_second"] for outcome in rounds]
        results.append(
            {
                "settings": [policy.setting.id for policy in arm],
                **taken[0],
                "tokens_per_second": round(median(each["tokens_per_second"] for each in taken), 2),
                "ratio": round(median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
            }
        )
    keep(options, results=results)


if __name__ == "__main__":
    main()

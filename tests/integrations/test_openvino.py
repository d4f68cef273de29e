"""OpenVINO GenAI: it reads what is exported, and its recipe serves a converted model as the map has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import Setting
from kvatlas.integrations.export_setting import export_setting
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.command_line import Call

RECIPE = Path(__file__).parents[2] / "recipes" / "openvino" / "serve.py"
#: A folder with embedded:tiny-llama as optimum-cli converts it (the command stands at the recipe's head).
CONVERTED = "KVATLAS_OPENVINO_MODEL"
SETTING = {"scope": "layer", "keep_prompt": False, "every": 32}


def test_the_recipe_speaks_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE.parent))
    import serve

    def ask(body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body["max_tokens"] > 9:
            raise RuntimeError("out of memory")
        return {"choices": [{"message": {"content": body["messages"][0]["content"]}}]}

    http = serve.server("tiny", ask, 0)
    threading.Thread(target=http.serve_forever, daemon=True).start()

    def said(path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http.server_port}{path}", data) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        assert said("/v1/models")[1]["data"][0]["id"] == "tiny"
        assert said("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"] == "hello"
        assert said("/v1/other", chat) == (404, "There is no /v1/other.")
        assert said("/v1/chat/completions", {**chat, "max_tokens": 10}) == (500, "OpenVINO failed: out of memory")
        for wrong in ([], {}, {**chat, "stream": True}, {**chat, "max_tokens": "x"}):
            code, text = said("/v1/chat/completions", wrong)
            assert code == 400
            assert text.startswith("This is no request of a chat")
    finally:
        http.shutdown()
        http.server_close()
        sys.modules.pop("serve")


@pytest.mark.parametrize(("kv_budget", "local_window"), [(128, 32), (1024, 256)])
def test_openvino_reads_what_is_exported(kv_budget: int, local_window: int) -> None:
    pytest.importorskip("openvino_genai", reason="needs the extra openvino")
    made = export_setting(Setting.of("h2o", kv_budget=kv_budget, local_window=local_window, **SETTING), "openvino")
    by_name: dict[str, Any] = {}
    exec(made.text, by_name)  # noqa: S102
    config = by_name["scheduler_config"]
    eviction = config.cache_eviction_config
    assert config.use_cache_eviction
    assert (eviction.get_max_cache_size(), eviction.get_recent_size()) == (kv_budget, local_window)
    assert eviction.get_start_size() + eviction.get_recent_size() + eviction.get_evictable_size() == kv_budget


@pytest.mark.skipif(CONVERTED not in os.environ, reason=f"needs {CONVERTED}, a folder that optimum-cli converted")
def test_a_converted_model_answers_as_the_full_cache_does_until_it_evicts(kvatlas: Call, tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="needs the extra openvino")
    spec = {
        "models": ["embedded:tiny-llama"],
        "benchmarks": ["CHAIN6"],
        "problems": 6,
        "samples": 1,
        "sampling": {"temperature": 0, "max_new_tokens": 300},
        "baseline": [{"policy": "full"}],
        "settings": [{"policy": "h2o", "local_window": 32, **SETTING}],
        "axes": {"kv_budget": [96, 160]},
    }
    run, deploy = tmp_path / "run", tmp_path / "deploy"
    sweep(make_plan(parse_spec(spec)), run, workers=1)
    kvatlas("export-setting", run, "--setting", "h2o kv_budget=96", "--to", "openvino", "--out", deploy)
    full = texts(run, "full")
    for name, words in {"all": (), "evicting": ("--setting", str(deploy / "openvino.py"))}.items():
        process = subprocess.Popen(
            [sys.executable, RECIPE, os.environ[CONVERTED], "--port", "0", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            url = re.findall(r"http://\S+", process.stdout.readline())[0]
            code, out, err = kvatlas(
                "verify", url, "--against", run, "--cell", "full", "--out", tmp_path / name, "--quiet", "--json"
            )
        finally:
            process.terminate()
            process.wait(60)
        assert code in (1, 3), err
        assert (texts(tmp_path / name, "served") == full) is (name == "all")
        assert json.loads(out)["checks"][0]["good"]


def texts(run: Path, policy: str) -> dict[str, str]:
    with Store.open(run) as store:
        traces = [trace for _, trace in store.traces() if trace.setting.policy == policy]
    return {trace.problem: trace.text.removeprefix("<think>") for trace in traces}

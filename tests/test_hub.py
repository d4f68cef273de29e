"""The hub's real client against a hub on this machine, and the messages without one."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvatlas.models import ModelHandle
from kvatlas.results import Store
from tests.command_line import Call, run_apart
from tests.hub_server import connect, hub
from tests.r1 import AIME, save_model


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    """A model whose weights are in several files."""
    return save_model("llama", tmp_path_factory.mktemp("r1") / "model", shards="100KB")


def test_a_model_and_a_data_set_come_from_the_hub_and_then_from_the_cache(
    r1: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Callable[..., str]
) -> None:
    # A data set in the layout of the hub's MATH-500.
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(AIME, data / "test.jsonl")
    path, out = tmp_path / "spec.json", tmp_path / "run"
    spec = {"benchmarks": ["MATH500"], "samples": 1, "sampling": {"max_new_tokens": 12}}
    spec["models"] = [{"model": "hf:owner/r1", "name": "R1"}]
    path.write_text(json.dumps(spec))
    with hub({"owner/r1": r1.folder, "HuggingFaceH4/MATH-500": data}) as (endpoint, fetched):
        connect(monkeypatch, endpoint, tmp_path / "cache")
        assert json.loads(succeed("plan", path, "--tokens-per-second", 100, "--json"))["traces"] == 3
        # A plan fetches no weights; a sweep does, every shard once.
        assert not [name for name in fetched if name.startswith("model-")]
        succeed("sweep", path, "--out", out, "--workers", 1, "--quiet")
        shards = [name for name in fetched if name.startswith("model-")]
        assert sorted(shards) == sorted(file.name for file in r1.folder.glob("model-*.safetensors"))
        assert len(shards) > 2
    # Without a hub, from the cache alone: the same files, hence the same run keys, hence nothing to do.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with Store.open(out) as store:
        before = store.keys()
    succeed("sweep", path, "--out", out, "--workers", 1, "--quiet")
    with Store.open(out) as store:
        assert store.keys() == before


#: By variables of the environment: commands, and what the hub's refusal of each says.
REFUSED: dict[str, dict[str, str]] = {
    "": {
        "list benchmarks GPQA_D": "'Idavidrein/gpqa' is gated: accept its terms on http",
        "list benchmarks AIME24": "'HuggingFaceH4/aime_2024' is not on http",
        "list benchmarks MATH500": "holds no file test.jsonl; name a local file: MATH500@FILE",
        "run hf:owner/none CHAIN4": "The model 'owner/none' is not on http",
        "run hf:owner/r1 CHAIN4 --model-option revision=v9": "The model 'owner/r1' at revision 'v9' is not on http",
    },
    "HF_HUB_OFFLINE=1": {"run hf:owner/r1 CHAIN4": "HF_HUB_OFFLINE switches downloads off"},
    "HF_ENDPOINT=http://127.0.0.1:9": {"run hf:owner/r1 CHAIN4": "cannot be reached; name a local"},
    "HTTPS_PROXY=http://127.0.0.1:9": {"list benchmarks AIME24": "is not on http"},
}


@pytest.mark.parametrize("variable", REFUSED)
def test_what_the_hub_refuses_is_one_sentence_and_soon(
    r1: ModelHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvatlas: Call, variable: str
) -> None:
    """Without a variable in a process of its own, which takes the hub's address from its environment."""
    refused = REFUSED[variable]
    name, _, value = variable.partition("=")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    monkeypatch.setattr("tests.hub_server.GATED", "Idavidrein/gpqa")
    for switch in [key for key in os.environ if key == "HF_HUB_OFFLINE" or key.lower().endswith("_proxy")]:
        monkeypatch.delenv(switch)
    with hub({"owner/r1": r1.folder, "HuggingFaceH4/MATH-500": tmp_path / "empty"}) as (endpoint, _):
        began = time.perf_counter()
        if not variable:
            environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache")}
            done = run_apart(refused, tmp_path, **environment)
        else:
            connect(monkeypatch, value if name == "HF_ENDPOINT" else endpoint, tmp_path / "cache")
            if name == "HF_HUB_OFFLINE":
                monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
            elif name == "HTTPS_PROXY":
                monkeypatch.setenv(name, value)
            done = [kvatlas(*command.split()) for command in refused]
        took = time.perf_counter() - began
    for (code, out, err), sentence in zip(done, refused.values(), strict=True):
        assert (code, out) == (2, "")
        assert sentence in err, err
        assert err.count("\n") == 1
    # The machine may be busy; without limits the hub's client would try for minutes.
    assert took < 90

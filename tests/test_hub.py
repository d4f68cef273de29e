"""The hub's real client against a hub on this machine, and the messages without one."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from kvatlas.models import ModelHandle
from kvatlas.results import Store
from tests.hub_server import hub
from tests.packaging.environments import COMMANDS
from tests.r1 import AIME, save_model


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> ModelHandle:
    """A model whose weights are in several files."""
    return save_model("llama", tmp_path_factory.mktemp("r1") / "model", shards="100KB")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in the layout of the hub's MATH-500."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(AIME, folder / "test.jsonl")
    return folder


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the hub's client of this process begin with an empty cache, without a proxy."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    close_session()


@pytest.mark.usefixtures("uncached")
def test_a_model_and_a_data_set_come_from_the_hub_and_then_from_the_cache(
    r1: ModelHandle, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeed: Callable[..., str]
) -> None:
    path, out = tmp_path / "spec.json", tmp_path / "run"
    spec = {
        "models": [{"model": "hf:owner/r1", "name": "R1"}],
        "benchmarks": ["MATH500"],
        "samples": 1,
        "sampling": {"max_new_tokens": 12},
    }
    path.write_text(json.dumps(spec))
    with hub({"owner/r1": r1.folder, "HuggingFaceH4/MATH-500": data}) as (endpoint, fetched):
        address = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
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


NONE, R1 = ("run", "hf:owner/none", "CHAIN4"), ("run", "hf:owner/r1", "CHAIN4")


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (
            {},
            [
                (("list", "benchmarks", "GPQA_D"), "'Idavidrein/gpqa' is gated: accept its terms on http"),
                (("list", "benchmarks", "AIME24"), "'HuggingFaceH4/aime_2024' is not on http"),
                (("list", "benchmarks", "MATH500"), "holds no file test.jsonl; name a local file: MATH500@FILE"),
                (NONE, "The model 'owner/none' is not on http"),
                (
                    (*R1, "--model-option", "revision=v9"),
                    "The model 'owner/r1' at revision 'v9' is not on http",
                ),
            ],
        ),
        ({"HF_HUB_OFFLINE": "1"}, [(R1, "HF_HUB_OFFLINE switches downloads off")]),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, [(R1, "cannot be reached; name a local")]),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, [(("list", "benchmarks", "AIME24"), "is not on http")]),
    ],
    ids=lambda item: " ".join(f"{name}={value}" for name, value in item.items()) if isinstance(item, dict) else "",
)
def test_what_the_hub_refuses_is_one_sentence_and_soon(
    r1: ModelHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, str],
    refused: list[tuple[tuple[str, ...], str]],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing")
    monkeypatch.setattr("tests.hub_server.GATED", "Idavidrein/gpqa")
    for name in [name for name in os.environ if name == "HF_HUB_OFFLINE" or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with hub({"owner/r1": r1.folder, "HuggingFaceH4/MATH-500": tmp_path / "empty"}) as (endpoint, _):
        began = time.perf_counter()
        commands = json.dumps([words for words, _ in refused])
        process = subprocess.run(
            [sys.executable, "-c", COMMANDS],
            env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), **more},
            input=commands, capture_output=True, text=True, check=False,
        )  # fmt: skip
        took = time.perf_counter() - began
    assert process.returncode == 0, process.stderr
    for (code, out, err), (_, sentence) in zip(json.loads(process.stdout), refused, strict=True):
        assert (code, out) == (2, "")
        assert sentence in err, err
        assert err.count("\n") == 1
    # The machine may be busy; without limits the hub's client would try for minutes.
    assert took < 90

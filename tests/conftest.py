"""Small real models for the tests: random weights of two and more architectures, with a real tokenizer."""

import gc
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import yaml

from kvatlas import models
from kvatlas.columns import CELL_COLUMNS
from kvatlas.models import ModelHandle
from tests.command_line import kvatlas, succeed
from tests.models.every_model import small_config
from tests.r1 import TEMPLATE, save_model
from tests.stored import decode_run

__all__ = ["kvatlas", "succeed"]

# Before torch is imported, and for the processes that tests start: as many threads as cores in each would wait for
# one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers would wait for every other process on the machine: their default is 15.
os.environ.setdefault("RAY_worker_niceness", "0")
# Wall time says how busy the machine is. The same examples at each start: a test that fails, fails by what was changed.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
# `make deep` looks for examples that are not known yet.
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile("same")

#: Plain ones, with windows, with a soft cap (gemma2), sinks (gpt_oss), values smaller than keys (deepseek_v3) and
#: layers with a state (qwen3_next).
ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"),
    *("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, a third of the time, and leave them out of later ones: they stay."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Begin each test with the same random numbers, whatever ran before it in its process.

    Modules that a test imports are left out of later garbage collections, an eighth of the time: they stay, too.
    """
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    before = len(sys.modules)
    result = yield
    if len(sys.modules) - before > 50:
        gc.collect()
        gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: one that began last would leave the other worker without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def save_random_model(kind: str, folder: Path) -> ModelHandle:
    """A small causal language model with random weights of the given architecture, in a Hugging Face folder."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    source = models.find("embedded:tiny-llama")
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "vocab_size": len(source.tokenizer),
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
        "eos_token_id": source.tokenizer.eos_token_id,
        "pad_token_id": source.tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    special: dict[str, dict[str, Any]] = {
        "gemma3_text": {
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": None},
        "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
        "deepseek_v3": {"v_head_dim": 12, "first_k_dense_replace": 1},
        "qwen3_next": {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    }
    kind = {"gemma3": "gemma3_text"}.get(kind, kind)
    config = small_config(CONFIG_MAPPING[kind], {**common, **special.get(kind, {})})
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source.folder / name).is_file():
            shutil.copy(source.folder / name, folder / name)
    return models.find(f"hf:{folder}")


class Models(dict[str, ModelHandle]):
    """Models with random weights by their architectures, each saved where a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, kind: str) -> ModelHandle:
        self[kind] = save_random_model(kind, self.folder / kind)
        return self[kind]


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Let interrupts reach the tests, which a shell's jobs in the background ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelHandle]:
    """One random-weight model of each architecture."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def r1_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelHandle]:
    """A model of R1's form with this template and these tags as single tokens, saved once; no test writes into it."""

    @cache
    def saved(template: str, tags: tuple[str, ...]) -> str:
        return save_model("llama", tmp_path_factory.mktemp("r1") / "m", template=template, tags=tags).name

    def build(template: str = TEMPLATE, tags: tuple[str, ...] = ("<think>", "</think>")) -> ModelHandle:
        return models.find(saved(template, tags))

    return build


@pytest.fixture(scope="session")
def tiny_llama() -> ModelHandle:
    """The embedded model."""
    return models.find("embedded:tiny-llama")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def spec_data(random_models: dict[str, ModelHandle]) -> Callable[..., dict[str, Any]]:
    """A small sweep of a random-weight model; keyword arguments replace keys."""

    def build(**changes: Any) -> dict[str, Any]:
        return {
            "models": [random_models["llama"].name],
            "benchmarks": ["CHAIN4", "CHAIN5"],
            "problems": 3,
            "samples": 2,
            "seed": 3,
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 90},
            "baseline": {"policy": "full"},
            "settings": [{"policy": name, "kv_budget": 64, "ratio_over": "thinking"} for name in ("window", "random")],
            "axes": {"local_window": [4, 8], "ratio": [0.2, 0.5]},
            **changes,
        }

    return build


@pytest.fixture(scope="session")
def finished(spec_data: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of this sweep, decoded in this process; no test writes into it."""
    return decode_run(spec_data(), tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def write_spec(tmp_path: Path, spec_data: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """The same as a file."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(spec_data(**changes)))
        return path

    return write


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as forks of this process: new processes would spend seconds on importing torch."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


@pytest.fixture
def column_list() -> Iterator[None]:
    """Take columns that a test adds away again."""
    count = len(CELL_COLUMNS)
    yield
    del CELL_COLUMNS[count:]

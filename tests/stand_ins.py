"""Stand-ins for what the documents use and a test lacks: models and data sets of the hub, trackers, a cluster."""

import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest

from kvatlas.benchmarks.public_data import SOURCES
from kvatlas.models import find
from tests.command_line import run_command
from tests.hub_server import hub
from tests.r1 import AIME, edit, save_model
from tests.serve.running import serving

#: Parts of commands, and what takes their place.
ELSEWHERE = {
    # A cluster: this machine.
    " --executor ray@10.0.0.1:6379": "",
    # A first look at all policies: half of it, in shorter traces.
    "sweep arena --problems 2": "sweep arena --problems 1 --set sampling.max_new_tokens=170",
    # Fewer problems, and fewer steps of training.
    "run embedded:tiny-qwen LEDGER24 --problems 20": "run embedded:tiny-qwen LEDGER24 --problems 4",
    "--problems 10 --max-new-tokens 300 --steps 60": "--problems 3 --max-new-tokens 200 --steps 20",
}
#: Models of the hub that the pages run.
MODELS = ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B",)
#: Benchmarks of the hub that the pages run.
BENCHMARKS = ("AIME24", "AIME25", "AMC23")


@contextmanager
def hub_of_small_models(folder: Path) -> Iterator[str]:
    """Serve a small random model under the name of each model of the pages, and three problems as each benchmark."""
    model = save_model("llama", folder / "model").folder
    # Short, so that its traces end soon.
    edit(model, "config.json", max_position_embeddings=512)
    folders = dict.fromkeys(MODELS, model)
    for name in BENCHMARKS:
        data_set = folder / name
        data_set.mkdir()
        file = data_set / SOURCES[name].files[0].replace("*", "")
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pd.read_json(AIME, lines=True, dtype=str).to_parquet(file)
        else:
            shutil.copy(AIME, file)
        folders[SOURCES[name].repository] = data_set
    with hub(folders) as (endpoint, _):
        yield endpoint


#: A program that lets a process of the tests run its command, and ends as that did.
ASKING = """#!/bin/sh
printf '%s\\n' "$@" > "$0.words"
exit "$(cat "$0.code")"
"""


def run_script(script: str, folder: Path) -> None:
    """Run a shell script with `kvatlas` on its path; the file system that it shares is a folder here.

    Its commands are run by a fork of this process: a new one would spend seconds on importing torch.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (folder / "shared" / "runs").mkdir(parents=True, exist_ok=True)
    kvatlas = programs / "kvatlas"
    kvatlas.write_text(ASKING)
    kvatlas.chmod(0o755)
    os.mkfifo(f"{kvatlas}.words")
    os.mkfifo(f"{kvatlas}.code")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    words = ["bash", "-c", script.replace("/shared/", f"{folder}/shared/")]
    answering = multiprocessing.get_context("fork").Process(target=_answer, args=(kvatlas, folder))
    answering.start()
    try:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    finally:
        answering.terminate()
        answering.join()
    assert done.returncode == 0, done.stdout + done.stderr + Path(f"{kvatlas}.said").read_text()


def _answer(kvatlas: Path, folder: Path) -> None:
    """Run the commands that a program sends."""
    os.chdir(folder)
    with Path(f"{kvatlas}.said").open("w") as said:
        while True:
            words = Path(f"{kvatlas}.words").read_text().splitlines()
            process = multiprocessing.get_context("fork").Process(target=run_command, args=(words, said.fileno()))
            process.start()
            process.join()
            Path(f"{kvatlas}.code").write_text(str(process.exitcode))


@contextmanager
def names_of(page: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield the names that the Python blocks of a page take as given, and serve what they ask."""
    if page.name == "README.md":
        yield _model_and_inputs()
    elif page.name == "serving.md":
        (command,) = re.findall(r"^kvatlas serve (.*)$", page.read_text(), flags=re.M)
        with serving(*shlex.split(command)) as (_, _, address):
            yield {"ADDRESS": address}
    else:
        for module in ("wandb", "mlflow"):
            monkeypatch.setitem(sys.modules, module, MagicMock())
        monkeypatch.setattr("huggingface_hub.HfApi", MagicMock())
        yield {}


def _model_and_inputs() -> dict[str, Any]:
    """Return a loaded model, as transformers has it, and a prompt for it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvatlas

    folder = find("embedded:tiny-llama").folder
    inputs = AutoTokenizer.from_pretrained(folder)("a = 3 . ? a", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    return {"model": AutoModelForCausalLM.from_pretrained(folder), "inputs": inputs, "kvatlas": kvatlas}

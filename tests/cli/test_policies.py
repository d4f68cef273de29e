"""Policies on the command line; a wrong one gives one sentence and exit code 2."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas.models import ModelHandle
from kvatlas.policies import PRESETS, policies
from kvatlas.predictor.labels import query_statistics
from tests.command_line import Call

RUN = ("run", "embedded:tiny-llama", "CHAIN4", "--problems", "2")
GOOD = ("--kv-budget", "80", "--local-window", "8", "--ratio", "0.3")
TRIATTENTION = ("--policy", "triattention", *GOOD, "--set")


def test_the_list_has_every_policy_with_what_a_user_asks_for(kvatlas: Call) -> None:
    rows = json.loads(kvatlas("list", "policies", "--json")[1])
    assert [row["name"] for row in rows] == [*policies.names(), *PRESETS]
    by_name = {row["name"]: row for row in rows}
    assert by_name["h2o"]["observes"] == ["attention"]
    assert by_name["tova"]["scope"] == "layer"
    assert by_name["snapkv"]["parameters"]["queries"] == 32
    assert by_name["snapkv"]["published"]["kernel"] == "7 on LongBench, 5 on others"
    assert all("arXiv" in row["paper"] for row in rows if row["name"] != "full")
    assert [row["name"] for row in rows if row["preset"]] == list(PRESETS)
    preset = by_name["h2o@dynts-paper"]
    assert preset["preset"]["policy"] == "tova"
    assert preset["preset"]["values"] == {"ratio_over": "older", "keep_prompt": False, "scope": "global"}
    assert "Robin930/DynTS" in preset["preset"]["source"]
    assert (preset["parameters"]["keep_prompt"], preset["scope"]) == (False, "global")
    out = kvatlas.succeed("list", "policies")
    for name in policies.names():
        assert f"\n{name} " in out
    assert all(name in out for name in PRESETS)
    assert len(out.splitlines()) < len(policies.names()) + 6


def test_one_policy_is_explained(kvatlas: Call) -> None:
    out = kvatlas.succeed("list", "policies", "rkv")
    for words in ("arXiv 2505.24133", "observes: queries; one choice for: head", "mix = 0.1   (published: 0.1)"):
        assert words in out
    assert "local_window: newest tokens that always stay" in out
    (row,) = json.loads(kvatlas("list", "policies", "rkv", "--json")[1])
    assert row["description"].startswith("Importance less redundancy")
    out = kvatlas.succeed("list", "policies", "h2o@dynts-paper")
    assert "tova with ratio_over=older, keep_prompt=False, scope=global" in out


def test_a_preset_is_run_by_its_name(kvatlas: Call) -> None:
    words = (*GOOD[2:], "--kv-budget", "60", "--max-new-tokens", "90", "--workers", "1", "--quiet")
    out = kvatlas.succeed(*RUN, "--policy", "sepllm@dynts-paper", *words)
    assert "Pass@1" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "h2o@unknown", *GOOD), "Unknown preset 'h2o@unknown'; expected: dynts@dynts-paper"),
        (("--policy", "h2o@dynts-paper", *GOOD, "--set", "keep_prompt=true"), "fixes keep_prompt = False"),
        (("--policy", "h2o", *GOOD, "--set", "scope=model"), "scope is 'model'; expected 'head', 'global', 'layer'"),
        (("--policy", "rkv", *GOOD, "--set", "mix=2"), "mix is 2; expected a number from 0 to 1"),
        (("--policy", "dynts-bottom", *GOOD, "--set", "predictor=no.safetensors"), "there is no file"),
        ((*TRIATTENTION, "statistics=no.safetensors"), "made by `kvatlas predictor calibrate`"),
        ((*TRIATTENTION, "statistics=FOLDER/README"), "cannot be read as those of queries"),
        ((*TRIATTENTION, "statistics=FOLDER/OTHER"), "the model 'embedded:tiny-llama' has"),
    ],
)
def test_wrong_policies_are_refused_in_one_sentence(
    kvatlas: Call, random_models: dict[str, ModelHandle], tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "README").write_text("hello")
    model = random_models["llama"]
    save_file(query_statistics(model, model.load(), [(5, 6, 7)]), tmp_path / "OTHER")
    given = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert sentence in kvatlas.refuse(*RUN, *given, "--workers", "1", "--quiet")


def test_calibrate_writes_what_triattention_reads(kvatlas: Call, tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    words = ("embedded:tiny-llama", "CHAIN3", "--problems", "2", "--max-new-tokens", "60")
    out = kvatlas.succeed("predictor", "calibrate", file, *words)
    assert "means over the queries of" in out
    assert load_file(file)["norm"].shape == (4, 4, 16)
    options = ("--policy", "triattention", *GOOD[2:], "--kv-budget", "60", "--set", f"statistics={file}")
    kvatlas.succeed(*RUN, *options, "--max-new-tokens", "90", "--workers", "1", "--quiet")
    half = tmp_path / "half.safetensors"
    kvatlas.succeed("predictor", "calibrate", half, *words, "--model-option", "dtype=bfloat16")
    assert not torch.equal(load_file(half)["norm"], load_file(file)["norm"])
    err = kvatlas.refuse("predictor", "calibrate", half, *words, "--model-option", "dtype=float33")
    assert "The model option dtype is 'float33'; expected auto, float32" in err
    err = kvatlas.refuse("predictor", "calibrate", tmp_path / "nowhere" / "x", *words)
    assert "name a file in an existing folder" in err

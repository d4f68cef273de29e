from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvatlas import cli, policies
from kvatlas.core import KvatlasError, Setting
from kvatlas.models import ModelHandle
from kvatlas.predictor import provenance_of
from kvatlas.results import Store
from kvatlas.sweeps import parse_spec
from kvatlas.sweeps.learning import Material, learn, left_out_as_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the embedded model, trained by the command."""
    folder = tmp_path_factory.mktemp("predictor")
    call(
        *("predictor", "train", "--model", "embedded:tiny-llama", "--benchmark", "CHAIN6", "--skip", 300),
        *("--problems", 30, "--steps", 150, "--max-new-tokens", 300, "--tokens-per-trace", 64, "--workers", 1),
        *("--quiet", "--out", folder / "head.safetensors"),
    )
    return folder / "head.safetensors"


def call(*words: object, code: int | None = None) -> None:
    before, sys.argv = sys.argv, ["kvatlas", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    assert (ended.value.code or None) == code


def test_a_trained_head_ranks_held_out_tokens_and_serves_dynts(trained: Path, tiny_llama: ModelHandle) -> None:
    made = provenance_of(trained)
    assert made["model_weights"] == tiny_llama.weights_digest
    assert made["benchmarks"] == [["CHAIN6", 2]]
    assert (made["skip"], made["held_out_problems"], made["steps"]) == (300, 6, 150)
    assert made["held_out"]["spearman"] > 0.5
    assert made["held_out"]["overlap"] > 0.5
    assert made["tokens"] <= 64 * made["traces"]
    assert (made["layout"], made["loss"]) == ("ours", "ranked")
    assert made["traces"] + sum(made["left_out"].values()) == 24
    assert made["held_out"]["traces"] + sum(made["held_out"]["left_out"].values()) == 6
    policy = policies.of(Setting.of("dynts", kv_budget=90, local_window=8, ratio=0.3, predictor=str(trained)))
    policy.check(tiny_llama)


def test_traces_and_hidden_states_are_made_once(trained: Path) -> None:
    work = trained.with_suffix(".work")
    with Store.open(work / "run") as store:
        problems = {trace.problem for _, trace in store.traces(texts=False)}
    assert min(problems) == "CHAIN6-0300"
    times = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert len(times) == 2
    call(
        *("predictor", "train", "--model", "embedded:tiny-llama", "--benchmark", "CHAIN6", "--skip", 300),
        *(
            "--problems",
            30,
            "--held-out",
            6,
            "--steps",
            2,
            "--max-new-tokens",
            300,
            "--tokens-per-trace",
            64,
            "--workers",
            1,
        ),
        *("--quiet", "--work", work, "--out", trained.with_name("other.safetensors")),
    )
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")} == times
    assert provenance_of(trained.with_name("other.safetensors"))["steps"] == 2


def test_hidden_states_are_made_again_for_other_prompts(tmp_path: Path) -> None:
    index = tmp_path / "hidden-states" / "index.json"
    made = []
    for opening in ("", "so far, ", ""):
        models = [{"model": "embedded:tiny-llama", "think_open": opening}]
        spec = {"models": models, "benchmarks": ["CHAIN3"], "problems": 12, "samples": 1}
        material = Material(parse_spec({**spec, "sampling": {"max_new_tokens": 300}}))
        learn(material, tmp_path, tmp_path / "head.safetensors", steps=1, workers=1)
        made.append(json.loads(index.read_text())["thinking_tokens"])
    assert made[0] == made[2] != made[1]


def test_a_head_in_the_authors_layout_is_trained_judged_and_used(
    trained: Path, tiny_llama: ModelHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = trained.with_suffix(".work"), trained.with_name("theirs.safetensors")
    call(
        *("predictor", "train", "--model", "embedded:tiny-llama", "--benchmark", "CHAIN6", "--skip", 300),
        *("--problems", 30, "--steps", 100, "--max-new-tokens", 300, "--tokens-per-trace", 64, "--workers", 1),
        *("--layout", "authors", "--loss", "power", "--quiet", "--work", work, "--out", out),
    )
    printed, said = capsys.readouterr()
    made = json.loads(printed)
    assert (made["layout"], made["loss"]) == ("authors", "power")
    assert made == provenance_of(out)
    assert made["held_out"]["spearman"] > 0.4
    assert said == f"learned from {made['traces']} traces; left out: {left_out_as_text(made['left_out'])}\n"
    assert sorted(load_file(out)) == ["is_head.0.weight", "is_head.2.weight", "is_head.4.weight"]
    heads = [
        policies.of(Setting.of("dynts", kv_budget=90, local_window=8, ratio=0.3, predictor=str(item)))
        for item in (trained, out)
    ]
    for policy in heads:
        policy.check(tiny_llama)
    assert heads[0].identity(tiny_llama) != heads[1].identity(tiny_llama)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--layout", "theirs"), "layout is 'theirs'; expected ours, authors."),
        (("--loss", "mse"), "loss is 'mse'; expected ranked, scaled, power."),
        (("--max-new-tokens", 5), "no traces for training: of 2 traces 2 without a closing think tag."),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], sentence: str
) -> None:
    base = ("predictor", "train", "--model", "embedded:tiny-llama", "--benchmark", "CHAIN3", "--problems", 3)
    rest = ("--max-new-tokens", 60, "--workers", 1, "--quiet", "--out", tmp_path / "head.safetensors", *words)
    call(*base, *rest, code=2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_a_head_is_judged_on_other_problems(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(
        *("predictor", "eval", trained, "--model", "embedded:tiny-llama", "--benchmark", "CHAIN6", "--skip", 340),
        *("--problems", 6, "--max-new-tokens", 300, "--workers", 1, "--quiet"),
    )
    quality = json.loads(capsys.readouterr().out)
    assert set(quality) == {"traces", "spearman", "overlap", "left_out"}
    assert quality["traces"] + sum(quality["left_out"].values()) == 6
    assert quality["spearman"] > 0.4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"models": ["embedded:tiny-llama", {"model": "embedded:tiny-llama", "name": "b"}]}, "for one model; name one"),
        ({"problems": 301}, "none without the first 300 and the last 2 (held out)"),
    ],
)
def test_too_little_to_learn_from_is_refused(changes: dict[str, Any], sentence: str) -> None:
    spec = parse_spec({"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "problems": 305, **changes})
    spec = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"max_new_tokens": 300})})
    with pytest.raises(KvatlasError) as caught:
        Material(spec, skip=300, held_out=2).plan()
    assert sentence in str(caught.value)

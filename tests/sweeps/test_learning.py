import json
from pathlib import Path

import pytest

from kvatlas import policies
from kvatlas.cli import command
from kvatlas.core import Setting
from kvatlas.models import ModelHandle
from kvatlas.predictor.learning import left_out_as_text
from kvatlas.results import Store
from tests.command_line import Call
from tests.stored import provenance_of

MODEL = "embedded:tiny-llama"
TRAIN = (*(MODEL, "CHAIN6", "--skip", 300, "--problems", 20), *("--max-new-tokens", 300, "--tokens-per-trace", 64))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of the embedded model, trained by the command."""
    file = tmp_path_factory.mktemp("predictor") / "head.safetensors"
    command()(["predictor", "train", str(file), *map(str, TRAIN), "--steps", "80"], standalone_mode=False)
    return file


def test_a_trained_head_ranks_held_out_tokens_and_serves_dynts(trained: Path, tiny_llama: ModelHandle) -> None:
    made = provenance_of(trained)
    assert made["model_weights"] == tiny_llama.weights_digest
    assert made["benchmarks"] == [["CHAIN6", 2]]
    assert (made["skip"], made["held_out_problems"], made["steps"]) == (300, 4, 80)
    assert made["held_out"]["spearman"] > 0.5
    assert made["held_out"]["overlap"] > 0.5
    assert made["tokens"] <= 64 * made["traces"]
    assert made["traces"] + sum(made["left_out"].values()) == 16
    assert made["held_out"]["traces"] + sum(made["held_out"]["left_out"].values()) == 4
    policy = policies.from_setting(
        Setting.from_parameters("dynts", kv_budget=90, local_window=8, ratio=0.3, predictor=str(trained))
    )
    policy.check(tiny_llama)


def test_traces_are_decoded_once(trained: Path, kvatlas: Call) -> None:
    work, other = trained.with_suffix(".work"), trained.with_name("other.safetensors")
    with Store.open(work / "run") as store:
        before = [(trace.problem, trace.usage.seconds) for _, trace in store.traces(texts=False)]
    assert min(before)[0] == "CHAIN6-0300"
    kvatlas.succeed("predictor", "train", other, *TRAIN, "--held-out", 4, "--steps", 2, "--work", work)
    with Store.open(work / "run") as store:
        assert [(trace.problem, trace.usage.seconds) for _, trace in store.traces(texts=False)] == before
    assert provenance_of(other)["steps"] == 2


def test_the_command_prints_the_provenance_of_the_file(trained: Path, kvatlas: Call) -> None:
    work, out = trained.with_suffix(".work"), trained.with_name("again.safetensors")
    code, printed, said = kvatlas("predictor", "train", out, *TRAIN, "--steps", 5, "--work", work)
    made = json.loads(printed)
    assert (code, made) == (0, provenance_of(out))
    assert (
        said.splitlines(keepends=True)[-1]
        == f"{out}: learned from {made['traces']} traces; left out: {left_out_as_text(made['left_out'])}\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-new-tokens", 5), "no traces for training: of 2 traces 2 without a closing think tag."),
        (
            ("--max-new-tokens", 5, "--target", "kv_head"),
            "no traces for training: of 2 traces 2 without a closing think tag.",
        ),
        (("--model-option", "think_close="), "has no think tags, so that a head has no thinking tokens to rank"),
        (("--held-out", 3), "the first 0 (--skip) and the last 3 (--held-out); expected more problems, or"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, kvatlas: Call, words: tuple[object, ...], sentence: str
) -> None:
    base = ("predictor", "train", tmp_path / "head.safetensors", MODEL, "CHAIN3", "--problems", 3)
    limit = () if "--max-new-tokens" in words else ("--max-new-tokens", 60)
    assert sentence in kvatlas.refuse(*base, *limit, *words)


def test_heads_of_a_model_without_think_tags_learn_from_its_whole_texts(tmp_path: Path, kvatlas: Call) -> None:
    words = (
        "predictor",
        "train",
        tmp_path / "heads.safetensors",
        MODEL,
        "CHAIN3",
        "--problems",
        3,
        "--target",
        "kv_head",
    )
    small = ("--max-new-tokens", 100, "--steps", 20, "--held-out", 1)
    _, out, err = kvatlas(*words, *small, "--model-option", "think_close=")
    assert "training: 20 of 20 steps" in err
    made = json.loads(out)
    assert made["traces"] == 2
    assert not any(made["left_out"].values())

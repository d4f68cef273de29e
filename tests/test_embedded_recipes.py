"""The programs that make the embedded models: their texts are what the models are asked and graded on."""

import json
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import MazeShape
from kvatlas.benchmarks.seqbench import draw as draw_maze
from kvatlas.core import Problem
from kvatlas.models.checks import Claims

RECIPES = Path(__file__).parents[1] / "recipes" / "embedded"


@pytest.fixture(scope="module")
def recipes() -> SimpleNamespace:
    sys.path.insert(0, str(RECIPES))
    try:
        import accuracy
        import batches
        import chain_traces
        import ledger_traces
        import masks
        import maze_traces
        import vocabulary
    finally:
        sys.path.remove(str(RECIPES))
    return SimpleNamespace(
        chain=chain_traces,
        maze=maze_traces,
        ledger=ledger_traces,
        masks=masks,
        batches=batches,
        vocabulary=vocabulary,
        accuracy=accuracy,
    )


@pytest.mark.parametrize("name", ["CHAIN10", "LEDGER8-36", "SEQBENCH-4x4", "SEQBENCH-5x5-B1"])
def test_training_prompts_are_what_the_benchmark_asks(recipes: SimpleNamespace, name: str) -> None:
    """Word by word the same vocabulary: no unknown token, and joining gives the text again."""
    tokenizer = recipes.vocabulary.tokenizer()
    for problem in find(name).problems(20):
        text = find(name).prompt(problem)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["SEQBENCH-4x4", "SEQBENCH-5x5-B1"])
def test_reference_solutions_of_mazes_are_graded_right(recipes: SimpleNamespace, name: str) -> None:
    benchmark = find(name)
    for index in range(10):
        instance = draw_maze(benchmark.shape, random.Random(f"kvatlas seqbench {name} test {index}"))
        example = recipes.maze.maze_example(instance, random.Random(index))
        answer = "".join(example.words[example.words.index("</think>") + 1 : -1])
        assert "".join(example.words[1 : example.prompt - 2]) == benchmark.prompt(benchmark.problem(index)) + "\n"
        assert benchmark.grade(benchmark.problem(index), answer).correct


def test_reference_solutions_of_chains_are_graded_right(recipes: SimpleNamespace) -> None:
    benchmark = find("CHAIN9")
    system = recipes.chain.draw_system(9, random.Random(5))
    example = recipes.chain.solution(system, random.Random(6))
    answer = "".join(example.words[example.words.index("</think>") + 1 : -1])
    problem = Problem("CHAIN9-x", system.question, system.answer)
    assert benchmark.prompt(problem) + "\n" == "".join(example.words[1 : example.prompt - 2])
    assert benchmark.grade(problem, answer).correct
    assert not benchmark.grade(problem, answer.replace("= ", "= 1", 1)).correct


def test_reference_solutions_of_ledgers_are_graded_right_and_state_early_what_the_answer_needs(
    recipes: SimpleNamespace,
) -> None:
    benchmark = find("LEDGER24")
    for index in range(20):
        ledger = recipes.ledger.draw_ledger(24, random.Random(f"kvatlas ledger 24 test {index}"))
        example = recipes.ledger.solution(ledger, random.Random(index))
        problem = benchmark.problem(index)
        assert "".join(example.words[1 : example.prompt - 2]) == benchmark.prompt(problem) + "\n"
        assert example.prompt <= 40
        assert 400 <= example.thinking_end - example.prompt <= 1000
        answer = "".join(example.words[example.thinking_end + 1 : -1])
        assert benchmark.grade(problem, answer).correct
        assert not benchmark.grade(problem, answer[:-1] + str((int(answer[-1]) + 1) % 10)).correct
        # Every result that the answer recalls was stated in the thinking before.
        recalled = [result for result in example.results if result[1] > example.thinking_end]
        assert len(recalled) == len(ledger.named) + (ledger.sought is not None)
        for name, first, last in recalled:
            places = [(a, b) for other, a, b in example.results if other == name and b <= example.thinking_end]
            assert {example.words[b - 1] for _, b in places} == {example.words[last - 1]}, (name, first)


def test_holes_spare_the_prompt_the_newest_tokens_and_what_is_not_yet_evicted(recipes: SimpleNamespace) -> None:
    rng, hidden = random.Random(4), 0
    shapes = [MazeShape(side, side, doors=keys, noise=1.0, shuffle=1.0) for side, keys in ((4, 0), (5, 1))]
    mazes = [draw_maze(shape, rng) for shape in shapes]
    batch = [recipes.chain.chain_example(9, rng), *(recipes.maze.maze_example(maze, rng) for maze in mazes)]
    batch.append(recipes.ledger.ledger_example(12, rng))
    longest = max(len(example.words) for example in batch)
    for seed in range(12):
        holes = recipes.masks.batch_holes(batch, longest, kv_heads=2, rng=random.Random(seed))
        for until, example in zip(holes, batch, strict=True):
            length = len(example.words)
            causal = np.tril(np.ones((length, length), bool))
            seen = causal & (np.arange(length)[:, None] < until[:, None, :length])
            assert seen[:, :, : example.prompt][:, causal[:, : example.prompt]].all()
            newest = recipes.masks.WINDOW[0]
            assert all(seen[:, q, max(0, q - newest + 1) : q + 1].all() for q in range(length))
            hidden += int((causal & ~seen).sum())
    assert hidden > 0


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen"])
def test_a_card_says_what_was_measured_and_claims_no_more(recipes: SimpleNamespace, name: str) -> None:
    """Every kind within the claims of what ships is solved in 60 % at least, ledgers in 85 %, and further training
    lost no panel more than a point."""
    folder = models.find(f"embedded:{name}").folder
    card, claims = (folder / "README.md").read_text(), Claims.read(folder)
    assert recipes.accuracy.tables(name) in card
    seed = json.loads((folder / "provenance.json").read_text())["seed"]
    measured = json.loads((RECIPES / "accuracy" / f"{name}-seed{seed}.json").read_text())
    before = json.loads((RECIPES / "accuracy" / f"{name}-seed{seed}-first.json").read_text())
    for panel, row in before["panels"].items():
        assert measured["panels"][panel]["pass_at_1"] >= row["pass_at_1"] - 1.0
    ledgers = [row for kind, row in {**measured["panels"], **measured["kinds"]}.items() if kind.startswith("LEDGER")]
    assert len(ledgers) == 7
    assert all(row["pass_at_1"] >= 85 for row in ledgers)
    solved = {kind: row["pass_at_1"] >= 60 for kind, row in measured["kinds"].items()}
    claimed = {kind for kind in solved if not claims.outside(kind, find(kind).problems(5))}
    assert all(solved[kind] for kind in claimed)
    assert len(claimed) >= 15


def test_training_goes_on_from_its_checkpoint_and_transformers_loads_the_result(
    recipes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def train(more: int) -> list[dict]:
        monkeypatch.syspath_prepend(RECIPES)
        words = ["--model", "tiny-qwen", "--out", str(tmp_path), "--tokens", "4000", "--more", str(more),
                 "--batch-tokens", "600", "--log-every", "1"]  # fmt: skip
        monkeypatch.setattr(sys, "argv", [str(RECIPES / "train.py"), *words])
        runpy.run_path(str(RECIPES / "train.py"), run_name="__main__")
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first = train(0)
    again = train(5_000)
    assert again[0]["step"] > first[-1]["step"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = find("SEQBENCH-4x4").prompt(find("SEQBENCH-4x4").problems(1)[0])
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == recipes.vocabulary.words(text)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "a = 1 ; b = a + a ? b"}], tokenize=False,
                                          add_generation_prompt=True)  # fmt: skip
    assert asked.endswith("<think>")
    assert sum(p.numel() for p in model.parameters()) < 3e6
    assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 8e6

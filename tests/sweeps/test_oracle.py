"""The oracle sees the finished full-cache trace of its own sample, and says where its text departs from it."""

from typing import Any

import torch

from kvatlas import policies
from kvatlas.benchmarks import find
from kvatlas.core import Sampling, Setting, Trace
from kvatlas.models import ModelHandle
from kvatlas.predictor import answer_attention
from kvatlas.sweeps.plan import WorkItem
from kvatlas.sweeps.worker import Job, decode, reference


def setting(policy: str, **values: Any) -> Setting:
    """A setting as plans have them, with all its defaults."""
    return policies.of(Setting.of(policy, **values)).setting


COMMON = {"kv_budget": 80, "local_window": 8, "ratio": 0.2, "ratio_over": "thinking"}
ORACLE, WINDOW, FULL = setting("oracle", **COMMON), setting("window", **COMMON), setting("full")


def traces(model: ModelHandle, *settings: Setting, batch_size: int = 16) -> dict[tuple[str, str], Trace]:
    benchmark = find("CHAIN6")
    units = tuple(WorkItem("CHAIN6", problem, 0, settings) for problem in benchmark.problems(4))
    job = Job(model, "digest", (benchmark,), units, Sampling(max_new_tokens=260), 0, batch_size)
    results = [trace for trace, _ in decode(job, range(len(units)))]
    assert len(results) == len(units) * len(settings)
    return {(trace.problem, trace.setting.policy): trace for trace in results}


def outcome(result: dict[tuple[str, str], Trace], policy: str) -> list[Any]:
    return sorted(
        (key, t.tokens, t.grade.correct, dict(t.grade.metrics)) for key, t in result.items() if key[1] == policy
    )


def test_it_departs_where_it_says_and_does_not_depend_on_what_else_runs(tiny_llama: ModelHandle) -> None:
    together = traces(tiny_llama, ORACLE, WINDOW, FULL)
    departed = 0
    for (problem, policy), trace in together.items():
        if policy != "oracle":
            assert "departs_at" not in trace.grade.metrics
            continue
        full = together[problem, "full"].tokens
        if trace.tokens == full:
            assert "departs_at" not in trace.grade.metrics
            continue
        at = int(trace.grade.metrics["departs_at"])
        assert trace.tokens[:at] == full[:at]
        assert trace.tokens[at : at + 1] != full[at : at + 1]
        departed += 1
    assert departed
    assert any(trace.usage.compressions for trace in together.values())
    alone = traces(tiny_llama, ORACLE, batch_size=3)
    assert outcome(alone, "oracle") == outcome(together, "oracle")


def test_the_reference_is_the_answers_attention(tiny_llama: ModelHandle) -> None:
    full = traces(tiny_llama, FULL)
    problem = find("CHAIN6").problems(1)[0]
    prompt = tiny_llama.encode(find("CHAIN6").prompt(problem))
    tokens = full[problem.id, "full"].tokens
    model = tiny_llama.load()
    result = reference(tiny_llama, model, prompt, tokens)
    assert result is not None
    start = len(prompt) + tokens.index(tiny_llama.think_close) + 1
    attention, _ = answer_attention(model, [*prompt, *tokens], start)
    assert torch.equal(result.attention, attention)
    assert reference(tiny_llama, model, prompt, tokens[:10]) is None

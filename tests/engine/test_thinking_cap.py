"""A cap on thinking: after so many thinking tokens the end of thinking is written, and nothing else changes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvatlas import models, policies
from kvatlas.benchmarks import find as benchmark
from kvatlas.core import KvatlasError, Setting
from kvatlas.engine import Request
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from tests.decoding import outcome, requests, run
from tests.r1 import FIRST_TEMPLATE, TEMPLATE

CAPS = (0, 7, 30)
#: Settings that compress once or several times before the caps, and after them.
RULE = {"kv_budget": 72, "local_window": 8, "ratio": 0.3}
RIVALS: dict[str, dict[str, Any]] = {
    "full": {},
    "random": RULE,
    "h2o": RULE,
    "rkv": RULE,
    "window": RULE | {"every": 9},
    "snapkv": RULE,
}


def capped(caps: Iterable[int], **rivals: dict[str, Any]) -> list[Policy]:
    """Each policy without a cap and with each of the caps."""
    found = []
    for name, values in rivals.items():
        for cap in ({}, *({"thinking_tokens": cap} for cap in caps)):
            own = {"ratio": values["ratio"]} if "every" in values else {}
            found.append(setting(name, **{key: value for key, value in (values | cap).items() if key not in own}))
    return found


def setting(name: str, **values: Any) -> Policy:
    return policies.from_setting(Setting.from_parameters(name, **values))


def forcing(handle: ModelHandle, prompt: Sequence[int], cap: int | None) -> Callable[..., torch.Tensor]:
    """The cap as a slow reading of the text: where the thinking ends, and how long it is, is decoded anew each time."""
    closing = handle.tokens(handle.thinking.close)

    def processor(so_far: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        new = list(so_far[len(prompt) :])
        text = handle.tokenizer.decode(new)
        if cap is None or handle.thinking.close in text:
            return logits
        begun = 0
        if not handle.opens_thinking:
            if handle.thinking.open not in text:
                return logits
            begun = next(n for n in range(1, len(new) + 1) if handle.thinking.open in handle.tokenizer.decode(new[:n]))
        if len(new) - begun < cap:
            return logits
        size = next(n for n in range(len(closing) - 1, -1, -1) if n == 0 or tuple(new[-n:]) == closing[:n])
        return torch.full_like(logits, -1e9).index_fill(0, torch.tensor([closing[size]]), 0.0)

    return processor


def forced_one_by_one(handle: ModelHandle, work: Sequence[Request[int]], **sampling: Any) -> dict[Any, Any]:
    """The outcome of every capped setting from its own request without a cap, whose logits are changed."""
    found = {}
    for request in work:
        for policy in request.policies:
            alone = replace(
                request,
                policies=(policy.uncapped,),
                logits_processor=forcing(handle, request.prompt, policy.cap),
            )
            (generation,) = run(handle, [alone], 1, **sampling)[1]
            found |= outcome([replace(generation, policy=policy)])
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.deep), 0.9])
def test_every_token_is_that_of_logits_in_which_the_end_is_forced(
    random_models: dict[str, ModelHandle], temperature: float
) -> None:
    """Under every rule of compression, with the random numbers of all other positions unchanged."""
    handle = random_models["llama"]
    work = requests(handle, capped(CAPS, **RIVALS), 2, (50, 60))
    limits = {"temperature": temperature, "max_new_tokens": 56}
    _, generations = run(handle, work, 16, **limits)
    expected = forced_one_by_one(handle, work, **limits)
    assert outcome(generations) == expected
    cut = [generation for generation in generations if generation.thinking_end == generation.policy.cap is not None]
    assert {0, 7} <= {generation.policy.cap for generation in cut}
    assert any(generation.usage.compressions for generation in cut)


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        pytest.param(TEMPLATE, ("<think>", "</think>"), marks=pytest.mark.deep),
        # The model opens thinking itself, and the end is written in several tokens.
        (FIRST_TEMPLATE, ("<think>", "</think>")),
        (TEMPLATE, ()),
        pytest.param(FIRST_TEMPLATE, (), marks=pytest.mark.deep),
    ],
    ids=["opened", "by the model", "end in parts", "both in parts"],
)
def test_tags_of_one_token_and_of_several(
    r1_model: Callable[..., ModelHandle], template: str, tags: tuple[str, ...]
) -> None:
    handle = models.find(r1_model(template, tags).name, think_close="</think>")
    closing = handle.tokens("</think>")
    assert (len(closing) == 1) == bool(tags)
    opening = handle.tokens("<think>")
    work = []
    for request in requests(handle, capped((0, 1, 5, 40), full={}, random=RULE), 2, (36, 60)):
        # A model that opens thinking itself has done so within its first tokens.
        opens = [] if handle.opens_thinking else [request.prompt[0], *opening]
        begun = writing(opens, len(request.prompt))
        work.append(replace(request, logits_processor=begun))
    _, generations = run(handle, work, 8, max_new_tokens=56)

    for request in work:
        for policy in request.policies:
            slow = forcing(handle, request.prompt, policy.cap)
            begun = request.logits_processor

            def both(so_far: Sequence[int], logits: torch.Tensor, begun: Any = begun, slow: Any = slow) -> torch.Tensor:
                return slow(so_far, begun(so_far, logits))

            alone = replace(request, policies=(policy.uncapped,), logits_processor=both)
            (expected,) = run(handle, [alone], 1, max_new_tokens=56)[1]
            found = next(g for g in generations if g.key == request.key and g.policy == policy)
            assert found.tokens == expected.tokens
            assert found.thinking_end == expected.thinking_end
    start = 0 if handle.opens_thinking else 1 + len(opening)
    assert {start, start + 1, start + 5} <= {generation.thinking_end for generation in generations}
    assert any(generation.usage.compressions for generation in generations)


def writing(tokens: Sequence[int], prompt_length: int) -> Callable[..., torch.Tensor]:
    """Write these tokens first."""

    def processor(so_far: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        place = len(so_far) - prompt_length
        if place >= len(tokens):
            return logits
        return torch.full_like(logits, -1e9).index_fill(0, torch.tensor([tokens[place]]), 0.0)

    return processor


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("gemma3", "qwen3_next"))]
)
def test_traces_do_not_depend_on_batch_size_order_or_sharing(random_models: dict[str, ModelHandle], kind: str) -> None:
    handle = random_models[kind]
    rivals = {name: RIVALS[name] for name in ("full", "random", "window")}
    work = requests(handle, capped((0, 7, 30), **rivals), 3)
    shared, generations = run(handle, work, 1)
    expected = outcome(generations)
    assert len(expected) == 3 * 12
    assert outcome(run(handle, work[::-1], 5)[1]) == expected
    separate = [replace(request, policies=(policy,)) for request in work for policy in request.policies]
    apart, alone = run(handle, separate, 64)
    assert outcome(alone) == expected
    assert sum(generation.decoded for generation in generations) == shared.decoded_tokens
    assert shared.decoded_tokens < 0.7 * apart.decoded_tokens


def test_settings_share_their_tokens_up_to_the_cap(tiny_llama: ModelHandle) -> None:
    """A trace that ends its thinking earlier is one generation for all caps, before a compression and after it."""
    chains = benchmark("CHAIN8")
    prompts = [tiny_llama.encode(chains.prompt(problem)) for problem in chains.problems(4)]
    rule = {"kv_budget": 96, "local_window": 16, "ratio": 0.5, "budget_over": "thinking"}
    for values, name in (({}, "full"), (rule, "random")):
        chosen = tuple(capped((40, 5_000, 6_000), **{name: values}))
        work = [Request(index, prompt, 70 + index, chosen) for index, prompt in enumerate(prompts)]
        engine, generations = run(tiny_llama, work, 4, max_new_tokens=600, temperature=0.6)
        longest = 0
        for index in range(len(prompts)):
            free, cut, wide, wider = (next(g for g in generations if (g.key, g.policy) == (index, p)) for p in chosen)
            assert free.tokens == wide.tokens == wider.tokens
            assert (free.thinking_end or 600) > 40
            assert cut.tokens[:40] == free.tokens[:40]
            assert cut.tokens[40] == tiny_llama.think_close
            assert cut.usage.thinking_tokens == 40
            longest += len(free.tokens) + len(cut.tokens) - 40
        assert engine.decoded_tokens == longest


def test_a_limit_right_behind_the_cap_cuts_the_trace_off(random_models: dict[str, ModelHandle]) -> None:
    handle = random_models["llama"]
    work = requests(handle, capped((11,), full={}), 4)
    _, generations = run(handle, work, 3, max_new_tokens=12)
    cut = [generation for generation in generations if generation.policy.cap]
    ended_earlier = {
        g.key for g in generations if not g.policy.cap and (len(g.tokens) < 12 or g.thinking_end is not None)
    }
    for generation in cut:
        if generation.key not in ended_earlier:
            assert generation.tokens[-1] == handle.think_close
            assert not generation.finished
    assert len(ended_earlier) < len(cut)


def test_a_model_without_think_tags_is_refused(random_models: dict[str, ModelHandle]) -> None:
    untagged = models.find(random_models["llama"].name, think_close="")
    with pytest.raises(KvatlasError, match="no think tags"):
        policies.fit_policy(setting("full", thinking_tokens=8), untagged)
    policies.fit_policy(setting("full"), untagged)


@pytest.mark.parametrize("value", [-1, 1.5, True, "all", None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(KvatlasError, match="an integer >= 0, or unlimited"):
        setting("full", thinking_tokens=value)


def test_a_setting_without_a_cap_keeps_its_name() -> None:
    assert setting("full", thinking_tokens="unlimited").setting == Setting("full")
    assert str(setting("full", thinking_tokens=64).setting) == "full(thinking_tokens=64)"
    assert policies.all_values(Setting("full"))["thinking_tokens"] == "unlimited"

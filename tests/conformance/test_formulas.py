"""Every policy against its paper's formula in float64, on three layers of a real model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.policies import CompressingPolicy, Scope, select_tokens
from kvatlas.policies.dynts import HEAD_FILE
from kvatlas.policies.triattention import STATISTICS_FILE
from kvatlas.predictor import answer_attention
from kvatlas.predictor.labels import query_statistics
from tests.conformance.agreement import TOLERANCE, Results, difference
from tests.conformance.real import Activations, reference
from tests.policies import formulas
from tests.policies.scenes import Score, expected, shared_scores

pytestmark = [pytest.mark.slow, pytest.mark.conformance]

COMMON = {"kv_budget": 300, "local_window": 64, "ratio": 0.3, "ratio_over": "thinking"}
#: New tokens that count as the answer, for `oracle`.
ANSWER = 70
NAMES = [name for name in policies.policies.names() if name != "full"]


def scopes(name: str) -> list[Scope]:
    """The scopes that a policy can have."""
    kind = policies.policies.get(name)
    return list(Scope) if "scope" in kind.__dataclass_fields__ else [kind.scope]


@pytest.fixture(scope="module")
def part(real: Activations) -> Activations:
    """The first, a middle and the last layer."""
    last = real.model.shape.layers - 1
    return real.part(0, last // 2, last)


@pytest.fixture(scope="module")
def folder(real: Activations, part: Activations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the model's queries and a DynTS head, which need not be a good one to be compared."""
    result: Path = tmp_path_factory.mktemp("files")
    statistics = query_statistics(real.model, real.model.load(), [real.tokens])
    last = real.model.shape.layers - 1
    rows = [0, last // 2, last]
    chosen = {name: stored if stored.dim() == 1 else stored[rows].contiguous() for name, stored in statistics.items()}
    save_file(chosen, result / STATISTICS_FILE)
    hidden = real.model.shape.hidden
    random = torch.Generator().manual_seed(3)
    widths = {0: (2 * hidden, hidden), 2: (hidden // 2, 2 * hidden), 4: (1, hidden // 2)}
    head = {}
    for layer, (out, into) in widths.items():
        head[f"{layer}.weight"] = torch.randn(out, into, generator=random) / into**0.5
        head[f"{layer}.bias"] = torch.randn(out, generator=random) / 10
    save_file(head, result / HEAD_FILE)
    return result


def formula(policy: CompressingPolicy, part: Activations, again: bool, folder: Path) -> Score:
    """The slow score of a policy on the same numbers as float64."""
    cached = part.cached(policy, again, exact=True)
    match policy.name:
        case "h2o":
            return formulas.h2o(policy, cached, part.shared_weights(policy))
        case "lazyeviction":
            return formulas.lazyeviction(policy, cached, part.shared_weights(policy)[part.prompt_length :])
        case "triattention":
            return formulas.triattention(policy, cached, load_file(folder / STATISTICS_FILE))
        case "dynts" | "dynts-bottom" | "dynts-noprompt":
            return formulas.dynts(policy, cached, formulas.importance(load_file(folder / HEAD_FILE), part.hidden))
        case "dynts-random":
            return formulas.random(policy, cached)
        case "oracle":
            return formulas.oracle(policy, replace(cached, reference=reference(part, ANSWER)))
        case name:
            return getattr(formulas, name)(policy, cached)  # type: ignore[no-any-return]


def make(name: str, scope: Scope, folder: Path) -> CompressingPolicy:
    changes: dict[str, Any] = {"scope": scope} if len(scopes(name)) > 1 else {}
    if name == "triattention":
        changes["statistics"] = str(folder / STATISTICS_FILE)
    elif name in ("dynts", "dynts-bottom", "dynts-noprompt"):
        changes["predictor"] = str(folder / HEAD_FILE)
    elif name in ("streaming", "sepllm"):
        # Otherwise their first tokens are part of the prompt, which stays in any case.
        changes["keep_prompt"] = False
    policy = policies.of(Setting.of(name, **{**COMMON, **changes}))
    assert isinstance(policy, CompressingPolicy)
    return policy


@pytest.mark.parametrize(
    ("name", "scope", "again"),
    [
        *((name, scope, False) for name in NAMES for scope in scopes(name)),
        *((name, policies.policies.get(name).scope, True) for name in NAMES),
    ],
)
def test_policies_keep_what_their_formulas_keep(
    part: Activations, results: Results, folder: Path, name: str, scope: Scope, again: bool
) -> None:
    policy = make(name, scope, folder)
    cached = part.cached(policy, again)
    if name == "oracle":
        cached = replace(cached, reference=reference(part, ANSWER))
    score = formula(policy, part, again, folder)
    ours, theirs = select_tokens(policy, cached).tolist(), expected(policy, cached, score)
    scores = torch.tensor(shared_scores(cached, score), dtype=torch.float64)
    competing = cached.positions >= (cached.prompt_length if policy.keep_prompt else 0)
    competing[..., -policy.local_window :] = False
    apart = difference(policy.score(cached).double().expand(scores.shape)[competing], scores[competing])
    assert results.compared(policy, "its formula in float64", ours, theirs, scores, apart, again)
    assert apart < TOLERANCE


def test_the_oracles_attention_is_that_of_all_layers_and_heads(real: Activations) -> None:
    """The reference that `oracle` is given and `dynts` learns from."""
    result, _ = answer_attention(real.model.load(), list(real.tokens), len(real.tokens) - ANSWER)
    wanted = reference(real, ANSWER).attention
    assert difference(result, wanted) < TOLERANCE

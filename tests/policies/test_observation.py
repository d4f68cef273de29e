"""Policies that observe plug into the loop: what they are shown equals a slow computation of the same."""

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.engine.attention import PassAttention
from kvatlas.engine.whole_texts import answer_attention
from kvatlas.models import ModelHandle, find
from kvatlas.policies import CacheView, CompressingPolicy, Scope
from kvatlas.policies.dynts import AUTHORS, importance, load_head
from kvatlas.policies.model_files import FilePolicy
from kvatlas.predictor.training import new_head
from tests.decoding import endless, prompts
from tests.policies import formulas
from tests.r1 import copied

#: Decodes a trace under a policy: all its tokens, and what `look` gives for each compression's cache and scores.
Decode = Callable[..., tuple[tuple[int, ...], list[Any]]]


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Decode:
    def decoded(
        model: ModelHandle, name: str, look: Callable[[CacheView, torch.Tensor], Any], **values: Any
    ) -> tuple[tuple[int, ...], list[Any]]:
        kind = policies.policies.get(name)
        score, seen = kind.score, []

        def spy(self: CompressingPolicy, cached: CacheView) -> torch.Tensor:
            scores = score(self, cached)
            seen.append(look(cached, scores))
            return scores

        monkeypatch.setattr(kind, "score", spy)
        policy = policies.from_setting(
            Setting.from_parameters(name, **{"kv_budget": 60, "local_window": 5, "ratio": 0.4, **values})
        )
        prompt = prompts(model, 1)[0][:25]
        engine = Engine(model, model.load(), [policy], Sampling(temperature=0.8, max_new_tokens=80), 8)
        (generation,) = engine.run([Request(0, prompt, 5, (policy,))])
        return prompt + generation.tokens, seen

    return decoded


def _attentions(handle: ModelHandle, tokens: tuple[int, ...]) -> torch.Tensor:
    """[layers, heads, tokens, tokens] in float64."""
    model = handle.load().double()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    return torch.stack([layer[0] for layer in output.attentions])


@pytest.mark.parametrize("scope", [Scope.GLOBAL, Scope.LAYER, Scope.HEAD, Scope.KV_HEAD])
@pytest.mark.parametrize("name", ["h2o", "lazyeviction"])
def test_attention_is_noted_as_the_whole_matrix_has_it(
    random_models: dict[str, ModelHandle], decode: Decode, name: str, scope: Scope
) -> None:
    """Summed up, and as the tokens' last times and longest pauses: by the first compression, from the first step on."""
    model, alpha = endless(random_models["qwen2"]), {} if name == "h2o" else {"alpha": 0.02}
    look = lambda cached, scores: (cached, scores.double())  # noqa: E731
    tokens, ((cached, result), *_) = decode(model, name, look, scope=scope, **alpha)
    attention = _attentions(model, tokens[:60]).unflatten(1, (model.shape.kv_heads, -1)).mean(2)
    averaged = {Scope.GLOBAL: (0, 1), Scope.LAYER: 1, Scope.KV_HEAD: 0}
    if scope in averaged:
        attention = attention.mean(averaged[scope], keepdim=True)
    wanted = attention.sum(-2)
    if name == "lazyeviction":
        written = attention[:, :, cached.prompt_length :].permute(2, 0, 1, 3)
        score = formulas.lazyeviction(SimpleNamespace(**alpha), cached, written)
        each = product(*map(range, wanted.shape))
        wanted = torch.tensor([score(cached, *at) for at in each], dtype=torch.double).view_as(wanted)
    torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-4)


def test_recent_queries_are_those_of_the_newest_tokens(
    random_models: dict[str, ModelHandle], decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring holds what the model computes for the last tokens, rotated, after any number of compressions."""
    recorded: list[dict[int, torch.Tensor]] = [{}, {}]

    unrecorded = PassAttention.__call__

    def attend(passing: PassAttention, module: Any, query: torch.Tensor, *rest: Any, **others: Any) -> Any:
        for at, position in enumerate(passing.batch.positions.tolist()):
            recorded[module.layer_idx][position] = query[0, :, at].clone()
        return unrecorded(passing, module, query, *rest, **others)

    def look(cached: CacheView, _: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        return cached.length, [cached.query(layer).clone() for layer in range(2)]

    monkeypatch.setattr(PassAttention, "__call__", attend)
    _, seen = decode(endless(random_models["qwen3"]), "snapkv", look, queries=12, local_window=12)
    assert len(seen) > 2
    for length, queries in seen:
        for layer in range(2):
            wanted = torch.stack([recorded[layer][at] for at in range(length - 12, length)], dim=1)
            assert torch.equal(queries[layer], wanted)


@pytest.fixture(scope="module", params=["granite", "gemma3"])
def scaled(request: pytest.FixtureRequest, random_models: dict[str, ModelHandle], tmp_path_factory: Any) -> ModelHandle:
    """A model whose layers do not scale q k by 1 / sqrt(head size), which is 0.25 here."""
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.6}
    source, changes = ("llama", granite) if request.param == "granite" else ("gemma3", {"query_pre_attn_scalar": 64})
    folder = tmp_path_factory.mktemp("scaled") / request.param
    return endless(copied(random_models[source], folder, "config.json", **changes))


def test_recent_attention_is_scaled_as_the_layers_scale_it(scaled: ModelHandle, decode: Decode) -> None:
    """The attention of the newest query that `tova` uses, at the first compression, is the eager attention's row."""
    tokens, seen = decode(scaled, "tova", lambda cached, scores: (cached.positions.clone(), scores), ratio=0.5)
    positions, result = seen[0]
    length = positions.shape[-1]
    assert torch.equal(positions[0, 0], torch.arange(length))
    wanted = _attentions(scaled, tokens[:length])[:, :, -1].mean(1)
    torch.testing.assert_close(result[:, 0].double(), wanted, atol=1e-5, rtol=1e-4)
    labels, _ = answer_attention(scaled.load(), list(tokens), 60)
    wanted = _attentions(scaled, tokens)[:, :, 60:, :60].mean((0, 1, 2))
    torch.testing.assert_close(labels.double(), wanted, atol=1e-5, rtol=1e-4)


def test_dynts_scores_the_last_hidden_state_of_each_token(
    random_models: dict[str, ModelHandle], decode: Decode, tmp_path: Path
) -> None:
    model = endless(random_models["llama"])
    file = tmp_path / "head.safetensors"
    save_file(_tensors("ours"), file)
    tokens, (result, *_) = decode(model, "dynts", lambda _, scores: scores.clone(), predictor=str(file))
    with torch.inference_mode():
        inputs = torch.tensor([tokens[:60]])
        hidden = model.load().get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state[0]
        wanted = importance(load_head(str(file)), hidden)
    torch.testing.assert_close(result[0, 0], wanted, atol=1e-4, rtol=1e-4)


def _tensors(layout: str, hidden: int = 64) -> dict[str, torch.Tensor]:
    head = new_head(hidden).state_dict()
    if layout == "authors":
        return {f"is_head.{name}": head[name] for name in AUTHORS}
    return head


@pytest.mark.parametrize("layout", ["ours", "authors"])
def test_a_head_is_applied_in_its_layout(tmp_path: Path, layout: str) -> None:
    """Against the formula, one token at a time; half precision and other tensors of the file change nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, generator=generator)
    head = {name: value.bfloat16() for name, value in _tensors(layout).items()}
    rest = {"lm_head.weight": torch.zeros(3, 3)} if layout == "authors" else {}
    save_file(head | rest, tmp_path / "head.safetensors")
    result = importance(load_head(str(tmp_path / "head.safetensors")), hidden)
    exact = {name.removeprefix("is_head."): value.double() for name, value in head.items()}
    activation = torch.nn.functional.gelu if layout == "ours" else torch.nn.functional.softplus
    for token, score in zip(hidden.double(), result, strict=True):
        for layer in (0, 2, 4):
            token = exact[f"{layer}.weight"] @ token + exact.get(f"{layer}.bias", 0)
            token = activation(token) if layer < 4 else torch.nn.functional.softplus(token)
        torch.testing.assert_close(score.double(), token[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda head: {name: value for name, value in head.items() if "4." not in name},
            "is no DynTS head: it holds 0.",
        ),
        (
            lambda head: head | {"4.weight": torch.zeros(2, 32)},
            r"4.weight \(2, 32\).*; expected linear layers 0, 2 and 4",
        ),
        (lambda head: head | {"2.weight": torch.zeros(32, 100)}, "is no DynTS head"),
        (lambda head: {f"layers.{i}.weight": torch.zeros(2) for i in range(12)}, " and 4 more; expected"),
        (lambda head: {}, "it holds nothing; expected"),
        (lambda head: head | {"4.weight": torch.full((1, 32), float("nan"))}, r"'4\.weight' that are no finite"),
        (lambda head: new_head(32).state_dict(), r"hidden size of 32, the model .* has 64"),
    ],
)
def test_what_is_no_head_is_refused_with_what_it_holds(
    random_models: dict[str, ModelHandle], tmp_path: Path, change: Any, sentence: str
) -> None:
    file = tmp_path / "head.safetensors"
    policy = policies.from_setting(
        Setting.from_parameters("dynts", kv_budget=80, local_window=6, ratio=0.2, predictor=str(file))
    )
    with pytest.raises(KvatlasError, match="there is no file"):
        policy.check(random_models["llama"])
    file.write_text("hello")
    with pytest.raises(KvatlasError, match="cannot be read as a DynTS head"):
        policy.check(random_models["llama"])
    save_file(change(_tensors("ours")), file)
    with pytest.raises(KvatlasError, match=sentence):
        policy.check(random_models["llama"])


@pytest.mark.parametrize(("policy", "parameter"), [("dynts", "predictor"), ("triattention", "statistics")])
def test_what_was_made_with_other_weights_is_refused_unless_named(policy: str, parameter: str, tmp_path: Path) -> None:
    """A fine-tuned model's folder often still holds what was made with the weights before."""
    shutil.copytree(find("embedded:tiny-llama").folder, tmp_path / "copy")
    values = {"kv_budget": 280, "local_window": 6, "ratio": 0.2}
    model = find(f"hf:{tmp_path / 'copy'}")
    file = model.folder / "kvatlas" / f"{policy}.safetensors"
    policies.from_setting(Setting.from_parameters(policy, **values)).check(model)
    save_file(load_file(file), file, metadata={"model_weights": "of another model"})
    with pytest.raises(KvatlasError, match=f"made with other weights .* the parameter {parameter} to use it"):
        policies.from_setting(Setting.from_parameters(policy, **values)).check(model)
    policies.from_setting(Setting.from_parameters(policy, **{parameter: str(file)}, **values)).check(model)


@pytest.mark.parametrize("name", ["embedded:tiny-llama", "embedded:tiny-qwen"])
def test_other_engines_find_weights_alone_beside_the_config(name: str) -> None:
    """They load every safetensors there; heads and statistics lie in a subfolder."""
    assert [path.name for path in find(name).folder.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("policy", ["dynts", "learned", "triattention"])
def test_files_beside_the_weights_are_still_read(policy: str, tmp_path: Path) -> None:
    """With the same identity; a file in the subfolder comes before them."""
    shutil.copytree(find("embedded:tiny-llama").folder, tmp_path / "copy")
    model = find(f"hf:{tmp_path / 'copy'}")
    made = policies.from_setting(Setting.from_parameters(policy, kv_budget=280, local_window=6, ratio=0.2))
    assert isinstance(made, FilePolicy)
    assert made.file(model) == tmp_path / "copy" / "kvatlas" / made.file_name
    identity = made.identity(model)
    earlier = made.file(model).rename(tmp_path / "copy" / made.file_name)
    assert made.file(model) == earlier
    made.check(model)
    assert made.identity(model) == identity
    assert model.weights_digest == find("embedded:tiny-llama").weights_digest


@pytest.mark.parametrize(
    ("policy", "name", "change", "sentence"),
    [
        ("learned", "second", lambda tensor: tensor[..., :3], r"'second' with the sizes \(4, 2, 3\); expected"),
        ("learned", "second_bias", lambda tensor: tensor * torch.nan, "in the tensor 'second_bias' that are no finite"),
        ("triattention", "norm", lambda tensor: tensor * torch.inf, "in the tensor 'norm' that are no finite numbers"),
    ],
)
def test_files_of_policies_with_faulty_tensors_are_refused_by_name(
    policy: str, name: str, change: Any, sentence: str, tmp_path: Path
) -> None:
    made = policies.from_setting(Setting.from_parameters(policy, kv_budget=280, local_window=6, ratio=0.2))
    shutil.copytree(find("embedded:tiny-llama").folder, tmp_path / "copy")
    model = find(f"hf:{tmp_path / 'copy'}")
    assert isinstance(made, FilePolicy)
    tensors = load_file(made.file(model))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, made.file(model))
    with pytest.raises(KvatlasError, match=sentence):
        made.check(model)

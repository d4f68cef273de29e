"""Packed layers against the model's own."""

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.cpu import native, packing
from kvatlas.cpu.fused import FusedDecoder, FusedLayer
from kvatlas.cpu.native.decoder import DecoderLayer
from kvatlas.cpu.packing import PackedLinear, pack_model
from kvatlas.cpu.shared_weights import PackedTables
from kvatlas.engine import Engine, Request
from kvatlas.engine.whole_texts import answer_attention
from kvatlas.forward import own_attention
from kvatlas.models import ModelHandle
from kvatlas.models.handle import handle_for
from kvatlas.models.weights import check_finite
from kvatlas.policies import from_setting
from tests.models.every_model import small_config

pytestmark = pytest.mark.newest

if native.load() is None:
    pytest.skip(str(native.why_not()), allow_module_level=True)

FULL = Setting.from_parameters("full")
#: Models whose decoders are of Llama's form.
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama bias": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "mistral": {"sliding_window": 8},
    "ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
}
#: Models with something else in their layers, experts with and without gates; tests of every model decode with them.
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.3},
    "qwen3": {},
    "bamba": {"attn_layer_indices": [1]},
    "mixtral": {},
    "gpt_oss": {},
    "nemotron_h": {},
}


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    own = {"num_hidden_layers": 2, "initializer_range": 0.2, **(FUSED | OTHERS)[kind], **changes}
    model = AutoModelForCausalLM.from_config(small_config(CONFIG_MAPPING[kind.split()[0]], own)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, *((0.5, 1.5) if "norm" in name else (-0.3, 0.3)))
    return model


#: Settings that store queries, watch attention, and keep packed keys and values of which the newest are unpacked.
STORED = [
    Setting.from_parameters("snapkv", kv_budget=32, queries=6, local_window=6, ratio=0.5),
    Setting.from_parameters("h2o", kv_budget=32, local_window=6, ratio=0.5),
    Setting.from_parameters("window", kv_budget=32, local_window=6, ratio=0.5, kv_bits=4, residual=4),
]


def fused(model: Any) -> bool:
    return isinstance(model.get_decoder().forward, FusedDecoder)


def decode(
    model: Any, tokenizer: Any, rows: int = 1, setting: Setting = FULL
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """New tokens and their logits of so many rows with prompts of their own."""
    handle, policy, seen = (
        handle_for(model, tokenizer, frozenset(), think_close=""),
        from_setting(setting),
        [],
    )
    hook = model.register_forward_hook(lambda *call: seen.append(call[2].logits[0]))
    requests = [Request(row, tuple(range(3 + row, 30 + row)), 5, (policy,)) for row in range(rows)]
    with hook:
        engine = Engine(handle, model, [policy], Sampling(0, 0, 1.0, 20), rows)
        generations = sorted(engine.run(requests), key=lambda generation: generation.key)
    steps = torch.stack([logits[-rows:] for logits in seen])
    return [(generation.tokens, steps[:, row]) for row, generation in enumerate(generations)]


@pytest.mark.parametrize("kind", [*FUSED, *OTHERS])
def test_a_packed_model_computes_what_its_own_layers_do_and_is_as_it_was_afterwards(kind: str) -> None:
    model, tokens = build(kind), torch.arange(3, 40)[None]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with torch.inference_mode():
        own = model(tokens).logits
        with pack_model(model):
            assert fused(model) == (kind in FUSED)
            assert {"PackedLinear", "PackedExperts"} & {type(module).__name__ for module in model.modules()}
            torch.testing.assert_close(model(tokens).logits, own, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(tokens).logits, own)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.config._attn_implementation == implementation
    assert "forward" not in vars(model.get_decoder())


SHORT = [*FUSED, "granite", "qwen3", "bamba", "mixtral", "gpt_oss"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        # One of two types in turn.
        pytest.param(kind, dtype, marks=[pytest.mark.deep] if place != number % 2 else [])
        for number, kind in enumerate(SHORT)
        for place, dtype in enumerate((torch.bfloat16, torch.int8))
    ],
)
def test_weights_in_short_types(kind: str, dtype: torch.dtype, tiny_llama: ModelHandle) -> None:
    """Close to the model in fp32, the same numbers alone and beside another sequence; what is left of weights stays."""
    model, tokens = build(kind, vocab_size=len(tiny_llama.tokenizer)), torch.arange(3, 40)[None]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.inference_mode():
        own = model(tokens).logits
        with pack_model(model, PackedTables(dtype)):
            packed = [module.packed.weight for module in model.modules() if isinstance(module, PackedLinear)]
            types = {weight.dtype for weight in packed}
            assert types == {torch.bfloat16} if dtype is torch.bfloat16 else torch.uint8 in types
            assert kind not in FUSED or (fused(model) and packed)
            # Rounding sends some tokens to other experts.
            bound = 0.5 if kind in ("mixtral", "gpt_oss") else 0.1 if dtype is torch.bfloat16 else 0.2
            assert torch.dist(model(tokens).logits, own) < bound * own.norm()
            ((new, logits),) = decode(model, tiny_llama.tokenizer)
            (beside_tokens, beside), _ = decode(model, tiny_llama.tokenizer, 2)
    assert new == beside_tokens
    assert torch.equal(logits, beside)
    for key, value in model.state_dict().items():
        if dtype is torch.bfloat16:
            assert torch.equal(value, before[key]) or torch.equal(value, before[key].bfloat16().float())
        else:
            torch.testing.assert_close(value, before[key], rtol=0, atol=float(before[key].abs().max()) / 250)


def test_a_model_that_rounding_breaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.int8, "int8")):
        monkeypatch.setitem(packing.ROUNDING, dtype, 1e-5)
        with pytest.raises(KvatlasError, match=f"The model option weights is '{name}'"):
            pack_model(build("llama"), PackedTables(dtype))


def test_a_model_whose_experts_rounding_breaks_is_not_packed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are undone would keep rounded weights."""
    linear_layers_then_experts = iter((True, False, False, False))
    monkeypatch.setattr(packing, "_close", lambda *_: next(linear_layers_then_experts))
    with pytest.raises(KvatlasError, match="The model option weights is 'bfloat16'"):
        pack_model(build("mixtral"), PackedTables(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_with_other_inputs_of_attention_is_undone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are within every window, so logits alone would not show that a layer passes another one."""

    class OtherWindow(FusedLayer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.window = 9

    model = build("mistral")
    monkeypatch.setattr(packing, "FusedLayer", OtherWindow)
    pack_model(model, PackedTables(dtype))
    assert not fused(model)


@pytest.mark.parametrize("kind", ["llama", "ministral", "granite", "qwen3"])
def test_the_engine_and_the_labels_compute_what_the_models_own_forward_does(kind: str, tiny_llama: ModelHandle) -> None:
    model = build(kind, vocab_size=len(tiny_llama.tokenizer))
    with pack_model(model):
        assert any(isinstance(module, PackedLinear) for module in model.modules())
        ((new, logits),) = decode(model, tiny_llama.tokenizer)
        (_, beside), _ = decode(model, tiny_llama.tokenizer, 2)
        _, hidden = answer_attention(model, list(range(3, 30)), 20)
    assert torch.equal(beside, logits)
    with torch.inference_mode():
        tokens = torch.tensor([[*range(3, 30), *new]])
        torch.testing.assert_close(logits, model(tokens).logits[0, 26:-1], atol=1e-4, rtol=1e-4)
        own = model.get_decoder()(tokens).last_hidden_state[0, :20]
        torch.testing.assert_close(hidden, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rotation",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)
@torch.inference_mode()
def test_angles_of_a_fused_decoder_are_those_of_transformers_to_the_bit(rotation: dict[str, Any]) -> None:
    """Also behind the first tokens, and where a longer text changes the angles of all its positions."""
    lengths = {"original_max_position_embeddings": 64, "rope_theta": 10_000.0}
    model = build("llama", rope_parameters={**rotation, **lengths}, max_position_embeddings=64)
    with pack_model(model):
        decoder = model.get_decoder().forward
        assert isinstance(decoder, FusedDecoder)
        for positions in ([[0, 2, 5]], [[900, 3, 17, 40]], [list(range(70))], [[7]]):
            x = torch.zeros(1, len(positions[0]), 1)
            angles = decoder.rotation(x, torch.tensor(positions))
            expected = decoder.rotary(x, position_ids=torch.tensor(positions))
            assert all(map(torch.equal, angles, expected))


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_decoder_computes_the_bits_of_its_own(kind: str, tiny_llama: ModelHandle) -> None:
    model = build(kind, vocab_size=len(tiny_llama.tokenizer))
    pack_model(model)
    (tokens, logits), *_ = decode(model, tiny_llama.tokenizer)
    del model.get_decoder().forward
    (expected, own), *_ = decode(model, tiny_llama.tokenizer)
    assert tokens == expected
    assert torch.equal(logits, own)


@pytest.mark.parametrize("setting", STORED, ids=lambda setting: setting.policy)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_fused_decoder_stores_what_policies_ask_for(kind: str, setting: Setting, tiny_llama: ModelHandle) -> None:
    model = build(kind, vocab_size=len(tiny_llama.tokenizer))
    pack_model(model)
    outcome = decode(model, tiny_llama.tokenizer, 3, setting)
    del model.get_decoder().forward
    for (tokens, logits), (expected, own) in zip(outcome, decode(model, tiny_llama.tokenizer, 3, setting), strict=True):
        assert tokens == expected
        assert torch.equal(logits, own)


def test_all_fused_layers_are_one_call_of_native_code(tiny_llama: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", vocab_size=len(tiny_llama.tokenizer))
    pack_model(model)
    decode(model, tiny_llama.tokenizer)
    calls: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def counted(*values: Any) -> Any:
            calls[name] += 1
            return method(*values)

        monkeypatch.setattr(owner, name, counted)

    count(DecoderLayer, "compute")
    count(native.Native, "attention")
    count(native.Native, "rms_norm")
    ((new, _),) = decode(model, tiny_llama.tokenizer)
    # The last token does not go through the model; the norm behind the layers is a call of its own.
    assert calls == {"compute": len(new), "rms_norm": len(new)}


def test_a_model_that_is_looked_into_is_not_run() -> None:
    model, seen = build("llama"), []
    layer = model.model.layers[1].self_attn.q_proj
    layer.register_forward_hook(lambda *call: seen.append(call[2]))
    pack_model(model)
    assert not seen
    assert model.model.layers[1].self_attn.q_proj is layer
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedLinear)
    assert not fused(model)


def test_a_model_that_decodes_is_called_by_nobody_else() -> None:
    model, tokens = build("llama"), torch.arange(3, 40)[None]
    with own_attention(model), pytest.raises(KvatlasError, match="The model is called while kvatlas decodes with it"):
        model(tokens)


class Own(torch.Tensor):
    """Of its own type and without some operators, as weights of packages for quantised ones are."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.Tensor.aminmax
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_of_another_type_are_left_alone() -> None:
    model = build("llama")
    layer, other = model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.o_proj
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Own))
    check_finite("it", model)
    pack_model(model)
    assert model.model.layers[0].self_attn.q_proj is layer
    assert model.model.layers[0].self_attn.o_proj is not other


def test_what_is_packed_or_replaced_already_is_left_alone() -> None:
    model = build("llama")
    layer = model.model.layers[1].self_attn.o_proj
    layer.forward = lambda x, forward=layer.forward: 2 * forward(x)
    pack_model(model)
    assert not fused(model)
    with torch.inference_mode():
        inputs = torch.tensor([[5, 6, 7]])
        wanted = model(inputs).logits
        with pack_model(model):
            assert torch.equal(model(inputs).logits, wanted)
    assert not fused(model)
    assert "forward" in vars(layer)
    assert type(layer) is torch.nn.Linear

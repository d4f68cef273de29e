"""Layers of a model on native CPU kernels: the numbers of a token never depend on the other tokens of a batch.

torch's own linear layers sum in another order for one row than for eight. Here weights are packed once, the originals
dropped, and every row is summed in its own order. Layers with the same input (queries, keys and values; gate and up)
lie side by side in one table, and usual forms take fewer calls: normalisations, gated feed-forward layers, whole
decoders of Llama's form, and mixtures of experts. Weights may be packed in bfloat16 or int8: half or a quarter of the
memory, and up to twice or three times as fast.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvatlas.core import KvatlasError
from kvatlas.cpu.fused import FusedDecoder, FusedLayer, FusedModel, compute_layers
from kvatlas.cpu.native import Linear, Native, load
from kvatlas.cpu.native.panels import LANES, unpack_weights
from kvatlas.cpu.shared_weights import PackedTables, WeightInBytes
from kvatlas.forward import attention_function, own_attention
from kvatlas.machine import out_of_memory, return_freed_memory

#: A step of packing a model, which can be undone.
Step = Callable[[PackedTables, "PreTrainedModel", ExitStack], None]
#: Linear layers that read the same input.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Layers with a packed form, by transformers' module and class. Copies of these classes in other models are recognised
#: by their code.
NORMS = ("llama.LlamaRMSNorm", "olmo2.Olmo2RMSNorm")
GATES = ("llama.LlamaMLP", "seed_oss.SeedOssMLP")
LAYERS = ("llama.LlamaDecoderLayer",)
MODELS = (
    *("llama.LlamaForCausalLM", "mistral.MistralForCausalLM", "qwen2.Qwen2ForCausalLM", "seed_oss.SeedOssForCausalLM"),
    "smollm3.SmolLM3ForCausalLM",
)
ATTENTIONS = (
    *("llama.LlamaAttention", "mistral.MistralAttention", "qwen2.Qwen2Attention", "seed_oss.SeedOssAttention"),
    "smollm3.SmolLM3Attention",
)
#: Functions that turn queries and keys.
ROTATION = ("apply_rotary_pos_emb", "rotate_half")
#: Children of a decoder of Llama's form.
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
#: Functions that torch computes in vectors of numbers, and by another formula for the remaining ones.
CURVES = ("sigmoid", "exp", "tanh", "softplus", "silu", "gelu")
#: A multiple of every vector's length.
VECTOR = 64
#: Outputs of a table in int8 that are unpacked at a time.
OUTPUTS_AT_A_TIME = 256
#: The largest distance of numbers that differ by rounding alone, relative to their norm: of fp32, and of numbers that
#: every layer rounds to bfloat16 or int8.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.int8: 0.15}


class PackedLinear(nn.Module):
    """A linear layer with packed weights; in other types than fp32 it computes as torch does.

    Unless it `rounds_inputs` it does so in fp32, too, with its weights as they are packed.
    """

    def __init__(self, packed: Linear) -> None:
        super().__init__()
        self.in_features = packed.inputs
        self.out_features = packed.outputs
        self.packed = packed
        self.rounds_inputs = True

    @property
    def weight(self) -> Tensor:
        """A copy of the original weights [outputs, inputs], fp32."""
        return unpack_weights(self.packed.weight, self.out_features).float()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            bias = self.packed.bias
            return F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        if not self.rounds_inputs:
            return self._without_rounding(x)
        return self.packed(x)

    def _without_rounding(self, x: Tensor) -> Tensor:
        """Return the layer's output for inputs in fp32; its weights are unpacked some outputs at a time."""
        outputs = []
        for first in range(0, self.out_features, OUTPUTS_AT_A_TIME):
            chosen = torch.arange(first, min(first + OUTPUTS_AT_A_TIME, self.out_features))
            outputs.append(F.linear(x, self.packed.rows(chosen)))
        output = torch.cat(outputs, -1)
        # The C library keeps the unpacked weights of all layers otherwise.
        return_freed_memory()
        return output if self.packed.bias is None else output + self.packed.bias


class PackedEmbedding(nn.Module):
    """The embedding that shares its weights with a packed layer."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        # Not a child of this module: the layer belongs to another.
        self.linear = (linear,)

    @property
    def weight(self) -> Tensor:
        """A copy of the original weights [tokens, hidden size]."""
        return self.linear[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear[0].packed.rows(tokens)


class PackedNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, native: Native, norm: Any) -> None:
        super().__init__()
        self.native = native
        self.norm = norm
        self.eps = norm.variance_epsilon

    @property
    def weight(self) -> Any:
        """The weight [hidden size] of the original layer."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return self.norm(x)  # type: ignore[no-any-return]
        return self.native.rms_norm(x.contiguous(), weight, self.eps)


class PackedGate(nn.Module):
    """down(silu(gate(x)) * up(x)), the gated feed-forward layer of Llama and its kin, over packed layers."""

    def __init__(self, native: Native, layer: Any) -> None:
        super().__init__()
        self.native = native
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return self.layer(x)  # type: ignore[no-any-return]
        layer = self.layer
        inner = self.native.silu_mul(layer.gate_proj(x).flatten(0, -2), layer.up_proj(x).flatten(0, -2))
        return layer.down_proj(inner.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class PackedCurve(nn.Module):
    """An activation over whole vectors: what is left of a row would be computed by another formula."""

    def __init__(self, curve: nn.Module) -> None:
        super().__init__()
        self.curve = curve

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if width % VECTOR:
            x = F.pad(x, (0, -width % VECTOR))
        return self.curve(x)[..., :width]  # type: ignore[no-any-return]


class PackedExperts(nn.Module):
    """Experts in the form of `transformers.integrations.moe`, one table for all, each packed by itself."""

    def __init__(self, tables: PackedTables, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.names = ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
        self.first, self.second = (self._packed(tables, name) for name in self.names)
        for name in self.names:
            getattr(layer, name).data = torch.empty(0)

    def _packed(self, tables: PackedTables, name: str) -> list[PackedLinear]:
        """Return the packed linear layer of each expert in the table `name`."""
        weights = getattr(self.layer, name)
        biases = getattr(self.layer, f"{name}_bias") if self.layer.has_bias else [None for _ in weights]
        if self.layer.is_transposed:
            weights = weights.transpose(1, 2)
        pairs = zip(weights, biases, strict=True)
        return [PackedLinear(tables.linear([weight], bias)) for weight, bias in pairs]

    def unpack(self) -> None:
        for name, experts in zip(self.names, (self.first, self.second), strict=True):
            weights = torch.stack([expert.weight for expert in experts])
            getattr(self.layer, name).data = weights.mT.contiguous() if self.layer.is_transposed else weights

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Pass x [tokens, hidden size] through the experts `chosen` [tokens, experts of each], summed in that order."""
        layer = self.layer
        flat = chosen.flatten()
        experts_per_token = chosen.shape[1]
        out = x.new_zeros(len(flat), x.shape[1])
        for expert in flat[flat < len(self.first)].unique().tolist():  # type: ignore[no-untyped-call]
            places = (flat == expert).nonzero()[:, 0]
            inner = self.first[expert](x[places // experts_per_token])
            out[places] = self.second[expert](layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner))

        if layer.has_post_expert_norm:
            out = layer.post_expert_norm(out)
        first, *others = (out * weights.reshape(-1, 1)).view(*chosen.shape, -1).unbind(1)
        return sum(others, first)


class RowExact(TorchFunctionMode):
    """The `forward` of a layer of experts and its router, with tables and curves computed row by row."""

    def __init__(self, tables: PackedTables, layer: nn.Module) -> None:
        super().__init__()
        self.inexact = layer.forward
        weights = [weight for weight in layer.parameters() if weight.dim() == 2 and weight.numel()]
        self.tables = {id(weight): PackedLinear(tables.linear([weight])) for weight in weights}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self:
            return self.inexact(*args, **kwargs)

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is F.linear and len(args) > 1 and id(args[1]) in self.tables:
            bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
            return self.tables[id(args[1])](args[0]) + (0 if bias is None else bias)
        if name in CURVES and (width := args[0].shape[-1]) % VECTOR:
            return function(F.pad(args[0], (0, -width % VECTOR)), *args[1:], **kwargs)[..., :width]
        return function(*args, **kwargs)


def pack_model(model: PreTrainedModel, tables: PackedTables | None = None) -> ExitStack:
    """Replace a model's layers by packed ones if native kernels support it: fp32 on the CPU.

    The weights of replaced linear layers are dropped; closing the returned stack restores every weight, bit for bit (as
    far as the type of the `tables` holds it): `with pack_model(model): ...`. A step that changes the
    numbers of a few tokens is undone. A model with hooks is not run: only its linear layers are packed. Hooks
    registered later inside a fused decoder see no call of the engine's.

    `tables` note the packed weights and the steps that were done; with stored ones the same steps are done again,
    without a look at the original weights. Raises KvatlasError if weights in bfloat16 or int8 change more than rounding
    does.
    """
    native = load()
    undo = ExitStack()
    if native is None or model.device.type != "cpu" or model.dtype is not torch.float32:
        return undo
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        return undo

    tables = tables or PackedTables()
    if any(map(has_hooks, model.modules())):
        _pack_linear(tables, model, undo)
        return undo
    steps = (_pack_linear, _pack_experts, _pack_forms, _fuse)
    if tables.steps is not None:
        for step in itertools.compress(steps, tables.steps):
            step(tables, model, undo)
        return undo
    tables.steps = _try_steps(steps, tables, model, undo)
    return undo


def _try_steps(steps: Sequence[Step], tables: PackedTables, model: PreTrainedModel, undo: ExitStack) -> list[bool]:
    """Do the steps that leave the numbers of a few tokens as they are; return which were done.

    Raises KvatlasError for a step that changes them with rounded weights: undoing it would leave them rounded.
    """
    tolerance = ROUNDING[tables.dtype]
    in_bytes = any(isinstance(weight, WeightInBytes) for weight in model.parameters())
    before = [] if in_bytes else _probe_numbers(model)
    done = []
    for step in steps:
        noted = len(tables.used)
        # Leaving the block undoes the step, unless its callbacks were moved to `undo`.
        with ExitStack() as undo_step:
            step(tables, model, undo_step)
            if in_bytes and step is _pack_linear:
                # Weights that were read as packed can be compared in no other form.
                with _unrounded_inputs(model):
                    before = _probe_numbers(model)
            is_close = bool(before) and _close(_probe_numbers(model), before, tolerance)
            if is_close:
                undo.push(undo_step.pop_all())
            elif tables.dtype is not torch.float32 and len(tables.used) > noted:
                name = str(tables.dtype).removeprefix("torch.")
                raise KvatlasError(
                    f"The model option weights is {name!r}, which does not suit this model: queries, keys, values or "
                    f"logits of three tokens differ by more than {tolerance:.0%}, or cannot be compared; expected "
                    "auto."
                )
            else:
                del tables.used[noted:]
        done.append(is_close)
    return done


def has_hooks(module: nn.Module) -> bool:
    """Return True if calls of a module are observed, or its `forward` is replaced."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


@contextmanager
def _unrounded_inputs(model: PreTrainedModel) -> Iterator[None]:
    """Let the packed layers of a model take their inputs in fp32."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for layer in layers:
        layer.rounds_inputs = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_inputs = True


@torch.inference_mode()
def _probe_numbers(model: PreTrainedModel) -> list[Tensor]:
    """Return the inputs of attention in each layer, and logits, for a few tokens; empty if the model raises."""
    numbers: list[Tensor] = []

    def probe(_layer: object, *tensors: Any, scaling: float, sliding_window: int = 0, **_: Any) -> tuple[Tensor, None]:
        query, key, value = tensors[:3]
        # Layers may share the memory of these.
        numbers.extend((query.clone(), key.clone(), value.clone(), torch.tensor([scaling, sliding_window or 0])))
        grouped = query.shape[1] != key.shape[1]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return seen.transpose(1, 2), None

    tokens = torch.arange(3)[None]
    positions = torch.tensor([[0, 2, 5]])
    try:
        with own_attention(model), attention_function(probe):
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    except Exception as error:
        if out_of_memory(error):
            raise
        return []
    return [*numbers, logits]


def _close(numbers: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    same = [each.shape for each in numbers] == [each.shape for each in others]
    return same and all(torch.dist(a, b) <= tolerance * b.norm() for a, b in zip(numbers, others, strict=True))


def _pack_linear(tables: PackedTables, model: PreTrainedModel, undo: ExitStack) -> None:
    """Replace the linear layers by packed ones, and drop weights that no other layer shares."""
    children: dict[nn.Module, list[tuple[str, Any]]] = {}
    users: Counter[int] = Counter()
    embeddings: dict[int, tuple[nn.Module, str]] = {}
    for parent in model.modules():
        children[parent] = [(name, child) for name, child in parent.named_children() if _has_weight(child)]
        for name, child in children[parent]:
            users[id(child.weight)] += 1
            if type(child) is nn.Embedding:
                embeddings[id(child.weight)] = (parent, name)

    for parent, layers in children.items():
        joined = _join_layers(tables, parent)
        for name, child in layers:
            if not _is_plain_linear(child):
                continue
            packed = PackedLinear(joined.get(id(child)) or tables.linear([child.weight], child.bias))
            _replace(parent, name, packed, undo)

            # The embedding that shares the weight reads the packed one; the weight goes if nothing else uses it.
            replaced = 1
            embedding = embeddings.get(id(child.weight))
            if embedding is not None:
                _replace(*embedding, PackedEmbedding(packed), undo)
                replaced = 2
            if users[id(child.weight)] == replaced:
                _drop_weight(child, packed, undo)

            # Packed layers share their weights, and the names that transformers would tie are gone.
            if "tie_weights" not in vars(model):
                model.tie_weights = lambda *_, **__: None
                undo.callback(vars(model).pop, "tie_weights")

    # Embeddings that share their weights with no other layer: in fp32 they would take a third of the memory.
    if tables.dtype is not torch.int8:
        return
    for weight_id, (parent, name) in embeddings.items():
        own_embedding: Any = getattr(parent, name)
        if users[weight_id] == 1 and type(own_embedding) is nn.Embedding and not has_hooks(own_embedding):
            packed = PackedLinear(tables.linear([own_embedding.weight]))
            _replace(parent, name, PackedEmbedding(packed), undo)
            _drop_weight(own_embedding, packed, undo)


def _drop_weight(layer: Any, packed: PackedLinear, undo: ExitStack) -> None:
    undo.callback(lambda: setattr(layer.weight, "data", packed.weight))
    layer.weight.data = layer.weight.data.new_empty(0)


def _has_weight(layer: nn.Module | None) -> bool:
    # Packages for quantised weights leave such layers without weights, or with tensors of a type of their own.
    weight = getattr(layer, "weight", None)
    return isinstance(layer, nn.Linear | nn.Embedding) and type(weight) in (nn.Parameter, WeightInBytes)


def _is_plain_linear(layer: nn.Module | None) -> bool:
    return type(layer) is nn.Linear and _has_weight(layer) and not has_hooks(layer)


def _join_layers(tables: PackedTables, parent: nn.Module) -> dict[int, Linear]:
    """Pack the layers of a parent with the same input side by side; return the part of each layer by its id."""
    parts: dict[int, Linear] = {}
    for names in JOINED:
        layers: list[Any] = [getattr(parent, name, None) for name in names]
        # They fit side by side in one table: whole lanes, and all with a bias or none.
        if not all(_is_plain_linear(layer) and layer.out_features % LANES == 0 for layer in layers):
            continue
        if len({layer.bias is None for layer in layers}) > 1:
            continue

        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else torch.cat(biases)
        table = tables.linear([layer.weight for layer in layers], bias)
        first = 0
        for layer in layers:
            parts[id(layer)] = table.part(first, layer.out_features)
            first += layer.out_features
    return parts


def _replace(parent: nn.Module, name: str, by: nn.Module, undo: ExitStack) -> None:
    undo.callback(setattr, parent, name, getattr(parent, name))
    setattr(parent, name, by)


def _pack_experts(tables: PackedTables, model: nn.Module, undo: ExitStack) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if {"has_gate", "has_post_expert_norm"} <= vars(child).keys():
                packed = PackedExperts(tables, child)
                undo.callback(packed.unpack)
                _replace(parent, name, packed, undo)
                parent.forward = RowExact(tables, parent)
                undo.callback(delattr, parent, "forward")


def _pack_forms(tables: PackedTables, model: nn.Module, undo: ExitStack) -> None:
    from transformers.activations import ACT2CLS, ACT2FN

    silu = (nn.SiLU, type(ACT2FN["silu"]))
    curves = tuple(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values())
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if computes_as(child, NORMS):
                _replace(parent, name, PackedNorm(tables.native, child), undo)
            elif computes_as(child, GATES) and isinstance(child.act_fn, silu):
                _replace(parent, name, PackedGate(tables.native, child), undo)
            elif isinstance(child, curves):
                _replace(parent, name, PackedCurve(child), undo)


def computes_as(layer: nn.Module, names: tuple[str, ...]) -> bool:
    """Return True if a layer's `forward` has the code of one of these classes."""
    classes = (name.split(".") for name in names)
    modules = ((import_module(f"transformers.models.{module}.modeling_{module}"), name) for module, name in classes)
    return _code(type(layer).forward) in [_code(getattr(module, name).forward) for module, name in modules]


def is_plain_llama(decoder: Any) -> bool:
    """Return True if a decoder consists of layers of Llama's form alone, with plain weights and without hooks.

    Hooks of the decoder itself do not count.
    """
    from transformers.activations import ACT2FN

    if "forward" in vars(decoder) or set(dict(decoder.named_children())) != DECODER:
        return False
    if any(has_hooks(module) for module in decoder.modules() if module is not decoder):
        return False

    for layer in decoder.layers:
        attention = layer.self_attn
        gated = layer.mlp
        if not (computes_as(layer, LAYERS) and computes_as(attention, ATTENTIONS) and computes_as(gated, GATES)):
            return False
        if not turns_halves(attention) or not isinstance(gated.act_fn, nn.SiLU | type(ACT2FN["silu"])):
            return False
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        joined, others = _linear_children(attention, gated)
        if not all(computes_as(norm, NORMS[:1]) for norm in norms):
            return False
        if not all(type(each) is nn.Linear for each in (*joined, *others)):
            return False

    # The rotation has to turn whole heads.
    with torch.inference_mode():
        place = torch.zeros(1, 1, dtype=torch.long, device=decoder.embed_tokens.weight.device)
        cos, _ = decoder.rotary_emb(decoder.embed_tokens(place), position_ids=place)
    return bool(cos.shape == (1, 1, decoder.layers[0].self_attn.head_dim))


def turns_halves(attention: nn.Module) -> bool:
    """Return True if a layer whose `forward` has the code of Llama's also calls the same rotation."""
    called = unwrap(type(attention).forward).__globals__
    expected = vars(import_module("transformers.models.llama.modeling_llama"))
    return all(_code(called.get(name)) == _code(expected[name]) for name in ROTATION)


def _code(function: Any) -> Any:
    # transformers wraps the layers that checkpoint gradients, all in the same code.
    function = unwrap(function)
    code = getattr(function, "__code__", None)
    # The docstring is a constant of the code, too.
    return code and (code.co_code, code.co_names, [value for value in code.co_consts if value != function.__doc__])


def _fuse(_tables: PackedTables, model: PreTrainedModel, undo: ExitStack) -> None:
    """Give a shorter `forward` to a decoder that consists of layers of Llama's form alone."""
    decoder = model.get_decoder()
    if set(dict(decoder.named_children())) != DECODER or not all(map(_fusable, decoder.layers)):
        return
    layers = list(map(FusedLayer, decoder.layers))
    products = [layer.products for layer in layers]
    if len({each.widths for each in products}) == 1 and all(each.fits for each in products):
        decoder.forward = FusedDecoder(decoder, [partial(compute_layers, layers)])
        undo.callback(delattr, decoder, "forward")
        if computes_as(model, MODELS) and type(model.lm_head) is PackedLinear:
            model.forward = FusedModel(model)
            undo.callback(delattr, model, "forward")


def _fusable(layer: Any) -> bool:
    """Return True if a layer has Llama's form, and all its parts are packed."""
    if not (computes_as(layer, LAYERS) and computes_as(layer.self_attn, ATTENTIONS)):
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if type(layer.mlp) is not PackedGate or any(type(norm) is not PackedNorm for norm in norms):
        return False
    joined, others = _linear_children(layer.self_attn, layer.mlp.layer)
    is_packed = all(type(each) is PackedLinear for each in (*joined, *others))
    return is_packed and all(each.packed.whole for each in joined)


def _linear_children(attention: Any, gated: Any) -> tuple[list[Any], list[Any]]:
    """Return the linear layers of a decoder layer that read the same input as others, and those that do not."""
    joined = [getattr(attention, name) for name in JOINED[0]] + [getattr(gated, name) for name in JOINED[1]]
    return joined, [attention.o_proj, gated.down_proj]

"""`dynts`: tokens that a small learned head finds important for the answer stay (Dynamic Thinking-Token Selection).

Beside it are the ablations of its paper: `dynts-bottom`, `dynts-noprompt` and `dynts-random`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, refusal
from kvatlas.cpu.native import load
from kvatlas.models import ModelHandle
from kvatlas.models.weights import check_numbers
from kvatlas.policies import CacheView, CompressingPolicy, Signal, Step, Tensor
from kvatlas.policies.model_files import FilePolicy, by_content

_ABLATION = "Dynamic Thinking-Token Selection, arXiv 2601.18383, ablation"
#: The file of the head in a model folder.
HEAD_FILE = "dynts.safetensors"


@dataclass(frozen=True)
class DynTS(FilePolicy):
    """Learned importance: score(t) = head(last hidden state of t), arXiv 2601.18383, section 4.

    The head is an MLP (hidden -> 2 * hidden -> hidden / 2 -> 1, softplus) trained to predict the attention that the
    answer will pay to the token; `kvatlas predictor train` trains one. The ablation without a local window is
    `local_window: 1`: the newest token always stays.

    Heads have two layouts, recognised by the names and shapes of their tensors, and run in float32. Ours
    has biases and GELU between its layers, and learns log(1 + attention * thinking tokens) by mean squared error plus
    a pairwise ranking loss. The authors' code has no biases, softplus between the layers and, for R1-Llama and R1-Qwen,
    inner widths of 8192 and 2048 whatever the hidden size is (Qwen3: as above); it learns attention * 10^4 (R1-Llama)
    or 10 / 0.3 * attention^0.3 (R1-Qwen) by mean squared error, in which a label from 4 up to 5 weighs five times, from
    all thinking tokens of one correct trace of each problem. Its ranking loss has weight 0 in the authors' scripts.

    predictor: safetensors file of the head in either layout (of a checkpoint of the authors' the part that holds
        `is_head.`); empty for the one in the model's folder.
    """

    predictor: str = ""

    name = "dynts"
    summary = "keeps the tokens that a learned head finds important for the answer"
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383"
    published = {
        "kv_budget": "5000 (3000 for MATH500 and GAOKAO2023EN)",
        "local_window": "500 to 3000",
        "ratio": "0.1 to 0.5",
    }
    observes = frozenset({Signal.HIDDEN})
    columns = ("importance",)
    file_parameter = "predictor"
    file_name = HEAD_FILE
    file_key = "head"
    file_about = "a trained predictor"

    @cached_property
    def observer(self) -> tuple[Any, ...]:
        # The ablations observe the same as DynTS itself.
        return (DynTS.name, self.predictor)

    def check_file(self, file: Path, model: ModelHandle) -> None:
        width = load_head(str(file))["0.weight"].shape[1]
        if width != model.shape.hidden:
            raise KvatlasError(
                f"The predictor {str(file)!r} is for a hidden size of {width}, the model {model.name!r} has "
                f"{model.shape.hidden}."
            )

    def observe(self, step: Step) -> None:
        assert step.hidden is not None
        file = self.file(step.model)
        head, layers = load_layers(str(file), str(step.hidden.device), self.content(file))
        step.enter("importance", importance(head, step.hidden, layers))

    def score(self, cached: CacheView) -> Tensor:
        return cached.columns["importance"]


class DynTSBottom(DynTS):
    """Ablation of arXiv 2601.18383: score(t) = - head(last hidden state of t).

    In the authors' code the prompt has an infinite importance and so is the first to go: `keep_prompt: false` does
    that, by default it stays as under every policy. Parameters are those of `dynts`.
    """

    name = "dynts-bottom"
    summary = "keeps the tokens that the learned head finds least important (ablation of dynts)"
    paper = _ABLATION

    def score(self, cached: CacheView) -> Tensor:
        return -super().score(cached).masked_fill(cached.positions < cached.prompt_length, float("inf"))


class DynTSNoPrompt(DynTS):
    """Ablation of arXiv 2601.18383: as `dynts`, but a prompt token has importance 0, as in the authors' code.

    The importance of thinking tokens is positive, so the prompt goes first. Parameters are those of `dynts`, without a
    choice of `keep_prompt`.
    """

    name = "dynts-noprompt"
    summary = "dynts without protection of the prompt (ablation)"
    paper = _ABLATION
    rule_defaults = {"keep_prompt": False}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget.keep_prompt:
            raise KvatlasError("keep_prompt is True; expected false for dynts-noprompt.")

    def score(self, cached: CacheView) -> Tensor:
        return super().score(cached).masked_fill(cached.positions < cached.prompt_length, 0.0)


@dataclass(frozen=True)
class DynTSRandom(CompressingPolicy):
    """Ablation of arXiv 2601.18383: score(t) is uniform on (0, 1), one draw for all layers and heads.

    Each compression makes a new draw, as in the authors' code, where the prompt competes as well (`keep_prompt:
    false`). `random` draws for each KV head instead.
    """

    name = "dynts-random"
    summary = "keeps a random subset, the same for all layers and heads (ablation of dynts)"
    random = True
    paper = _ABLATION
    published = {"keep_prompt": "false"}

    def score(self, cached: CacheView) -> Tensor:
        return cached.uniform()


# A head has the linear layers 0, 2 and 4 of an `nn.Sequential` and a softplus at the end.
#: The tensors of our layout: with biases, GELU between the layers.
OURS = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
#: Those of the authors' layout, without their prefix: no biases, softplus between the layers.
AUTHORS = ("0.weight", "2.weight", "4.weight")
#: The prefix of the head's tensors in the authors' checkpoints, which hold it beside the language model.
AUTHORS_PREFIX = "is_head."
_EXPECTED = (
    "linear layers 0, 2 and 4 that fit one another and end in one number, either as 0.weight, 0.bias and so on (ours) "
    "or as is_head.0.weight and so on without biases (the authors')"
)


def is_head(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return True if tensors with these names, without a prefix, and shapes are a head in one of the layouts."""
    if set(shapes) not in (set(OURS), set(AUTHORS)) or any(len(shapes[weight]) != 2 for weight in AUTHORS):
        return False
    widths = [shapes["0.weight"][1], *(shapes[weight][0] for weight in AUTHORS)]
    fitting: dict[str, tuple[int, ...]] = {}
    for weight, before, after in zip(AUTHORS, widths, widths[1:], strict=False):
        fitting |= {weight: (after, before), weight.replace("weight", "bias"): (after,)}
    return widths[-1] == 1 and all(tuple(shape) == fitting[name] for name, shape in shapes.items())


@by_content
def load_head(file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Return the weights of the head in float32, named without the authors' prefix.

    Other tensors beside those of `is_head.` are ignored, so that the file may be a part of the authors' checkpoints.
    Raises KvatlasError for another layout, and for weights that are not finite.
    """
    from safetensors import SafetensorError, safe_open

    head: dict[str, Tensor] = {}
    unreadable = refusal(f"The predictor {file!r} cannot be read as a DynTS head", OSError, ValueError, SafetensorError)
    with unreadable, safe_open(file, framework="pt", device=device) as content:
        names = list(content.keys())
        prefix = AUTHORS_PREFIX if any(name.startswith(AUTHORS_PREFIX) for name in names) else ""
        shapes = {name: content.get_slice(name).get_shape() for name in names if name.startswith(prefix)}
        if is_head({name.removeprefix(prefix): shape for name, shape in shapes.items()}):
            head = {name.removeprefix(prefix): content.get_tensor(name).float() for name in shapes}
    if not head:
        held = [f"{name} {tuple(shape)}" for name, shape in shapes.items()]
        more = f" and {len(held) - 8} more" if len(held) > 8 else ""
        way_out = ""
        if "center_real" in shapes:
            way_out = ". They are statistics for triattention; `kvatlas predictor train` makes a head"
        raise KvatlasError(
            f"The predictor {file!r} is no DynTS head: it holds {', '.join(held[:8]) or 'nothing'}{more}; expected "
            f"{_EXPECTED}{way_out}."
        )
    check_numbers(f"The predictor {file!r}", head)
    return head


Layers = tuple[Callable[["Tensor"], "Tensor"], ...]


@by_content
def load_layers(file: str, device: str = "cpu") -> tuple[dict[str, Tensor], Layers]:
    """Return the head with its linear layers, on native kernels if possible, so that during decoding the importance of
    a token does not depend on the number of others beside it."""
    head = load_head(file, device)
    native = load() if device == "cpu" else None
    if native is None:
        return head, linear_layers(head)
    return head, tuple(native.linear(head[f"{layer}.weight"], head.get(f"{layer}.bias")) for layer in (0, 2, 4))


def linear_layers(head: Mapping[str, Tensor]) -> Layers:
    """Return the linear layers of a head."""
    from torch.nn import functional as F

    return tuple(
        partial(F.linear, weight=head[f"{layer}.weight"], bias=head.get(f"{layer}.bias")) for layer in (0, 2, 4)
    )


def importance(head: Mapping[str, Tensor], hidden: Tensor, layers: Layers | None = None) -> Tensor:
    """Return the predicted importance [...] of tokens with last hidden states `hidden` [..., hidden size]."""
    from torch.nn import functional as F

    activation = F.gelu if "0.bias" in head else F.softplus
    first, second, last = layers or linear_layers(head)
    inner = activation(second(activation(first(hidden.to(head["0.weight"].dtype)))))
    # In double precision, because short vectors are rounded otherwise than long ones.
    return F.softplus(last(inner).double()).squeeze(-1).to(inner.dtype)

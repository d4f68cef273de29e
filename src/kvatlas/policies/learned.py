"""`learned`: tokens to which a small trained head of their KV head predicts much future attention stay."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvatlas.core import KvatlasError, refusal
from kvatlas.models import ModelHandle
from kvatlas.models.rotation import frequencies, turn_back
from kvatlas.models.weights import check_numbers
from kvatlas.policies import CacheView, Scope, Tensor, scope_param
from kvatlas.policies.model_files import FilePolicy, by_content
from kvatlas.policies.recent import positions

#: The file of the heads in a model folder, and its tensors.
SCORER_FILE = "kv_heads.safetensors"
TENSORS = ("first", "first_bias", "second", "second_bias")


@dataclass(frozen=True)
class Learned(FilePolicy):
    """Predicted future attention: score(t) = MLP of layer and KV head (key of t without its rotation, value of t).

    After KVzap, TRIM-KV (arXiv 2512.03324) and ForesightKV (arXiv 2602.03203), which train a small scorer of each KV
    head too: there from hidden states, here from what is cached anyway. `kvatlas predictor train --target kv_head`
    trains the heads (key and value -> 32 -> 1, GELU) on a model's own full-cache traces: the target is the logarithm of
    the mean attention of all later tokens, mean over the query heads of the KV head.

    scorer: safetensors file of the heads; empty for the one in the model's folder.
    scope: the unit of one choice: head (as trained), kv_head, layer or global, then with the mean of the scores.
    """

    scorer: str = ""
    scope: Scope = scope_param(Scope.HEAD)

    name = "learned"
    summary = "keeps the tokens whose keys and values a trained head of each KV head finds important later"
    paper = "after TRIM-KV, arXiv 2512.03324"
    file_parameter = "scorer"
    file_name = SCORER_FILE
    file_key = "scorer"
    file_about = "heads (of `kvatlas predictor train --target kv_head`)"

    def check_file(self, file: Path, model: ModelHandle) -> None:
        frequencies(model)
        shape = model.shape
        found = tuple(load_scorer(str(file))["first"].shape[:3])
        expected = (shape.layers, shape.kv_heads, sum(shape.cached_layers[0][1:]))
        if found != expected:
            form = "(layers, KV heads, key and value)"
            raise KvatlasError(f"The scorer {str(file)!r} is for {form} {found}, {model.name!r} has {expected}.")

    def score(self, cached: CacheView) -> Tensor:
        file = self.file(cached.model)
        device = str(cached.positions.device)
        scorer = load_scorer(str(file), device, self.content(file))
        frequency = frequencies(cached.model, device)

        def predicted(layer: int) -> Tensor:
            key = turn_back(cached.key(layer), positions(cached, layer), frequency)
            return predict({name: scorer[name][layer] for name in TENSORS}, key, cached.value(layer))

        return cached.each_layer(predicted)


def predict(scorer: Mapping[str, Tensor], key: Tensor, value: Tensor) -> Tensor:
    """Return the predicted logarithm of attention [..., tokens] from keys and values [..., tokens, size]."""
    import torch
    from torch.nn import functional as F

    inner = torch.cat([key, value.float()], -1) @ scorer["first"] + scorer["first_bias"].unsqueeze(-2)
    scores: Tensor = (F.gelu(inner) * scorer["second"].unsqueeze(-2)).sum(-1) + scorer["second_bias"].unsqueeze(-1)
    return scores


@by_content
def load_scorer(file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of a file. Raises KvatlasError unless it has those of `TENSORS`, in finite numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with refusal(f"The scorer {file!r} cannot be read", OSError, ValueError, SafetensorError):
        scorer = {name: numbers.float() for name, numbers in load_file(file, device).items()}
    if set(scorer) != set(TENSORS) or scorer["first"].dim() != 4:
        raise KvatlasError(f"The scorer {file!r} holds {', '.join(scorer)}; expected {', '.join(TENSORS)}.")

    *heads, _, inner = scorer["first"].shape
    sizes = {"first_bias": (*heads, inner), "second": (*heads, inner), "second_bias": (*heads,)}
    for name, expected in sizes.items():
        found = tuple(scorer[name].shape)
        if found != expected:
            raise KvatlasError(
                f"The scorer {file!r} holds the tensor {name!r} with the sizes {found}; expected {expected}."
            )
    check_numbers(f"The scorer {file!r}", scorer)
    return scorer

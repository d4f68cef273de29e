"""`triattention`: tokens stay whose keys future queries will look for, by the queries' mean before rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvatlas.core import KvatlasError
from kvatlas.policies.base import CacheView, CompressingPolicy, Scope, int_param, scope_param
from kvatlas.policies.made_files import beside, by_content, check_made_with, first_content

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import ModelHandle

#: Name of the statistics' file in a model folder, where the policy looks when `statistics` is empty.
STATISTICS_FILE = "triattention.safetensors"


@dataclass(frozen=True)
class TriAttention(CompressingPolicy):
    """Trigonometric score: S(k) = mean over d of sum over f of |E q_f| |k_f| cos(w_f (D + d) + phi_f)
    + sum over f of (E |q_f| - |E q_f|) |k_f|.

    Source: arXiv 2604.04921, section 4 (trigonometric series, norm score, future offsets, grouped queries). f are the
    planes that the rotation of positions turns, w_f its frequencies, q_f and k_f queries and keys before rotation as
    complex numbers, phi_f the angle between E q_f and k_f, D the distance from the key to the next token, d = 1, 2, 4,
    ... up to `reach`. Each query head's scores are standardised over the tokens after the prompt; the greatest over the
    query heads of a KV head counts. E q_f and E |q_f| are means over a calibration text, made once for each model by
    `kvatlas calibrate`, which runs the model on prompts of a benchmark and on its own full-cache traces; the paper
    finds that the text hardly matters. The authors' default shares a head's choice over all layers, their paper's
    formulas do not: here each layer and KV head chooses. Budget and pruning interval are replaced by kv_budget, ratio
    and local_window.

    statistics: file of the means; empty for the one in the model's folder.
    reach: the farthest future distance that counts.
    scope: for what one choice is made: head, layer or global, then with the mean of the scores.
    """

    statistics: str = ""
    reach: int = int_param(65_536, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "triattention"
    summary = "keeps the tokens whose keys future queries will look for, by the queries' mean before rotation"
    paper = "TriAttention, arXiv 2604.04921"
    published: ClassVar[Mapping[str, str]] = {
        "kv_budget": "2048 (512 for R1-Llama and MATH500), pruned every 128 tokens",
        "reach": "65536",
        "local_window": "128",
    }

    def file(self, model: ModelHandle) -> Path:
        """Where the statistics are."""
        return Path(self.statistics).expanduser() if self.statistics else beside(model, STATISTICS_FILE)

    def check(self, model: ModelHandle) -> None:
        file = self.file(model)
        if not file.is_file():
            raise KvatlasError(
                f"The policy 'triattention' needs statistics of the queries of the model {model.name!r}: there is no "
                f"file {str(file)!r}; make it with `kvatlas calibrate` or name one with the parameter statistics."
            )
        shape = tuple(load_statistics(str(file))["center_real"].shape)
        wanted = (model.shape.layers, model.shape.heads, model.shape.head_dim // 2)
        if shape != wanted:
            raise KvatlasError(
                f"The statistics {str(file)!r} are for (layers, heads, planes) {shape}, the model {model.name!r} has "
                f"{wanted}."
            )
        if not self.statistics:
            check_made_with(file, model, "statistics")

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        return {**super().identity(model), "statistics": first_content(self, self.file(model))}

    def score(self, cached: CacheView) -> Tensor:
        file = self.file(cached.model)
        statistics = load_statistics(str(file), str(cached.positions.device), first_content(self, file))
        towards = directions(statistics, cached.length, self.reach)
        return cached.each_layer(lambda layer: _of_layer(cached, layer, statistics, towards))


def directions(statistics: Mapping[str, Tensor], length: int, reach: int) -> Tensor:
    """What a rotated key is multiplied with to give the mean score over all offsets [layers, heads, head size].

    |E q| |k| cos(w (D + d) + phi) is the real part of E q exp(i w (length + d)) times the conjugate of the rotated key,
    so that the mean over d is one vector for each head, and no key has to be rotated back.
    """
    import torch

    frequency = statistics["frequency"].double()
    offsets = 2.0 ** torch.arange(reach.bit_length(), device=frequency.device)
    angle = (length + offsets.double())[:, None] * frequency
    turned = torch.complex(statistics["center_real"], statistics["center_imag"])
    turned = turned.to(torch.complex128) * torch.polar(torch.ones_like(angle), angle).mean(0)
    return torch.cat([turned.real, turned.imag], dim=-1).float()


def _of_layer(cached: CacheView, layer: int, statistics: Mapping[str, Tensor], towards: Tensor) -> Tensor:
    import torch

    key = cached.key(layer).float()
    kv_heads, _, size = key.shape
    center = torch.complex(statistics["center_real"][layer], statistics["center_imag"][layer])
    spread = (statistics["norm"][layer] - center.abs()).view(kv_heads, -1, size // 2)
    norms = torch.complex(key[..., : size // 2], key[..., size // 2 :]).abs()
    scores = towards[layer].view(kv_heads, -1, size) @ key.transpose(-1, -2) + spread @ norms.transpose(-1, -2)
    written = cached.positions[min(layer, cached.positions.shape[0] - 1)] >= cached.prompt_length
    written = written.expand(kv_heads, -1)[:, None]
    count = written.sum(-1, keepdim=True).clamp_min(1)
    mean = (scores * written).sum(-1, keepdim=True) / count
    deviation = (((scores - mean) * written).square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
    return ((scores - mean) / deviation).amax(1)


@by_content
def load_statistics(file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Means of queries before rotation: center_real, center_imag, norm [layers, heads, planes], frequency [planes]."""
    from safetensors.torch import load_file

    try:
        tensors = load_file(file, device=device)
        shapes = [tuple(tensors[name].shape) for name in ("center_real", "center_imag", "norm")]
        if len(set(shapes)) > 1 or tensors["frequency"].shape != shapes[0][2:]:
            raise ValueError(f"shapes {shapes} and {tuple(tensors['frequency'].shape)}")
    except Exception as error:
        raise KvatlasError(f"The statistics {file!r} cannot be read as those of queries ({error}).") from error
    return tensors

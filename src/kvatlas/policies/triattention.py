"""`triattention`: tokens with keys that future queries will look for stay, by the queries' mean before rotation."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason
from kvatlas.machine import out_of_memory
from kvatlas.models import ModelHandle
from kvatlas.models.rotation import frequencies
from kvatlas.models.weights import check_numbers
from kvatlas.policies import CacheView, Scope, Tensor, int_param, scope_param
from kvatlas.policies.model_files import FilePolicy, by_content
from kvatlas.policies.recent import positions

#: The file of the statistics in a model folder.
STATISTICS_FILE = "triattention.safetensors"


@dataclass(frozen=True)
class TriAttention(FilePolicy):
    """Trigonometric score: S(k) = mean over d of sum over f of |E q_f| |k_f| cos(w_f (D + d) + phi_f)
    + sum over f of (E |q_f| - |E q_f|) |k_f|.

    Source: arXiv 2604.04921, section 4 (trigonometric series, norm score, future offsets, grouped queries). f are the
    planes that the rotation of positions turns, w_f its frequencies, q_f and k_f queries and keys before rotation as
    complex numbers, phi_f the angle between E q_f and k_f, D the distance from the key to the next token, d = 1, 2, 4,
    ... up to `reach`. Each query head's scores are standardised over the tokens after the prompt; the greatest over the
    query heads of a KV head counts. E q_f and E |q_f| are means over a calibration text: `kvatlas predictor calibrate`
    runs the model on prompts of a benchmark and on its own full-cache traces; the paper finds that the text hardly
    matters. The authors' default shares a head's choice over all layers (`kv_head`, `triattention@paper`), their
    paper's formulas do not: here each layer and KV head chooses. In their base setting, the default of TensorRT-LLM,
    each head nominates as many tokens as stay, and of these the ones with the greatest score of any head stay, which
    are those with the greatest score of all (`union`). Budget and pruning interval are replaced by kv_budget, ratio and
    local_window.

    statistics: file of the means, also one of the authors' .pt files; empty for the one in the model's folder.
    reach: the farthest future distance that counts.
    scope: the unit of one choice: head, kv_head, layer or global, then with the mean of the scores; union, one choice
        with the greatest score.
    """

    statistics: str = ""
    reach: int = int_param(65_536, 1)
    scope: Scope = scope_param(Scope.HEAD, Scope.UNION)

    name = "triattention"
    summary = "keeps the tokens whose keys future queries will look for, by the queries' mean before rotation"
    paper = "TriAttention, arXiv 2604.04921"
    published = {
        "kv_budget": "2048 (512 for R1-Llama and MATH500), pruned every 128 tokens",
        "reach": "65536",
        "local_window": "128 in their vLLM runtime, none in their transformers code",
    }
    file_parameter = "statistics"
    file_name = STATISTICS_FILE
    file_key = "statistics"
    file_about = "statistics of the queries (made by `kvatlas predictor calibrate`)"

    def check_file(self, file: Path, model: ModelHandle) -> None:
        shape = tuple(load_statistics(str(file))["center_real"].shape)
        expected = (model.shape.layers, model.shape.heads, model.shape.head_dim // 2)
        if shape != expected:
            raise KvatlasError(
                f"The statistics {str(file)!r} are for (layers, heads, planes) {shape}, the model {model.name!r} has "
                f"{expected}."
            )
        self._statistics(file, model, "cpu")

    def _statistics(self, file: Path, model: ModelHandle, device: str, content: str = "") -> Mapping[str, Tensor]:
        """Return the file's statistics, with the model's frequency if the file has none."""
        statistics = load_statistics(str(file), device, content)
        return {"frequency": frequencies(model, device), **statistics} if "frequency" not in statistics else statistics

    def score(self, cached: CacheView) -> Tensor:
        file = self.file(cached.model)
        statistics = self._statistics(file, cached.model, str(cached.positions.device), self.content(file))
        towards = directions(statistics, cached.length, self.reach)
        union = self.scope == Scope.UNION
        return cached.each_layer(lambda layer: _of_layer(cached, layer, statistics, towards), union)


def directions(statistics: Mapping[str, Tensor], length: int, reach: int) -> Tensor:
    """Return vectors [layers, heads, head size] whose products with rotated keys are mean scores over all offsets.

    |E q| |k| cos(w (D + d) + phi) is the real part of E q exp(i w (length + d)) times the conjugate of the rotated key,
    so that the mean over d is one vector for each head, and no key has to be rotated back.
    """
    import torch

    frequency = statistics["frequency"].double()
    offsets = 2.0 ** torch.arange(reach.bit_length(), device=frequency.device)
    angle = (length + offsets.double())[:, None] * frequency
    center = torch.complex(statistics["center_real"], statistics["center_imag"])
    rotated = center.to(torch.complex128) * torch.polar(torch.ones_like(angle), angle).mean(0)
    return torch.cat([rotated.real, rotated.imag], dim=-1).float()


def _of_layer(cached: CacheView, layer: int, statistics: Mapping[str, Tensor], towards: Tensor) -> Tensor:
    import torch

    key = cached.key(layer).float()
    kv_heads, _, size = key.shape
    center = torch.complex(statistics["center_real"][layer], statistics["center_imag"][layer])
    spread = (statistics["norm"][layer] - center.abs()).view(kv_heads, -1, size // 2)
    norms = torch.complex(key[..., : size // 2], key[..., size // 2 :]).abs()
    scores = towards[layer].view(kv_heads, -1, size) @ key.transpose(-1, -2) + spread @ norms.transpose(-1, -2)
    new = (positions(cached, layer) >= cached.prompt_length).expand(kv_heads, -1)[:, None]
    count = new.sum(-1, keepdim=True).clamp_min(1)
    mean = (scores * new).sum(-1, keepdim=True) / count
    deviation = (((scores - mean) * new).square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
    return ((scores - mean) / deviation).amax(1)


@by_content
def load_statistics(file: str, device: str = "cpu") -> dict[str, Tensor]:
    """Load center_real, center_imag, norm [layers, heads, planes] of unrotated queries, and frequency [planes].

    The authors' `.pt` files have no frequency, which is the model's.
    """
    from safetensors.torch import load_file

    try:
        if Path(file).suffix == ".pt":
            tensors = _load_authors_file(file, device)
        else:
            tensors = load_file(file, device=device)
            if tensors["frequency"].shape != tensors["norm"].shape[2:]:
                raise ValueError(f"frequency has the shape {tuple(tensors['frequency'].shape)}")
        shapes = {tuple(tensors[name].shape) for name in ("center_real", "center_imag", "norm")}
        if len(shapes) > 1:
            raise ValueError(f"center and norm have the shapes {sorted(shapes)}")
    except Exception as error:
        if out_of_memory(error):
            raise
        raise KvatlasError(
            f"The statistics {file!r} cannot be read as those of queries ({reason(error)}); expected a file that "
            "`kvatlas predictor calibrate` writes, or a .pt file of TriAttention's authors."
        ) from error
    check_numbers(f"The file of statistics {file!r}", tensors)
    return tensors


def _load_authors_file(file: str, device: str) -> dict[str, Tensor]:
    """Load a file of the authors' calibration: `stats` by layer and query head (WeianMao/triattention at c3744ee)."""
    import torch

    content: Any = torch.load(file, map_location=device, weights_only=True)
    style = content["metadata"].get("rope_style", "half")
    if style != "half":
        raise ValueError(f"rope_style is {style!r}; expected 'half'")
    heads = {}
    for name, means in content["stats"].items():
        match = re.fullmatch(r"layer(\d+)_head(\d+)", name)
        if match is None:
            raise ValueError(f"unknown entry {name!r}")
        heads[int(match[1]), int(match[2])] = means
    last_layer, last_head = max(heads)
    expected = list(itertools.product(range(last_layer + 1), range(last_head + 1)))
    if sorted(heads) != expected:
        raise ValueError(f"{len(heads)} heads of {len(expected)}; expected all")

    def stacked(name: str) -> Tensor:
        means = torch.stack([heads[place][name].float() for place in expected])
        return means.view(last_layer + 1, last_head + 1, -1)

    return {
        "center_real": stacked("q_mean_real"),
        "center_imag": stacked("q_mean_imag"),
        "norm": stacked("q_abs_mean"),
    }

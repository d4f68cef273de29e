"""Files with the means of a model's queries before rotation, for `triattention`: ours, and its authors' `.pt` files."""

import itertools
import re
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason
from kvatlas.machine import out_of_memory
from kvatlas.models.weights import check_numbers
from kvatlas.policies.cache_view import Tensor
from kvatlas.policies.model_files import by_content

#: The file of the statistics in a model folder.
STATISTICS_FILE = "triattention.safetensors"


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

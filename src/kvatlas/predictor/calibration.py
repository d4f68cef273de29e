"""What `triattention` has to know of a model: means of its queries before rotation, over a calibration text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.core import KvatlasError
from kvatlas.engine.attention import refuse_unsupported
from kvatlas.models import ModelHandle
from kvatlas.models.attention import attention_function, own_attention
from kvatlas.models.folder import STEADY

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@torch.inference_mode()
def query_statistics(
    handle: ModelHandle, model: PreTrainedModel, texts: Iterable[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Means over all tokens of `texts` (token ids): center (complex, by parts) and norm [layers, heads, planes] of the
    queries before rotation, and the rotation's frequency [planes].

    Source: TriAttention, arXiv 2604.04921, section 4 and the authors' calibration. KvatlasError for models whose
    rotation depends on the length or turns only a part of each head.
    """
    rotary: Any = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", None) not in STEADY:
        raise KvatlasError(f"The model {handle.name!r} cannot be calibrated: its rotation of positions is not steady.")
    frequency = rotary.inv_freq.double()
    shape, planes = handle.shape, len(frequency)
    if 2 * planes != shape.head_dim:
        raise KvatlasError(
            f"The model {handle.name!r} cannot be calibrated: it rotates {2 * planes} of {shape.head_dim}."
        )
    center = torch.zeros(shape.layers, shape.heads, planes, dtype=torch.complex128, device=model.device)
    norm = center.real.clone()

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        refuse_unsupported(others)
        turned = torch.arange(query.shape[2], device=query.device)[:, None] * frequency
        pairs = torch.complex(query[0, ..., :planes].double(), query[0, ..., planes:].double())
        pairs = pairs * torch.polar(torch.full_like(turned, 1 / rotary.attention_scaling), -turned)
        center[module.layer_idx] += pairs.sum(1)
        norm[module.layer_idx] += pairs.abs().sum(1)
        places = torch.arange(query.shape[2], device=query.device)
        back = places[:, None] - places
        near = None if sliding_window is None else (back >= 0) & (back < sliding_window)
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=near,
            is_causal=near is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2), None

    seen = 0
    with own_attention(model), attention_function(attend):
        for text in texts:
            model.get_decoder()(input_ids=torch.tensor([text], device=model.device), use_cache=False)
            seen += len(text)
    if seen == 0:
        raise KvatlasError("There is no text to calibrate on.")
    center, norm = center / seen, norm / seen
    statistics = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    return {name: value.float().contiguous().cpu() for name, value in statistics.items()}

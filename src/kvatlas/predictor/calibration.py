"""The query statistics of the policy triattention, from prompts and the model's own traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvatlas import benchmarks, models
from kvatlas.core import KvatlasError, Sampling
from kvatlas.engine import Engine, Request
from kvatlas.engine.cache import Layer
from kvatlas.engine.whole_texts import run_whole_text
from kvatlas.models import ModelHandle
from kvatlas.models.files import STEADY
from kvatlas.results.export import check_target
from kvatlas.sweeps.plan import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrate(
    model: str,
    names: Sequence[str],
    out: Path,
    *,
    problems: int,
    max_new_tokens: int,
    model_options: Mapping[str, Any],
) -> int:
    """Write the query statistics of the policy triattention and return their number of tokens.

    They are means over the model's own traces on the first `problems` of the named benchmarks. Raises KvatlasError for
    a file that cannot be written.
    """
    torch.set_num_threads(1)
    check_target(out, ".safetensors")
    if not out.parent.is_dir():
        raise KvatlasError(f"{str(out)!r} cannot be written; name a file in an existing folder.")

    handle = models.find(model, **model_options)
    prompts: list[tuple[int, ...]] = []
    for name in names:
        benchmark = benchmarks.find(name)
        model_benchmark = benchmarks.for_model(benchmark, handle.reads)
        chosen = benchmarks.problems_of(benchmark, problems)
        prompts += [handle.encode(benchmarks.prompt_of(model_benchmark, problem)) for problem in chosen]

    loaded = handle.load()
    engine = Engine(handle, loaded, [FULL], Sampling(max_new_tokens=max_new_tokens), 16)
    requests = [Request(index, prompt, index, (FULL,)) for index, prompt in enumerate(prompts)]
    texts = [prompts[generation.key] + generation.tokens for generation in engine.run(requests)]
    save_file(statistics_of_queries(handle, loaded, texts), out, metadata={"model_weights": handle.weights_digest})
    return sum(map(len, texts))


@torch.inference_mode()
def statistics_of_queries(
    handle: ModelHandle, model: PreTrainedModel, texts: Sequence[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return center (complex, by parts) and norm [layers, heads, planes] of the queries before rotation, as means over
    all tokens of `texts` (token ids), and the rotation's frequency [planes].

    Source: TriAttention, arXiv 2604.04921, section 4 and the authors' calibration. Raises KvatlasError for models whose
    rotation depends on the length or covers only a part of each head.
    """
    rotary: Any = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", None) not in STEADY:
        raise KvatlasError(f"The model {handle.name!r} cannot be calibrated: its rotation of positions is not steady.")
    frequency = rotary.inv_freq.double()
    shape = handle.shape
    planes = len(frequency)
    if 2 * planes != shape.head_dim:
        raise KvatlasError(
            f"The model {handle.name!r} cannot be calibrated: it rotates {2 * planes} of {shape.head_dim}."
        )
    center = torch.zeros(shape.layers, shape.heads, planes, dtype=torch.complex128, device=model.device)
    norm = center.real.clone()

    def observe(layer: Layer, query: Tensor, *_: Any) -> None:
        place = shape.place[layer.place]
        angles = torch.arange(query.shape[1], device=query.device)[:, None] * frequency
        pairs = torch.complex(query[..., :planes].double(), query[..., planes:].double())
        pairs = pairs * torch.polar(torch.full_like(angles, 1 / rotary.attention_scaling), -angles)
        center[place] += pairs.sum(1)
        norm[place] += pairs.abs().sum(1)

    for text in texts:
        run_whole_text(model, text, observe)
    tokens = sum(map(len, texts))
    center = center / tokens
    norm = norm / tokens
    statistics = {"center_real": center.real, "center_imag": center.imag, "norm": norm, "frequency": frequency}
    return {name: value.float().contiguous().cpu() for name, value in statistics.items()}

"""Measure attention in a full cache: sinks and heavy hitters, of a pretrained model and embedded ones.

    python bench/attention_shape.py --models embedded:tiny-llama=CHAIN10 smollm2-135m-think=WORDS9 --problems 20 \
        --figure docs/images/attention-shape.png --out bench/results/attention_shape.json

Each model answers so many problems with the full cache; its traces go through it once more, and for every layer and
head the attention of the queries of the second half is added up, by key. `sink`: the share that the first token gets
(Xiao et al. 2023, arXiv 2309.17453, section 3.1). `hitters`: the share of the rest that its best tenth of tokens gets
(Zhang et al. 2023, arXiv 2306.14048, section 3). `newest`: the share of the 32 newest tokens before each query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, keep
from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import Sampling, Setting
from kvatlas.engine import Engine, Request
from kvatlas.serve.service import stream_of

NEWEST = 32


@torch.inference_mode()
def shape_of(model: Any, tokens: list[int]) -> np.ndarray:
    """[3, layers]: sink, hitters and newest of one trace, mean over heads."""
    model.set_attn_implementation("eager")
    attention = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    rows = []
    for layer in attention:
        weights = layer[0, :, len(tokens) // 2 :].float()
        queries = torch.arange(len(tokens) // 2, len(tokens))[:, None]
        near = (torch.arange(len(tokens))[None] > queries - NEWEST).float()
        received = weights.mean(1)
        rest = received[:, 1:] / received[:, 1:].sum(-1, keepdim=True)
        best = rest.topk(max(1, rest.shape[-1] // 10), -1).values.sum(-1)
        rows.append([received[:, 0].mean(), best.mean(), (weights * near).sum(-1).mean()])
    return np.array(rows, float).T


def measured(name: str, benchmark: str, problems: int, most: int) -> dict[str, Any]:
    """The three shares by layer, mean over the traces of a model."""
    handle, asked = models.find(name), find(benchmark)
    model, full = handle.load(), policies.from_setting(Setting.from_parameters("full"))
    work = []
    for problem in asked.problems(problems):
        prompt = handle.encode(problem.question)
        work.append(Request(problem.id, prompt, stream_of(0, prompt, 0), (full,)))
    engine = Engine(handle, model, [full], Sampling(max_new_tokens=most), 16)
    prompts = {request.key: request.prompt for request in work}
    traces = [[*prompts[done.key], *done.tokens] for done in engine.run(iter(work))]
    shares = np.mean([shape_of(model, trace) for trace in traces], axis=0)
    told = {
        part: [round(float(v), 4) for v in row] for part, row in zip(("sink", "hitters", "newest"), shares, strict=True)
    }
    tokens = round(float(np.mean([len(trace) for trace in traces])), 1)
    return {"model": name, "benchmark": benchmark, "traces": len(traces), "tokens": tokens, **told}


def drawn(result: list[dict[str, Any]], path: Path) -> None:
    """A panel for each share, a line for each model, over the depth of the layer."""
    from kvatlas.figures.colours import MARKERS
    from kvatlas.figures.style import (
        NAME_TYPE,
        SMALL_TYPE,
        FigureOptions,
        Line,
        Margins,
        finish_texts,
        line_axes,
        make_panels,
        save,
        write_above,
    )

    look = FigureOptions(2)
    titles = {
        "sink": "First token",
        "hitters": "Best tenth of the others",
        "newest": f"{NEWEST} newest tokens",
    }
    about = ["attention in %, mean over heads, by the depth of the layer (first 0, last 1)"]
    with look.applied():
        margins = Margins(0.3, 0.1, 0.3, 0.22, 0.42)
        title = "The share of attention that goes to one token, to a tenth of them, and to the newest"
        figure, panels = make_panels(look, (look.widest, 1.6), 3, 3, margins, title=title, about=about)
        for panel, (part, heading) in zip(panels, titles.items(), strict=True):
            for number, item in enumerate(result):
                values = [100 * value for value in item[part]]
                depth = np.linspace(0, 1, len(values))
                name = item["model"].removeprefix("embedded:")
                colour = look.colours.lines[number]
                panel.plot(depth, values, color=colour, marker=MARKERS[number], ms=3, lw=1.2, label=name)
            line_axes(panel, look)
            write_above(panel, [Line(heading, NAME_TYPE, look.colours.ink, "bold")])
            panel.set_xlabel("Depth of the layer", fontsize=SMALL_TYPE, labelpad=2)
            panel.set(ylim=(0, 100))
        panels[0].legend(frameon=False, fontsize=SMALL_TYPE)
        finish_texts(figure, look)
    save(figure, path)


def main() -> None:
    args = arguments(__doc__, models=["embedded:tiny-llama=CHAIN10"], problems=20, max_new_tokens=700, figure=Path)
    torch.set_num_threads(1)
    results = [measured(*model.split("="), args.problems, args.max_new_tokens) for model in args.models]
    if args.figure:
        drawn(results, args.figure)
    keep(args, bench="attention_shape", models=results)


if __name__ == "__main__":
    main()

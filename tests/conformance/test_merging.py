"""`cam` against kvpress' CAMPress: the same tokens stay, with the same values, where both draw the same numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas.policies.selection import make_selection
from tests.conformance import environment
from tests.policies.scenes import SHAPE, make, scene

pytestmark = [pytest.mark.slow, pytest.mark.conformance]
NEIGHBOURS = (1, 4, 32)


def test_cam_merges_what_kvpress_merges(tmp_path: Path) -> None:
    """kvpress makes one choice for each layer, by the mean over KV heads; it knows no prompt."""
    stored = {}
    cases = {}
    ours = {}
    for neighbours in NEIGHBOURS:
        policy = make("cam", scope="layer", neighbours=neighbours, local_window=1, keep_prompt=False)
        cached = scene(policy, neighbours)
        mass = torch.rand(cached.positions.shape, generator=torch.Generator().manual_seed(neighbours))
        # The newest token stays in any case, there by its score.
        mass[..., -1] = 2.0
        cached = replace(cached, columns={"mass": mass})
        selection = make_selection(policy, cached)
        draws = cached.uniform()
        for layer, values in enumerate(selection.merged_values(policy, cached)):
            case = f"{neighbours}.{layer}"
            kept = selection.kept[layer].expand(SHAPE.kv_heads, -1)[..., None].expand(-1, -1, SHAPE.head_dim)
            ours[case] = (cached.key(layer).gather(1, kept), values)
            cases[case] = (kept.shape[1], neighbours)
            stored[f"{case}.keys"] = cached.key(layer)
            stored[f"{case}.values"] = cached.value(layer)
            for name, numbers in (("mass", mass), ("draws", draws.float())):
                stored[f"{case}.{name}"] = numbers[layer].expand(SHAPE.kv_heads, -1)
    contents = {name: numbers.contiguous() for name, numbers in stored.items()}
    save_file(contents, tmp_path / "in", {"cases": json.dumps(cases)})
    environment.run(str(Path(__file__).with_name("kvpress_cam.py")), str(tmp_path / "in"), str(tmp_path / "out"))

    theirs = load_file(tmp_path / "out")
    merged = 0
    for case, (keys, values) in ours.items():
        assert torch.equal(theirs[f"{case}.keys"], keys)
        assert torch.allclose(theirs[f"{case}.values"], values, atol=1e-5)
        neighbours, layer = map(int, case.split("."))
        merged += int((stored[f"{case}.values"][:, -1] != values[:, -1]).any())
    assert merged

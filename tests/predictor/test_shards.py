from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvatlas.core import KvatlasError
from kvatlas.predictor import evaluate, provenance_of, save_head, shards, train
from kvatlas.predictor.labels import join


def parts(traces: int = 5, tokens: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(traces):
        hidden = torch.randn(tokens, 8, generator=generator)
        results.append(shards.sampled(hidden, hidden[:, 0].exp(), 0, 0))
    return results


def counted(traces: int = 5) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """As they are written: each with the number of its trace's thinking tokens, of which 40 are there."""
    return [(*part, 100 + number) for number, part in enumerate(parts(traces))]


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 70)
    shards.write(tmp_path, counted(), {"model": "m"})
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 3
    result, wanted = shards.read(tmp_path), join(parts())
    assert result.hidden.dtype is torch.float16
    for name in ("hidden", "label", "trace"):
        assert torch.equal(getattr(result, name), getattr(wanted, name))
    assert result.thinking is not None
    assert result.thinking.tolist() == [100, 101, 102, 103, 104]
    assert torch.equal(result.attention[40:80], result.label[40:80] / 101)
    assert shards.is_made_from(tmp_path, {"model": "m"})
    assert not shards.is_made_from(tmp_path, {"model": "other"})
    # Written anew, nothing of the old stays.
    shards.write(tmp_path, counted(1), {"model": "other"})
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 1
    assert int(shards.read(tmp_path).trace.max()) == 0


def test_an_unfinished_folder_does_not_count(tmp_path: Path) -> None:
    def broken() -> object:
        yield counted(1)[0]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        shards.write(tmp_path, broken(), {})  # type: ignore[arg-type]
    assert not shards.is_made_from(tmp_path, {})
    with pytest.raises(KvatlasError, match="cannot be read"):
        shards.read(tmp_path)
    shards.write(tmp_path, [], {})
    with pytest.raises(KvatlasError, match="nothing to learn from"):
        train(shards.read(tmp_path))


def test_sampling_keeps_pairs_order_and_range() -> None:
    hidden = torch.arange(100.0)[:, None] * torch.tensor([1.0, 1e5])
    label = torch.arange(100.0)
    few, labels = shards.sampled(hidden, label, 30, 7)
    assert few.shape == (30, 2)
    assert torch.equal(few[:, 0].float(), labels)
    assert torch.equal(labels, labels.sort().values)
    assert torch.isfinite(few).all()
    again, _ = shards.sampled(hidden, label, 30, 7)
    assert torch.equal(few, again)
    assert len(shards.sampled(hidden, label, 200, 7)[1]) == 100


def test_a_head_keeps_its_provenance_and_is_judged_on_its_own_width(tmp_path: Path) -> None:
    data = join(parts())
    head = train(data, steps=20, batch=64)
    path = tmp_path / "deep" / "head.safetensors"
    save_head(path, head, {"model": "m", "traces": 5, "held_out": {"spearman": 0.5}})
    assert provenance_of(path) == {"model": "m", "traces": 5, "held_out": {"spearman": 0.5}}
    assert json.loads(json.dumps(provenance_of(path)))
    wide = join([(torch.zeros(4, 9), torch.ones(4))])
    with pytest.raises(KvatlasError, match="is for a hidden size of 8, the model has 9"):
        evaluate(head, wide)
    with pytest.raises(KvatlasError, match="nothing to be judged on"):
        evaluate(head, join([]))

"""The search for repeated keys: exact near the threshold, and no more products than needed."""

from __future__ import annotations

import pytest
import torch

from kvatlas.policies import rkv


def newest_by_matrix(unit: torch.Tensor, threshold: float) -> list[int]:
    similarity = (unit.double() @ unit.double().T).fill_diagonal_(0.0)
    return torch.where(similarity > threshold, torch.arange(len(unit)), -1).amax(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("apart", [1e-5, 1e-3, 5e-3, 2e-2])
def test_similarities_about_the_threshold_are_told_apart(
    bfloat16: bool, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys whose similarities to one another lie just above and below it, by less and by more than bfloat16 rounds."""
    monkeypatch.setattr(rkv, "_has_bfloat16", lambda _unit: bfloat16)
    monkeypatch.setattr(rkv, "BLOCK", 32)
    random = torch.Generator().manual_seed(int(1e6 * apart))
    centres = torch.linalg.qr(torch.randn(64, 64, generator=random)).Q
    which = torch.randint(16, (300,), generator=random)
    # No two of these add up to nothing, so that no similarity is the threshold.
    share = (0.5 + apart * torch.tensor([-3.0, -1.0, 2.0])[torch.randint(3, (300,), generator=random)]).sqrt()
    beside = centres[16 + torch.arange(300) % 48]
    unit = share[:, None] * centres[which] + (1 - share**2).sqrt()[:, None] * beside
    wanted = newest_by_matrix(unit, 0.5)
    assert rkv.newest_similar(unit, 0.5).tolist() == wanted
    assert newest_by_matrix(unit.bfloat16(), 0.5) != wanted or apart > 1e-3


@pytest.mark.parametrize("groups", [3, 40, 250])
def test_each_keys_newest_similar_is_searched_in_older_keys_too(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few keys and of many there is one beyond the block, found by the older or by the newer of two."""
    monkeypatch.setattr(rkv, "BLOCK", 16)
    random = torch.Generator().manual_seed(groups)
    centres = torch.nn.functional.normalize(torch.randn(groups, 32, generator=random), dim=-1)
    unit = centres[torch.randint(groups, (400,), generator=random)]
    unit = torch.nn.functional.normalize(unit + 0.13 * torch.randn(400, 32, generator=random), dim=-1)
    wanted = newest_by_matrix(unit, 0.6)
    assert rkv.newest_similar(unit, 0.6).tolist() == wanted
    assert any(-1 < newest < own - 16 for own, newest in enumerate(wanted)) or groups == 3


def sizes_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    similarity = rkv._similarity

    def spy(keys: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        result = similarity(keys, rows, columns)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(rkv, "_similarity", spy)
    monkeypatch.setattr(rkv, "_has_bfloat16", lambda _unit: False)
    return sizes


def test_redundancy_never_holds_the_matrix_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of it alone: and one block against all where every key repeats another."""
    sizes = sizes_of_products(monkeypatch)
    key = torch.randn(1, 8192, 16, generator=torch.Generator().manual_seed(0)) + 3.0
    assert int(rkv.newest_similar(torch.nn.functional.normalize(key[0], dim=-1), 0.5).min()) >= 8190
    assert max(sizes) <= rkv.PAIRS
    assert sum(sizes) == 8192 * rkv.BLOCK


def test_no_pair_is_compared_twice_where_no_key_repeats_another(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of_products(monkeypatch)
    count, block = 4096, rkv.BLOCK
    key = torch.randn(count, 128, generator=torch.Generator().manual_seed(0))
    assert set(rkv.newest_similar(torch.nn.functional.normalize(key, dim=-1), 0.9).tolist()) == {-1}
    assert max(sizes) <= rkv.PAIRS
    assert sum(sizes) == count * (count + block) // 2

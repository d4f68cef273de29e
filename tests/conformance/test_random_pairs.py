"""`cam` and `lagkv` against kvpress' presses on random numbers: the same tokens stay, with the same values."""

import pytest
import torch

from tests.conformance.random_pairs import PAIRS, Case, compare

pytestmark = [pytest.mark.slow, pytest.mark.conformance]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return compare(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: f"{PAIRS[number].policy}-{PAIRS[number].seed}")
def test_policies_keep_and_merge_what_presses_do(cases: list[Case], number: int) -> None:
    merged = 0
    for case in cases:
        if case.pair is not PAIRS[number]:
            continue
        for head, (ours, theirs) in enumerate(zip(case.ours.tolist(), case.theirs.tolist(), strict=True)):
            # Only tokens that score alike may differ: equal ranks of partitions.
            apart = case.scores[head, sorted({*ours} ^ {*theirs})]
            assert not len(apart) or apart.max() == apart.min()
        if torch.equal(case.ours, case.theirs):
            assert torch.allclose(case.our_values, case.their_values, atol=1e-5)
            kept = case.ours[..., None].expand(-1, -1, case.our_values.shape[2])
            merged += int((case.our_values != case.values_before.gather(1, kept)).any(-1).sum())
    assert (merged > 0) == (PAIRS[number].policy == "cam")


def test_most_lines_were_compared_with_their_values(cases: list[Case]) -> None:
    alike = [torch.equal(case.ours, case.theirs) for case in cases if case.pair.policy == "cam"]
    assert all(alike)

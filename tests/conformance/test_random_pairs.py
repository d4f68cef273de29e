"""`lagkv` against kvpress' press on random numbers: the same tokens stay."""

import pytest

from tests.conformance.random_pairs import PAIRS, Case, compare

pytestmark = [pytest.mark.slow, pytest.mark.conformance]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return compare(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: f"{PAIRS[number].policy}-{PAIRS[number].seed}")
def test_policies_keep_what_presses_do(cases: list[Case], number: int) -> None:
    for case in cases:
        if case.pair is not PAIRS[number]:
            continue
        for head, (ours, theirs) in enumerate(zip(case.ours.tolist(), case.theirs.tolist(), strict=True)):
            # Only tokens that score alike may differ: equal ranks of partitions.
            apart = case.scores[head, sorted({*ours} ^ {*theirs})]
            assert not len(apart) or apart.max() == apart.min()

from __future__ import annotations

from kvatlas.service.queue import FairQueue


def queue(*requests: str) -> FairQueue[str]:
    result: FairQueue[str] = FairQueue()
    for name in requests:
        result.extend(f"{name}{number}" for number in range(3 if name.isupper() else 1))
    return result


def test_requests_take_turns_and_the_one_with_fewest_rows_is_next() -> None:
    waiting = queue("A", "B", "c")
    assert (len(waiting), list(waiting)) == (7, ["A0", "A1", "A2", "B0", "B1", "B2", "c0"])
    assert [waiting.take() for _ in range(4)] == ["A0", "B0", "c0", "A1"]
    waiting.done("A0")
    waiting.done("A1")
    waiting.extend(["d0"])
    # Neither A nor d has a row; A waits longer, though it came later in turn than B.
    assert [waiting.take() for _ in range(5)] == ["A2", "d0", "B1", "B2", None]
    assert len(waiting) == 0


def test_what_goes_away_or_comes_back_leaves_nothing_behind() -> None:
    waiting = queue("A", "b")
    waiting.drop("A1")
    waiting.drop("A1")
    assert waiting.take() == "A0"
    waiting.drop("A0")  # has a row
    waiting.back("A0")
    assert (len(waiting), list(waiting)) == (3, ["b0", "A0", "A2"])
    assert set(waiting.clear()) == {"A0", "A2", "b0"}
    assert (len(waiting), waiting.take()) == (0, None)

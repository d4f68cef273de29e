"""The grammar of expressions, in this process: what it reads, it reads whole."""

from pathlib import Path

from kvatlas.answers.expressions import read_expression

PAIRS = Path(__file__).parents[1] / "data" / "answer_kinds.txt"


def test_every_spelling_is_read_whole_or_not_at_all() -> None:
    read = 0
    lines = [line[2:] for line in PAIRS.read_text("utf-8").splitlines() if line.startswith(("= ", "! "))]
    for line in lines:
        for text in line.split(" :: "):
            chain = read_expression(text)
            # What is left behind an expression makes it unreadable.
            assert chain is None or read_expression(f"{text} )(") is None, text
            read += chain is not None
    assert read > len(lines) / 2

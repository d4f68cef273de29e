"""The text of each token of a trace."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=16)
def quick_tokenizer(folder: Path) -> Any:
    """Load a tokenizer without transformers, which takes seconds and 300 MB; None where only transformers can."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    # The library raises nothing narrower.
    with suppress(Exception):
        return Tokenizer.from_file(str(path))
    return None


def token_texts(tokenizer: Any, tokens: tuple[int, ...]) -> list[str]:
    """Return the text that each token adds; a character of several tokens comes with the last of them."""

    def decode(ids: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    whole = decode(tokens)
    alone = {token: decode((token,)) for token in set(tokens)}
    # Most tokenizers write each token alone as in a text; some put a space between words.
    for joint in ("", " "):
        pieces = [alone[token] for token in tokens]
        if joint.join(pieces) == whole:
            return [*pieces[:1], *(joint + piece for piece in pieces[1:])]
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(tokens) + 1):
        before = decode(tokens[start:read])
        now = decode(tokens[start:end])
        if now.endswith("\ufffd") and end < len(tokens):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        # A few tokens of context are enough for spaces; decoding all of them each time would be quadratic.
        start = max(0, end - 4)
        read = end
    return texts

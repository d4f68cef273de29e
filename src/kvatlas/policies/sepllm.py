"""`sepllm`: separators between segments of text stay, with the first and the most recent tokens (SepLLM)."""

from dataclasses import dataclass
from functools import lru_cache

from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Tensor, choice_param, int_param

SEPARATORS = frozenset(".,?!;: \t\n")


@dataclass(frozen=True)
class SepLLM(CompressingPolicy):
    """Separators: the first `sinks` tokens come first, then separators, newest first, then the others, newest first.

    Source: arXiv 2412.12094, section 3 (initial, separator and neighbouring tokens; when the separators' cache is full
    its oldest leave). A separator is a token whose text consists of . , ? ! ; : space, tab and newline alone: the
    paper's nine separators, and tokens that join several. Its caches of fixed sizes are replaced by ratio and
    local_window; the rest of the ratio goes to the most recent tokens, as in the authors' past window. The DynTS
    paper's baseline leaves it empty, so that it keeps far fewer tokens than its rivals in the same cell: the preset
    `sepllm@dynts-paper`. Positions stay true.

    sinks: initial tokens that stay; with the prompt kept they are part of it.
    separators: `joined` as above; `single` excludes tab and tokens that join several, but counts the token that begins
        a sequence (the DynTS paper's baseline).
    rest: the use of the rest of the ratio: `recent` tokens, or `empty`.
    """

    sinks: int = int_param(4, 0)
    separators: str = choice_param("joined", "single")
    rest: str = choice_param("recent", "empty")

    name = "sepllm"
    summary = "keeps separators (punctuation, line ends), the first and the most recent tokens"
    paper = "SepLLM, arXiv 2412.12094"
    published = {"sinks": "4", "keep_prompt": "false"}

    def score(self, cached: CacheView) -> Tensor:
        score = cached.positions.double() + self._separating(cached) * cached.length
        return score.masked_fill(cached.positions < self.sinks, float("inf"))

    def can_drop(self, older: int, protected: int, prompt: int) -> bool:
        # How many slots stay empty depends on the tokens.
        return self.rest == "empty" or super().can_drop(older, protected, prompt)

    def slots_used(self, cached: CacheView, protected: Tensor, quota: int) -> int:
        if self.rest == "recent":
            return quota
        separators_and_sinks = self._separating(cached) | (cached.positions < self.sinks)
        older = protected.shape[-1]
        return min(quota, int((separators_and_sinks[..., :older] & ~protected).sum()))

    def _separating(self, cached: CacheView) -> Tensor:
        """Return a mask [1, 1, cached] of the separators among the cached tokens."""
        import torch

        tokens = cached.tokens()
        flags = [is_separator(cached.model, token, self.separators == "joined") for token in tokens.tolist()]
        return torch.tensor(flags, device=tokens.device)[cached.positions]


@lru_cache(maxsize=2**18)
def is_separator(model: ModelHandle, token: int, joined: bool) -> bool:
    """Return True if the text of a token consists of separators.

    Unless they may be `joined`, it is one other than tab, or that of the token that begins a sequence.
    """
    text = str(model.tokenizer.decode([token]))
    if joined:
        return bool(text) and SEPARATORS.issuperset(text)
    return token == getattr(model.tokenizer, "bos_token_id", None) or text in SEPARATORS - {"\t"}

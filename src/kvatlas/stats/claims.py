"""The claim of a run's numbers, the reason why a run cannot make it, and the look at which it is read.

Samples of a problem that are one long text may be one draw, which limits by trace would count as several. All of a
loss may lie on such problems: where a share q of their draws is lost, n of them show nothing with a chance of
(1 - q)^n, however many samples each has. So a run with copies speaks of problems like these: limits by problem hold
however the samples of a problem depend on each other. Copies on a share of at most `MOST_COPIED` of the problems are
let pass, since a text may be drawn twice: if all of these problems were lost, the loss would be higher by that share,
one point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import Claim
from kvatlas.results.manifest import Manifest
from kvatlas.stats.metrics import rule
from kvatlas.stats.numerics.arrays import Flags
from kvatlas.stats.numerics.looks import Look
from kvatlas.text import percent_text

if TYPE_CHECKING:
    from kvatlas.stats.table import CellTraces

#: Why a greedy run cannot speak of its problems sampled anew.
GREEDY = "at temperature 0 nothing is drawn"
#: Texts of fewer tokens may be equal by chance.
LONG_TEXT = 50
#: The share of problems with copies above which the samples are no independent draws.
MOST_COPIED = 0.01
#: Above this share of missing pairs nothing is proven.
MOST_MISSING = 0.05


def stored_claim(manifests: Iterable[Mapping[str, Any]]) -> Claim:
    """Return the claim that the specs of runs decided before the data; problems like these for runs that had none."""
    claims = {spec.get("claim") for spec in manifests}
    return Claim.THESE if claims == {Claim.THESE.value} else Claim.LIKE


def is_greedy(manifest: Manifest) -> bool:
    """Return whether nothing was drawn: the temperature is 0."""
    temperature = manifest.spec.get("sampling", {}).get("temperature")
    return temperature is not None and float(temperature) == 0


def why_not_these(manifests: Sequence[Manifest], metric: str, cells: Sequence[CellTraces]) -> str:
    """Return the reason, as a clause, why a run cannot speak of its problems sampled anew, or ""."""
    if rule(metric) is not None:
        return f"{metric} is made of the samples of a problem together"
    if any(map(is_greedy, manifests)):
        return GREEDY
    sessions = chain.from_iterable(manifest.provenance.get("sessions", ()) for manifest in manifests)
    if any(session.get("seeds") == "constant" for session in sessions):
        return "the server writes one text for all seeds"
    copied = most_copied(cells)
    if copied > MOST_COPIED:
        return copies_clause(copied)
    return ""


def most_copied(cells: Iterable[CellTraces]) -> float:
    """Return the largest share of problems of a cell on which two samples are one long text (`copied_share`)."""
    shares = [copied_share(cell.token_digest, cell.numbers("output_tokens") >= LONG_TEXT) for cell in cells]
    return max(shares, default=0.0)


def copies_clause(share: float) -> str:
    """Return as a clause that samples are copies of each other on a share of the problems."""
    return f"two samples are copies of one long text on {percent_text(share)} % of the problems"


def copied_share(texts: NDArray[Any], is_long: Flags) -> float:
    """Return the share of problems on which two samples are one long text, as with one seed for both.

    `texts` [problems, samples] are numbers or digests of texts, zeros where they are unknown; short ones may be equal
    by chance, so that problems without two long texts count in neither. It is the largest share over the pairs of
    samples: samples 0 and 4 are copies where a log of four samples was read twice, though samples 0 and 1 differ.
    """
    if texts.shape[1] < 2 or not len(texts):
        return 0.0
    is_known = is_long & (texts != np.zeros(1, texts.dtype))
    numbers = np.unique(texts, return_inverse=True)[1].reshape(texts.shape)
    most = 0.0
    for first in range(texts.shape[1] - 1):
        # The later samples beside this one, all at once.
        are_known = is_known[:, first, None] & is_known[:, first + 1 :]
        are_equal = are_known & (numbers[:, first, None] == numbers[:, first + 1 :])
        known_pairs = are_known.sum(0)
        # The texts of a single problem may be equal by chance.
        most = max(most, float((are_equal.sum(0) / np.where(known_pairs > 1, known_pairs, math.inf)).max()))
    return most


def look_of(manifests: Sequence[Manifest], cells: Sequence[CellTraces]) -> Look:
    """Return the look at a run.

    With declared looks it is the last one of which all samples are there.
    """
    extensions = max((manifest.provenance.get("extensions", 0) for manifest in manifests), default=0)
    looks = manifests[0].spec.get("looks") if len(manifests) == 1 else None
    if extensions or not looks:
        return Look(extensions=extensions)

    # The first samples that are there of nearly every problem, in each cell.
    whole_samples = []
    for cell in cells:
        lacking = 1 - cell.is_stored.mean(0)
        is_lacking = lacking > MOST_MISSING
        whole_samples.append(int(np.argmax(is_lacking)) if is_lacking.any() else len(lacking))
    reached = [samples for samples in looks if samples <= min(whole_samples, default=0)]
    samples = reached[-1] if reached else looks[0]
    return Look(share=samples / looks[-1], samples=samples)

"""The claim of a run's numbers, the reason why a run cannot make it, and the look at which it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Claim
from kvatlas.results.manifest import Manifest
from kvatlas.stats.metrics import rule
from kvatlas.stats.numerics.looks import ONE_LOOK, Look

if TYPE_CHECKING:
    from kvatlas.stats.table import CellTraces

#: Why a greedy run cannot speak of its problems sampled anew.
GREEDY = "at temperature 0 nothing is drawn"
#: Texts of fewer tokens may be equal by chance.
LONG_TEXT = 50
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
    if any(manifest.screened for manifest in manifests):
        return "a screen reads given texts and draws none"
    if rule(metric) is not None:
        return f"{metric} is made of the samples of a problem together"
    if any(map(is_greedy, manifests)):
        return GREEDY
    if any(map(has_copies, cells)):
        return "samples of the same problems are copies of each other"
    return ""


def has_copies(cell: CellTraces) -> bool:
    """Return whether two samples wrote the same tokens on every problem with long texts, as with one seed for both."""
    if cell.expected.samples < 2:
        return False
    is_long = np.asarray((cell.traces["output_tokens"] >= LONG_TEXT).all(1))
    digests = cell.token_digest[is_long]
    is_unknown = digests == np.zeros(1, digests.dtype)
    if len(digests) < 2 or bool(is_unknown.any()):
        return False
    samples = {digests[:, sample].tobytes() for sample in range(digests.shape[1])}
    return len(samples) < cell.expected.samples


def look_of(manifests: Sequence[Manifest], cells: Sequence[CellTraces]) -> tuple[Look, int | None]:
    """Return the look at a run, and the first samples of each problem that it reads; None for all.

    With declared looks it is the last one of which all samples are there.
    """
    extensions = max((manifest.provenance.get("extensions", 0) for manifest in manifests), default=0)
    looks = manifests[0].spec.get("looks") if len(manifests) == 1 else None
    if not looks:
        return (Look(extensions=extensions) if extensions else ONE_LOOK), None

    # The first samples that are there of nearly every problem, in each cell.
    whole_samples = []
    for cell in cells:
        lacking = 1 - cell.is_stored.mean(0)
        is_lacking = lacking > MOST_MISSING
        whole_samples.append(int(np.argmax(is_lacking)) if is_lacking.any() else len(lacking))
    reached = [samples for samples in looks if samples <= min(whole_samples, default=0)]
    samples = reached[-1] if reached else looks[0]
    if extensions:
        return Look(extensions=extensions), None
    return Look(share=samples / looks[-1]), samples

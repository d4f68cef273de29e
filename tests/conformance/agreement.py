"""Agreement of two selections, and the document and the table that the suite makes of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kvatlas.policies import Policy

#: Scores may differ by this share of the greatest: float32 against float64, or sums in other orders.
TOLERANCE = 1e-4
#: Scores of two tokens that differ by less than this share of them are a tie.
EQUAL = 1e-5

#: Parameters that name files.
FILES = ("predictor", "statistics")

Nested = list[list[list[Any]]]


@dataclass
class Results:
    """Findings of the suite, in order."""

    facts: dict[str, Any] = field(default_factory=dict)
    #: A policy under one setting against a peer, over all choices (layers and heads).
    rows: list[dict[str, Any]] = field(default_factory=list)

    def compared(
        self,
        policy: Policy,
        peer: str,
        ours: Nested,
        theirs: Nested,
        scores: Tensor,
        apart: float | None = None,
        again: bool = False,
        departs: str = "",
    ) -> bool:
        """Add what a policy keeps and what a peer keeps, slots by layer and head; `scores` say which are equal.

        Returns whether both keep the same tokens in every choice, but for equal scores. `apart` is the difference of
        the scores of tokens that compete, as a share of the greatest, None where scores have no counterpart; `departs`
        says why the peer keeps others, where it does.
        """
        item = jaccards(ours, theirs)
        ties = min(item) < 1 and differ_by_ties_alone(ours, theirs, scores)
        self.rows.append(
            {
                "policy": policy.name,
                # Files that the suite made for itself have no place in a document.
                "setting": {name: value for name, value in policy.setting.values.items() if name not in FILES},
                "peer": peer,
                "scene": "compressed before" if again else "first compression",
                "choices": len(item),
                "kept": len(ours[0][0]),
                "jaccard_mean": sum(item) / len(item),
                "jaccard_least": min(item),
                "score_difference": apart,
                "ties": ties,
                "departs": departs,
            }
        )
        return min(item) == 1 or ties

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"bench": "conformance", **self.facts, "agreements": self.rows}) + "\n")


def jaccards(ours: Nested, theirs: Nested) -> list[float]:
    """Of the kept sets of every choice."""
    pairs = [
        (set(a), set(b)) for rows, others in zip(ours, theirs, strict=True) for a, b in zip(rows, others, strict=True)
    ]
    return [len(a & b) / len(a | b) for a, b in pairs]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference as a share of the greatest score; infinite scores have to be the same tokens'."""
    assert (ours.isinf() == theirs.isinf()).all(), "other tokens have infinite scores"
    finite = ~ours.isinf()
    if not finite.any():
        return 0.0
    ours, theirs = ours[finite].double(), theirs[finite].double()
    greatest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) / (greatest or 1.0)


def differ_by_ties_alone(ours: Nested, theirs: Nested, scores: Tensor) -> bool:
    """Return whether the tokens that only one of two selections keeps score alike, to the precision of float32."""
    for layer, rows in enumerate(ours):
        for head, kept in enumerate(rows):
            apart = set(kept) ^ set(theirs[layer][head])
            results = [float(scores[layer, head, slot]) for slot in apart]
            if results and not max(results) - min(results) <= EQUAL * max(map(abs, results)):
                return False
    return True

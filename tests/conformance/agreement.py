"""How well two selections agree, and the document and the table that the suite makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True)
class Agreement:
    """A policy under one setting against a peer, over all choices (layers and heads)."""

    policy: str
    setting: dict[str, Any]
    peer: str
    scene: str
    choices: int
    kept: int
    jaccard_mean: float
    jaccard_least: float
    #: Of the scores of tokens that compete, as a share of the greatest; None where scores have no counterpart.
    score_difference: float | None
    #: Whether kept sets differ in tokens of equal scores alone.
    ties: bool
    #: Why the peer keeps others, where it does.
    departs: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the same tokens were kept in every choice, but for equal scores."""
        return self.jaccard_least == 1.0 or self.ties


@dataclass
class Results:
    """What the suite found, in the order in which it did."""

    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Agreement] = field(default_factory=list)

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
    ) -> Agreement:
        """Add what a policy keeps and what a peer keeps, slots by layer and head; `scores` say which are equal."""
        item = jaccards(ours, theirs)
        row = Agreement(
            policy=policy.name,
            # Files that the suite made for itself have no place in a document.
            setting={name: value for name, value in policy.setting.values.items() if name not in FILES},
            peer=peer,
            scene="compressed before" if again else "first compression",
            choices=len(item),
            kept=len(ours[0][0]),
            jaccard_mean=sum(item) / len(item),
            jaccard_least=min(item),
            score_difference=apart,
            ties=min(item) < 1 and differ_by_ties_alone(ours, theirs, scores),
            departs=departs,
        )
        self.rows.append(row)
        return row

    def document(self) -> dict[str, Any]:
        return {"bench": "conformance", **self.facts, "agreements": [asdict(row) for row in self.rows]}

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.document()) + "\n")


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
    """Whether the tokens that only one of two selections keeps score alike, to the precision of float32."""
    for layer, rows in enumerate(ours):
        for head, kept in enumerate(rows):
            apart = set(kept) ^ set(theirs[layer][head])
            results = [float(scores[layer, head, slot]) for slot in apart]
            if results and not max(results) - min(results) <= EQUAL * max(map(abs, results)):
                return False
    return True

"""The budget audit of a plan, printed as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvatlas.policies.audit import varying

if TYPE_CHECKING:
    from kvatlas.core import BudgetAudit
    from kvatlas.policies.audit import AuditedCell


def print_audit(cells: Sequence[AuditedCell]) -> None:
    """For each model a table: settings by rows, policies that share a rule once; benchmarks by columns."""
    for model in dict.fromkeys(cell.model for cell in cells):
        own = [cell for cell in cells if cell.model == model]
        benchmarks = list(dict.fromkeys(cell.benchmark for cell in own))
        names = varying(own)
        same = ", ".join(f"{name} {value}" for name, value in own[0].rule if name not in names)
        audits = {(cell.rule, cell.benchmark): cell.audit for cell in own}
        rows = [[*names, *benchmarks]]
        for rule in dict.fromkeys(cell.rule for cell in own):
            values = dict(rule)
            parameters = [str(values.get(name, "")) for name in names]
            rows.append([*parameters, *(_text(audits[rule, benchmark]) for benchmark in benchmarks)])
        typer.echo(
            f"\nbudget audit of {model}{f' with {same}' if same else ''}: places for older thinking tokens at the "
            "first compression,\nmedian / worst problem (share of the problems in which policies cannot differ)"
        )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            typer.echo("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def _text(audit: BudgetAudit) -> str:
    return f"{audit.median:,.0f} / {audit.worst:,} ({100 * audit.no_choice:.0f} %)"

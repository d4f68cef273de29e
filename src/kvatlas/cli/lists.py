"""What is there: policies, and how rows of such lists are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvatlas.findings import Finding

Json = Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")]


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None, as_json: Json = False
) -> None:
    """List the policies and the presets of some, or explain one."""
    from kvatlas.policies import PRESETS
    from kvatlas.policies import policies as registry

    chosen = [registry.get(name)] if name else [*dict(registry.items()).values(), *map(registry.get, PRESETS)]
    rows = [_about(each) for each in chosen]
    if as_json:
        print_rows(rows, as_json)
    elif name:
        _explain(registry.get(name), rows[0])
    else:
        print_rows([_short(row) for row in rows if row["preset"] is None], as_json)
        typer.echo("\nPublished values stand in brackets. Every policy that compresses takes as well:")
        typer.echo(", ".join(_written(_shared())))
        typer.echo("\nPresets, methods as somebody ran them; a preset is named wherever a policy is:")
        print_rows([{"name": row["name"], **row["preset"]} for row in rows if row["preset"]], as_json)


def _about(policy: Any) -> dict[str, Any]:
    """A policy as data; `published` are the values of parameters in its paper, `preset` is what it is a preset of."""
    preset = getattr(policy, "preset", None)
    parameters = {each.name: "required" if each.default is MISSING else each.default for each in fields(policy)}
    return {
        "name": policy.name,
        "summary": policy.summary,
        "paper": policy.paper,
        "scope": str(preset.values.get("scope", policy.scope) if preset else policy.scope),
        "observes": sorted(signal.value for signal in policy.observes),
        "parameters": parameters | (dict(preset.values) if preset else {}),
        "published": dict(policy.published),
        "preset": preset and {"policy": preset.policy, "values": dict(preset.values), "source": preset.source},
        "description": "\n".join(line.removeprefix("    ") for line in (policy.__doc__ or "").strip().splitlines()),
    }


def _shared() -> dict[str, Any]:
    from kvatlas.policies import CompressingPolicy

    return {each.name: "required" if each.default is MISSING else each.default for each in fields(CompressingPolicy)}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """One line of the table: of the parameters the policy's own, and those that its paper gives values for."""
    common = _shared()
    own = {name: value for name, value in row["parameters"].items() if name not in common or name in row["published"]}
    return {
        "name": row["name"],
        "keeps": row["summary"].removeprefix("keeps "),
        "paper": row["paper"],
        "observes": row["observes"] or ["nothing"],
        "scope": row["scope"],
        "parameters": _written(own, row["published"]),
    }


def _written(parameters: dict[str, Any], published: dict[str, str] | None = None) -> list[str]:
    """Parameters with their defaults, and their published values in brackets."""
    lines = []
    for name, default in parameters.items():
        text = name if default == "required" else f"{name}={default!s}"
        lines.append(f"{text} [{published[name]}]" if published and name in published else text)
    return lines


def _explain(policy: Any, row: dict[str, Any]) -> None:
    from kvatlas.policies import CompressingPolicy

    typer.echo(f"{row['name']}: {row['summary']}")
    if row["paper"]:
        typer.echo(row["paper"])
    typer.echo(f"\n{row['description']}\n")
    typer.echo(f"observes: {', '.join(row['observes']) or 'nothing'}; one choice for: {row['scope']}")
    for name, default in row["parameters"].items():
        published = f"   (published: {row['published'][name]})" if name in row["published"] else ""
        typer.echo(f"  {name} = {default}{published}")
    if issubclass(policy, CompressingPolicy):
        shared = (CompressingPolicy.__doc__ or "").partition("\n\n")[2].rstrip()
        typer.echo(
            "\nParameters of every policy that compresses:\n"
            + "\n".join(line.removeprefix("    ") for line in shared.splitlines())
        )


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows with equal keys as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kvatlas.visible import visible

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0] if rows else []:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(escape(visible(_cell(value))) for value in row.values()))
    Console().print(table)


def print_findings(findings: Iterable[Finding], as_json: bool) -> None:
    """Findings, a line for each as they come, or all as JSON; exit code 2 if one of them failed."""
    from kvatlas.findings import Status

    seen = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            typer.echo(f"{finding.status.value:<8} {finding.name:<15} {finding}")
    if as_json:
        rows = [
            {"name": each.name, "status": each.status.value, "message": each.message, "advice": each.advice}
            for each in seen
        ]
        typer.echo(json.dumps(rows, indent=2))
    if any(finding.status is Status.FAILED for finding in seen):
        raise typer.Exit(2)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}" if default == "required" else f"{name}={default}" for name, default in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(policies)

"""What is there: policies, models."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")]


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None, as_json: Json = False
) -> None:
    """List the policies, or explain one."""
    from kvatlas.policies import policies as registry

    if name is not None:
        policy = registry.get(name)
        typer.echo(f"{policy.name}: {policy.summary}\n{policy.paper}\n".replace("\n\n", "\n"))
        typer.echo("\n".join(line.removeprefix("    ") for line in (policy.__doc__ or "").splitlines()))
        typer.echo("\n".join(f"  {key} = {value}" for key, value in _parameters(policy).items()))
        return
    rows = []
    for each in registry.names():
        policy = registry.get(each)
        rows.append(
            {
                "name": each,
                "summary": policy.summary,
                "paper": policy.paper,
                "scope": policy.scope.value,
                "observes": sorted(signal.value for signal in policy.observes),
                "parameters": _parameters(policy),
            }
        )
    print_rows(rows, as_json)


def models(as_json: Json = False) -> None:
    """List the models that ship with kvatlas; any local Hugging Face folder is `hf:FOLDER`."""
    from kvatlas.models import embedded, find

    rows = []
    for name in embedded():
        model = find(name)
        rows.append(
            {
                "name": name,
                "architecture": model.config["architectures"][0],
                "layers": model.shape.layers,
                "kv_heads": model.shape.kv_heads,
                "kv_bytes_per_token": model.shape.kv_bytes_per_token(),
            }
        )
    print_rows(rows, as_json)


def _parameters(policy: Any) -> dict[str, Any]:
    return {field.name: "required" if field.default is MISSING else field.default for field in fields(policy)}


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows with equal keys as a table, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0] if rows else []:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}" if default == "required" else f"{name}={default}" for name, default in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (policies, models):
        app.command()(command)

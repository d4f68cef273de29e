"""What is there: policies and recipes, and how rows of such lists are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvatlas.core import Finding

#: Columns of what is no terminal.
_NO_EDGE = 10_000

Json = Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")]


def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None, as_json: Json = False
) -> None:
    """List the policies and the presets of some, or explain one."""
    from kvatlas.policies import PRESETS
    from kvatlas.policies import policies as registry

    chosen = [registry.get(name)] if name else [*dict(registry.items()).values(), *map(registry.get, PRESETS)]
    rows = [_about(policy) for policy in chosen]
    if as_json:
        print_rows(rows, as_json)
    elif name:
        _explain(registry.get(name), rows[0])
    else:
        short = [{"name": row["name"], "keeps": row["summary"].removeprefix("keeps ")} for row in rows]
        print_rows([row for row in short if row["name"] not in PRESETS], as_json, one_line=True)
        typer.echo(f"\nPresets, methods as somebody ran them: {', '.join(PRESETS)}.\nIn full: kvatlas policies NAME")


def _about(policy: Any) -> dict[str, Any]:
    """A policy as data; `published` are the values of parameters in its paper, `preset` is what it is a preset of."""
    preset = getattr(policy, "preset", None)
    parameters = {field.name: "required" if field.default is MISSING else field.default for field in fields(policy)}
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


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="SPEC.yaml", help="Copy it to this file, to be changed.")] = None,
    as_json: Json = False,
) -> None:
    """List the sweep specs that come with the package, print one, or copy it."""
    from kvatlas.core import KvatlasError

    texts = {
        file.name.removesuffix(".yaml"): file.read_text("utf-8")
        for file in sorted(files("kvatlas.sweeps").iterdir(), key=lambda file: file.name)
        if file.name.endswith(".yaml")
    }
    if name is None:
        # The first sentence of the comment that each begins with.
        heads = {
            recipe: text.partition("\n#\n")[0].replace("\n# ", " ").removeprefix("# ") for recipe, text in texts.items()
        }
        rows = [{"name": recipe, "about": head.partition("\n")[0]} for recipe, head in heads.items()]
        print_rows(rows, as_json, one_line=True)
        return
    if name not in texts:
        raise KvatlasError(f"There is no recipe {name!r}; valid are: {', '.join(texts)}.")
    if out is None:
        typer.echo(texts[name], nl=False)
        return
    if out.exists():
        raise KvatlasError(f"{str(out)!r} is there already; name another file with --out.")
    out.write_text(texts[name], "utf-8")
    typer.echo(f"{out}: check it with kvatlas plan {out}")


def print_rows(rows: list[dict[str, Any]], as_json: bool, one_line: bool = False) -> None:
    """Rows with equal keys as a table, or as JSON; in a terminal long texts are wrapped, or cut to `one_line`."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    from kvatlas.text import visible

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(rows[0] if rows else []):
        numbers = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(column.replace("_", " "), no_wrap=one_line or number == 0 or numbers)
    for row in rows:
        table.add_row(*(escape(visible(_cell(value))) for value in row.values()))
    table_console().print(table)


def table_console() -> Console:
    """A console that wraps tables at the edge of a terminal; in files and pipes they are as wide as they are."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_NO_EDGE)


def print_findings(findings: Iterable[Finding], as_json: bool) -> None:
    """Findings, a line for each as they come, or all as JSON; exit code 2 if one of them failed."""
    from kvatlas.core import Check

    seen = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            typer.echo(f"{finding.status.value:<8} {finding.name:<15} {finding}")
    if as_json:
        rows = [
            {"name": finding.name, "status": finding.status.value, "message": finding.message, "advice": finding.advice}
            for finding in seen
        ]
        typer.echo(json.dumps(rows, indent=2))
    if any(finding.status is Check.FAILED for finding in seen):
        raise typer.Exit(2)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}" if default == "required" else f"{name}={default}" for name, default in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(policies)
    app.command()(recipes)

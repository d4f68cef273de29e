"""The `kvatlas` command: nothing but argument handling. An error is one sentence and exit code 2."""

from __future__ import annotations

import functools
import sqlite3
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from kvatlas.core import KvatlasError, reason
from kvatlas.text import VisibleStream, visible

#: Characters of a sentence, which may name what was given.
_LONGEST = 2000
#: What the system, SQLite and Python say of input that nobody foresaw: no fault of ours, so no traceback.
_OUTSIDE = (OSError, UnicodeError, sqlite3.Error, RecursionError, OverflowError, MemoryError)


def new_app() -> typer.Typer:
    """The command line with all its commands."""
    from kvatlas.cli import (
        benchmarks,
        calibration,
        compare,
        deploy,
        doctor,
        grading,
        imports,
        lists,
        lm_eval,
        maps,
        models,
        predictor,
        results,
        serve,
        sweeps,
        view,
    )

    app = typer.Typer(
        name="kvatlas",
        help="Maps of what a reasoning model can forget: KV-cache token selection, measured honestly.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    rooms = (
        *(sweeps, serve, lm_eval, maps, results, compare, grading, deploy),
        *(imports, predictor, calibration, benchmarks, lists, models, doctor, view),
    )
    for room in rooms:
        room.add_to(app)
    app.callback()(_common)
    return app


@functools.cache
def _command() -> Any:
    """The same for all calls in a process: it takes a quarter of a second to make."""
    return typer.main.get_command(new_app())


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvatlas import __version__

        typer.echo(f"kvatlas {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; wrong input ends in one sentence on standard error and exit code 2."""
    usual = warnings.formatwarning

    def as_sentence(message: Warning | str, category: type[Warning], *rest: Any, **line: Any) -> str:
        ours = category.__module__.startswith("kvatlas.")
        return f"kvatlas: {visible(str(message))}\n" if ours else usual(message, category, *rest, **line)

    warnings.formatwarning = as_sentence
    usual_output = sys.stdout
    sys.stdout = VisibleStream(usual_output)
    try:
        code = _command()(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TyperException as error:
        from typer.rich_utils import rich_format_error

        # Rich draws it, and takes for harmless what turns the direction of writing.
        error.message = visible(error.message)
        rich_format_error(error)  # type: ignore[arg-type]
        sys.exit(error.exit_code)
    except typer.Abort:
        _end("Aborted.", 1)
    except KvatlasError as error:
        _end(str(error))
    except _OUTSIDE as error:
        _end(f"This cannot be done: {reason(error)} ({type(error).__name__}).")
    finally:
        warnings.formatwarning = usual
        sys.stdout = usual_output


def _end(sentence: str, code: int = 2) -> NoReturn:
    if len(sentence) > _LONGEST:
        sentence = f"{sentence[:_LONGEST]} ... ({len(sentence):,} characters)"
    # Names that are no UTF-8 come as lone surrogates, which some terminals cannot be told.
    print(f"kvatlas: {visible(sentence)}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    sys.exit(code)

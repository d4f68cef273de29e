"""The `kvatlas` command, which handles arguments only. An error is one sentence and exit code 2."""

import _thread
import contextlib
import functools
import os
import sqlite3
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from kvatlas.cli import drawing, gate_command, lists, options, results, serving, sweeps
from kvatlas.core import KvatlasError, reason
from kvatlas.machine import collect_seldom
from kvatlas.registry import features
from kvatlas.text import VisibleStream, visible

#: The longest error sentence in characters; sentences may quote values of any length.
_LONGEST = 2000
#: Seconds after which an interrupt that was lost is raised again.
_AGAIN = 0.05
#: Errors of the system, SQLite and Python without a traceback, because unforeseen input raises them.
_OUTSIDE = (OSError, UnicodeError, sqlite3.Error, RecursionError, OverflowError, MemoryError)
#: SQLite's errors that are mistakes in code of ours.
_OURS = (sqlite3.ProgrammingError, sqlite3.InterfaceError)

app = typer.Typer(
    name="kvatlas",
    cls=options.CommandGroup,
    help="Maps of what a reasoning model can forget: KV-cache token selection, measured honestly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from kvatlas import __version__

        typer.echo(f"kvatlas {__version__}")
        raise typer.Exit


@app.callback()
def _app_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@functools.cache
def command() -> Any:
    """Return the command line as one command, which takes a quarter of a second to build."""
    # In the order of the help.
    groups = [sweeps.app, _commands_of("autopsy"), _commands_of("predictor")]
    groups += [module.app for module in (drawing, results, serving, gate_command, lists)]
    for group in groups:
        app.add_typer(group)
    return typer.main.get_command(app)


def _commands_of(feature: str) -> typer.Typer:
    """Return the commands of a feature; of one that is not installed a hidden one that says so."""
    commands: typer.Typer | None = features.find(f"{feature}.commands")
    if commands is not None:
        return commands
    group = typer.Typer()

    @group.command(feature, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def refuse() -> None:
        features.get(f"{feature}.commands")

    return group


def main() -> None:
    """Run the command line; an error is one sentence on standard error and exit code 2."""
    usual = warnings.formatwarning

    def as_sentence(message: Warning | str, category: type[Warning], *rest: Any, **line: Any) -> str:
        ours = category.__module__.startswith("kvatlas.")
        return f"kvatlas: {visible(str(message))}\n" if ours else usual(message, category, *rest, **line)

    collect_seldom()
    warnings.formatwarning = as_sentence
    usual_output = sys.stdout
    # Without standard output (`>&-`) nothing is written, as by Python's own print.
    sys.stdout = VisibleStream(usual_output or Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        with _no_interrupt_lost():
            code = command()(standalone_mode=False)
    except SystemExit as error:
        # Commands return their code: only completion in a shell and the code of others call sys.exit.
        if "_KVATLAS_COMPLETE" in os.environ:
            raise
        # Typer ends a command whose reader closed the pipe, as `head` does.
        if isinstance(error.__context__, BrokenPipeError):
            sys.exit(error.code)
        _exit_with(f"Code outside kvatlas ended this command ({reason(error)}).")
    except TyperException as error:
        from typer.rich_utils import rich_format_error

        # Rich does not escape marks that change the direction of writing.
        error.message = visible(error.message)
        rich_format_error(error)  # type: ignore[arg-type]
        sys.exit(error.exit_code)
    except typer.Abort:
        _exit_with("Aborted.", 130)
    except KvatlasError as error:
        _exit_with(str(error))
    except Exception as error:
        if isinstance(error, _OUTSIDE) and not isinstance(error, _OURS):
            _exit_with(f"This cannot be done: {reason(error)} ({type(error).__name__}).")
        # A fault of ours keeps its traceback. Its exit code is no verdict: `gate` and `deploy verify` use 1 and 3.
        traceback.print_exc()
        sys.exit(2)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    finally:
        warnings.formatwarning = usual
        sys.stdout = usual_output


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Raise Ctrl-C again if it fell into a finalizer or a callback, whose exceptions Python only prints."""
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            usual(unraisable)
            return
        # Raised within this function it would be lost, too.
        timer = threading.Timer(_AGAIN, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _exit_with(sentence: str, code: int = 2) -> NoReturn:
    if len(sentence) > _LONGEST:
        sentence = f"{sentence[:_LONGEST]} ... ({len(sentence):,} characters)"
    # Names that are not UTF-8 hold lone surrogates, which terminals may not encode.
    print(f"kvatlas: {visible(sentence)}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    sys.exit(code)

"""The command that runs lm-eval with our model class: lm-eval."""

from __future__ import annotations

import sys

import typer


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness, which then knows `--model kvatlas`; all arguments are its own."""
    from kvatlas.core import KvatlasError

    try:
        import lm_eval.__main__ as harness

        import kvatlas.integrations.lm_eval  # noqa: F401 (registers the class)
    except ModuleNotFoundError as error:
        raise KvatlasError("Running lm-eval needs the extra: pip install 'kvatlas[lm-eval]'.") from error
    sys.argv = ["kvatlas lm-eval", *context.args]
    harness.cli_evaluate()


def add_to(app: typer.Typer) -> None:
    """Add this command; what it does not know goes to lm-eval, --help too."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("lm-eval", context_settings=settings)(lm_eval)

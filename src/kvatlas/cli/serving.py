"""Commands that serve a setting or look at one that is served: serve, lm-eval, deploy export, deploy verify."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli import options
from kvatlas.cli.output import answers_display, note
from kvatlas.core import KvatlasError, Sampling

#: The environment variable that holds the key, unless another is named.
KEY = "KVATLAS_API_KEY"

app = typer.Typer()
deploy = typer.Typer(no_args_is_help=True)
app.add_typer(deploy, name="deploy", help="A setting in another engine: its configuration, and proof.")


@app.command()
def serve(
    model: options.Model,
    policy: options.Policy = "full",
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: as given here.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar=KEY, help="Key that clients have to send.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that are decoded together.")] = 32,
    queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more get 429.")] = 256,
    grace: Annotated[float, typer.Option(min=0, callback=options.finite, help="Seconds to finish answers.")] = 30.0,
    temperature: Annotated[float, typer.Option(min=0, help="For requests that name none.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="For requests that name none.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="For requests that name none; 0 is off.")] = 20,
    model_option: options.ModelOption = None,
) -> None:
    """Serve a model under token selection: OpenAI-compatible, requests share batches."""
    from kvatlas.models import find

    try:
        from kvatlas.serve.app import application
        from kvatlas.serve.server import LOOPBACK, run
    except ModuleNotFoundError as error:
        raise KvatlasError("Serving needs the extra: pip install 'kvatlas[serve]'.") from error
    from kvatlas.serve.service import Service, find_policy, sampling_with

    loaded = find(model, **options.assignments("--model-option", model_option))
    loaded.check()
    for sentence in loaded.notes:
        note(sentence)
    values = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    setting = find_policy(loaded, policy, values | options.assignments("--set", set_))
    sampling = sampling_with(Sampling(), temperature=temperature, top_p=top_p, top_k=top_k)
    if host not in LOOPBACK and not api_key:
        note(f"Warning: anyone who reaches {host} can use this server; --api-key asks for a key.")
    service = Service(loaded, setting, sampling, batch_size, queue)
    hosts = LOOPBACK if host in LOOPBACK and not api_key else ()
    run(application(service, name or model, api_key, hosts), service, host, port, grace)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness, which then knows `--model kvatlas`; all arguments are its own, --help too."""
    try:
        import lm_eval.__main__ as harness

        import kvatlas.integrations.lm_eval  # noqa: F401 (registers the class)
    except ModuleNotFoundError as error:
        raise KvatlasError("Running lm-eval needs the extra: pip install 'kvatlas[lm-eval]'.") from error
    sys.argv = ["kvatlas lm-eval", *context.args]
    harness.cli_evaluate()


@deploy.command()
def export(
    run: options.Run,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="tensorrt-llm, triattention-vllm, triattention-sglang, r-kv-vllm, kvpress."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the configuration.")],
    cell: options.Cell = "",
    nearest: Annotated[bool, typer.Option("--nearest", help="Write the nearest that the target can.")] = False,
) -> None:
    """Write a cell as the configuration of a serving engine; what that cannot express is named."""
    from kvatlas.deploy.export import write_export

    for path in write_export(run, cell, to, out, nearest):
        typer.echo(path)


@deploy.command()
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible endpoint, http://HOST:PORT.")],
    against: Annotated[Path, typer.Option(metavar="RUN", help="The run with the cell.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run of the answers; an unfinished one is resumed.")],
    cell: options.Cell = "",
    served: Annotated[str, typer.Option(help="The model's name there; default: the only one.")] = "",
    problems: options.FirstProblems = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of each; default: the run's.")] = None,
    texts: Annotated[int, typer.Option(min=0, metavar="N", help="Also read N greedy texts; 32 will do.")] = 0,
    lose_at_most: options.LoseAtMost = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions under way at once.")] = 8,
    top_k: Annotated[bool, typer.Option("--top-k/--no-top-k", help="Send top_k, which OpenAI's API lacks.")] = True,
    key_env: Annotated[str, typer.Option(help="The environment variable with the key.")] = KEY,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Ask an endpoint a run's problems: is it the map's cell? Exit code 1 where it is not, 3 where that is open."""
    from kvatlas.deploy.endpoint import Endpoint, ask
    from kvatlas.deploy.export import MeasuredCell
    from kvatlas.deploy.verify import as_text, report
    from kvatlas.results.store import check_folder
    from kvatlas.stats.losses import Equivalence
    from kvatlas.stats.run_data import margin_of

    key = os.environ.get(key_env)
    if key is None and key_env != KEY:
        raise KvatlasError(f"The environment has no variable {key_env!r} with a key.")
    endpoint = Endpoint(url, served, key)
    check_folder(out)
    reference = MeasuredCell.of(against, cell)
    margin = reference.run.margin if lose_at_most is None else margin_of({"lose_at_most": lose_at_most})
    read = None
    if texts:
        from kvatlas.deploy.verify import read_texts

        display = answers_display(f"{endpoint.url}, temperature 0", quiet)
        read = read_texts(endpoint, reference, out / "texts", texts, concurrency=concurrency, on_trace=display)
    limits = {"problems": problems, "samples": samples}
    display = answers_display(endpoint.url, quiet)
    answers = ask(endpoint, reference, out, **limits, concurrency=concurrency, top_k=top_k, on_trace=display)
    result = report(reference, answers, margin, read)
    typer.echo(json.dumps(result, indent=2) if as_json else as_text(result, endpoint.url))
    if result["alarmed"]:
        raise typer.Exit(1)
    if result["cell"]["verdict"] == Equivalence.UNDECIDED:
        raise typer.Exit(3)

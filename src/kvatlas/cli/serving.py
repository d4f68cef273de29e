"""Commands that serve a setting, export it to another engine, or check an endpoint."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note
from kvatlas.cli.progress import count_display
from kvatlas.core import Sampling, importing

#: The environment variable with the key of the server.
KEY = "KVATLAS_API_KEY"

app = options.Commands()
deploy = options.Commands(no_args_is_help=True)
app.add_typer(deploy, name="deploy", help="A setting in another engine: its configuration, and proof.")


@app.command("serve")
def serve_command(
    model: options.Model,
    policy: options.Policy = "full",
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: as given here.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    batch_size: Annotated[int, typer.Option(min=1, max=65_536, help="Sequences decoded together.")] = 32,
    queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more get 429.")] = 256,
    grace: Annotated[
        float, typer.Option(min=0, callback=options.finite_option, help="Seconds to finish answers.")
    ] = 30.0,
    temperature: Annotated[float, typer.Option(min=0, help="For requests that name none.")] = 0.6,
    seed: Annotated[
        int | None, typer.Option(help="For requests that name none: answer n to a prompt is its sample n.")
    ] = None,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    template: options.Template = "",
    system: options.System = "",
) -> None:
    """Serve a model under token selection: OpenAI-compatible, requests share batches.

    The environment variable KVATLAS_API_KEY holds the key that clients must send.
    """
    from kvatlas.models import find

    with importing("Serving", "serve"):
        from kvatlas.serve.app import application
        from kvatlas.serve.server import LOOPBACK, serve_forever
    from kvatlas.serve.service import Service, find_policy, sampling_with

    # The imports of the next calls take seconds.
    note(f"Loading {model}.")
    loaded = find(model, **options.model_options(model_option, template_values, template, system))
    loaded.check()
    for sentence in loaded.notes:
        note(sentence)
    cell = options.cell(policy, kv_budget, local_window, ratio, set_)
    key = os.environ.get(KEY)
    setting = find_policy(loaded, cell.policy, cell.values)
    if host not in LOOPBACK and not key:
        note(f"Warning: anyone who reaches {host} can use this server; the variable {KEY} asks for a key.")
    sampling = sampling_with(Sampling(), temperature=temperature)
    service = Service(loaded, setting, sampling, batch_size, queue, seed)
    hosts = LOOPBACK if host in LOOPBACK and not key else ()
    serve_forever(application(service, name or model, key, hosts), service, host, port, grace)


def _known_engine(name: str) -> str:
    """Return a target, which is refused before options that are missing."""
    from kvatlas.deploy.engine_config import check_engine

    return check_engine(name)


@deploy.command("export")
def deploy_export_command(
    run: options.Run,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            callback=_known_engine,
            help="tensorrt-llm, kvatlas-vllm, triattention-vllm, r-kv-vllm, kvpress.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the configuration.")],
    policy: options.Cell = "",
    nearest: Annotated[bool, typer.Option("--nearest", help="Write the nearest that the target can.")] = False,
) -> None:
    """Write a cell as the configuration of a serving engine; what it cannot express is named."""
    from kvatlas.deploy.engine_config import write_export

    for path in write_export(run, policy, to, out, nearest):
        typer.echo(path)


@deploy.command("verify")
def deploy_verify_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible endpoint, http://HOST:PORT.")],
    against: Annotated[Path, typer.Option(metavar="RUN", help="The run with the cell.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run of the answers; an unfinished one is resumed.")],
    policy: options.Cell = "",
    served: Annotated[str, typer.Option(help="The model's name there; default: the only one.")] = "",
    problems: options.FirstProblems = None,
    texts: Annotated[int, typer.Option(min=0, metavar="N", help="Also read N greedy texts; 32 are enough.")] = 0,
    lose_at_most: options.LoseAtMost = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Open questions at a time.")] = 8,
    again: Annotated[bool, typer.Option("--again", help="Ask all anew, as after a new deployment.")] = False,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
) -> None:
    """Compare an endpoint's answers to a run's problems with a cell. Exit code 1 if they differ, 3 if undecided.

    The environment variable KVATLAS_API_KEY holds the endpoint's key.
    """
    from kvatlas.deploy.engine_config import MeasuredCell
    from kvatlas.deploy.verify import ask_measured, read_texts
    from kvatlas.engines.client import Endpoint
    from kvatlas.gates.verification import UNDECIDED, verification, verification_text
    from kvatlas.results.store import check_new_folder
    from kvatlas.stats.run_data import margin_from_points

    endpoint = Endpoint(url, served, os.environ.get(KEY))
    check_new_folder(out)
    reference = MeasuredCell.from_run(against, policy, allow_code)
    margin = reference.run.margin if lose_at_most is None else margin_from_points(lose_at_most)
    read = None
    how: dict[str, Any] = {"concurrency": concurrency, "again": again}
    try:
        if texts:
            display = count_display(f"{endpoint.url}, temperature 0", "answers")
            read = read_texts(endpoint, reference, out / "texts", texts, on_trace=display, **how)
        display = count_display(endpoint.url, "answers")
        answers, traces = ask_measured(endpoint, reference, out, problems=problems, on_trace=display, **how)
    except KeyboardInterrupt:
        without = " without --again" if again else ""
        note(f"Stopped. Answers that arrived are kept in {out}; the same command{without} goes on from there.")
        raise typer.Exit(130) from None
    note(str(answers))
    result = verification(reference, endpoint, out, traces, margin, read)
    typer.echo(json.dumps(result, indent=2) if as_json else verification_text(result))
    if result["alarmed"]:
        raise typer.Exit(1)
    if result["cell"]["verdict"] == UNDECIDED:
        raise typer.Exit(3)

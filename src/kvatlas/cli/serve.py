"""The command that serves a model over HTTP: serve."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.quantities import finite
from kvatlas.cli.sweeps import ModelOption, assignments
from kvatlas.text import visible


def serve(
    model: Annotated[str, typer.Argument(help="embedded:NAME, hf:FOLDER or hf:OWNER/NAME.")],
    policy: Annotated[str, typer.Option(help="KV-cache token selection.")] = "full",
    kv_budget: Annotated[int | None, typer.Option(help="Cache length at which a compression fires.")] = None,
    local_window: Annotated[int | None, typer.Option(help="Newest tokens that always stay.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of the older tokens that stays.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the policy.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: as given here.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVATLAS_API_KEY", help="Key that clients have to send.", show_envvar=True)
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that are decoded together.")] = 32,
    queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more get 429.")] = 256,
    grace: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds that answers have to finish when stopped.")
    ] = 30.0,
    temperature: Annotated[float, typer.Option(min=0, help="Where a request names none.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="Where a request names none.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Where a request names none; 0 is off.")] = 20,
    model_option: ModelOption = None,
) -> None:
    """Serve a model under token selection: OpenAI-compatible, requests share batches."""
    from kvatlas.core import KvatlasError, Sampling
    from kvatlas.models import find

    try:
        from kvatlas.server.app import application
        from kvatlas.server.running import LOOPBACK, run
    except ModuleNotFoundError as error:
        raise KvatlasError("Serving needs the extra: pip install 'kvatlas[serve]'.") from error
    from kvatlas.service import Service, chosen
    from kvatlas.service.request_validation import drawing

    loaded = find(model, **assignments("--model-option", model_option))
    values = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    loaded.check()
    for sentence in loaded.notes:
        typer.echo(visible(sentence), err=True)
    setting = chosen(loaded, policy, values | assignments("--set", set_))
    sampling = drawing(Sampling(), temperature=temperature, top_p=top_p, top_k=top_k)
    if host not in LOOPBACK and not api_key:
        typer.echo(f"Warning: whoever reaches {host} can use this server; --api-key asks for a key.", err=True)
    service = Service(loaded, setting, sampling, batch_size, queue)
    hosts = LOOPBACK if host in LOOPBACK and not api_key else ()
    run(application(service, name or model, api_key, hosts), service, host, port, grace)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(serve)

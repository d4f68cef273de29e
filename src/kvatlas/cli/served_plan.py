"""Reports of `plan` and `check` on a spec of servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvatlas.cli.output import note, print_text
from kvatlas.core import Check, CheckResult, KvatlasError
from kvatlas.text import duration_text

if TYPE_CHECKING:
    from kvatlas.sweeps.spec import Spec


def print_served_plan(spec: Spec, spec_file: Path, tokens_per_second: float | None, as_json: bool) -> None:
    """Print the command of each setting, the questions, and what they can prove; nothing is started."""
    from kvatlas.report.description import say
    from kvatlas.sweeps.served import make_served_plan

    planned = make_served_plan(spec, spec_file.parent, str(spec_file))
    spec = planned.spec
    for served in planned.settings:
        try:
            served.command.check(planned.spec_folder, os.environ)
        except KvatlasError as error:
            note(f"{served.title} cannot be started here. {error}")
            break

    samples = sum(served.samples for served in planned.settings)
    tokens = samples * sum(len(planned.problems[one.name]) * planned.output_tokens(one) for one in planned.benchmarks)
    seconds = tokens / tokens_per_second if tokens_per_second else None
    provable = planned.provable()

    if as_json:
        document = {
            "settings": [
                {"model": one.model, "setting": one.label, "command": str(one.command), "samples": one.samples}
                for one in planned.settings
            ],
            "questions": planned.questions,
            "decoded_tokens": tokens,
            "seconds": seconds,
            "claim": planned.claim.value,
            "provable": provable.to_dict(),
            "warnings": planned.warnings,
        }
        typer.echo(json.dumps(document))
        return
    for served in planned.settings:
        print_text(f"{served.title}\n  {served.command}")
    print_text(f"\nquestions  {planned.questions:,}, {spec.concurrency} open at a time, one server after another")
    print_text(f"tokens     about {tokens:,}")
    if seconds is not None:
        print_text(f"time       {duration_text(seconds)} at {tokens_per_second:,.0f} tokens/s, without starts")
    print_text(f"\nThe numbers will speak of {planned.claim.words}.")
    is_drawn = spec.sampling.temperature > 0
    per_sample = tokens // max(1, spec.samples)
    print_text(" ".join(say("provable", provable, per_sample) if is_drawn else say("provable_greedy", provable)))
    if not any(served.control for served in planned.settings):
        print_text(
            "\nNo setting is a control: add one that must lose, as a narrow window or 2 bits, with control: true; a "
            "run that sees its loss can see a loss."
        )
    for sentence in planned.warnings:
        print_text(f"\nWarning: {sentence}")


def check_servers(spec: Spec, spec_file: Path) -> list[CheckResult]:
    """Start the reference of each model, and ask it four short questions."""
    import shutil
    import tempfile

    from kvatlas.sweeps.served import REFERENCE, SEEDS, make_served_plan, probe, server_of

    planned = make_served_plan(spec, spec_file.parent, str(spec_file))
    for served in planned.settings:
        served.command.check(spec_file.parent, os.environ)
    found = []
    for served in planned.settings:
        if served.setting != REFERENCE:
            continue
        # It stays with its log if the server fails.
        folder = Path(tempfile.mkdtemp(prefix="kvatlas-check-"))
        with server_of(planned, served, folder) as server:
            facts = probe(server, planned.spec.sampling.model_dump())
        shutil.rmtree(folder)
        version = server.session["version"] or "of unknown version"
        found.append(CheckResult("server", Check.OK, f"{served.model} answers as {server.endpoint.model}, {version}"))
        if "seeds" in facts:
            seeds_status = Check.WARNING if facts["seeds"] in SEEDS else Check.OK
            found.append(CheckResult("seeds", seeds_status, SEEDS.get(facts["seeds"], "seeds are honoured")))
        found.append(CheckResult("sampling", Check.OK, f"fields that the server refuses: {facts['left_out']}"))
    return found

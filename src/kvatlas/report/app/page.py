"""The app as one HTML file of a run, and as files for a static host."""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from kvatlas.columns import page_columns
from kvatlas.core import KvatlasError, Measure
from kvatlas.figures import colours
from kvatlas.figures.marks import page_marks
from kvatlas.report.app.documents import MARKS, RIGHT, Json, maps_of
from kvatlas.report.app.run_source import AppRun, Place, address_name, trace_address
from kvatlas.report.result import Result
from kvatlas.results.export import check_target, write_text
from kvatlas.results.store import Store
from kvatlas.text import visible

#: Suffixes of a page.
PAGE_SUFFIXES = (".html", ".htm")
#: Bytes of traces that stand in the page itself, before compression.
TRACES_LIMIT = 4_000_000
#: The scripts in their order; each uses those before it.
SCRIPTS = ("base", "source", "maps", "forest", "problems", "maze", "tokens", "trace", "decide", "app")


def json_for_script(value: Any) -> str:
    """Return JSON that can stand inside a script element: no character in it ends the element or begins markup.

    All texts in it, keys too, are made `visible`.
    """
    text = json.dumps(_made_visible(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _made_visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _made_visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_made_visible(item) for item in value]
    return value


def app_page(source: str, documents: Mapping[str, Any] | None = None, measures: Iterable[Measure] = ()) -> str:
    """Return the HTML of the app.

    Args:
        source: `server`, `files`, or `embedded` for a page that holds its documents.
        measures: those of the runs that it shows.
        documents: the documents of an embedded source by address, compressed in the page.
    """
    web = resources.files("kvatlas.report.app") / "web"
    palettes = {"light": _colour_variables(colours.LIGHT), "dark": _colour_variables(colours.DARK)}
    sheet = Template((web / "app.css").read_text("utf-8")).substitute(palettes)
    script = "\n".join((web / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    constants: dict[str, Any] = {
        "source": source,
        "scales": {scale: colours.colour_steps(scale) for scale in colours.SCALES},
        "states": page_marks(),
        "columns": [column.page_words() for column in page_columns(measures) if column.title],
        "marks": MARKS,
    }

    if documents is not None:
        packed = gzip.compress(json_for_script(documents).encode(), mtime=0)
        constants["documents"] = base64.b64encode(packed).decode()
    return Template((web / "app.html").read_text("utf-8")).substitute(
        style=sheet,
        script=script,
        style_hash=_policy_hash(sheet),
        script_hash=_policy_hash(script),
        connect="" if source == "embedded" else "connect-src 'self'; ",
        page=json_for_script(constants),
    )


def _colour_variables(palette: colours.Palette) -> str:
    """Return the colours of a palette that pages share with figures, as variables of a style sheet."""
    shared = {"silent": palette.within_margin, "picked": palette.picked, "band": palette.band, "closer": palette.closer}
    return " ".join(f"--{name}: {colour};" for name, colour in {**shared, **palette.states}.items())


def measures_of_runs(runs: Iterable[AppRun]) -> list[Measure]:
    """Return the measures that the runs declare."""
    return list(dict.fromkeys(chain.from_iterable(run.data.manifest.measures for run in runs)))


def _policy_hash(text: str) -> str:
    """Return the name of this exact inline script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_bundle(runs: Sequence[AppRun], folder: Path) -> int:
    """Write the app and all documents of the runs into a new or empty folder; return the number of files.

    Raises KvatlasError for a folder that holds anything.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KvatlasError(f"A bundle needs a new or empty folder, got {str(folder)!r}.")
    for run in runs:
        with Store.open(run.folder) as store:
            run.refresh(store)

    _write_document(folder / "index.html", app_page("files", measures=measures_of_runs(runs)))
    _write_document(folder / "data" / "runs.json", json_for_script([run.summary() for run in runs]))
    count = 2
    for run in runs:
        for address in ("run", "about", *run.addresses(), *map(trace_address, run.places())):
            _write_document(folder / "data" / run.name / f"{address}.json", json_for_script(run.answer(address)))
            count += 1
    return count


def _write_document(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8", newline="")


def write_report(result: Result, out: Path, *, per_cell: int = 2) -> bool:
    """Write the app of a stored run to the HTML file `out`, whole or not at all; return True if it holds all traces.

    All traces stand in the page if they fit into `TRACES_LIMIT` bytes; if not, `per_cell` of each cell do: the first
    lost one with the full cache's trace of the same problem, the first right one, then other lost ones.
    Raises KvatlasError as `maps_of_run` does, for a file that cannot be written, and for a name without .html.
    """
    check_page(out)
    if not maps_of(result):
        raise KvatlasError("The run has no settings that a report could show.")
    data = result.only_run
    run = AppRun(data, address_name(data.folder or Path("run")), result)

    traces = _traces_of_page(run, per_cell)
    documents = {address: run.answer(address) for address in ("run", "about", *run.addresses())}
    documents |= {trace_address(place): trace for place, trace in traces.items()}
    named = {f"{run.name}/{address}": document for address, document in documents.items()}
    page = app_page("embedded", {"runs": [{**run.summary(), "held": len(traces)}], **named}, data.manifest.measures)
    write_text(page, out)
    return len(traces) == run.done


def check_page(out: Path) -> None:
    """Raise KvatlasError for a name that no page has and a path that cannot be written to."""
    check_target(out)
    if out.suffix.lower() not in PAGE_SUFFIXES:
        raise KvatlasError(f"A report is a page and cannot be written as {out.name!r}; name it '{out.stem}.html'.")


def _traces_of_page(run: AppRun, per_cell: int) -> dict[Place, Json]:
    """Return the page's traces, at most `TRACES_LIMIT` bytes of them."""
    tokens = sum(float(np.nansum(cell.numbers("output_tokens"))) for cell in run.data.cells)
    # A token takes about seven bytes of the page; only where all may fit are all tried.
    most = run.promised if per_cell and 7 * tokens < TRACES_LIMIT else per_cell
    cells = sorted(range(len(run.marks)), key=lambda cell: not run.is_recommended(cell))
    places_by_cell = []
    for cell in cells:
        # After a trace that is not right stands that of the full cache.
        pairs: list[list[Place]] = []
        for place in _telling_places(run, cell)[:most]:
            full = run.full(place)
            pairs.append([place] if full is None or run.mark(place) == RIGHT else [place, full])
        places_by_cell.append(pairs)

    traces: dict[Place, Json] = {}
    size = 0
    # In turns over the cells, recommended ones first, so that a limit takes from all of them alike.
    turns = filter(None, chain.from_iterable(zip_longest(*places_by_cell)))
    shown_first: list[Place] = []
    lost = run.document["lost"]
    if lost is not None and per_cell:
        shown_first = [place for place in (lost, run.full(lost)) if place is not None]
    places = list(dict.fromkeys(chain(shown_first, *turns)))
    if not places:
        return traces
    with run.data.store() as store:
        for place in places:
            document = run.trace_in(store, place, whole=False)
            size += len(json_for_script(document).encode())
            if size > TRACES_LIMIT:
                break
            traces[place] = document
    return traces


def _telling_places(run: AppRun, cell: int) -> list[Place]:
    """Return the stored places of a cell: the first lost one, the first right one, other lost ones, then the rest.

    An answer is lost where it is not right and the full cache's is; without one, any other wrong one stands
    for it.
    """
    places = list(run.places([cell]))
    right = [place for place in places if run.mark(place) == RIGHT]
    wrong = [place for place in places if run.mark(place) != RIGHT]
    lost = list(filter(run.is_lost, places)) or wrong[:1]
    return list(dict.fromkeys([*lost[:1], *right[:1], *lost[1:], *wrong, *right]))

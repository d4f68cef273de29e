"""The app's documents, its one-file report, its server and its bundle: complete, and inert whatever a model wrote."""

import http.client
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas.core import EvictionTrace, KvatlasError, Outcome, Setting, Status
from kvatlas.models.token_texts import token_texts
from kvatlas.report import evidence, sources
from kvatlas.report.app.documents import LETTERS, MARKS, MISSING
from kvatlas.report.app.local_server import AppServer
from kvatlas.report.app.page import write_bundle, write_report
from kvatlas.report.app.run_source import AppRun, open_runs
from kvatlas.report.app.traces import TEXT_LIMIT, evictions_in_steps
from kvatlas.report.materials import RunMaterials
from kvatlas.report.result import open_result
from kvatlas.report.sources import ReadOptions
from kvatlas.results import Manifest, Store
from kvatlas.results.store import FILE
from kvatlas.text import visible
from tests.command_line import Call
from tests.goldens import documents
from tests.stats.synthetic import grid, manifest, traces
from tests.stored import store_run

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x00\x1b[31m\u2066 {{ 7*7 }}"


def report(folder: Path, plan: Manifest, change: Callable[[Any], Any] = lambda item: item, **options: Any) -> Path:
    out = folder / "report.html"
    write_report(open_result([store_run(folder / "run", plan, change=change)]), out, **options)
    return out


def traces_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [document for name, document in page.items() if name.startswith("trace/")]


# -- a report ----------------------------------------------------------------------------------------------------------


def test_a_page_that_cannot_hold_all_has_lost_answers_first_with_those_of_the_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solved(trace: Any) -> Any:
        # The last problem alone is lost: the first ones of a cell do not show it.
        is_lost = trace.setting.policy != "full" and trace.problem == "p11"
        return replace(trace, grade=replace(trace.grade, status=Status.OK, correct=not is_lost))

    monkeypatch.setattr("kvatlas.report.app.page.TRACES_LIMIT", 300_000)
    found = documents(report(tmp_path, manifest(grid("dynts", "random")), solved, per_cell=2))
    held = {(trace["cell"], trace["index"], trace["sample"]): trace["right"] for trace in traces_of(found)}
    assert len(held) < found["run"]["done"]
    for table in found["run"]["outcomes"]:
        for cell in table["rows"]:
            own = {place: right for place, right in held.items() if place[0] == cell}
            if cell == table["full"]:
                continue
            assert sorted(own.values()) == [False, True]
            (lost,) = [place for place, right in own.items() if not right]
            assert lost[1] == 11
            assert held[table["full"], *lost[1:]]
    assert not held[tuple(found["run"]["lost"])]


def test_it_holds_words_maps_comparisons_traces_and_provenance(tmp_path: Path) -> None:
    found = documents(report(tmp_path, manifest(grid("dynts", "random"))))
    assert {f"outcomes/{number}" for number in range(2)} | {f"cell/{number}" for number in range(38)} <= set(found)
    run, about, text = found["run"], found["about"], json.dumps([found["run"], found["about"]])
    assert (run["models"], run["benchmarks"], run["done"]) == (["tiny"], ["CHAIN6", "CHAIN8"], 912)
    for words in ("lose at most 3 points", "rest", "key-tiny-CHAIN6", "0.1.0"):
        assert words in text
    assert json.loads(about["spec"])["seed"] == 0
    assert [(one["first"], one["second"]) for one in about["comparisons"]] == [("dynts", "random")]
    assert [(item["benchmark"], item["policy"]) for item in run["maps"]] == [
        (benchmark, policy) for benchmark in ("mean of 2", "CHAIN6", "CHAIN8") for policy in ("dynts", "random")
    ]
    for item in run["maps"]:
        assert (item["rows"], item["columns"]) == (["32", "16", "8"], ["0.1", "0.3", "0.5"])
        assert all(number is not None for row in item["cells"] for number in row)
        # By luck the dearest setting of one policy was 23 points ahead of the full cache.
        kept = [place for place, state in np.ndenumerate(np.array(item["states"], object)) if state == "within"]
        assert kept in ([], [(0, 2)])
    cell = run["cells"][run["maps"][2]["cells"][0][0]]
    assert cell["short"] == "dynts(local_window=32, ratio=0.1)"
    assert (cell["problems"], cell["samples"], cell["kept"], cell["output"], cell["peak"]) == (12, 2, 60.5, 100, 96)
    assert len(cell["difference"]) == 3
    assert 0 <= cell["truncated"] <= 100
    assert cell["low"] < cell["value"] < cell["high"]


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_it_needs_no_network_and_hostile_text_is_inert_visible_and_cut(tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), models=("<script>m</script>",), benchmarks=('B"><script>',), problems=1, samples=1)
    out = report(tmp_path, plan, lambda item: replace(item, text=HOSTILE + "y" * 200_000))
    html = out.read_text("utf-8")
    page = Tags(html)
    assert not {"link", "iframe", "object", "form", "img"} & set(page.tags)
    assert page.tags.count("script") == 2
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("style", "src")]
    assert all(value and value.startswith("#") for name, value in page.attributes if name == "href")
    assert "https://" not in html
    assert html.replace("http://www.w3.org/2000/svg", "").count("http://") == 0
    assert re.search(r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'; base-uri", html)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", html)
    trace = traces_of(documents(out))[0]
    assert trace["text"] == visible(HOSTILE) + "y" * (TEXT_LIMIT - len(HOSTILE))
    assert trace["more"] == len(HOSTILE) + 200_000 - TEXT_LIMIT
    assert "⟨U+202E⟩evil⟨U+0000⟩⟨U+001B⟩[31m⟨U+2066⟩ {{ 7*7 }}" in trace["text"]


def test_a_page_holds_all_traces_that_fit_else_some_of_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = open_result([store_run(tmp_path / "run", manifest(grid("dynts"), problems=3))])
    out = tmp_path / "report.html"
    assert write_report(result, out)
    assert len(traces_of(documents(out))) == 3 * 10 * 2 * 2
    monkeypatch.setattr("kvatlas.report.app.page.TRACES_LIMIT", 9_000)
    assert not write_report(result, out, per_cell=1)
    found = documents(out)
    full = {table["full"] for table in found["run"]["outcomes"]}
    own = Counter(trace["cell"] for trace in traces_of(found) if trace["cell"] not in full)
    assert len(own) > 5
    assert set(own.values()) == {1}


def test_a_partial_run_is_refused_or_says_so(tmp_path: Path) -> None:
    plan = manifest(grid("dynts"))
    out, folder = tmp_path / "r.html", tmp_path / "run"
    with Store.create(folder) as store:
        store.put_manifest(plan)
        with pytest.raises(KvatlasError, match="none of its 480 traces"):
            write_report(open_result([folder]), out)
        for key, trace in list(traces(plan))[24:]:
            store.add(key, trace)
    with pytest.raises(KvatlasError, match="24 of 480 traces are missing"):
        write_report(open_result([folder]), out)
    assert not out.exists()
    write_report(open_result([folder], ReadOptions(partial=True)), out)
    run = documents(out)["run"]
    assert "PARTIAL: 24 of 240 traces of a map are missing, in 1 cell" in run["warnings"]
    assert run["maps"][1]["cells"][2][0] is None
    with pytest.raises(KvatlasError, match="is a folder"):
        write_report(open_result([folder], ReadOptions(partial=True)), tmp_path)


@pytest.mark.parametrize(
    ("settings", "axes", "rows", "columns"),
    [
        ([Setting.from_parameters(p, kv_budget=b) for p in ("dynts", "window") for b in (64, 96)],
         (("kv_budget", (64, 96)),), ["window", "dynts"], ["64", "96"]),
        ([Setting.from_parameters("dynts", kv_budget=64), Setting.from_parameters("window", kv_budget=64)], (),
         ["full", "window", "dynts"], ["pass@1"]),
    ],
)  # fmt: skip
def test_runs_without_two_axes_have_a_page_too(
    tmp_path: Path, settings: list[Setting], axes: Any, rows: list[str], columns: list[str]
) -> None:
    plan = manifest(settings, axes=axes, problems=3)
    found = documents(report(tmp_path, plan))
    run = found["run"]
    assert (run["maps"][1]["rows"], run["maps"][1]["columns"]) == (rows, columns)
    # Every two settings are compared, and stand in a table with what they lose, the highest first.
    pairs = len(settings) * (len(settings) + 1) // 2
    assert len(found["about"]["comparisons"]) == pairs
    (table,) = run["tables"]
    values = [run["cells"][row["cell"]]["value"] for row in table["rows"]]
    assert len(values) == len(settings) + 1
    assert values == sorted(values, reverse=True)
    lost = {run["cells"][row["cell"]]["name"]: row["loss"] for row in table["rows"]}
    assert {name for name, loss in lost.items() if loss is None} == {"full"}
    (card,) = run["cards"]
    assert card["settings"] == len(settings)


def test_every_outcome_has_a_letter_and_a_word_on_the_page() -> None:
    assert set(LETTERS) == set(Outcome)
    assert MARKS.keys() == {*LETTERS.values(), MISSING}
    assert len(MARKS) == len(Outcome) + 1


def test_a_csv_map_has_no_page(tmp_path: Path) -> None:
    file = tmp_path / "map.csv"
    file.write_text("model,benchmark,local_window,ratio,pass_at_1\nM,B,8,0.1,40\nM,B,8,0.2,41\n")
    with pytest.raises(KvatlasError, match="A report needs the folder of one run, and the file is a map without"):
        write_report(open_result([file]), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_evictions_of_a_trace() -> None:
    eviction_trace = EvictionTrace(1, (0, 5, 3, 0, 5, 0, 0, 0), (1, 0, 0, 1, 0, 1, 1, 1))
    coded = {"steps": [3, 5], "left": [1, 0, 2, 0, 0, 0], "judged": 3, "prompt_left": [0, 1]}
    assert evictions_in_steps(eviction_trace, 2, 6, 1) == coded
    shared = evictions_in_steps(EvictionTrace(4, (0, 0, 2), (4, 1, 0)), 1, 2, None)
    assert (shared["holders"], shared["held"]) == (4, [25, 0])
    never = {"steps": [], "left": [], "judged": 0, "prompt_left": []}
    assert evictions_in_steps(EvictionTrace(1, (0,), (1,)), 1, 0, 8) == never


@pytest.mark.parametrize("text", ["plain text", "数学 é 𝕏 mixed", "ends in é"])
def test_texts_of_tokens_join_to_the_whole(text: str) -> None:
    # A tokenizer of bytes: characters beyond ASCII are several tokens.
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))
    tokens = tuple(text.encode())
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text


@pytest.mark.parametrize("spec", [{}, {"models": ["hf:/nowhere"], "benchmarks": ["NONE"]}])
def test_what_is_gone_is_missing_and_no_error(spec: dict[str, Any]) -> None:
    result = RunMaterials.from_manifest(Manifest((), (), spec, {}))
    assert (result.models, result.problems) == ({}, {})
    assert result.pieces("m", (1, 2)) is None


# -- a server and a bundle ---------------------------------------------------------------------------------------------

Get = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> AppRun:
    def again(item: Any) -> Any:
        return replace(item, text="Wait, again") if item.problem == "p1" and not item.grade.correct else item

    folder, plan = tmp_path_factory.mktemp("view") / "run", manifest(grid("dynts"), problems=2)
    store_run(folder, plan, lambda one: 1.0 if one.policy == "full" else 0.5, again)
    (opened,) = open_runs([folder], {})
    with Store.open(folder) as store:
        opened.refresh(store)
    return opened


def test_the_metric_and_the_margin_of_the_command_line_are_those_of_the_app(run: AppRun) -> None:
    (usual,) = open_runs([run.folder], {})
    (other,) = open_runs([run.folder], {}, "progress", 7.0)
    with Store.open(run.folder) as store:
        usual.refresh(store)
        other.refresh(store)
    assert (usual.document["metric"], other.document["metric"]) == ("Pass@1", "Progress Ratio")
    assert (usual.result.margin, other.result.margin) == (0.03, 0.07)


@pytest.fixture
def get(run: AppRun) -> Iterator[Get]:
    server = AppServer([run], token="right-token")
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(path: str, host: str | None = "localhost", method: str = "GET") -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text

    yield ask
    server.shutdown()
    server.server_close()


def test_only_this_machine_and_the_token_get_an_answer(get: Get) -> None:
    status, headers, text = get("/right-token/data/runs.json")
    assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
    assert json.loads(text)[0]["name"] == "run"
    status, headers, text = get("/right-token/", "127.0.0.1:1234")
    assert (status, headers["referrer-policy"], headers["cache-control"]) == (200, "no-referrer", "no-store")
    assert "connect-src 'self'" in text
    for path in (
        "/", "/data/runs.json", "/wrong/data/runs.json", "/right-toke/", "/right-token/data/x/run.json",
        "/right-token/data/run/cell/99.json", "/right-token/data/run/trace/0/99/0.json",
        "/right-token/data/run/trace/0/0/9.json", "/right-token/data/run/trace/0/-1/0.json",
        "/right-token/data/run/outcomes/9.json", "/right-token/data/run/publish.json",
        "/right-token/data/run/trace/0/../../../../etc/passwd", "/right-token/%2e%2e/run.sqlite",
        "/right-token/data/run/find.json?start=x",
    ):  # fmt: skip
        assert get(path)[0] == 404, path
    for host in ("evil.example", "127.0.0.1.evil.example", None, "[::1", "127.0.0.1/evil.example", "127.0.0.1@evil"):
        assert get("/right-token/data/runs.json", host)[0] == 403, host
    status, _, text = get("/right-token/data/run/find.json?what=no")
    assert (status, "Unknown filter 'no'; expected one of lost, " in text) == (409, True)
    assert get("/right-token/", method="POST")[0] == 501
    assert get("http://[/right-token/data/runs.json")[0] == 404


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replace(folder: Path) -> None:
    """Put a copy in the place of the run, as deleting it and sweeping anew does."""
    copied = shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    copied.rename(folder)


def _cut(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.truncate(100)


@pytest.mark.parametrize("change", [shutil.rmtree, _move, _replace, _cut])
@pytest.mark.parametrize("is_read", [True, False])
def test_a_run_that_goes_while_it_is_shown_is_told(
    run: AppRun, tmp_path: Path, change: Callable[[Path], Any], is_read: bool
) -> None:
    """Deleted, moved, replaced or damaged, before or after it was read: its line says so, and another run goes on."""
    for name in ("gone", "stays"):
        shutil.copytree(run.folder, tmp_path / name)
    gone, stays = open_runs([tmp_path / "gone", tmp_path / "stays"], {})
    server = AppServer([gone, stays])
    if not is_read:
        _ = gone.materials
        change(gone.folder)
    follower = threading.Thread(target=server.follow, daemon=True)
    follower.start()
    try:
        wait_until(lambda: stays.done == stays.promised)
        if is_read:
            wait_until(lambda: gone.done == gone.promised)
            assert server.failures == {}
            change(gone.folder)
        if is_read or change is not _replace:
            wait_until(lambda: gone.name in server.failures)
            assert str(gone.folder) in server.failures[gone.name]
        assert stays.name not in server.failures
        assert follower.is_alive()
    finally:
        server.server_close()
        follower.join()


def test_a_mistake_in_reading_one_run_is_shown_and_leaves_the_others(
    run: AppRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wrong", "right"):
        shutil.copytree(run.folder, tmp_path / name)
    wrong, right = open_runs([tmp_path / "wrong", tmp_path / "right"], {})
    monkeypatch.setattr(wrong, "refresh", lambda _: {}["nope"])
    server = AppServer([wrong, right])
    follower = threading.Thread(target=server.follow, daemon=True)
    follower.start()
    try:
        wait_until(lambda: right.done == right.promised and wrong.name in server.failures)
        assert server.failures == {wrong.name: "The run is not followed any more (KeyError: 'nope')."}
    finally:
        server.server_close()
        follower.join()
    assert capsys.readouterr().err.count("Traceback") == 1


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_answers_what_the_store_holds(run: AppRun) -> None:
    with Store.open(run.folder) as store:
        stored = {(t.benchmark, str(t.setting), t.problem, t.sample): t for _, t in store.traces()}
    assert run.done == run.promised == len(stored) == run.summary()["done"]
    found = open_result([run.folder])
    values = {
        (map_.benchmark, str(cell.setting)): 100 * cell.estimate.value
        for map_ in found.untested
        for cell in map_.cells.values()
    }
    cells, tables = run.document["cells"], run.document["outcomes"]
    assert [table["benchmark"] for table in tables] == ["CHAIN6", "CHAIN8"]
    # The full cache first, then by the values of parameters: 8 before 16.
    names = [cells[cell]["short"] for cell in tables[0]["rows"]]
    assert names[:2] == ["full", "dynts(local_window=8, ratio=0.1)"]
    assert names[4] == "dynts(local_window=16, ratio=0.1)"
    for number, table in enumerate(tables):
        assert (table["problems"], table["samples"], len(table["rows"])) == (("p0", "p1"), 2, 10)
        for cell, marks in zip(table["rows"], run.outcomes(number)["marks"], strict=True):
            name, places = cells[cell]["name"], list(run.places([cell]))
            own = [stored[table["benchmark"], name, f"p{problem}", sample] for _, problem, sample in places]
            assert marks == "".join(map(run.mark, places)) == "".join("r" if t.grade.correct else "t" for t in own)
            assert [run.trace(*place)["text"] for place in places] == [trace.text for trace in own]
            assert run.cell(cell)["lengths"] == [trace.usage.output_tokens for trace in own]
            if name != "full":
                assert cells[cell]["value"] == pytest.approx(values[table["benchmark"], name], abs=1e-3)
    assert len(run.document["cards"]) == len(found.choices) == 1
    assert run.document["finished"]
    assert len(run.about()["comparisons"]) == len(found.comparisons)


def test_the_analysis_is_made_once_for_map_and_evidence(run: AppRun, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    modules = dict.fromkeys(("fixed_run_tests", "losses_of", "comparisons", "with_regions"), evidence)
    modules |= dict.fromkeys(("maps_of_run", "mean_maps"), sources)
    for name, module in modules.items():
        original = getattr(module, name)

        def counted(*given: Any, original: Any = original, name: str = name) -> Any:
            calls[name] += 1
            return original(*given)

        monkeypatch.setattr(module, name, counted)
    (fresh,) = open_runs([run.folder], {})
    with Store.open(run.folder) as store:
        fresh.refresh(store)
    first = fresh.answer("about")
    made = Counter(calls)
    assert made["losses_of"] == made["fixed_run_tests"] == made["comparisons"] == 1
    # Of three documents (no traces, all traces, with tests) each has its maps made once; tested are maps and means.
    assert made == Counter(dict.fromkeys(modules, 1) | {"maps_of_run": 3, "with_regions": 2})
    assert [fresh.answer("about"), fresh.answer("about")] == [first, first]
    assert calls == made


def test_a_page_that_sees_a_version_finds_its_document(run: AppRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page asks for the document once for each version: one that was told too early would stay old for good."""
    told = []

    def noted(self: AppRun) -> None:
        told.append((self.summary()["version"], self.document["version"]))

    monkeypatch.setattr(AppRun, "first_lost", noted)
    (fresh,) = open_runs([run.folder], {})
    with Store.open(run.folder) as store:
        fresh.refresh(store)
    assert told
    assert all(version == of_document for version, of_document in told)
    assert fresh.summary() == {name: fresh.document[name] for name in fresh.summary()}


def test_searches_find_exactly_what_fits(run: AppRun) -> None:
    with Store.open(run.folder) as store:
        stored = [trace for _, trace in store.traces()]

    def count(**query: Any) -> int:
        hits, start = [], 0
        while start is not None:
            answer = run.find(**query, start=start)
            hits += answer["hits"]
            start = answer["next"]
        assert len({tuple(hit[:3]) for hit in hits}) == len(hits)
        return len(hits)

    assert count() == len(stored)
    assert count(text="WAIT, again") == sum("Wait, again" in item.text for item in stored) > 0
    # The full cache is right everywhere.
    assert count(what="lost") == count(what="wrong") == sum(not item.grade.correct for item in stored) > 0
    assert count(what="right", table=0) == sum(item.grade.correct and item.benchmark == "CHAIN6" for item in stored)


def test_it_follows_a_sweep_and_its_numbers_stay(tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), problems=3)
    every = list(traces(plan))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        (run,) = open_runs([tmp_path / "run"], {"local_window": "8"})
        assert run.data.fix == {"local_window": 8}
        (run,) = open_runs([tmp_path / "run"], {})
        assert run.document["maps"] == []
        assert run.summary()["loading"]
        with Store.open(tmp_path / "run") as reader:
            run.refresh(reader)
            for key, item in every[: len(every) // 2]:
                store.add(key, item)
            assert run.refresh(reader)
            half = run.document
            assert (half["done"], half["finished"], half["cards"]) == (len(every) // 2, False, [])
            assert not half["loading"]
            assert run.about()["interpretation"] == ()
            assert not run.refresh(reader)
            for key, item in every[len(every) // 2 :]:
                store.add(key, item)
            assert run.refresh(reader)
    whole = run.document
    assert whole["version"] > half["version"]
    assert (whole["done"], whole["finished"]) == (len(every), True)
    names = [(cell["model"], cell["benchmark"], cell["name"]) for cell in half["cells"]]
    count = len(plan.expected)
    assert names[:count] == [(cell["model"], cell["benchmark"], cell["name"]) for cell in whole["cells"]][:count]


def test_a_bundle_holds_what_the_app_answers(
    tmp_path: Path, run: AppRun, get: Get, succeed: Callable[..., str]
) -> None:
    said = succeed("view", str(run.folder), "--out", str(tmp_path / "site"))
    files = sorted((tmp_path / "site" / "data").rglob("*.json"))
    assert f"{len(files) + 1:,} files" in said
    assert sum(path.parts[-4] == "trace" for path in files) == run.promised
    for path in files:
        if path.name not in ("runs.json", "run.json"):
            address = path.relative_to(tmp_path / "site").as_posix()
            assert get(f"/right-token/{address}")[2] == path.read_text("utf-8"), path
    with pytest.raises(KvatlasError, match="new or empty folder"):
        write_bundle([run], tmp_path / "site")


def test_what_is_wrong_is_a_sentence(tmp_path: Path, kvatlas: Call, run: AppRun) -> None:
    err = kvatlas.refuse("view", tmp_path / "none")
    assert err.startswith(f"kvatlas: There is no run {str(tmp_path / 'none')!r}; expected its folder.")
    with AppServer([]) as server, pytest.raises(KvatlasError, match="cannot be had; name another with --port"):
        AppServer([], server.server_port)
    names = [one.name for one in open_runs([run.folder, run.folder], {})]
    assert names == ["run", "run-2"]

"""The app over stores: who may ask, what it answers, what it follows, and the files of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kvatlas.core import Grade, KvatlasError, Status
from kvatlas.results import Store
from kvatlas.view.app import application, named
from kvatlas.view.bundle import write_bundle
from kvatlas.view.find import Query, find
from kvatlas.view.run_view import RunView
from tests.stats.synthetic import grid, manifest, traces

LOOPED = (*range(200), *([7, 8, 9] * 40))


def made(folder: Path, chance: float = 0.5, seed: int = 0, **options: Any) -> Path:
    plan = manifest(grid("dynts"), problems=2, **options)
    with Store.create(folder) as store:
        store.put_manifest(plan)
        for key, trace in traces(plan, lambda setting: 1.0 if setting.policy == "full" else chance, seed):
            looped = trace.grade.status is Status.TRUNCATED and trace.problem == "p1"
            store.add(key, replace(trace, tokens=LOOPED, text="Wait, again") if looped else trace)
    return folder


def read(*folders: Path) -> list[RunView]:
    views = named(folders, {})
    for view in views:
        with Store.open(view.folder) as store:
            view.refresh(store)
    return views


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return read(made(tmp_path_factory.mktemp("view") / "run"))[0]


def test_only_this_machine_and_the_token_get_an_answer(view: RunView) -> None:
    app = application([view], "right-token")
    client = TestClient(app, base_url="http://127.0.0.1:1234")
    assert client.get("/right-token/data/runs.json").status_code == 200
    assert client.get("/right-token/").headers["referrer-policy"] == "no-referrer"
    for path in ("/", "/data/runs.json", "/wrong/data/runs.json", "/wrong/", "/right-toke/", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 404, path
    for host in ("evil.example", "evil.example:1234", "127.0.0.1.evil.example", ""):
        assert client.get("/right-token/data/runs.json", headers={"Host": host}).status_code == 403, host
    for path in (
        "x/run.json",
        "run/cell/99.json",
        "run/trace/0/99/0.json",
        "run/trace/0/0/9.json",
        "run/outcomes/9.json",
    ):
        assert client.get(f"/right-token/data/{path}").status_code == 404, path
    assert client.get("/right-token/data/run/trace/0/../../../../etc/passwd").status_code == 404
    assert client.get("/right-token/data/run/find.json", params={"what": "no"}).status_code == 409


def test_it_answers_what_the_store_holds(view: RunView) -> None:
    with Store.open(view.folder) as store:
        stored = list(store.traces())
    assert view.done == view.promised == len(stored) == view.summary()["done"]
    for key, trace in stored:
        number = next(
            n
            for n, item in enumerate(view.manifest.expected)
            if (item.run_key, item.setting, item.benchmark) == (key, trace.setting, trace.benchmark)
        )
        at = int(trace.problem[1:]) * 2 + trace.sample
        assert view.marks[number][at] == ("r" if trace.grade.correct else "t")
        assert view.cell(number)["lengths"][at] == trace.usage.output_tokens
    document = json.loads(view.document)
    from kvatlas.stats.run_analysis import RunAnalysis
    from kvatlas.stats.run_data import RunData

    analysis = RunAnalysis(RunData.open(view.folder))
    for map_ in analysis.maps:
        for cell in map_.cells.values():
            number = next(
                n
                for n, item in enumerate(view.manifest.expected)
                if (item.model, item.benchmark, item.setting) == (map_.model, map_.benchmark, cell.setting)
            )
            assert document["cells"][number]["value"] == pytest.approx(100 * cell.estimate.value, abs=1e-3)
    assert len(document["cards"]) == len(analysis.choices) == 1
    assert document["finished"]


def test_searches_find_exactly_what_fits(view: RunView) -> None:
    with Store.open(view.folder) as store:
        stored = [trace for _, trace in store.traces()]

    def count(**query: Any) -> int:
        hits, start = [], 0
        while start is not None:
            answer = find(view, Query(**query), start)
            hits += answer["hits"]
            start = answer["next"]
        assert len({tuple(hit[:3]) for hit in hits}) == len(hits)
        return len(hits)

    assert count() == len(stored)
    assert count(text="WAIT, again") == sum("Wait, again" in item.text for item in stored) > 0
    # The full cache is right everywhere.
    assert count(filter="lost") == count(filter="wrong") == sum(not item.grade.correct for item in stored) > 0
    assert count(filter="right", table=0) == sum(item.grade.correct and item.benchmark == "CHAIN6" for item in stored)
    with pytest.raises(KvatlasError, match="lost, right, wrong, truncated"):
        Query(filter="else")


def test_it_follows_a_sweep_and_its_numbers_stay(tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), problems=3)
    every = list(traces(plan))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        (view,) = named([tmp_path / "run"], {})
        assert json.loads(view.document)["maps"] == []
        with Store.open(tmp_path / "run") as reader:
            view.refresh(reader)
            for key, item in every[: len(every) // 2]:
                store.add(key, item)
            assert view.refresh(reader)
            half = json.loads(view.document)
            assert (half["done"], half["finished"], half["cards"]) == (len(every) // 2, False, [])
            assert not view.refresh(reader)
            for key, item in every[len(every) // 2 :]:
                store.add(key, item)
            assert view.refresh(reader)
            whole = json.loads(view.document)
    assert whole["version"] > half["version"]
    assert (whole["done"], whole["finished"]) == (len(every), True)
    names = [(cell["model"], cell["benchmark"], cell["name"]) for cell in half["cells"]]
    count = len(plan.expected)
    assert names[:count] == [(cell["model"], cell["benchmark"], cell["name"]) for cell in whole["cells"]][:count]


def test_a_bundle_holds_what_the_app_answers(tmp_path: Path, succeed: Callable[..., str]) -> None:
    run = made(tmp_path / "run")
    said = succeed("view", str(run), "--bundle", str(tmp_path / "site"))
    (view,) = read(run)
    client = TestClient(application([view], "t"), base_url="http://localhost")
    files = sorted((tmp_path / "site" / "data").rglob("*.json"))
    assert f"{len(files) + 1:,} files" in said
    assert sum(path.parts[-4] == "trace" for path in files) == view.promised
    for path in files:
        if path.name in ("runs.json", "run.json"):
            continue
        answer = client.get(f"/t/data/{path.relative_to(tmp_path / 'site' / 'data').as_posix()}")
        assert answer.text == path.read_text("utf-8"), path
    with pytest.raises(KvatlasError, match="new or empty folder"):
        write_bundle([view], tmp_path / "site")


def test_what_is_wrong_is_a_sentence(tmp_path: Path, kvatlas: Callable[..., Any]) -> None:
    code, _, err = kvatlas("view", tmp_path / "none")
    assert code == 2
    assert err == f"kvatlas: {str(tmp_path / 'none')!r} is no run: there is no run.sqlite in it.\n"


def test_hostile_answers_stay_text(tmp_path: Path) -> None:
    plan = manifest(grid("dynts"), models=("m\x1b[2J</script>",), benchmarks=("b\u202e",), problems=1, samples=1)
    hostile = "</script><script>window.harmed=1</script>\x00\u202e"
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan)
        for key, trace in traces(plan):
            store.add(key, replace(trace, text=hostile, grade=Grade(True, 1.0, hostile, Status.OK)))
    (view,) = read(tmp_path / "run")
    client = TestClient(application([view], "t"), base_url="http://localhost")
    for path in ("run/run.json", "run/trace/0/0/0.json", "run/find.json?text=harmed", "run/cell/0.json", "runs.json"):
        answer = client.get(f"/t/data/{path}")
        assert answer.status_code == 200
        assert "<" not in answer.text
        assert not {"\x1b", "\u202e", "\x00"} & set(answer.text)
    assert "⟨U+202E⟩" in client.get("/t/data/run/trace/0/0/0.json").json()["text"]

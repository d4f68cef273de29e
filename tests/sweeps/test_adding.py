"""Another spec into the folder of a run: its settings are added, or it is refused with what differs."""

import json
import multiprocessing
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvatlas as package
from kvatlas.benchmarks.chain import Chain
from kvatlas.cli import command
from kvatlas.core import SERVED, KvatlasError, Problem, digest
from kvatlas.results import Manifest, Store
from kvatlas.results.store import FILE
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.command_line import Call
from tests.sweeps.conftest import Build, contents


def promise(folder: Path) -> Manifest:
    with Store.open(folder) as store:
        return store.manifest()


def policies(folder: Path) -> list[str]:
    return list(dict.fromkeys(cell.setting.policy for cell in promise(folder).expected))


@pytest.fixture(scope="module")
def grid(spec_data: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished grid of one policy with the full cache beside it, on one benchmark."""
    folder = tmp_path_factory.mktemp("grid") / "run"
    sweep(make_plan(parse_spec(small(spec_data))), folder, workers=1)
    return folder


def small(spec_data: Build, policy: str = "window", **changes: Any) -> dict[str, Any]:
    setting = {"policy": policy, "kv_budget": 64, "ratio_over": "thinking"}
    return spec_data(**{"benchmarks": ["CHAIN4"], "problems": 2, "samples": 1, "settings": setting, **changes})


@pytest.fixture
def copy(grid: Path, tmp_path: Path) -> Path:
    with Store.open(grid) as store:
        store.copy(tmp_path / "run")
    return tmp_path / "run"


def test_a_smaller_sweep_into_a_larger_run_says_what_stays(spec_data: Build, copy: Path) -> None:
    said: list[str] = []
    plan = make_plan(parse_spec(small(spec_data, problems=1)))
    sweep(plan, copy, workers=1, on_message=said.append)
    assert said[-1] == "The run keeps its 2 problems of CHAIN4; this sweep asks the first 1."
    said.clear()
    sweep(plan, copy, workers=1, replace=True, on_message=said.append)
    assert not any("keeps its" in sentence for sentence in said)


def test_a_damaged_manifest_is_refused_and_replaced_where_asked(spec_data: Build, copy: Path) -> None:
    with sqlite3.connect(copy / FILE) as connection:
        connection.execute("UPDATE meta SET value = '{}' WHERE name = 'manifest'")
    plan = make_plan(parse_spec(small(spec_data)))
    with pytest.raises(KvatlasError, match="the manifest is not what was written"):
        sweep(plan, copy, workers=1)
    sweep(plan, copy, workers=1, replace=True)
    # What the run had is unknown, so its tests may have been chosen after the data.
    assert promise(copy) == plan.manifest().with_cells([], replaced=True)


def test_a_setting_after_the_other_makes_one_run(kvatlas: Call, succeed: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "acc"
    run = ("run", "embedded:tiny-llama", "CHAIN4", "--problems", 2, "--max-new-tokens", 60, "--workers", 1)
    run = (*run, "--out", out)
    cell = ("--kv-budget", 64, "--local-window", 16, "--ratio", 0.5, "--set", "ratio_over=thinking", "--policy")
    succeed(*run, *cell, "h2o")
    (printed,) = json.loads(succeed(*run, *cell, "snapkv", "--json"))["benchmarks"]
    assert (printed["benchmark"], printed["problems"]) == ("CHAIN4", 2)
    assert policies(out) == ["h2o", "snapkv"]
    assert {cell.policy for cell in package.open_run(out).cells().itertuples()} == {"h2o", "snapkv"}
    traces = succeed("export", out, "--format", "jsonl").splitlines()
    assert [json.loads(line)["policy"] for line in traces].count("snapkv") == 2 == len(traces) - 2
    succeed(*run, *cell, "h2o", "--show", 0)
    assert policies(out) == ["h2o", "snapkv"]
    assert succeed("export", out, "--format", "jsonl").splitlines() == traces
    code, _, said = kvatlas(*run, *cell, "h2o", "--temperature", 0.8)
    assert (code, said.splitlines()[-1]) == (
        2,
        f"kvatlas: The run in {str(out)!r} has sampling.temperature 0.6 (this spec: 0.8); name another folder, or "
        "replace its settings by this spec with --replace (its traces stay in the store).",
    )
    succeed(*run, *cell, "h2o", "--temperature", 0.8, "--replace")
    assert policies(out) == ["h2o"]
    with Store.open(out) as store:
        assert len(store.keys()) == 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"benchmarks": ["CHAIN5"], "seed": 4},
            "has benchmarks CHAIN4 (this spec: CHAIN5) and seed 3 (this spec: 4); ",
        ),
        ({"models": ["embedded:tiny-llama"]}, "(this spec: embedded:tiny-llama); name another folder"),
        ({"models": ["MODEL"]}, "(this spec: other); name another folder"),
        ({"models": ["WEIGHTS"]}, "has window(keep_prompt=True, kv_budget=64, local_window=4, ratio=0.2, "),
    ],
)
def test_what_is_of_another_kind_is_refused_with_what_differs(
    grid: Path, copy: Path, spec_data: Build, changes: dict[str, Any], sentence: str
) -> None:
    spec = small(spec_data, "random")
    named = {"MODEL": {"model": spec["models"][0], "name": "other"}}
    # The same name for other weights.
    named["WEIGHTS"] = {"model": "embedded:tiny-llama", "name": spec["models"][0]}
    changes = {**changes, "models": [named.get(name, name) for name in changes.get("models", spec["models"])]}
    before = promise(copy)
    plan = make_plan(parse_spec({**spec, **changes}))
    with pytest.raises(KvatlasError) as caught:
        sweep(plan, copy, workers=1, on_trace=lambda _: pytest.fail("decoded"))
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(
        "or replace its settings by this spec with --replace (its traces stay in the store)."
    )
    assert promise(copy) == before


def test_grids_are_added_up(copy: Path, spec_data: Build) -> None:
    """Another policy, another ratio, another baseline, another problem."""
    axes = {"local_window": [4, 8], "ratio": [0.5, 0.8]}
    baseline = [{"policy": "streaming", "kv_budget": 64, "local_window": 8, "ratio": 0.5, "ratio_over": "thinking"}]
    added = small(spec_data, "random", axes=axes, baseline=baseline)
    run = package.sweep(added, copy, workers=1)
    assert policies(copy) == ["window", "full", "random", "streaming"]
    assert dict(promise(copy).axes) == {"local_window": (4, 8), "ratio": (0.2, 0.5, 0.8)}
    assert [(map_.policy, dict(map_.axes)["ratio"], list(map_.baselines)) for map_ in run.maps()] == [
        ("window", (0.2, 0.5), ["full", "streaming"]),
        ("random", (0.5, 0.8), ["full", "streaming"]),
    ]
    assert {"window", "random"} <= {map_["policy"] for map_ in run.describe().to_json()["maps"]}
    # Its spec makes the whole of it again.
    plan = make_plan(parse_spec(dict(promise(copy).spec)))
    expected = {cell.name: cell for cell in promise(copy).expected}
    assert {cell.name: cell for cell in plan.manifest().expected} == expected
    assert Manifest.from_json(json.loads(json.dumps(promise(copy).to_json()))).spec == promise(copy).spec
    sweep(plan, copy, workers=1, on_trace=lambda _: pytest.fail("decoded"))
    first = make_plan(parse_spec(small(spec_data)))
    sweep(first, copy, workers=1, on_trace=lambda _: pytest.fail("decoded"))
    assert {cell.name: cell for cell in promise(copy).expected} == expected
    # More problems extend all settings; those that did not run lack them.
    sweep(make_plan(parse_spec(small(spec_data, problems=3, samples=2))), copy, workers=1)
    assert {(len(cell.problems), cell.samples) for cell in promise(copy).expected} == {(3, 2)}
    with pytest.raises(KvatlasError, match="20 of 60 traces are missing, in 5 of 10 cells"):
        maps_of_run(RunData.open(copy))
    fewer = make_plan(parse_spec(small(spec_data)))
    sweep(fewer, copy, workers=1)
    assert {(len(cell.problems), cell.samples) for cell in promise(copy).expected} == {(3, 2)}
    sweep(fewer, copy, workers=1, replace=True)
    assert promise(copy).expected == fewer.manifest().expected


def test_imported_cells_stay_as_they_are(copy: Path, spec_data: Build) -> None:
    """Next to another policy, and next to more problems of the same benchmark."""
    cell = replace(promise(copy).expected[0], model="remote", setting=SERVED, run_key="log", baseline=True)
    with Store.create(copy) as store:
        before = store.manifest()
        imported = {"imported": {f"remote {cell.benchmark}": {"log": "a.eval"}}}
        provenance = {**before.provenance, **imported}
        store.put_manifest(replace(before, expected=(*before.expected, cell), provenance=provenance))
    for added in (small(spec_data, "random"), small(spec_data, problems=3)):
        sweep(make_plan(parse_spec(added)), copy, workers=1)
        assert [c for c in promise(copy).expected if c.model == "remote"] == [cell]
    assert {len(c.problems) for c in promise(copy).expected if c.model != "remote"} == {3}


def test_an_adaptive_run_is_refused_and_completed_by_its_spec(copy: Path, grid: Path, spec_data: Build) -> None:
    """Its settings have unlike problems, chosen by outcomes: no reader may take them for a fixed sweep."""
    with Store.open(copy) as store:
        before = store.manifest()
        with sqlite3.connect(store.path) as connection:
            data = before.to_json()
            data["spec"] = {**before.spec, "allocate": {"kind": "adaptive", "blocks": 2}}
            data["allocation"] = {"kind": "adaptive", "blocks": 2, "problems": {"CHAIN4": 2}, "stopped": {}}
            text = json.dumps(data)
            rows = [(text, "manifest"), (digest(text), "manifest_digest")]
            connection.executemany("UPDATE meta SET value = ? WHERE name = ?", rows)

    spec = make_plan(parse_spec(small(spec_data)))
    for read in (lambda: promise(copy), lambda: sweep(spec, copy, workers=1)):
        with pytest.raises(KvatlasError, match=r"is an adaptive sweep .*; kvatlas 0\.1\.0 is the last release"):
            read()
    sweep(spec, copy, workers=1, replace=True)
    assert promise(copy).expected == promise(grid).expected
    assert contents(copy) == contents(grid)


def test_facts_of_an_earlier_version_are_read_without_the_parameters_that_went(copy: Path) -> None:
    """Its cells have equal parameters with those of today, unless such a parameter changed something."""
    stored = json.loads(json.dumps(promise(copy).to_json()))
    earlier = json.loads(json.dumps(stored).replace('"plan_prefix": 0', '"plan_prefix": 0, "refresh": 1, "carry": 0.0'))
    assert earlier != stored
    assert Manifest.from_json(earlier) == Manifest.from_json(stored)
    other = json.loads(json.dumps(stored).replace('"plan_prefix": 0', '"plan_prefix": 0, "refresh": 4'))
    facts = [[cell.facts for cell in Manifest.from_json(read).expected] for read in (stored, other)]
    assert facts[0] != facts[1]


def test_the_spec_of_an_earlier_fixed_sweep_is_read_without_its_allocation(copy: Path) -> None:
    manifest = promise(copy)
    stored = manifest.to_json()
    earlier = {**stored, "spec": {**stored["spec"], "allocate": {"kind": "full", "blocks": 20}}, "allocation": {}}
    assert Manifest.from_json(json.loads(json.dumps(earlier))) == Manifest.from_json(json.loads(json.dumps(stored)))
    with pytest.raises(KvatlasError, match=r"^Unknown key 'allocate' in spec; .* declare looks to read a run early\.$"):
        parse_spec({**manifest.spec, "allocate": "full"})


#: A policy of a file, which leaves a mark when its code runs.
PLUGIN = """
from pathlib import Path

from kvatlas.policies import CompressingPolicy

Path(__file__).with_suffix(".ran").touch()


class Newest(CompressingPolicy):
    name = "newest"
    summary = "keeps the newest tokens"

    def score(self, cached):
        return cached.positions
"""


Received = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def received_runs(spec_data: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Received]:
    """Return runs with a policy of a file, each with its file and the mark that its code leaves."""
    root = tmp_path_factory.mktemp("received")
    names = [f"theirs{number}" for number in range(4)]
    for name in names:
        (root / name).mkdir()
        file = root / name / "newest.py"
        file.write_text(PLUGIN)
        data = small(spec_data, f"{file}:Newest", axes={"local_window": [8], "ratio": [0.5]})
        (root / name / "theirs.yaml").write_text(json.dumps(data))

    def sweep_each() -> None:
        os.environ["KVATLAS_CACHE"] = str(root / "their-cache")
        for name in names:
            words = ["sweep", f"{root / name}/theirs.yaml", "--out", f"{root / name}/run", "--workers", "1", "--quiet"]
            command()(words, standalone_mode=False)

    # By another user, in a fork: in this process no code of these files has run, and no cache remembers them.
    user = multiprocessing.get_context("fork").Process(target=sweep_each)
    user.start()
    user.join()
    assert user.exitcode == 0
    return iter([(root / name / "run", root / name / "newest.py", root / name / "newest.ran") for name in names])


@pytest.fixture
def received(received_runs: Iterator[Received]) -> Received:
    """Return a run with a policy of a file, that file, and the mark that its code would leave."""
    folder, file, mark = next(received_runs)
    mark.unlink()
    return folder, file, mark


def test_the_code_that_a_received_run_names_runs_only_where_it_is_allowed(
    spec_data: Build, received: Received, tmp_path: Path, kvatlas: Call
) -> None:
    folder, file, mark = received
    spec = tmp_path / "spec.yaml"
    data = small(spec_data, axes={"local_window": [8], "ratio": [0.5]})
    spec.write_text(json.dumps(data))
    sentence = kvatlas.refuse("sweep", spec, "--out", folder, "--quiet")
    assert f"the code of the file {str(file)!r}; if you trust that file add --allow-code" in sentence
    assert (mark.exists(), set(policies(folder))) == (False, {"full", f"{file}:Newest"})
    assert kvatlas("sweep", spec, "--out", folder, "--quiet", "--allow-code")[0] == 0
    assert mark.exists()
    assert set(policies(folder)) == {"full", "window", f"{file}:Newest"}


def test_a_spec_that_names_the_file_itself_may_be_added(
    spec_data: Build, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, _ = received
    monkeypatch.chdir(file.parent)
    data = small(spec_data, "newest.py:Newest", axes={"local_window": [4], "ratio": [0.5]})
    package.sweep(data, folder, workers=1)
    assert set(policies(folder)) == {"full", f"{file}:Newest", "newest.py:Newest"}


def test_an_autopsy_runs_the_code_of_a_run_only_where_it_is_allowed(received: Received, kvatlas: Call) -> None:
    folder, file, mark = received
    for name in ("Newest", "Newest ratio=0.5"):
        assert f"the code of the file {str(file)!r}; if you trust" in kvatlas.refuse(
            "autopsy", folder, "--policy", name
        )
    # A setting that cannot be replayed is refused before any code is asked for.
    sentence = kvatlas.refuse("autopsy", folder, "--policy", "full")
    assert "cannot be replayed: policy is 'full'; expected one that compresses by itself: Newest" in sentence
    assert not mark.exists()
    _, _, err = kvatlas("autopsy", folder, "--policy", "Newest", "--allow-code")
    assert "--allow-code" not in err
    assert mark.exists()


def test_no_engine_has_a_policy_of_a_file_and_none_is_run_to_see_it(
    received: Received, tmp_path: Path, kvatlas: Call
) -> None:
    folder, file, mark = received
    words = ("deploy", "export", folder, "--to", "kvpress", "--out", tmp_path / "out", "--policy", f"{file}:Newest")
    assert f"No other engine has the policy '{file}:Newest'" in kvatlas.refuse(*words)
    assert not mark.exists()


def test_clusters_that_change_make_the_claims_anew_and_say_so(
    tmp_path: Path, spec_data: Build, kvatlas: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that solves some problems: its numbers are those of a fresh run with these clusters."""
    setting = {"policy": "window", "kv_budget": 144, "local_window": 32, "ratio": 0.5}
    changes = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN9"], "problems": 10}
    spec = parse_spec(small(spec_data, **changes, settings=setting, sampling={"max_new_tokens": 400}))
    whole = Chain.problem

    def swept(folder: str, join: int) -> tuple[list[str], list[tuple[float, float, float]]]:
        """Sweep with so many problems in a cluster; return the messages, and the cells' values and intervals."""

        def problem(self: Any, index: int) -> Problem:
            return replace(whole(self, index), cluster=f"{index // join}" if join else "")

        monkeypatch.setattr(Chain, "problem", problem)
        said: list[str] = []
        sweep(make_plan(spec), tmp_path / folder, workers=1, on_message=said.append)
        cells = RunData.open(tmp_path / folder).cells
        numbers = [(c.cell.estimate.value, c.cell.estimate.low, c.cell.estimate.high) for c in cells]
        return [sentence for sentence in said if "clusters of CHAIN9 were changed" in sentence], numbers

    said, plain = swept("run", 0)
    assert said == []
    assert any(0 < value < 1 for value, *_ in plain)
    for join, before, now in ((5, 10, 2), (2, 2, 5), (0, 5, 10)):
        said, numbers = swept("run", join)
        (sentence,) = said
        assert f"the run's 10 problems were {before} units and are {now}." in sentence
        if join == 5:
            assert numbers == swept("fresh", join)[1]
        assert [value for value, *_ in numbers] == pytest.approx([value for value, *_ in plain])
        assert (numbers == plain) == (join == 0)
        assert swept("run", join)[0] == []
    code, out, _ = kvatlas("describe", tmp_path / "run", "--long")
    assert code == 0
    assert "clusters of CHAIN9 were changed after the first traces" in " ".join(out.split())

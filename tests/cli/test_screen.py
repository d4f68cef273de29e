"""Screens as people use them: a grid is screened, and its maps are not labelled Pass@1."""

import json
from collections.abc import Callable
from pathlib import Path

from kvatlas.core import Status
from kvatlas.results import Store
from tests.command_line import Call
from tests.stored import traces_of


def test_a_grid_is_screened_and_drawn(kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec, out = write_spec(benchmarks=["CHAIN4"], problems=2, samples=1), tmp_path / "screened"
    code, _, said = kvatlas("sweep", spec, "--screen", "--out", out, "--workers", 1)
    assert code == 0
    assert "2 full-cache traces are missing: they are decoded first." in said
    assert (
        f"{out} is a screen: it says where settings depart from the full cache, not how often they are right." in said
    )
    written = kvatlas.succeed("map", out, "--out", tmp_path / "map.svg", "--metric", "top1")
    assert (tmp_path / "map.svg").is_file()
    assert "map.svg" in written
    assert "This run is a screen" in kvatlas.refuse("map", out, "--out", tmp_path / "no.svg")
    few = tmp_path / "few"
    words = ("sweep", write_spec(benchmarks=["CHAIN4"], problems=1, samples=1), "--out", few, "--from", out)
    assert "add --screen" in kvatlas.refuse(*words)
    code, _, said = kvatlas(*words, "--screen", "--workers", 1)
    assert code == 0, said
    assert "decoded first" not in said
    with Store.open(few) as store:
        assert {len(cell.problems) for cell in store.manifest().expected} == {1}


SHORT = """
models: [embedded:tiny-llama]
benchmarks: [CHAIN4, CHAIN7]
problems: 3
samples: 2
sampling: {max_new_tokens: 75}
settings: {policy: window, kv_budget: 96, ratio_over: thinking}
axes: {local_window: [8, 16], ratio: [0.2, 0.5]}
"""


def test_traces_without_an_answer_keep_none_and_are_counted(kvatlas: Call, tmp_path: Path) -> None:
    """75 tokens suffice for no chain of seven and for some of four; of an answer that is not there nothing is said."""
    (tmp_path / "spec.yaml").write_text(SHORT)
    out = tmp_path / "screened"
    code, _, said = kvatlas("sweep", tmp_path / "spec.yaml", "--screen", "--out", out, "--workers", 1)
    assert code == 0, said
    records = traces_of(out)
    cut = {(t.benchmark, t.problem, t.sample) for t in records if t.tokens and t.grade.status is Status.TRUNCATED}
    lacking = sum(benchmark == "CHAIN4" for benchmark, _, _ in cut)
    assert len(cut) == lacking + 6
    assert 0 < lacking < 6
    for trace in records:
        if not trace.tokens:
            known = (trace.benchmark, trace.problem, trace.sample) not in cut
            assert ("answer_kept" in trace.grade.metrics) is ("answer_change" in trace.grade.metrics) is known
            assert (trace.grade.status is Status.OK) is known

    drawing = ("map", out, "--out", tmp_path / "a.svg", "--metric")
    said = kvatlas.refuse(*drawing, "answer_kept")
    assert "answer_kept is unknown of all 6 traces of embedded:tiny-llama on CHAIN7" in said
    kvatlas.succeed(*drawing, "answer_kept", "--partial")
    note = f"{lacking} of 6 traces of CHAIN4 have no answer and are left out of answer_kept"
    assert note.partition(" have")[0] in (tmp_path / "a.svg").read_text()
    said = kvatlas.succeed("describe", out, "--metric", "answer_kept", "--partial", "--json")
    (only,) = json.loads(said)["maps"]
    assert (only["benchmark"], only["unmeasured"]) == ("CHAIN4", lacking)
    assert {cell["unmeasured"] for cell in only["estimates"]} == {lacking}
    assert note in kvatlas("describe", out, "--metric", "answer_kept", "--partial")[1]
    kvatlas.succeed(*drawing, "likeness")
    assert note.partition(" have")[0] not in (tmp_path / "a.svg").read_text()

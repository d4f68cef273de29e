"""The gate of a store: what it accepts can be read, exported and drawn; what it refuses is one sentence."""

import json
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvatlas.api import Run
from kvatlas.core import Costs, EvictionTrace, Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.style import rendered
from kvatlas.report.app.page import write_report
from kvatlas.report.app.traces import trace_document
from kvatlas.report.description import every_map
from kvatlas.report.materials import RunMaterials
from kvatlas.report.result import open_result
from kvatlas.report.sources import ReadOptions
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.export import csv_text, table_text, write_traces
from kvatlas.results.records import MAX_SAMPLES, RefusedTraceError
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData

#: Shrinking a run of wild values takes minutes.
WITHOUT_SHRINKING = settings(
    deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)
#: Values that programs from outside have sent, and some that none has sent yet.
NUMBERS = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -(10**400), 2**63, 2**31, -1, True, 1e300, 5e-324]),
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=8),
    st.sampled_from(["", "\ud800", "a\x00b", "=1+1", "$\\frac{", "\u202e\n<b>", "a" * 300, "~", ","]),
)
ODD = st.one_of(NUMBERS, TEXTS, st.none(), st.lists(st.integers(), max_size=1))


def usually(strategy: st.SearchStrategy[Any], otherwise: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw 39 of 40 values from a strategy of sound ones: a trace has about 30."""
    return st.integers(0, 39).flatmap(lambda number: strategy if number != 20 else otherwise)


COUNTS = usually(st.integers(0, 10_000), ODD)
PLAIN = st.text("abc é-_1", min_size=1, max_size=6)
GRADES = st.builds(
    Grade,
    usually(st.booleans(), ODD),
    usually(st.floats(0, 1) | st.just(-0.0), ODD),
    usually(st.none() | PLAIN, ODD),
    usually(st.sampled_from([status for status in Status if status is not Status.UNKNOWN]), ODD),
    st.dictionaries(usually(PLAIN, TEXTS), usually(st.floats(0, 1) | PLAIN, ODD), max_size=2),
)
KNOWN_COSTS = [COUNTS] * 4 + [usually(st.floats(0, 1e4), ODD), COUNTS, usually(st.floats(0, 1e4), ODD)]
COSTS = st.builds(Usage, *KNOWN_COSTS) | st.builds(Costs, *(st.none() | costs for costs in KNOWN_COSTS))
EVICTIONS = st.none() | st.builds(
    EvictionTrace,
    usually(st.integers(1, 4), ODD),
    st.lists(usually(st.integers(0, 9), NUMBERS), max_size=3).map(tuple),
    st.lists(usually(st.integers(0, 4), NUMBERS), max_size=3).map(tuple),
)


@dataclass
class Counts:
    """The numbers of traces that were accepted and refused over all examples of a test."""

    accepted: int = 0
    refused: int = 0
    runs: int = 0
    sentences: set[str] = field(default_factory=set)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw the promise of a run of two windows and two ratios."""
    windows = draw(st.lists(usually(st.integers(0, 64), NUMBERS), min_size=2, max_size=2, unique_by=repr))
    ratios = draw(st.lists(usually(st.floats(0, 1), NUMBERS), min_size=2, max_size=2, unique_by=repr))
    model, benchmark, policy = (draw(usually(PLAIN, TEXTS)) for _ in range(3))
    problems = tuple(dict.fromkeys(draw(st.lists(usually(PLAIN, TEXTS), min_size=1, max_size=2))))
    cells = []
    for window, ratio in product(windows, ratios):
        setting = Setting.from_parameters(policy, kv_budget=100, local_window=window, ratio=ratio)
        cells.append(Expected(model, benchmark, setting, "key", problems, 2, False))
    axes = (("local_window", tuple(windows)), ("ratio", tuple(ratios)))
    return Manifest(axes, tuple(cells), {}, {})


@st.composite
def traces_of(draw: st.DrawFn, manifest: Manifest) -> list[Trace]:
    """Draw a trace for each place of a run."""
    found = []
    for cell in manifest.expected:
        for problem, sample in product(cell.problems, range(cell.samples)):
            found.append(
                Trace(
                    cell.model,
                    cell.benchmark,
                    problem,
                    sample,
                    cell.setting,
                    tuple(draw(st.lists(usually(st.integers(0, 2**31 - 1), NUMBERS), max_size=2))),
                    draw(usually(PLAIN, TEXTS)),
                    draw(GRADES),
                    draw(COSTS),
                    draw(EVICTIONS),
                    made_with=draw(st.sampled_from(["", '{"torch":"2"}', '{"torch":NaN}', '{"a":1e999}', "x"])),
                )
            )
    return found


def store_drawn(folder: Path, data: st.DataObject, counts: Counts) -> list[Trace]:
    """Store a drawn run in a folder; return the traces that were accepted."""
    accepted: list[Trace] = []
    manifest = data.draw(manifests())
    with Store.create(folder) as store:
        try:
            store.put_manifest(manifest)
        except KvatlasError as error:
            counts.sentences.add(str(error))
            return []
        for trace in data.draw(traces_of(manifest)):
            try:
                store.add("key", trace)
            except RefusedTraceError as error:
                counts.refused += 1
                counts.sentences.add(str(error))
            else:
                accepted.append(trace)
    counts.accepted += len(accepted)
    counts.runs += 1
    return accepted


SETTING = Setting.from_parameters("window", kv_budget=64, local_window=8, ratio=0.1)
SOUND = Trace(
    *("m", "CHAIN8", "p", 0, SETTING, (5, 6), "text"),
    Grade(True, 1.0, "3", Status.OK, {"recall": 0.5}),
    Usage(10, 3, 2, 13, 11.5, 1, 0.25),
)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"usage": replace(SOUND.usage, mean_kv_tokens=math.nan)}, "mean_kv_tokens is nan, expected a finite number"),
        ({"usage": replace(SOUND.usage, output_tokens=10**400)}, "output_tokens is an integer of 1,329 bits, expected"),
        ({"usage": replace(SOUND.usage, peak_kv_tokens="9")}, "peak_kv_tokens is 9, expected an integer from 0"),
        ({"usage": replace(SOUND.usage, seconds=-1.0)}, "seconds is -1.0, expected a finite number"),
        ({"setting": Setting.from_parameters("served", ratio=math.nan)}, "ratio is nan, expected a finite number"),
        ({"setting": Setting.from_parameters("served", model=("a",))}, "model is ('a',), expected a finite number"),
        ({"sample": MAX_SAMPLES}, "its number is 10000, expected an integer from 0 to 9,999"),
        ({"tokens": (2**31,)}, "a token is 2147483648, expected the number of a token"),
        ({"text": "half \ud800"}, "text is 'half \\ud800', expected a text of whole characters"),
        ({"grade": replace(SOUND.grade, answer="\udfff")}, "the answer is '\\udfff', expected a text"),
        ({"grade": replace(SOUND.grade, progress=math.inf)}, "progress is inf, expected a number from 0 to 1"),
        ({"grade": replace(SOUND.grade, metrics={"recall": math.nan})}, "the metric recall is nan, expected"),
        ({"eviction_trace": EvictionTrace(1, (0, 2), (0, 0))}, "its eviction trace contradicts itself"),
        ({"made_with": "kvatlas 7"}, "made_with is no JSON"),
        ({"made_with": '{"torch":1e400}'}, "made_with is no JSON of numbers and texts (torch is inf, expected"),
        ({"made_with": '{"torch":"\\ud800"}'}, "made_with is no JSON of numbers and texts (torch is '\\ud800'"),
        ({"made_with": '{"torch":' * 100_000}, "made_with is no JSON of numbers and texts (it is nested too deeply)"),
        ({"usage": replace(SOUND.usage, prompt_tokens=2.5)}, "prompt_tokens is 2.5, expected an integer from 0"),
        ({"setting": Setting("p", (("b", 1), ("a", 2)))}, "the order of its parameters is b, a, expected each once"),
        ({"grade": replace(SOUND.grade, correct=np.array([1]))}, "correct is [1], expected true or false"),
        ({"made_with": b"{}"}, "made_with is of the type bytes, expected str"),
        ({"tokens": None}, "tokens is of the type NoneType, expected tuple | list"),
        ({"usage": {}}, "usage is of the type dict, expected Costs"),
        ({"grade": None}, "the grade is of the type NoneType, expected Grade"),
        ({"eviction_trace": 3}, "the eviction trace is of the type int, expected"),
        ({"setting": Setting("p", [("a", 1)])}, "parameters is of the type list, expected tuple"),
        ({"grade": replace(SOUND.grade, metrics=None)}, "metrics is of the type NoneType, expected Mapping"),
        ({"eviction_trace": EvictionTrace(1, None, ())}, "evicted_at is of the type NoneType, expected tuple"),
    ],
)
def test_a_refused_trace_is_one_sentence_and_the_others_are_kept(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    wrong = replace(SOUND, **{"problem": "q", **changes})
    others = [SOUND, replace(SOUND, sample=1)]
    with Store.create(tmp_path) as store:
        with pytest.raises(RefusedTraceError) as refused:
            store.add_all(("key", trace) for trace in (others[0], wrong, others[1]))
        assert [trace for _, trace in store.traces_of_all_sweeps()] == others
    assert str(refused.value).startswith(f"Sample {wrong.sample} of q in CHAIN8 under {wrong.setting} of m cannot be")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"grade": replace(SOUND.grade, progress=-0.0)},
        {"grade": replace(SOUND.grade, progress=np.float64(0.5), answer=np.str_("3"))},
        {"grade": replace(SOUND.grade, correct=np.bool(1), answer=Status.OK, metrics={"recall": -0.0})},
        {"usage": replace(SOUND.usage, mean_kv_tokens=-0.0, seconds=-0.0)},
        {"model": np.str_("m"), "benchmark": Status.OK, "problem": np.str_("p"), "text": Status.OK},
        {"sample": IntEnum("Samples", {"FIRST": 0}).FIRST},
    ],
)
def test_values_that_sqlite_gives_back_in_another_form_are_read_as_they_were(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    trace = replace(SOUND, **changes)
    with Store.create(tmp_path) as store:
        store.add("key", trace)
    with Store.open(tmp_path) as store:
        assert [read for _, read in store.traces_of_all_sweeps()] == [trace]
        assert sum(map(len, store.columns())) == 1


def test_a_cell_whose_traces_no_store_can_hold_is_not_promised(tmp_path: Path) -> None:
    cell = Expected("m", "CHAIN8", SETTING, "key", ("p",), 1, False)
    for wrong, sentence in (
        (replace(cell, setting=Setting.from_parameters("served", ratio=math.nan)), "ratio is nan"),
        (replace(cell, samples=2**31), "the number of samples is 2147483648"),
        (replace(cell, problems=("p", "\ud800")), "a name is '\\ud800'"),
    ):
        with Store.create(tmp_path) as store:
            store.put_manifest(Manifest((), (cell,), {}, {}))
            with pytest.raises(KvatlasError, match="A run cannot hold") as refused:
                store.put_manifest(Manifest((), (cell, wrong), {}, {}))
            assert store.manifest().expected == (cell,)
        assert sentence in str(refused.value)


@pytest.mark.parametrize("examples", [25, pytest.param(150, marks=pytest.mark.deep)])
def test_what_is_accepted_can_be_read_and_exported(examples: int) -> None:
    counts = Counts()

    @settings(WITHOUT_SHRINKING, max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        with TemporaryDirectory() as scratch:
            run = Path(scratch)
            accepted = store_drawn(run, data, counts)
            if not accepted:
                return
            with Store.open(run) as store:
                read = [trace for _, trace in store.traces()]
                assert sum(map(len, store.columns())) == len(accepted)
            by_name = {_named(trace): trace for trace in accepted}
            assert {_named(trace) for trace in read} == by_name.keys()
            for trace in read:
                added = by_name[_named(trace)]
                # Costs are known or not; a class that says that all are known is not kept.
                assert vars(trace.usage) == vars(added.usage)
                for name in vars(added).keys() - {"usage", "token_digest"}:
                    assert getattr(trace, name) == getattr(added, name), name
                json.dumps(trace_document(trace, RunMaterials()), allow_nan=False).encode()
            write_traces(run, "jsonl", run / "traces.jsonl")
            lines = (run / "traces.jsonl").read_text().splitlines()
            assert [json.loads(line)["text"] for line in lines] == [trace.text for trace in read]
            write_traces(run, "parquet", run / "traces.parquet")
            assert pq.read_table(run / "traces.parquet").column("text").to_pylist() == [trace.text for trace in read]
            data_of_run = RunData.open(run, partial=True)
            csv_text(maps_of_run(data_of_run)).encode()
            table_text(Run(data_of_run).cells()).encode()

    check()
    print(vars(counts) | {"sentences": len(counts.sentences)})
    assert counts.accepted > 2 * examples
    assert counts.refused > 3 * examples
    # One sentence each, in characters that a terminal can write.
    assert all(sentence.isprintable() for sentence in counts.sentences)
    for sentence in counts.sentences:
        sentence.encode()


def _named(trace: Trace) -> tuple[str, str, int]:
    return trace.setting.id, trace.problem, trace.sample


@pytest.mark.parametrize("examples", [6, pytest.param(30, marks=pytest.mark.deep)])
def test_what_is_accepted_can_be_drawn(examples: int) -> None:
    counts = Counts()

    @settings(WITHOUT_SHRINKING, max_examples=examples)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        with TemporaryDirectory() as scratch:
            run = Path(scratch)
            if not store_drawn(run, data, counts):
                return
            rendered(map_figure(maps_of_run(RunData.open(run, partial=True))), ".png", 40)
            result = open_result([run], ReadOptions(partial=True))
            every_map(result).encode()
            json.dumps(result.to_dict(), allow_nan=False).encode()
            write_report(result, run / "report.html", per_cell=2)

    check()
    print(vars(counts) | {"sentences": len(counts.sentences)})
    assert counts.runs > examples // 3

"""Problems that share a passage, a seed or a template are one unit of claims on problems like these."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvatlas import benchmarks
from kvatlas.core import Claim, KvatlasError, Problem
from kvatlas.results.manifest import Manifest, clusters_of
from kvatlas.stats.losses import losses_of
from kvatlas.stats.numerics.against_reference import losses_of_units
from kvatlas.stats.numerics.arrays import cluster_numbers, means_of_clusters, strata_of_clusters
from kvatlas.stats.numerics.units import units_of_traces
from kvatlas.stats.power import provable
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import TraceTable
from kvatlas.sweeps import make_plan, parse_spec
from kvatlas.sweeps.plan_notes import cluster_notes
from kvatlas.sweeps.spec import Spec

MARGIN = 0.05


def test_a_cluster_is_the_mean_of_its_problems() -> None:
    clusters = cluster_numbers(["a", "b", "a", "c"])
    assert clusters is not None
    assert clusters.tolist() == [0, 1, 0, 2]
    values = np.array([[1.0, 0.0, 0.5, np.nan]])
    np.testing.assert_array_equal(means_of_clusters(values, clusters), [[0.75, 0.0, np.nan]])
    assert strata_of_clusters(np.array([0, 0, 0, 1]), clusters).tolist() == [0, 0, 1]
    assert cluster_numbers(["a", "b"]) is None
    assert means_of_clusters(values, None) is values


@pytest.mark.parametrize(("clusters", "size"), [(60, 8), (100, 4)])
def test_clusters_that_are_wholly_alike_break_no_promise(clusters: int, size: int) -> None:
    """A setting fails a whole cluster or none, at a loss of the margin: it is proven in at most 5 % of runs.

    The chance is exact, a sum over the number of lost clusters. With problems as units it is far greater.
    """
    strata = np.zeros(clusters * size, int)
    numbers = np.repeat(np.arange(clusters), size)
    failed = range(12)
    # One run for each number of lost clusters [runs, problems, samples].
    lost = np.array([(numbers < count).astype(float) for count in failed])[..., None]
    promised = np.ones(lost.shape, bool)

    def chance_of_proof(of_problems: Any) -> float:
        units = units_of_traces(lost, promised, strata, by_trace=False, clusters=of_problems)
        chance = 0.0
        for row, count in enumerate(failed):
            (loss,) = losses_of_units(one_row(units, row), MARGIN, [[0]])
            assert loss is not None
            chance += loss.is_kept * float(stats.binom.pmf(count, clusters, MARGIN))
        return chance

    assert 0.03 < chance_of_proof(numbers) <= 0.05
    assert chance_of_proof(None) > 0.15


def one_row(units: Any, row: int) -> Any:
    rows = slice(row, row + 1)
    return replace(units, means=units.means[rows], lowest=units.lowest[rows], highest=units.highest[rows])


def test_equal_problems_are_one_unit() -> None:
    """A file that holds each question three times, its choices in another order, proves no more than the questions."""
    rows: list[dict[str, Any]] = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(6) for _ in range(3)]
    rows.append({"question": "7 + 7?", "answer": 14})
    rows += [{"question": "A metal?", "choices": ["tin", "air", "tea"], "answer": "A"} for _ in range(2)]
    rows += [{"question": "A metal?", "choices": ["iron", "air", "tea"], "answer": "A"}]
    problems = [
        Problem(f"p{n}", row["question"], str(row["answer"]), {"choices": row.get("choices", ())})
        for n, row in enumerate(rows)
    ]
    turned = replace(problems[-2], answer="B", about={"choices": ("air", "tin", "tea")})
    clusters = clusters_of([*problems[:-2], turned, problems[-1]])
    assert len(clusters) == 20
    assert len(set(clusters.values())) == 7
    assert clusters["p2"] == clusters["p0"] != clusters["p3"]
    assert {"p18", "p21"}.isdisjoint(clusters)

    spec = parse_spec({"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN9"], "problems": 1})
    plan = dataclasses.replace(make_plan(spec), problems={"mine": problems[:19]})
    assert plan.sizes == [7]
    assert len(plan.promise((), {}, {}).clusters["mine"]) == 18
    (note,) = cluster_notes("mine", problems[:19])
    assert "are 6 clusters and 1 problem alone" in note


def test_limits_do_not_see_which_problems_a_cluster_has() -> None:
    """Alike problems of a cluster count once, so that limits equal those of one problem each."""
    generator = np.random.default_rng(2)
    single = generator.choice([0.0, 1.0, -1.0], size=(3, 30, 2))
    repeated = single.repeat(4, axis=1)
    numbers = np.repeat(np.arange(30), 4)
    alone = units_of_traces(single, np.ones(single.shape, bool), np.zeros(30, int), by_trace=False)
    joined = units_of_traces(
        repeated, np.ones(repeated.shape, bool), np.zeros(120, int), by_trace=False, clusters=numbers
    )
    assert alone.contrasts() == joined.contrasts()


def test_problem_files_name_clusters(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "cluster": f"p{n // 2}"} for n in range(6)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = benchmarks.find(str(file)).problems()
    assert [problem.cluster for problem in problems] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    # It is no part of the content: named later, it sets no trace aside.
    assert problems[0].content_digest() == replace(problems[0], cluster="").content_digest()

    file.write_text("".join(json.dumps({"passage": row.pop("cluster"), **row}) + "\n" for row in rows))
    assert not benchmarks.find(str(file)).problems()[0].cluster
    named = benchmarks.find(str(file), columns={"cluster": "passage"})
    assert named.problems()[5].cluster == "p2"
    with pytest.raises(KvatlasError, match="no column 'book' for the cluster"):
        benchmarks.find(str(file), columns={"cluster": "book"}).problems()


def in_clusters(run: RunData, size: int) -> RunData:
    """The same run, so many of whose problems in a row share something."""
    clusters: dict[str, dict[str, str]] = {}
    for cell in run.manifest.expected:
        clusters[cell.benchmark] = {problem: str(index // size) for index, problem in enumerate(cell.problems)}
    manifest = replace(run.manifest, clusters=clusters)
    with run.store() as store:
        return RunData(manifest, TraceTable(manifest, store.columns()), other_claim=run.other_claim)


def test_statistics_of_a_run_count_clusters(finished: Path) -> None:
    run = RunData.open(finished, claim=Claim.LIKE)
    joined = in_clusters(run, 3)
    problems = {cell.benchmark: len(cell.problems) for cell in run.manifest.expected}
    (family,) = [found for (_, names), found in losses_of(run).items() if len(names) == 2]
    (of_clusters,) = [found for (_, names), found in losses_of(joined).items() if len(names) == 2]
    assert family.sizes == list(problems.values())
    assert of_clusters.sizes == [-(-count // 3) for count in problems.values()]
    for name, loss in of_clusters.by_setting.items():
        assert loss.value == pytest.approx(family.by_setting[name].value)
        assert loss.limit_of(Claim.LIKE) >= family.by_setting[name].limit_of(Claim.LIKE)
        assert loss.limit_of(Claim.THESE) == family.by_setting[name].limit_of(Claim.THESE)
        assert loss.units == sum(of_clusters.sizes)
    assert any("clusters" in note.text for note in joined.claim_notes)
    before, after = (one.cells[0].cell.estimate for one in (run, joined))
    assert after.value == pytest.approx(before.value)
    assert after.high - after.low > before.high - before.low


def test_a_plan_declares_clusters_and_a_run_keeps_them(
    spec_data: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvatlas.benchmarks.chain import Chain

    plain = make_plan(Spec(**spec_data(problems=4)))
    assert plain.manifest().clusters == {}
    whole = Chain.problem

    def problem(self: Any, index: int) -> Problem:
        return replace(whole(self, index), cluster=str(index // 2))

    monkeypatch.setattr(Chain, "problem", problem)
    plan = make_plan(Spec(**spec_data(problems=4)))
    assert plan.sizes == [2, 2]
    assert any("2 clusters" in note for note in plan.notes)
    manifest = Manifest.from_json(json.loads(json.dumps(plan.manifest().to_json())))
    assert set(manifest.clusters["CHAIN4"].values()) == {"0", "1"}
    # Names of clusters change no run key, and no trace of a run that had none.
    assert plan.compute_keys() == plain.compute_keys()
    assert plan.contents == plain.contents
    # A later plan of the same problems says anew which of them share something.
    assert plain.manifest().merge_with(manifest).clusters == {}
    assert manifest.merge_with(plain.manifest()).clusters == manifest.clusters
    # Other names of the same clusters join the same problems.
    renamed = {
        benchmark: {id_: f"set {name}" for id_, name in named.items()} for benchmark, named in manifest.clusters.items()
    }
    assert replace(manifest, clusters=renamed).changed_units(manifest) == {}
    alone = {benchmark: {id_: id_ for id_ in named} for benchmark, named in manifest.clusters.items()}
    assert replace(manifest, clusters=alone).changed_units(plain.manifest()) == {}


def test_clusters_are_units_of_problems_like_these_alone() -> None:
    by_problem = provable([40], MARGIN, {}, 3)
    by_cluster = provable([10], MARGIN, {}, 3, [40])
    assert by_cluster.smallest == provable([10], MARGIN, {}).smallest > by_problem.smallest
    assert by_cluster.smallest_here == by_problem.smallest_here
    assert by_cluster.samples_needed == by_problem.samples_needed


def test_a_cluster_that_is_no_text_is_refused() -> None:
    for cluster in (0, ["a"], True):
        with pytest.raises(KvatlasError, match=r"cluster of the problem 'p' is .*; expected a text"):
            Problem("p", "1 + 1?", "2", cluster=cluster)

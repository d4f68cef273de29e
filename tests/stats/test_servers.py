"""Runs whose settings are commands of servers: what is proven and recommended, and what is said of the reference."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.core import AGAIN, REFERENCE, Setting, ascending
from kvatlas.report.app.page import write_report
from kvatlas.report.app.run_source import AppRun
from kvatlas.report.description import every_map, one_page
from kvatlas.report.map_figure import MapOptions, plot_sources
from kvatlas.report.result import Result, analyse
from tests.stored import store_outcomes

SIZE = 400


def served(**values: Any) -> Setting:
    return Setting.from_parameters("served", **values)


def grades(lost: int, size: int = SIZE) -> dict[str, Any]:
    """A setting that loses the first problems, of a reference that is always right."""
    return {"A": (np.arange(size) >= lost).astype(float)[:, None]}


DTYPES = {served(dtype=name): grades(lost) for name, lost in (("fp8", 1), ("int4", 2), ("int2", 90))}


def read(folder: Path, settings: dict[Setting, Any], **options: Any) -> Result:
    names = {name for one in settings for name in one.values}
    store_outcomes(folder, {**settings, REFERENCE: grades(0)}, axis_names=sorted(names), **options)
    return analyse([folder])


def recommended(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = result.to_dict()["recommendation"]
    return found


def test_without_costs_all_proven_settings_are_listed_and_none_is_the_cheapest(tmp_path: Path) -> None:
    result = read(tmp_path / "run", DTYPES)
    page = one_page(result)
    assert (
        "On these 400 problems and for problems like these served dtype fp8 (at most 1.5) and served dtype int4 (at "
        "most 1.9) are proven to lose at most 3 points; the costs are not known, so none is called the cheapest."
    ) in page
    found = recommended(result)
    assert found["proven"] == ["served(dtype=fp8)", "served(dtype=int4)"]
    assert (found["proven_cheapest"], found["deployable"], found["by_time"]) == (None, None, None)


def test_of_a_declared_order_the_last_proven_setting_is_named(tmp_path: Path) -> None:
    result = read(tmp_path / "run", DTYPES, tests="in_order")
    assert "served dtype int4 is the last setting in the order of the spec proven to lose at most 3" in one_page(result)
    assert recommended(result)["proven_cheapest"] == "served(dtype=int4)"
    # The first one ends the order of a list that begins with the harshest.
    turned = read(tmp_path / "turned", dict(reversed(DTYPES.items())), tests="in_order")
    page = one_page(turned)
    assert (
        "a chain goes in the order of the spec, and ends at the first that is not proven: served at dtype int2" in page
    )
    assert not any(loss["shown"] for loss in recommended(turned)["losses"])


def test_declared_bytes_decide_which_setting_is_the_cheapest(tmp_path: Path) -> None:
    sizes = dict(zip((*DTYPES, REFERENCE), (512, 256, 128, 1024), strict=True))
    result = read(tmp_path / "run", DTYPES, kv_bytes=sizes)
    page = one_page(result)
    assert "served dtype int4 is the cheapest setting proven to lose at most 3 points" in page
    assert "By the bytes of the spec a cached token takes 25 % of that of the reference." in page
    assert recommended(result)["saving"] == {"memory": 75.0, "work": None}


def test_two_axes_are_a_map_with_words_in_the_order_of_the_spec(tmp_path: Path) -> None:
    settings = {
        served(dtype=name, window=window): grades(lost)
        for name, lost in (("zeta", 0), ("alpha", 3))
        for window in (512, 256)
    }
    result = read(tmp_path / "run", settings)
    (map_,) = result.maps
    assert map_.map.axes == (("dtype", ("zeta", "alpha")), ("window", (256, 512)))
    assert map_.map.full is not None
    assert len(map_.map.keeps or ()) == 4
    assert ascending(["b", "a", "c"]) == ("b", "a", "c")
    assert ascending([512, 256]) == (256, 512)


def test_everywhere_the_reference_is_called_so_and_unknown_costs_stay_unknown(tmp_path: Path) -> None:
    settings = {served(dtype=name, window=window): grades(1) for name in ("b", "a") for window in (512, 256)}
    result = read(tmp_path / "run", settings)
    texts = [one_page(result), every_map(result), str(result.to_dict()["recommendation"])]
    figures = plot_sources([tmp_path / "run"], tmp_path / "map.svg", show=MapOptions())
    figures += plot_sources([tmp_path / "run"], tmp_path / "against.svg", show=MapOptions(against="reference"))
    write_report(result, tmp_path / "page.html")
    document = AppRun(result.opened_runs[0], "run", result).run()
    texts += [path.read_text("utf-8") for path in figures if path.suffix == ".svg"]
    for text in texts:
        assert "full cache" not in text.replace("a full cache", "")
        assert "nan" not in text.lower().split()
    assert "the reference" in texts[0]
    assert document["reference"] == document["against"] == "the reference"


def test_a_reference_that_is_asked_again_stands_beside_the_settings(tmp_path: Path) -> None:
    result = read(tmp_path / "same", {**DTYPES, AGAIN: grades(0)})
    page = one_page(result)
    assert "Asked again after a new start, the reference changed 0 of 400 texts, lost no and gained no answers" in page
    assert "| asked again       | 400      | 0             | 0            | 0      |" in page
    assert "| served dtype int2 | 400      | 90            | 90           | 0      |" in page
    assert not recommended(result)["withheld"]
    # It is no setting: nothing is proven of it, and no pair holds it.
    assert len(recommended(result)["losses"]) == 3
    assert not any("again" in (one.first, one.second) for one in result.comparisons)


def test_a_reference_that_drifted_is_said_first_and_nothing_is_recommended(tmp_path: Path) -> None:
    result = read(tmp_path / "run", {**DTYPES, AGAIN: grades(8)}, tests="in_order")
    reason = "the reference drifted: asked again it lost 8 and gained 0 of 400 answers (p 0.0078)"
    assert f"tiny: {reason}." in result.findings[0].text
    assert f"no setting is recommended, because {reason}." in one_page(result)
    found = recommended(result)
    assert (found["withheld"], found["proven_cheapest"], found["deployable"]) == (reason, None, None)
    # Flips without a direction are noise.
    noise = grades(8)
    reference = grades(0)
    reference["A"][20:28] = 0.0
    outcomes = {**DTYPES, AGAIN: noise, REFERENCE: reference}
    mixed = analyse([store_outcomes(tmp_path / "mixed", outcomes, axis_names=["dtype"], tests="in_order")])
    assert recommended(mixed)["changes"][0] == {
        "setting": "again", "pairs": 400, "lost": 8, "gained": 8, "texts": 16, "p": 1.0,
    }  # fmt: skip
    assert not recommended(mixed)["withheld"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"version": "0.9.1"}, "more than one version (0.9.0; 0.9.1)"),
        ({"node": "b"}, "more than one node (a; b)"),
        ({"gpu": "H200"}, "more than one GPU (H100; H200)"),
        ({}, ""),
    ],
)
def test_servers_of_two_kinds_recommend_nothing(tmp_path: Path, other: dict[str, str], words: str) -> None:
    first = {
        "served": "tiny",
        "setting": "x",
        "version": "0.9.0",
        "node": "a",
        "gpu": "H100",
        "started": 1,
        "concurrency": 32,
    }
    result = read(tmp_path / "run", DTYPES, sessions=[first, {**first, "started": 2, **other}], tests="in_order")
    found = recommended(result)
    assert (words in one_page(result)) if words else "its servers" not in one_page(result)
    assert (found["proven_cheapest"] is None) == bool(words)


def test_a_setting_may_be_declared_a_control(tmp_path: Path) -> None:
    harsh = served(dtype="int2")
    result = read(tmp_path / "run", DTYPES, controls=[harsh], tests="in_order")
    page = one_page(result)
    assert "The control, served dtype int2, is proven to lose (22.5 points): the run can see a loss." in page
    assert "served dtype int2 is a control" in page
    assert "of 2 settings 2 are proven" in page
    blind = read(tmp_path / "blind", {one: grades(1) for one in DTYPES}, controls=[harsh])
    assert "Not even the control, served dtype int2, is proven to lose" in one_page(blind)
    without = read(tmp_path / "without", {one: grades(0) for one in DTYPES})
    assert "has no control that keeps little enough (`control: true` at a setting that must lose)" in one_page(without)
    assert math.isfinite(recommended(without)["losses"][0]["loses_limit"])

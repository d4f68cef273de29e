"""lighteval's details files as runs, compared in pairs; what is none ends in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import SERVED
from kvatlas.results import Store
from tests.command_line import Call

pytest.importorskip("pyarrow", reason="needs the extra parquet")

DATE = "2026-11-20T10-11-12.345678"


def row(number: int, right: float, **metric: Any) -> dict[str, Any]:
    """A document as lighteval 0.13.0 writes it: the fields of Doc, ModelResponse and Detail that matter here."""
    return {
        "doc": {"id": str(number), "query": f"{number} + {number}?", "choices": ["4"], "gold_index": 0},
        "metric": {"extractive_match": right, **metric},
        "model_response": {
            "text": [f"It is {number}."],
            "input_tokens": [1, 2, 3],
            "output_tokens": [[4, 5, 6, 7]],
            "logprobs": [],
        },
    }


def details(folder: Path, model: str, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    path = folder / "details" / model / DATE / f"details_gsm8k|0_{DATE}.parquet"
    path.parent.mkdir(parents=True)
    write_table(pa.Table.from_pylist(rows), path)
    return path


def test_details_of_two_models_are_compared_in_pairs(tmp_path: Path, succeed: Callable[..., str]) -> None:
    run = tmp_path / "run"
    first = details(tmp_path, "Qwen/Qwen3-8B", [row(n, float(n % 4 > 0), length=12.5) for n in range(40)])
    second = details(tmp_path, "org/other", [row(n, float(n % 2)) for n in reversed(range(40))])
    assert succeed("import", first, second, run).splitlines() == [
        f"{run}: 40 of 40 traces of Qwen/Qwen3-8B on gsm8k|0",
        f"{run}: 40 of 40 traces of org/other on gsm8k|0",
    ]
    with Store.open(run) as store:
        trace = next(trace for _, trace in store.traces() if trace.problem == "3")
    assert (trace.text, trace.setting, trace.grade.correct) == ("It is 3.", SERVED, True)
    assert (trace.usage.prompt_tokens, trace.usage.output_tokens, trace.usage.peak_kv_tokens) == (3, 4, None)
    # Documents find one another by their id: the second file has them in another order.
    said = succeed("compare", run, "--out", tmp_path / "pairs.png", "--metric", "pass@1")
    assert "x ahead on 25.0 %, equal on 75.0 %, y ahead on 0.0 % of 40 problems; mean of x - y +0.250 (+0.09" in said


def test_files_that_are_none_and_scores_that_are_no_shares(tmp_path: Path, kvatlas: Call) -> None:
    run = tmp_path / "run"

    def said(*words: object) -> str:
        code, _, err = kvatlas("import", *words, run)
        assert code == 2
        assert err.count("\n") == 1
        return err

    text = tmp_path / "details_x.parquet"
    text.write_text("no parquet")
    assert "is no details file of lighteval (" in said(text)
    assert "is no details file of lighteval (" in said(tmp_path / "details_there.parquet")
    assert "is no details file as lighteval 0.13" in said(details(tmp_path / "a", "m", [{"full_prompt": "?"}]))
    plain = details(tmp_path / "b", "m", [{"doc": "?", "metric": 1.0, "model_response": "?"}])
    assert "its columns are doc, model_response, metric, each with fields" in said(plain)
    good = details(tmp_path / "c", "m", [row(0, 1.0)])
    assert "has no metric 'em'; valid are: extractive_match" in kvatlas("import", good, run, "--scorer", "em")[2]
    assert "has the score 12.5; valid are" in said(details(tmp_path / "d", "m", [row(0, 12.5)]))
    assert "several rows of one document" in said(details(tmp_path / "e", "m", [row(0, 1.0), row(0, 1.0)]))
    assert "has no metric in its column" in said(details(tmp_path / "f", "m", [{**row(0, 1.0), "metric": {"a": "b"}}]))

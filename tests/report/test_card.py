"""Result cards: an embedded model's run is made again elsewhere to the token, and what was changed is found."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import KvatlasError, digest
from kvatlas.report.card import card_of, compare_cards, plan_of, read_card
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.command_line import Call

SPEC: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN4"],
    "problems": 3,
    "samples": 2,
    "sampling": {"temperature": 1.0, "max_new_tokens": 120},
    "settings": [{"policy": "window", "kv_budget": 64, "budget_over": "thinking"}],
    "axes": {"local_window": [4, 8], "every": [16]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "run"
    sweep(make_plan(parse_spec(SPEC)), folder, workers=1)
    return folder


def test_a_card_is_reproduced_to_identical_traces_in_another_folder(run: Path, kvatlas: Call, tmp_path: Path) -> None:
    card, again = tmp_path / "card.json", tmp_path / "again"
    assert kvatlas("card", run, "--out", card)[0] == 0
    written = json.loads(card.read_text())
    assert set(written["models"]["embedded:tiny-llama"]) == {"weights", "tokenizer", "dtype"}
    assert set(written["benchmarks"]["CHAIN4"]) == {"identity", "data", "prompts"}
    assert {cell["n"] for cell in written["cells"]} == {6}
    assert written["versions"]["torch"]
    assert written["sampling"]["top_p"] == 0.95
    code, out, err = kvatlas("reproduce", card, "--out", again, "--workers", 1, "--quiet")
    assert (code, out) == (0, "All 3 cells agree token by token (18 traces).\n"), err
    with Store.open(run) as first, Store.open(again) as second:
        assert [(key, t.tokens, t.eviction_trace) for key, t in first.traces()] == [
            (key, t.tokens, t.eviction_trace) for key, t in second.traces()
        ]
    other = tmp_path / "other.json"
    assert kvatlas("card", again, "--out", other)[0] == 0
    assert kvatlas("check", card, other)[0] == 0
    assert json.loads(kvatlas("check", card, other, "--json")[1])["same"] is True


def test_a_changed_token_and_a_changed_byte_are_found(run: Path, kvatlas: Call, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    with Store.open(run) as store:
        store.copy(changed)
        key, trace = next(store.traces())
    with Store.create(changed) as store:
        from dataclasses import replace

        store.add(key, replace(trace, tokens=(*trace.tokens[:-1], trace.tokens[-1] + 1)))
    first, second = card_of(run), card_of(changed)
    (cell,) = compare_cards(first, second).cells
    assert cell.problems == (trace.problem,)
    assert str(trace.setting.values.get("local_window", "full")) in cell.name

    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, data in zip(files, (first, second), strict=True):
        path.write_text(json.dumps(data))
    code, out, _ = kvatlas("check", *files)
    assert code == 1
    assert "2 of 3 cells agree token by token" in out
    assert trace.problem in out
    text = files[0].read_text()
    at = text.index('"pass_at_1": ') + len('"pass_at_1": ')
    files[0].write_text(text[:at] + ("9" if text[at] != "9" else "8") + text[at + 1 :])
    with pytest.raises(KvatlasError, match=r"is not what was written|is no result card"):
        read_card(files[0])
    # A byte of the store itself: its checksum tells.
    connection = sqlite3.connect(changed / "run.sqlite")
    connection.execute("UPDATE traces SET correct = 1 - correct WHERE sample = 1")
    connection.commit()
    connection.close()
    with pytest.raises(KvatlasError, match="damaged"):
        card_of(changed)


def test_what_is_another_here_and_what_is_no_card_is_said(run: Path, tmp_path: Path) -> None:
    card = card_of(run)
    other = json.loads(json.dumps(card))
    other["models"]["embedded:tiny-llama"]["weights"] = "0" * 64
    with pytest.raises(KvatlasError, match="cannot be reproduced here: of embedded:tiny-llama the weights differ"):
        plan_of(other)
    with pytest.raises(KvatlasError, match="has no spec"):
        plan_of({**card, "spec": {}})
    path = tmp_path / "card.json"
    for text in ("", "[]", '{"kind": "map"}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(KvatlasError, match="is no result card"):
            read_card(path)
    newer = {**card, "version": 9}
    path.write_text(json.dumps({**newer, "digest": digest(newer)}))
    with pytest.raises(KvatlasError, match="has version 9"):
        read_card(path)

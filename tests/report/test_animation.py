"""The cache in motion as a GIF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kvatlas.core import KvatlasError
from kvatlas.report.animation import Column, write_animation
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec, sweep

GONE, CACHED = (201, 193, 187), (203, 218, 251)


def pixels(picture: Any, colour: tuple[int, int, int]) -> int:
    colours = picture.convert("RGB").getcolors(1 << 20)
    return sum(count for count, item in colours if all(abs(a - b) <= 6 for a, b in zip(item, colour, strict=True)))


def test_tokens_leave_in_the_frame_of_their_fate(tmp_path: Path) -> None:
    column = Column("dynts", ["word "] * 20, [10] * 8 + [0] * 12, [0, 10, 0])
    assert [column.cached(moment) for moment in (0, 9, 10, 20)] == [3, 12, 4, 14]
    write_animation([column], "one trace", tmp_path / "a.gif", frames=21)
    with Image.open(tmp_path / "a.gif") as picture:
        assert picture.n_frames == 21
        gone, cached = [], []
        for number in range(21):
            picture.seek(number)
            gone.append(pixels(picture, GONE))
            cached.append(pixels(picture, CACHED))
    assert cached[0] == 0
    assert cached[:10] == sorted(cached[:10])
    assert cached[10] < cached[9] / 2
    assert max(gone[:10]) < min(gone[10:])
    with pytest.raises(KvatlasError, match=r"must end in \.gif"):
        write_animation([column], "one trace", tmp_path / "a.mp4")


def test_a_stored_trace_is_animated_with_the_full_caches(
    tmp_path: Path, spec_data: Callable[..., dict[str, Any]], kvatlas: Callable[..., tuple[int, str, str]]
) -> None:
    sweep(make_plan(parse_spec(spec_data(problems=1, samples=1))), tmp_path / "run", workers=1)
    with Store.open(tmp_path / "run") as store:
        item = next(trace for _, trace in store.traces() if trace.setting.policy != "full")
    words = ["animate", tmp_path / "run", "--problem", item.problem, "--policy", item.setting.policy]
    code, out, err = kvatlas(*words, "--out", tmp_path / "a.gif")
    assert (code, out.strip(), err) == (0, str(tmp_path / "a.gif"), "")
    with Image.open(tmp_path / "a.gif") as picture:
        assert picture.width > 1000
        assert picture.n_frames > 10
    code, _, err = kvatlas(*words, "--set", "ratio=7", "--out", tmp_path / "b.gif")
    assert code == 2
    assert str(item.setting) in err
    assert not (tmp_path / "b.gif").exists()

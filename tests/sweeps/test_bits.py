"""Bits of cached numbers as an axis of a sweep: maps, bytes, and the keys of settings of 16 bits."""

from pathlib import Path
from typing import Any

from kvatlas import open_run
from kvatlas.stats.maps import maps_of_run
from kvatlas.sweeps.plan import make_plan
from kvatlas.sweeps.run import sweep
from kvatlas.sweeps.spec import parse_spec

WINDOW = {"policy": "window", "kv_budget": 160, "ratio": 0.3}
SPEC: dict[str, Any] = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN6-14"],
    "problems": 2,
    "sampling": {"max_new_tokens": 120},
    "settings": [WINDOW],
    "axes": {"kv_bits": [16, 4], "local_window": [32, 40]},
}


def test_bits_are_an_axis_and_bytes_are_known(tmp_path: Path) -> None:
    plan = make_plan(parse_spec(SPEC))
    sweep(plan, tmp_path, workers=1)
    shape = plan.models[0].shape
    (map_,) = maps_of_run(open_run(tmp_path).data)
    assert dict(map_.axes) == {"kv_bits": (4, 16), "local_window": (32, 40)}
    # 4 layers of 2 KV heads with keys and values of 32 numbers; 32 codes of 4 bits and two numbers of fp16.
    assert shape.kv_bytes_per_token() == 16 * 32 * 4
    for (bits, _), cell in map_.cells.items():
        token, beside = (16 * 20, 32 * 16 * 32 * 4) if bits == 4 else (16 * 32 * 4, 0)
        assert cell.mean_kv_tokens is not None
        assert cell.peak_kv_tokens is not None
        assert cell.mean_kv_bytes == cell.mean_kv_tokens * token + beside
        assert cell.peak_kv_bytes == cell.peak_kv_tokens * token + beside


def test_keys_of_16_bits_are_those_without_bits() -> None:
    plain = make_plan(parse_spec({**SPEC, "axes": {"local_window": [32, 40]}}))
    keys = make_plan(parse_spec(SPEC)).keys
    assert {name: key for name, key in keys.items() if "kv_bits" not in name[2].values} == dict(plain.keys)
    packed = {key for (_, _, setting), key in keys.items() if "kv_bits" in setting.values}
    assert len(packed) == 1
    assert not packed & {*plain.keys.values()}

"""An exported setting for kvpress is read by kvpress itself."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas.core import Setting
from kvatlas.deploy.export import export_setting
from tests.conformance.environment import run

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize(
    ("policy", "press", "values"),
    [
        ("snapkv", "SnapKVPress", {"queries": 16, "kernel": 5, "pooling": "avg", "local_window": 16}),
        ("tova", "TOVAPress", {"local_window": 1}),
        ("keydiff", "KeyDiffPress", {"local_window": 1}),
        ("streaming", "StreamingLLMPress", {"sinks": 6, "local_window": 32}),
        ("random", "RandomPress", {"local_window": 1}),
    ],
)
def test_kvpress_reads_what_is_exported(policy: str, press: str, values: dict[str, Any]) -> None:
    common = {"kv_budget": 512, "every": 64, "every_from": "prompt", "keep_prompt": False}
    text = export_setting(Setting.of(policy, **common, **values), "kvpress").text
    shown = (
        "print(type(press.base_press).__name__, press.compression_interval, press.target_size, vars(press.base_press))"
    )
    name, interval, size, own = run("-c", f"{text}\n{shown}").strip().splitlines()[-1].split(" ", 3)
    assert (name, interval, size) == (press, "64", "512")
    for theirs, ours in (("window_size", "queries"), ("kernel_size", "kernel"), ("n_sink", "sinks")):
        assert ours not in values or f"'{theirs}': {values[ours]}" in own

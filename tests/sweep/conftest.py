from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas.models import Model


@pytest.fixture(scope="session")
def spec_data(random_models: dict[str, Model]) -> Callable[..., dict[str, Any]]:
    """A small sweep of a random-weight model; keyword arguments replace keys."""

    def build(**changes: Any) -> dict[str, Any]:
        return {
            "models": [random_models["llama"].name],
            "benchmarks": ["CHAIN4", "CHAIN5"],
            "problems": 3,
            "samples": 2,
            "seed": 3,
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 90},
            "baseline": {"policy": "full"},
            "settings": [{"policy": name, "kv_budget": 64, "ratio_over": "thinking"} for name in ("window", "random")],
            "axes": {"local_window": [4, 8], "ratio": [0.2, 0.5]},
            **changes,
        }

    return build


@pytest.fixture
def write_spec(tmp_path: Path, spec_data: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """The same as a file."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(spec_data(**changes)))
        return path

    return write

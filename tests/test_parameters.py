from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvatlas import policies
from kvatlas.cli.options import assignments, cell
from kvatlas.core import KvatlasError, Setting
from kvatlas.models import Options, find
from kvatlas.policies import Scope
from kvatlas.policies.parameter_types import check_parameters
from kvatlas.serve.service import find_policy
from kvatlas.sweeps import read_spec
from kvatlas.text import read_value

#: Texts that YAML takes for something else.
ODD = ("", "null", "Answer:", "no", "0123", "1.0", "1e3", "[a", "2024-05-01", "'x'", " a ", "<think>\\n")

#: A type by another name.
Share = float | None


@dataclass(frozen=True)
class Parameters:
    words: str = "a"
    perhaps: str | None = None
    scope: Scope = Scope.GLOBAL
    tokens: int = 1
    share: float = 0.5
    other_share: "Share" = None
    keep: bool = True
    many: Any = None
    steps: list[int] = field(default_factory=list)


@pytest.mark.parametrize("text", ODD)
def test_what_is_declared_as_text_stays_the_text_given(text: str) -> None:
    assert [read_value(Parameters, name, text) for name in ("words", "perhaps", "scope")] == [text] * 3
    assert read_value(Parameters, "unknown", text) == text
    assert assignments("--model-option", [f"think_close={text}"]) == {"think_close": text}
    assert cell("dynts", None, None, None, [f"predictor={text}"]).values == {"predictor": text}
    assert Options.from_values({"think_close": text}).think_close == text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tokens", "5000", 5000),
        ("tokens", "0123", 123),
        ("tokens", "many", "many"),
        ("share", "0.3", 0.3),
        ("share", "1e-3", 0.001),
        ("share", "1", 1),
        ("other_share", "1e-3", 0.001),
        ("keep", "false", False),
        ("keep", "perhaps", "perhaps"),
        ("many", "[1", "[1"),
        ("steps", "[1, 2]", [1, 2]),
    ],
)
def test_all_else_is_read_by_its_type(name: str, text: str, value: object) -> None:
    result = read_value(Parameters, name, text)
    assert (type(result), result) == (type(value), value)


def test_a_name_that_only_type_checkers_import_leaves_the_other_fields_readable() -> None:
    @dataclass(frozen=True)
    class Foreign:
        tensor: "Missing" = None  # type: ignore[name-defined]  # noqa: F821
        tokens: int = 1

    assert read_value(Foreign, "tokens", "5000") == 5000
    assert read_value(Foreign, "tensor", "[1, 2]") == [1, 2]


def test_a_parameter_without_a_description_takes_values_like_its_default() -> None:
    @dataclass(frozen=True)
    class Foreign:
        sinks: int = 4
        share: float = 0.5
        is_kept: bool = True

    check_parameters(Foreign(share=1))
    for values, sentence in (
        ({"sinks": "four"}, "sinks is 'four'; expected an integer."),
        ({"share": "half"}, "share is 'half'; expected a number."),
        ({"is_kept": "maybe"}, "is_kept is 'maybe'; expected true or false."),
    ):
        with pytest.raises(KvatlasError, match=sentence):
            check_parameters(Foreign(**values))  # type: ignore[arg-type]


def test_what_asks_for_a_policy_reads_its_texts_alike() -> None:
    model = find("embedded:tiny-llama")
    values = {"kv_budget": "96", "local_window": "8", "ratio": "0.3", "pooling": "no"}
    with pytest.raises(KvatlasError, match="pooling is 'no'; expected 'max', 'avg'"):
        find_policy(model, "snapkv", values)
    assert find_policy(model, "snapkv", {**values, "pooling": "avg"}).setting.values["kv_budget"] == 96
    with pytest.raises(KvatlasError, match="predictor is 7; expected a text"):
        policies.from_setting(Setting.from_parameters("dynts", kv_budget=96, local_window=8, ratio=0.3, predictor=7))


SPEC = """
models:
  - model: hf:lab/model
    name: 1.5
    revision: 0123
    cache: 2024-05-01
    think_close: ''
    think_open: Answer
  - {model: embedded:tiny-llama, think_close: ~}
benchmarks:
  - CHAIN4
  - {name: MINE, file: 007, columns: {question: 1, answer: no}}
baseline: {policy: dynts, kv_budget: 96, local_window: 8, ratio: 0.3, predictor: 017}
settings: [{policy: snapkv, kv_budget: 96, local_window: 8, keep_prompt: false}]
axes: {pooling: [off, avg], ratio: [0.1, 1]}
"""


def test_texts_of_a_spec_stay_what_stands_there(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = read_spec(tmp_path / "spec.yaml")
    first, second = spec.models
    assert (first.name, first.model_extra) == (
        "1.5", {"revision": "0123", "cache": "2024-05-01", "think_close": "", "think_open": "Answer"},
    )  # fmt: skip
    assert second.model_extra == {"think_close": None}
    assert (spec.benchmarks[1].file, spec.benchmarks[1].columns) == ("007", {"question": "1", "answer": "no"})
    assert spec.baseline[0].setting().values["predictor"] == "017"
    assert spec.settings[0].setting().values["keep_prompt"] is False
    assert spec.axes == {"pooling": ["off", "avg"], "ratio": [0.1, 1]}

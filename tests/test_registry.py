from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvatlas import registry
from kvatlas.core import KvatlasError
from kvatlas.registry import Registry


def test_third_parties_are_found_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [EntryPoint("theirs", "collections:OrderedDict.fromkeys", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: theirs if group == "g" else [])
    result: Registry[Any] = Registry("thing", "g", {"ours": "json:loads"})
    assert result.names() == ["ours", "theirs"]
    assert result.get("ours")("1") == 1
    assert list(result.get("theirs")("ab")) == ["a", "b"]
    with pytest.raises(KvatlasError, match="Unknown thing 'other'; expected: ours, theirs"):
        result.get("other")


def test_a_name_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("ours", "a:b", group)])
    result: Registry[Any] = Registry("thing", "g", {"ours": "json:loads"})
    with pytest.raises(KvatlasError, match="registered twice: json:loads and a:b"):
        result.names()


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package whose entry points cannot be used, and one of each kind that can."""
    (tmp_path / "third_party.py").write_text("import kvatlas_needs_this_module\n")
    (tmp_path / "third_kinds.py").write_text(
        "from kvatlas.policies import CompressingPolicy\n"
        "class Good(CompressingPolicy):\n    name = 'good'\n    summary = 'keeps something'\n"
        "class Misnamed(Good):\n    name = 'other'\n"
        "class Family:\n    about = examples = 'WELL1'\n    named = print\n"
        "def run(job, pool):\n    yield from ()\n"
        "def lonely(job):\n    yield from ()\n"
    )
    entries = {
        "kvatlas.policies": {
            "gone": "third_party:Policy",
            "lost": "third_kinds:Nothing",
            "number": "third_kinds:lonely",
            "misnamed": "third_kinds:Misnamed",
            "good": "third_kinds:Good",
        },
        "kvatlas.benchmarks": {"GONE": "third_party:Sum", "BAD": "third_kinds:run", "WELL": "third_kinds:Family"},
        "kvatlas.executors": {"gone": "third_party:run", "lonely": "third_kinds:lonely", "well": "third_kinds:run"},
    }
    about = tmp_path / "third-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {a}\n" for n, a in entry.items()) for group, entry in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def kvatlas(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvatlas", *words], cwd=folder, capture_output=True, text=True)


def test_broken_policies_and_benchmarks_are_left_out_with_a_warning_each(broken: Path) -> None:
    done = kvatlas(broken, "policies", "--json")
    names = [row["name"] for row in json.loads(done.stdout)]
    assert done.returncode == 0
    assert "window" in names
    assert [name for name in names if "@" not in name][-1] == "good"
    warned = done.stderr.splitlines()
    assert len(warned) == 4
    assert warned[0] == (
        "kvatlas: The policy 'gone' of the plug-in third_party:Policy cannot be used (ModuleNotFoundError: No module "
        "named 'kvatlas_needs_this_module'). It is left out."
    )
    assert "'lost' of the plug-in third_kinds:Nothing cannot be used (AttributeError" in warned[1]
    assert "'number'" in warned[2]
    assert "expected subclasses of kvatlas.policies.CompressingPolicy" in warned[2]
    assert "its name is 'other'; expected that of its entry point, 'misnamed'" in warned[3]

    done = kvatlas(broken, "benchmarks", "--json")
    names = [row["name"] for row in json.loads(done.stdout)]
    assert done.returncode == 0
    assert "CHAIN" in names
    assert names[-1] == "WELL"
    warned = done.stderr.splitlines()
    assert len(warned) == 2
    assert "The benchmark family 'GONE' of the plug-in third_party:Sum cannot be used" in warned[0]
    assert "The benchmark family 'BAD' of the plug-in third_kinds:run cannot be used" in warned[1]


def test_a_broken_plugin_that_is_asked_for_is_refused_with_its_reason(broken: Path) -> None:
    (broken / "spec.yaml").write_text(
        "{models: ['embedded:tiny-llama'], benchmarks: [CHAIN3], problems: 1, sampling: {max_new_tokens: 9}}"
    )
    for words, sentence in (
        (("policies", "gone"), "The policy 'gone' of the plug-in third_party:Policy cannot be used (ModuleNotFound"),
        (("benchmarks", "show", "GONE3"), "The benchmark family 'GONE' of the plug-in third_party:Sum cannot be used"),
        (("sweep", "spec.yaml", "--out", "run", "--executor", "gone"), "The executor 'gone' of the plug-in third_pa"),
        (
            ("sweep", "spec.yaml", "--out", "run", "--executor", "lonely"),
            "expected a function of a kvatlas.sweeps",
        ),
    ):
        done = kvatlas(broken, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert sentence in done.stderr


def test_an_unknown_name_is_answered_with_those_that_can_be_used(broken: Path) -> None:
    """Not with the entry point of a plug-in whose policy is spelled otherwise, which would be refused next."""
    for words, noun, there, not_there in (
        (("policies", "mine"), "policy", {"window", "good"}, {"gone", "lost", "number", "misnamed"}),
        (("benchmarks", "show", "MINE3"), "benchmark", {"CHAIN", "WELL"}, {"GONE", "BAD"}),
        (("sweep", "x", "--out", "run", "--executor", "mine"), "executor", {"local", "well"}, {"gone", "lonely"}),
    ):
        done = kvatlas(broken, *words)
        sentence = done.stderr.splitlines()[-1]
        assert (done.returncode, f"Unknown {noun} " in sentence) == (2, True), sentence
        named = set(sentence.partition("; ")[2].replace(".", " ").replace(",", " ").split())
        assert (there - named, not_there & named) == (set(), set()), sentence

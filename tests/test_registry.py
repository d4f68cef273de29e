import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvatlas import registry
from kvatlas.core import KvatlasError, Setting
from kvatlas.policies import from_setting, permit
from kvatlas.registry import Registry
from tests.command_line import run_apart


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


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package whose entry points cannot be used, and one of each kind that can."""
    tmp_path = tmp_path_factory.mktemp("broken")
    (tmp_path / "third_party.py").write_text("import kvatlas_needs_this_module\n")
    (tmp_path / "third_script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "third_kinds.py").write_text(
        "from kvatlas.policies import CompressingPolicy\n"
        "class Good(CompressingPolicy):\n    name = 'good'\n    summary = 'keeps something'\n"
        "    def score(self, cached): pass\n"
        "class Misnamed(Good):\n    name = 'other'\n"
        "class Family:\n    about = examples = 'WELL1'\n    named = print\n"
        "def run(job, pool):\n    yield from ()\n"
        "def lonely(job):\n    yield from ()\n"
    )
    entries = {
        "kvatlas.policies": {
            "gone": "third_party:Policy",
            "lost": "third_kinds:Nothing",
            "script": "third_script:Policy",
            "number": "third_kinds:lonely",
            "misnamed": "third_kinds:Misnamed",
            "good": "third_kinds:Good",
        },
        "kvatlas.benchmarks": {"GONE": "third_party:Sum", "BAD": "third_kinds:run", "WELL": "third_kinds:Family"},
    }
    about = tmp_path / "third-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {a}\n" for n, a in entry.items()) for group, entry in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


#: Commands where that package is installed, with parts of the lines that each ends with.
WARNED: dict[str, list[str]] = {
    "list policies --json": [
        "kvatlas: The policy 'gone' of the plug-in third_party:Policy cannot be used (ModuleNotFoundError: No module "
        "named 'kvatlas_needs_this_module'). It is left out.",
        "'lost' of the plug-in third_kinds:Nothing cannot be used (AttributeError",
        "'script' of the plug-in third_script:Policy cannot be used (SystemExit: it called sys.exit(0)).",
        "expected subclasses of kvatlas.policies.CompressingPolicy",
        "its name is 'other'; expected that of its entry point, 'misnamed'",
    ],
    "list benchmarks --json": [
        "The benchmark family 'GONE' of the plug-in third_party:Sum cannot be used",
        "The benchmark family 'BAD' of the plug-in third_kinds:run cannot be used",
    ],
}
REFUSED = {
    "list policies gone": "The policy 'gone' of the plug-in third_party:Policy cannot be used (ModuleNotFound",
    "list policies script": "The policy 'script' of the plug-in third_script:Policy cannot be used (SystemExit",
    "list benchmarks GONE3": "The benchmark family 'GONE' of the plug-in third_party:Sum cannot be used",
}
#: Unknown names, with some that the sentence lists and those that it must not: entry points that cannot be used.
UNKNOWN = {
    "list policies mine": ({"window", "good"}, {"gone", "lost", "script", "number", "misnamed"}),
    "list benchmarks MINE3": ({"CHAIN", "WELL"}, {"GONE", "BAD"}),
    "sweep x --out run --executor mine": ({"local", "ray"}, set()),
}


@pytest.fixture(scope="module")
def done(broken: Path) -> dict[str, tuple[int, str, str]]:
    """Return the exit codes and outputs of these commands, in one process."""
    (broken / "spec.yaml").write_text(
        "{models: ['embedded:tiny-llama'], benchmarks: [CHAIN3], problems: 1, sampling: {max_new_tokens: 9}}"
    )
    paths = os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")])
    words = [*WARNED, *REFUSED, *UNKNOWN]
    return dict(zip(words, run_apart(words, broken, PYTHONPATH=paths), strict=True))


@pytest.mark.parametrize(("words", "good"), [("list policies --json", "good"), ("list benchmarks --json", "WELL")])
def test_broken_plugins_are_left_out_with_a_warning_each(done: dict[str, Any], words: str, good: str) -> None:
    code, out, err = done[words]
    assert code == 0
    assert good in {row["name"] for row in json.loads(out)}
    for sentence, line in zip(WARNED[words], err.splitlines(), strict=True):
        assert sentence in line


@pytest.mark.parametrize("words", REFUSED)
def test_a_broken_plugin_that_is_asked_for_is_refused_with_its_reason(done: dict[str, Any], words: str) -> None:
    code, out, err = done[words]
    assert (code, out) == (2, ""), err
    assert REFUSED[words] in err.splitlines()[-1]


@pytest.mark.parametrize("words", UNKNOWN)
def test_an_unknown_name_is_answered_with_those_that_can_be_used(done: dict[str, Any], words: str) -> None:
    (code, _, err), (there, not_there) = done[words], UNKNOWN[words]
    sentence = err.splitlines()[-1]
    assert (code, "Unknown " in sentence) == (2, True), sentence
    named = set(sentence.partition("; ")[2].replace(".", " ").replace(",", " ").split())
    assert (there - named, not_there & named) == (set(), set()), sentence


def test_a_class_of_a_file_without_a_name_is_told_to_have_one(tmp_path: Path) -> None:
    code = "from kvatlas.policies import CompressingPolicy\n\n\nclass Mine(CompressingPolicy):\n    pass\n"
    (tmp_path / "nameless.py").write_text(code)
    setting = Setting.from_parameters(f"{tmp_path / 'nameless.py'}:Mine", kv_budget=64, local_window=8, ratio=0.3)
    permit(setting.policy)
    with pytest.raises(KvatlasError, match="its name is None; expected a text in the class, as in name = 'mine'"):
        from_setting(setting)

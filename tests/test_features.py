"""Features stand by themselves: without the folders of one or of all the rest works, and says what is missing."""

import io
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvatlas.core import KvatlasError
from kvatlas.registry import MissingFeatureError, Registry, features
from tests.command_line import COMMANDS

ROOT = Path(__file__).parents[1]
#: What needs each feature, and is refused without it; RUN is a finished run, SPEC a spec.
REFUSED = {
    "autopsy": "describe RUN --deaths",
    "predictor": "predictor train head.safetensors embedded:tiny-llama CHAIN6 --seed 2",
    "ray": "sweep SPEC --executor ray --out other",
}
#: Tests that use no feature.
OTHERS = (
    "tests/sweeps/test_same.py",
    "tests/stats/test_maps.py",
    "tests/report/test_app.py",
    "tests/figures/test_maps.py",
    "tests/cli/test_maps.py",
    "tests/test_api.py",
)
SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN6"],
    "problems": 2,
    "samples": 2,
    "sampling": {"max_new_tokens": 80},
    "settings": {"policy": "window", "kv_budget": 72, "ratio_over": "thinking"},
    "axes": {"local_window": [4, 8], "ratio": [0.1, 0.3]},
}


def package_without(names: Iterable[str], folder: Path) -> Path:
    """Make the package in a folder, without the folders of features; return what PYTHONPATH is to be."""
    package = folder / "kvatlas"
    package.mkdir(parents=True)
    for item in (ROOT / "src/kvatlas").iterdir():
        if item.name not in {*names, "__pycache__"}:
            (package / item.name).symlink_to(item)
    return folder


def test_the_features_are_those_of_the_registry() -> None:
    addresses = [*features.ours.values(), "kvatlas.ray.cluster:on_ray"]
    assert {address.split(".")[1] for address in addresses} == REFUSED.keys()
    assert all(features.get(name) is not None for name in features.names())


def test_what_is_missing_is_named_and_other_faults_are_not_hidden() -> None:
    ours = {"away": "kvatlas.not_there.file:name", "here": "json:loads"}
    result: Registry[object] = Registry("thing", "", ours)
    with pytest.raises(MissingFeatureError, match=r"^The feature not_there is not part of this installation\.$"):
        result.get("away")
    assert result.find("away") is None
    assert result.find("here") is json.loads
    with pytest.raises(KvatlasError, match=r"^Unknown thing 'other'; expected: here\."):
        result.get("other")
    broken: Registry[object] = Registry("thing", "", {"broken": "kvatlas.core.not_there:name"})
    with pytest.raises(ModuleNotFoundError):
        broken.find("broken")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spec") / "spec.yaml"
    file.write_text(json.dumps(SPEC))
    return file


@pytest.mark.slow
def test_without_any_feature_the_main_job_is_done(spec: Path, tmp_path: Path) -> None:
    package = package_without(REFUSED, tmp_path / "package")
    run = tmp_path / "run"
    works = [
        "--help",
        f"plan {spec} --tokens-per-second 1000",
        f"sweep {spec} --out {run} --quiet --workers 1",
        f"describe {run}",
        f"map {run} --out {tmp_path / 'map.svg'}",
        f"view {run} --out {tmp_path / 'page.html'}",
        f"export {run} --format csv",
    ]
    refused = [words.replace("SPEC", str(spec)).replace("RUN", str(run)) for words in REFUSED.values()]
    answers = run_forked([*works, *refused], package, tmp_path)
    assert [code for code, _, _ in answers[: len(works)]] == [0] * len(works), answers
    assert "autopsy" not in answers[0][1]
    assert "predictor" not in answers[0][1]
    for feature, answer in zip(REFUSED, answers[len(works) :], strict=True):
        assert answer == (2, "", f"kvatlas: The feature {feature} is not part of this installation.\n")


def run_forked(commands: list[str], package: Path, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of commands, in a fork of this process that imports the package of a folder anew."""
    answers = folder / "answers.json"

    def run() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "kvatlas":
                del sys.modules[name]
        sys.path.insert(0, str(package))
        sys.stdin = io.StringIO(json.dumps([words.split() for words in commands]))
        with answers.open("w") as sys.stdout:
            exec(COMMANDS, {"__name__": "__main__"})  # noqa: S102

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0
    return [(code, out, err) for code, out, err in json.loads(answers.read_text())]


@pytest.mark.deep
@pytest.mark.parametrize("feature", REFUSED)
def test_without_a_feature_other_tests_pass(feature: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(package_without([feature], tmp_path / "package")), str(ROOT)])
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *OTHERS]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

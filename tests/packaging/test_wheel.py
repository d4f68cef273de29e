"""The built package can be installed and used, with a separate package that adds a policy and a benchmark."""

import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import hatch_build
import pytest

from tests.packaging.environments import ROOT, Environment, build

PLUGIN = ROOT / "examples" / "plugin"
#: A sweep of the policy and the benchmark of the plug-in, on both embedded models.
SPEC = """
models: [embedded:tiny-llama, embedded:tiny-qwen]
benchmarks: [SUM3]
problems: 1
sampling: {max_new_tokens: 60}
settings: {policy: sinks, kv_budget: 48, ratio_over: thinking, sinks: 2}
axes: {local_window: [4, 8], ratio: [0.2, 0.4]}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """kvatlas' sdist (`gz`) and the wheel (`whl`) that is built from it."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheels of kvatlas and of the plug-in in an empty environment that sees the dependencies."""
    environment = Environment.made(tmp_path_factory.mktemp("environment") / "env")
    environment.install(built["whl"], build(PLUGIN, tmp_path_factory.mktemp("plugin"), "--wheel")["whl"])
    return environment


def test_wheel_and_sdist_hold_what_they_should(built: dict[str, Path]) -> None:
    wheel = set(zipfile.ZipFile(built["whl"]).namelist())
    models = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/kvatlas/models/embedded").rglob("*.*")}
    assert {name for name in models if "__pycache__" not in name} <= wheel
    assert {"kvatlas/py.typed", "kvatlas/sweeps/demo.yaml", "kvatlas/sweeps/dynts_r1_llama.yaml"} <= wheel
    assert {f"kvatlas/native/lib/{name}" for name in hatch_build.TARGETS} <= wheel
    assert not [name for name in wheel if name.startswith(("tests", "docs", "recipes")) or "__pycache__" in name]
    with tarfile.open(built["gz"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "tests/conftest.py", "mkdocs.yml", "LICENSE"} <= sdist
    assert {"examples/plugin/pyproject.toml", "hatch_build.py", "src/kvatlas/native/kernels.c"} <= sdist
    assert not [name for name in sdist if name.startswith("src/kvatlas/native/lib/")]


def test_an_index_page_has_no_link_that_leads_nowhere(built: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(built["whl"])
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about, _, page = wheel.read(name).decode().partition("\n\n")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith("https://")] == []
    assert any(re.search(r"/raw/v[\d.]+/docs/images/.*png$", target) for target in targets)
    assert "Project-URL: Repository, https://" in about


def test_a_package_is_built_without_kernels_where_they_do_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.c").write_text("no C")
    name = next(iter(hatch_build.TARGETS))
    assert hatch_build.compile_kernels(tmp_path, name).startswith(name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert "nothing" in hatch_build.compile_kernels(tmp_path, name)
    assert not list((tmp_path / "lib").iterdir())


@pytest.mark.slow
def test_a_recipe_and_a_sweep_of_plugins_to_its_page_come_from_the_wheels(
    installed: Environment, tmp_path: Path
) -> None:
    where = installed.run(tmp_path, "-c", "import kvatlas; print(kvatlas.__file__)").stdout
    assert where.startswith(str(installed.folder))
    (tmp_path / "spec.yaml").write_text(SPEC)
    done = installed.commands(
        tmp_path,
        ["plan", "demo", "--tokens-per-second", "10000"],
        ["sweep", "spec.yaml", "--out", "run", "--quiet", "--workers", "1"],
        ["map", "run", "--out", "map.png"],
        ["view", "run", "--out", "page.html"],
        ["export", "run", "--format", "jsonl", "--out", "run.jsonl"],
    )
    assert [code for code, _, _ in done] == [0] * 5, done
    assert "<html" in (tmp_path / "page.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} == {"full", "sinks"}


def test_the_guides_show_the_files_of_the_plugin() -> None:
    for guide, file in (("adding-a-benchmark.md", "sums.py"), ("adding-a-policy.md", "sinks.py")):
        text = (ROOT / "docs" / guide).read_text()
        assert (PLUGIN / "src" / "kvatlas_example" / file).read_text().strip() in text


def test_the_command_and_its_completion(installed: Environment, tmp_path: Path) -> None:
    script = installed.folder / "bin" / "kvatlas"
    asked = {"_KVATLAS_COMPLETE": "complete_bash", "COMP_WORDS": "kvatlas s", "COMP_CWORD": "1"}
    assert {"serve", "sweep"} <= set(installed.run(tmp_path, str(script), **asked).stdout.split())

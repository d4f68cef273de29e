"""The packages: their files and description; built, installed and used beside a package with plug-ins."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import hatch_build
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tests.command_line import run_apart

ROOT = Path(__file__).parents[2]
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


def output(folder: Path, *words: object, **environment: str) -> str:
    """Return what a program prints in a folder, without a source tree on its path."""
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=os.environ | {"PYTHONPATH": ""} | environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, out: Path, *options: str) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it, by their endings."""
    output(ROOT, sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, project)
    return {path.name.rpartition(".")[2]: path for path in out.iterdir()}


@dataclass
class Packages:
    """The files of the wheel and of the sdist, and the description that an index shows."""

    wheel: set[str]
    sdist: set[str]
    description: str
    urls: str


@pytest.fixture(scope="module", params=["to be built", pytest.param("built", marks=pytest.mark.deep)])
def packages(request: pytest.FixtureRequest) -> Packages:
    """Return what the build system lists, which takes no compiler; in `make deep` what it builds."""
    if request.param == "to be built":
        wheel = WheelBuilder(str(ROOT))
        core = wheel.metadata.core
        # The hook compiles the libraries; every sdist holds pyproject.toml.
        libraries = {f"kvatlas/cpu/native/lib/{name}" for name in hatch_build.TARGETS}
        sdist = SdistBuilder(str(ROOT))
        return Packages(
            {file.distribution_path for file in wheel.recurse_included_files()} | libraries,
            {file.distribution_path for file in sdist.recurse_included_files()} | {"pyproject.toml"},
            core.readme,
            " ".join(f"Project-URL: {name}, {address}" for name, address in core.urls.items()),
        )
    built = request.getfixturevalue("built")
    with tarfile.open(built["gz"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    wheel_file = zipfile.ZipFile(built["whl"])
    names = wheel_file.namelist()
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    about, _, description = wheel_file.read(metadata).decode().partition("\n\n")
    return Packages(set(names), sdist, description, about)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """kvatlas' sdist (`gz`) and the wheel (`whl`) that is built from it."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheels of kvatlas and the plug-in, which sees what is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    output(folder, sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    places = [position for position in sys.path if position.endswith("-packages") and Path(position).is_dir()]
    (packages / "dependencies.pth").write_text("".join(f"{position}\n" for position in places))
    wheels = built["whl"], build(PLUGIN, tmp_path_factory.mktemp("plugin"), "--wheel")["whl"]
    words = ("--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", "--force-reinstall")
    output(folder, sys.executable, "-m", "pip", *words, *wheels)
    return folder / "bin"


def test_wheel_and_sdist_hold_what_they_should(packages: Packages) -> None:
    wheel, sdist = packages.wheel, packages.sdist
    models = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/kvatlas/models/embedded").rglob("*.*")}
    assert {name for name in models if "__pycache__" not in name} <= wheel
    assert {"kvatlas/py.typed", "kvatlas/sweeps/demo.yaml", "kvatlas/sweeps/dynts_r1_llama.yaml"} <= wheel
    assert {f"kvatlas/cpu/native/lib/{name}" for name in hatch_build.TARGETS} <= wheel
    assert not [name for name in wheel if name.startswith(("tests", "docs", "recipes")) or "__pycache__" in name]
    assert {"pyproject.toml", "Makefile", "constraints.txt", "tests/conftest.py", "mkdocs.yml", "LICENSE"} <= sdist
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"} <= sdist
    assert {"examples/plugin/pyproject.toml", "hatch_build.py", "src/kvatlas/cpu/native/kernels.c"} <= sdist
    assert not [name for name in sdist if name.startswith("src/kvatlas/cpu/native/lib/")]


def test_an_index_page_has_no_link_that_leads_nowhere(packages: Packages) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", packages.description)
    assert len(targets) > 15
    assert [target for target in targets if not target.startswith("https://")] == []
    assert any(re.search(r"/raw/v[\w.]+/docs/images/.*png$", target) for target in targets)
    assert "Project-URL: Repository, https://" in packages.urls


def test_a_package_is_built_without_kernels_where_they_do_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.c").write_text("no C")
    name = next(iter(hatch_build.TARGETS))
    assert hatch_build.compile_kernels(tmp_path, name).startswith(name)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert "nothing" in hatch_build.compile_kernels(tmp_path, name)
    assert not list((tmp_path / "lib").iterdir())


@pytest.mark.deep
def test_a_recipe_and_a_sweep_of_plugins_to_its_page_come_from_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = output(tmp_path, installed / "python", "-c", "import kvatlas; print(kvatlas.__file__)")
    assert where.startswith(str(installed.parent))
    (tmp_path / "spec.yaml").write_text(SPEC)
    commands = (
        "plan demo --tokens-per-second 10000",
        "sweep spec.yaml --out run --quiet --workers 1",
        "map run --out map.png",
        "view run --out page.html",
        "export run --format jsonl --out run.jsonl",
    )
    done = run_apart(commands, tmp_path, installed / "python", PYTHONPATH="")
    assert [code for code, _, _ in done] == [0] * 5, done
    assert "<html" in (tmp_path / "page.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} == {"full", "sinks"}


def test_the_guides_show_the_files_of_the_plugin() -> None:
    shown = {"adding-a-benchmark.md": "sums.py", "adding-a-policy.md": "sinks.py", "api.md": "loops.py"}
    for guide, file in shown.items():
        text = (ROOT / "docs" / guide).read_text()
        assert (PLUGIN / "src" / "kvatlas_example" / file).read_text().strip() in text


COMPLETION = {"_KVATLAS_COMPLETE": "complete_bash", "COMP_WORDS": "kvatlas s", "COMP_CWORD": "1"}


def test_a_shell_completes_the_commands(tmp_path: Path) -> None:
    program = "import sys; sys.argv = ['kvatlas']; from kvatlas import cli; cli.main()"
    environment = COMPLETION | {"PYTHONPATH": str(ROOT / "src")}
    assert {"serve", "sweep"} <= set(output(tmp_path, sys.executable, "-c", program, **environment).split())


@pytest.mark.deep
def test_the_installed_command_completes_too(installed: Path, tmp_path: Path) -> None:
    assert {"serve", "sweep"} <= set(output(tmp_path, installed / "kvatlas", **COMPLETION).split())

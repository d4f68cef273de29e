"""Documents, sentences and programs name what is there: commands, options, extras, imports, pages of the site."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas import __version__, cli

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "bench" / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Options of other programs that pages and sentences name.
OTHERS = {
    "--no-deps", "--user", "--map-root-user", "--mount", "--system-site-packages", "--model", "--model_args", "--tasks",
    "--cache-type-k", "--cache-type-v", "--enable-deterministic-inference", "--kv-cache-dtype", "--no-x",
    "--gen_kwargs", "--apply_chat_template", "--limit", "--log_samples", "--batch_size", "--document", "--head",
    "--config", "--long-problems", "--local-dir", "--repo-type",
}  # fmt: skip


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Every command with its options."""
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    yield path, options | {"--help", "-h"}
    for name, part in getattr(command, "commands", {}).items():
        yield from commands(part, (*path, name))


COMMANDS = dict(commands(cli.command()))
OPTIONS = set().union(*COMMANDS.values())


def calls(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The commands of kvatlas in a page's code, each as its words and the options among them."""
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", text, flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(kvatlas [^`\n]+)`", text)
    for line in lines:
        start = re.search(r"(?<![\w.-])kvatlas ([a-z].*)", line.split(" #")[0])
        if start:
            words = shlex.split(start[1].split("|")[0].replace("'s ", " "))
            yield words, [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


def program_options() -> set[str]:
    """Options that the programs in bench/ and recipes/ take."""
    texts = [path.read_text() for folder in ("bench", "recipes") for path in (ROOT / folder).rglob("*.py")]
    written = {name for text in texts for name in re.findall(r'"(--[a-z][a-z-]+)"', text)}
    parts = [part for text in texts for part in re.findall(r" = arguments\((.*?)\)\n", text, flags=re.S)]
    declared = {name for part in parts for name in re.findall(r"\b([a-z_]+)=", part)}
    return written | {f"--{name.replace('_', '-')}" for name in declared}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_is_there(page: Path) -> None:
    text = page.read_text()
    for words, options in calls(text):
        path = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len)
        assert path, f"no command: kvatlas {' '.join(words)}"
        assert set(options) <= COMMANDS[path], f"kvatlas {' '.join(words)}"
    named = {
        option for code in re.findall(r"`([^`\n]+)`", text) for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", code)
    }
    known = OPTIONS | OTHERS | program_options()
    assert named <= known, sorted(named - known)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {part for names in re.findall(r"kvatlas\[([a-z,-]+)\]", text) for part in names.split(",")} <= set(extras)


def test_options_that_a_sentence_names_are_those_of_a_command() -> None:
    """Of all sentences for users: errors, findings, notes, and what commands print."""
    texts = "KvatlasError", "CheckResult", "Note", "echo", "note"
    named = {
        option
        for path in (ROOT / "src").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", "")) in texts
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", text.value)
    }
    assert len(named) > 10
    assert named <= OPTIONS | OTHERS


PROGRAMS = sorted(path for folder in ("bench", "docs", "examples", "recipes") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_of_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvatlas":
            module = importlib.import_module(str(node.module))
            missing = [
                name.name
                for name in node.names
                if not hasattr(module, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}")
            ]
            assert not missing, f"{node.module} has no {missing}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "kvatlas":
                    importlib.import_module(name.name)


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w/-]+\.md", yaml.safe_dump(nav))
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_the_reference_names_objects_that_are_there() -> None:
    """The directives of the API's page, which a site is built from in `make deep`."""
    directives = re.findall(r"^::: (\S+)\n((?: +\S.*\n)*)", (ROOT / "docs" / "api.md").read_text(), flags=re.M)
    assert len(directives) > 10
    for name, options in directives:
        target = pkgutil.resolve_name(name)
        members = (yaml.safe_load(options) or {}).get("options", {}).get("members") or []
        assert [member for member in members if not hasattr(target, member)] == [], name


@pytest.mark.deep
def test_the_site_builds_in_strict_mode(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("kvatlas.serve.service.Service.ask", "kvatlas.engine.Engine.run", "kvatlas.core.Usage"):
        assert f'id="{name}"' in api
    text = re.sub(r"<[^>]+>", "", api)
    assert "kv_budget" in text


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert project["version"] == cited == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text())["jobs"].values():
            commands_run = [step["run"].split() for step in job["steps"] if "run" in step]
            assert commands_run
            assert {words[1] for words in commands_run if words[0] == "make"} <= targets


def test_guides_are_short() -> None:
    """Pages in which one looks things up are reference, and no guides; findings are as long as they need."""
    reference = {"api", "architecture", "glossary", "model-types", "policies"}
    guides = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in reference]
    assert sum(len(page.read_text("utf-8").split()) for page in guides) <= 12_150


def test_readme_is_read_in_one_sitting() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 170
    assert max(map(len, lines)) <= 140

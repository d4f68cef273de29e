"""The names behind `--out`: the suffix decides, and one that a command cannot write is refused before any work."""

from pathlib import Path
from typing import Any

import pytest

from kvatlas.cli import command
from tests.command_line import Call
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

MAP = "published:dynts_r1_llama"
FIGURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
TABLES = (".csv", ".jsonl", ".parquet")
#: Names of files that somebody may expect from any command.
NAMES = [
    f"report{suffix}"
    for suffix in (*FIGURES, *PAGES, *TABLES, ".PDF", ".tex", ".xls", ".xlsx", ".json", ".txt", ".md", ".yaml", ".zip")
]
#: The words of each command with `--out`, and the suffixes that it writes; RUN is a finished run.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "demo": (("--quick",), ()),
    "run": (("embedded:tiny-llama", "CHAIN3"), ()),
    "sweep": (("demo-quick",), ()),
    "map": ((MAP,), FIGURES),
    "compare": (("RUN",), FIGURES),
    "view": (("RUN",), PAGES),
    "export": (("RUN",), TABLES),
    "gate": (("RUN", "RUN"), (*FIGURES, *PAGES)),
    "deploy export": (("RUN", "--to", "kvpress"), ()),
    "deploy verify": (("http://127.0.0.1:9", "--against", "RUN"), ()),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_run(tmp_path_factory.mktemp("out") / "run", manifest(grid("dynts"), problems=2, samples=1))


def _commands_with(option: str) -> set[str]:
    """Return the names of all commands that have an option."""
    found = set()
    groups: list[tuple[str, Any]] = [("", command())]
    while groups:
        prefix, group = groups.pop()
        for name, item in group.commands.items():
            if hasattr(item, "commands"):
                groups.append((f"{name} ", item))
            elif any(option in parameter.opts for parameter in item.params):
                found.add(prefix + name)
    return found


def test_every_command_with_an_out_is_here() -> None:
    assert _commands_with("--out") == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_suffix_that_a_command_cannot_write_is_refused(
    name: str, finished: Path, kvatlas: Call, tmp_path: Path
) -> None:
    words, suffixes = COMMANDS[name]
    given = [finished if word == "RUN" else word for word in words]
    for file in NAMES:
        if Path(file).suffix.lower() in suffixes:
            continue
        said = kvatlas.refuse(*name.split(), *given, "--out", tmp_path / file)
        assert repr(file) in said
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "start"),
    [
        ("a.csv", b"model,"),
        ("a.CSV", b"model,"),
        ("a.jsonl", b'{"model"'),
        ("a.JSONL", b'{"model"'),
        ("a.parquet", b"PAR1"),
    ],
)
def test_an_export_is_what_its_suffix_says(
    file: str, start: bytes, finished: Path, kvatlas: Call, tmp_path: Path
) -> None:
    assert kvatlas.succeed("export", finished, "--out", tmp_path / file) == f"{tmp_path / file}\n"
    assert (tmp_path / file).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("kind", "file"),
    [("csv", "a.jsonl"), ("cells", "a.parquet"), ("jsonl", "a.csv"), ("parquet", "a.jsonl"), ("run", "a.csv")],
)
def test_a_format_that_contradicts_the_suffix_is_refused(
    kind: str, file: str, finished: Path, kvatlas: Call, tmp_path: Path
) -> None:
    assert repr(file) in kvatlas.refuse("export", finished, "--format", kind, "--out", tmp_path / file)
    assert list(tmp_path.iterdir()) == []


def test_a_page_has_its_suffix_in_any_case(finished: Path, kvatlas: Call, tmp_path: Path) -> None:
    kvatlas.succeed("view", finished, "--out", tmp_path / "PAGE.HTML")
    assert (tmp_path / "PAGE.HTML").read_bytes().startswith(b"<!doctype html>")


def test_folders_may_have_dots_in_their_names(finished: Path, kvatlas: Call, tmp_path: Path) -> None:
    kvatlas.succeed("export", finished, "--format", "run", "--out", tmp_path / "v0.2")
    kvatlas.succeed("view", finished, "--out", tmp_path / "llama.q8")
    # A run that is there already keeps its name.
    finished.rename(finished.with_name("old.csv"))
    try:
        kvatlas.succeed("export", finished.with_name("old.csv"), "--format", "jsonl")
    finally:
        finished.with_name("old.csv").rename(finished)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_is_given_twice_is_refused(name: str, finished: Path, kvatlas: Call, tmp_path: Path) -> None:
    words, suffixes = COMMANDS[name]
    given = [finished if word == "RUN" else word for word in words]
    outs = [word for number in (1, 2) for word in ("--out", tmp_path / f"{number}{'.png' if suffixes else ''}")]
    code, out, said = kvatlas(*name.split(), *given, *outs)
    assert (code, out) == (2, "")
    assert "--out is given 2 times" in said


@pytest.mark.parametrize(
    "words",
    [
        ("sweep", "demo", "--out", ""),
        ("map", "published:dynts_r1_qwen", "--out", ""),
        ("describe", ""),
        ("compare", "published:dynts_r1_qwen", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: tuple[str, ...], kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = kvatlas(*words)
    assert code == 2
    assert "is empty; expected a name or a path" in err
    assert not list(tmp_path.iterdir())

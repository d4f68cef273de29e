"""The documents hold: every command and every block of code runs, links lead somewhere; the budget of lines."""

import ast
import io
import json
import re
import shlex
import shutil
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvatlas.sweeps.spec import recipes
from tests.demo_numbers import FILE, quotes
from tests.stored import decode_run

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
#: Commands that need minutes, other machines or the network; each is run elsewhere, for the reason given.
NOT_HERE = {
    "make demo": "runs in a fresh clone before each release",
    "make test": "is what runs this test",
    "make bench": "measures for minutes",
    "make site": "is what tests/test_documented.py builds",
    "kvatlas demo": "is `make demo`",
    "pip install": "needs the network",
    "git clone": "needs the network",
    "inspect eval": "asks a remote or a large model; tests/integrations asks local ones",
    "kvatlas view runs": "runs until it is stopped; tests/report",
    "kvatlas serve": "runs until it is stopped; tests/serve",
    "python -m kvatlas.integrations.lm_eval": "fetches a large model; tests/integrations runs a local task",
    "kvatlas draw curves": "needs a run over mazes; tests/cli/test_compare.py draws one",
    "kvatlas import": "needs the log of the line before; tests/integrations",
    "kvatlas deploy export": "needs a run in an engine's terms; tests/deploy/test_export.py",
    "kvatlas deploy verify": "needs an endpoint; tests/deploy/test_verify.py",
    "kvatlas map runs/others": "draws what the line before imports; tests/integrations",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def test_docstrings_and_comments_are_plain_english() -> None:
    """Docstrings begin with a verb or a noun; some riddles are in no docstring and no comment."""
    found = []
    rooms = ("src", "tests", "bench", "recipes", "examples")
    for file in [file for room in rooms for file in ROOT.glob(f"{room}/**/*.py")]:
        text = file.read_text()
        docstrings = [
            ast.get_docstring(node) or ""
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        words = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [word.string for word in words if word.type == tokenize.COMMENT]
        found += [(file, item) for item in docstrings if re.match(r"(What|Who|Whether|Where|How)\b", item)]
        found += [(file, item) for item in docstrings + comments if re.search(r"\b(valid are|nobody|is none)\b", item)]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", page.read_text()):
        assert (page.parent / "".join(target)).exists(), target


def test_readme_quotes_the_numbers_of_the_demo() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in quotes(json.loads(FILE.read_text())) if line not in lines] == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader would stand in: the documents, and a finished small demo."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("docs", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    quick = yaml.safe_load(small(recipes()["demo-quick"]))
    decode_run({**quick, "problems": 2}, folder / "runs" / "demo")
    return folder


def small(recipe: str) -> str:
    """A recipe with one problem and short traces."""
    return recipe.replace("problems: 6", "problems: 1").replace("max_new_tokens: 700", "max_new_tokens: 300")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(
    page: Path, workplace: Path, succeed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("COLUMNS", "100")
    one_problem = {name: small(text) for name, text in recipes().items()}
    monkeypatch.setattr("kvatlas.sweeps.spec.recipes", lambda: one_problem)
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.split(" #")[0].strip()
            if not text or any(text.startswith(name) and "--quick" not in text for name in NOT_HERE):
                continue
            assert text.startswith("kvatlas "), f"a command that this test cannot run: {text}"
            succeed(*shlex.split(text)[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("column_list")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for block in blocks(page, "python"):
        code = compile(block, page.name, "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})  # noqa: S102


@pytest.mark.slow
def test_the_tutorials_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script as it is; the notebook cell by cell on the same traces, each result shown as a notebook would."""
    monkeypatch.chdir(tmp_path)
    script = (ROOT / "docs" / "tutorial.py").read_text()
    exec(compile(script, "tutorial.py", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102
    assert (tmp_path / "report.html").is_file()
    assert "# Against the full cache" in capsys.readouterr().out
    shutil.copytree("grid", "tutorial-run")
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
    names: dict[str, object] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            value = isinstance(last, ast.Expr)
            exec(compile(ast.Module([*body, *([] if value else [last])], []), "cell", "exec"), names)  # noqa: S102
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))  # noqa: S307
    pictures = [value._repr_png_() for value in shown if hasattr(value, "_repr_png_")]
    assert [picture[:4] for picture in pictures] == [b"\x89PNG"]
    assert (tmp_path / "tutorial-report.html").is_file()

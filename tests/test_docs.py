"""The documents hold: every command and every block of code runs, links lead somewhere; the budget of lines."""

import ast
import io
import json
import re
import shlex
import shutil
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from kvatlas.sweeps import parse_spec, read_spec
from kvatlas.sweeps.served import make_served_plan
from kvatlas.sweeps.spec import recipes
from tests.demo_numbers import FILE, quotes
from tests.hub_server import connect
from tests.stand_ins import ELSEWHERE, hub_of_small_models, names_of, run_script
from tests.stored import decode_run

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Commands that need minutes, other machines or the network; each is run elsewhere, for the reason given.
NOT_HERE = {
    "make demo": "runs in a fresh clone before each release",
    "make test": "is what runs this test",
    "make bench": "measures for minutes",
    "make site": "is what tests/test_documented.py builds",
    "kvatlas demo": "is `make demo`",
    "pip install": "needs the network; tests/packaging installs a wheel",
    "git clone": "needs the network",
    "cd kvatlas": "is the folder of the line before",
    "inspect eval": "asks a remote or a large model; tests/integrations asks local ones",
    "kvatlas view runs": "runs until it is stopped; tests/report",
    "kvatlas serve": "runs until it is stopped; the client of the same page asks it below",
    "python examples/depth_curves.py": "needs a run over mazes; tests/test_examples.py draws one",
    "kvatlas import": "needs the log of the line before; tests/integrations",
    "kvatlas deploy export": "needs a run in an engine's terms; tests/deploy/test_export.py",
    "kvatlas deploy verify": "needs an endpoint; tests/deploy/test_verify.py",
    "vllm serve": "needs vLLM; tests/engines runs one with the plug-in",
    "lm_eval run": "fetches a task or a large model; tests/integrations and tests/gates run the harness",
    "kvatlas gate": "needs the logs of the lines before, or endpoints; tests/gates",
    "kvatlas describe runs/others": "reads what the line before imports; tests/integrations",
}
#: Words with which a line of code begins.
CODE = re.compile(r"(kvatlas|pip|python|git|make|cd|import|from|export|[\w.]+\() ?")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.S | re.M)


#: Words that are in no docstring and no comment.
RIDDLES = re.compile(r"\b(valid are|nobody|is none)\b")


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
        found += [(file, item) for item in docstrings if re.match(r"(What|Who|Whether|Where|How)\b", item)]
        comments = []
        # Finding the comments of a file takes as long as all the rest.
        if RIDDLES.search(text):
            words = tokenize.generate_tokens(io.StringIO(text).readline)
            comments = [word.string for word in words if word.type == tokenize.COMMENT]
        found += [(file, item) for item in docstrings + comments if RIDDLES.search(item)]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", page.read_text()):
        assert (page.parent / "".join(target)).exists(), target


def test_readme_quotes_the_numbers_of_the_demo() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in quotes(json.loads(FILE.read_text())) if line not in lines] == []


def test_readme_quotes_the_findings() -> None:
    """Its figures of autopsies and of the arena are those of the stored results, of the last look at data."""
    results = ROOT / "bench" / "results"
    models = json.loads((results / "equal_arms.json").read_text())["numbers"].values()
    right = [model["summary"]["held_out"]["right"] for model in models]
    saving, others = ([f"{one[arm]['value']:.0f}" for one in right] for arm in ("cause", "kind"))

    looks = json.loads((results / "arena.json").read_text())["numbers"].values()
    rows = [row for model in looks for row in model["second"]["against"]["random"]["rows"]]
    chosen = ("h2o(per_query=True)", True, 160)
    ahead, behind = (row["value"] for row in rows if (row["name"], row["keep_prompt"], row["kv_budget"]) == chosen)

    text = " ".join((ROOT / "README.md").read_text().split())
    for first, second in (saving, others):
        assert f" {first} and {second} %" in text
    assert f" {ahead:.1f} points above random on tiny-llama and {-behind:.1f} below on tiny-qwen" in text


def test_every_block_says_what_it_is() -> None:
    """Blocks of text hold output and drawings, no code: code is run below."""
    known = {"bash", "python", "yaml", "toml", "bibtex", "dockerfile", "text"}
    for page in PAGES:
        assert set(re.findall(r"^```(\w*)\n.*?^```", page.read_text(), flags=re.S | re.M)) <= known, page.name
        for block in blocks(page, "text"):
            assert not [line for line in block.splitlines() if CODE.match(line)], page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_specs_are_read(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without models, benchmarks or settings is a part of a spec: it is read beside these.

    Of servers also the commands are made.
    """
    monkeypatch.setenv("HF_TOKEN", "x")
    rest = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"]}
    rest["settings"] = [{"policy": "rkv"}, {"policy": "random"}]
    for block in blocks(page, "yaml"):
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump({**rest, **yaml.load(block, yaml.BaseLoader)}))
        spec = read_spec(path)
        if spec.is_served:
            small_ones = parse_spec({**spec.model_dump(exclude_unset=True), "benchmarks": ["CHAIN4"], "problems": 1})
            assert make_served_plan(small_ones, tmp_path).settings


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader would stand in: the documents, the specs that they name, and a finished small demo."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("docs", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    quick = yaml.safe_load(small(recipes()["demo-quick"]))
    grid_of_cluster = {**quick, "models": quick["models"][:1], "benchmarks": quick["benchmarks"][:1]}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid_of_cluster))
    (grid,) = blocks(ROOT / "docs" / "one-gpu.md", "yaml")
    (folder / "r1-llama.yaml").write_text(f"problems: 1\n{grid}")
    (folder / "mine.jsonl").write_text(blocks(ROOT / "docs" / "small-model.md", "text")[0])
    (folder / "small.yaml").write_text(small(blocks(ROOT / "docs" / "small-model.md", "yaml")[0]))
    (folder / "mine.py").write_text(blocks(ROOT / "docs" / "adding-a-policy.md", "python")[0])
    decode_run({**quick, "problems": 2}, folder / "runs" / "demo")
    return folder


def small(recipe: str) -> str:
    """A recipe with one problem, short traces, and of the arena's settings four: `make deep` runs them all."""
    spec = yaml.safe_load(recipe)
    if len(spec["settings"]) > 8:
        spec["settings"] = spec["settings"][:2] + spec["settings"][-2:]
    recipe = yaml.safe_dump(spec)
    return re.sub(r"problems: \d+\b", "problems: 1", recipe).replace("max_new_tokens: 700", "max_new_tokens: 300")


@pytest.fixture(scope="module")
def hub_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with hub_of_small_models(tmp_path_factory.mktemp("hub")) as address:
        yield address


#: Commands that drew a figure of the demo.
DRAWN: set[str] = set()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(
    page: Path,
    workplace: Path,
    hub_address: str,
    succeed: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("COLUMNS", "100")
    one_problem = {name: small(text) for name, text in recipes().items()}
    monkeypatch.setattr("kvatlas.sweeps.spec.recipes", lambda: one_problem)
    connect(monkeypatch, hub_address, tmp_path / "cache")
    for block in blocks(page, "bash"):
        if block.startswith("#!"):
            run_script(block, workplace)
            continue
        for line in block.replace("\\\n", " ").splitlines():
            # Several pages have the same figures of the demo.
            command = line.split(" #")[0].strip()
            if command not in DRAWN:
                run_line(line, succeed)
            if command.startswith("kvatlas map runs/demo"):
                DRAWN.add(command)


def run_line(line: str, succeed: Callable[..., str]) -> None:
    """Run a line of a block with stand-ins, unless it is run elsewhere."""
    text = line.split(" #")[0].strip()
    for part, stand_in in ELSEWHERE.items():
        text = text.replace(part, stand_in)
    if not text or any(text.startswith(name) and "--quick" not in text for name in NOT_HERE):
        return
    assert text.startswith("kvatlas "), f"a command that this test cannot run: {text}"
    succeed(*shlex.split(text)[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("column_list")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    with names_of(page, monkeypatch) as names:
        address = names.pop("ADDRESS", "")
        for block in blocks(page, "python"):
            text = block.replace("http://127.0.0.1:8000", address or "http://127.0.0.1:8000")
            code = compile(text, page.name, "exec", dont_inherit=True)
            exec(code, {"__name__": "__main__", **names})  # noqa: S102


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
    # Of the run, and of one map.
    assert [picture[:4] for picture in pictures] == [b"\x89PNG", b"\x89PNG"]
    assert (tmp_path / "tutorial-report.html").is_file()

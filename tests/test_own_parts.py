"""One's own parts: policies of a file and of Python, chat templates, system messages, folders, recipes, GPUs."""

import inspect
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvatlas
from kvatlas import benchmarks, class_files, models, policies
from kvatlas.benchmarks.file_checks import check_benchmark
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.models import EMBEDDED
from kvatlas.policies import CompressingPolicy
from kvatlas.results.regrade import regrade
from kvatlas.sweeps import make_plan, parse_spec, read_spec
from kvatlas.sweeps.executors import devices, shares, usual_workers
from kvatlas.sweeps.worker import Job
from tests.command_line import Call

ROOT = Path(__file__).parents[1]


class Newest(CompressingPolicy):
    name = "newest"
    summary = "keeps the newest tokens"

    def score(self, cached):
        return cached.positions


#: The same in a file.
CODE = f"from kvatlas.policies import CompressingPolicy\n\n\n{inspect.getsource(Newest)}"


#: A family of benchmarks in a file, as the guide has it.
SUMS = (ROOT / "docs" / "adding-a-benchmark.md").read_text("utf-8").split("```python\n")[1].split("```")[0]


def texts(policy: str, **options: Any) -> list[str]:
    """The texts of a small run; each problem is compressed."""
    values = {"kv_budget": 150, "local_window": 8, "ratio": 0.3}
    run = kvatlas.run(
        "embedded:tiny-llama", "CHAIN6", problems=2, policy=policy, max_new_tokens=120, **values, **options
    )
    assert all(trace.usage.compressions for trace in run.traces())
    return [trace.text for trace in run.traces()]


def test_a_policy_comes_from_a_file_or_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    monkeypatch.setattr(policies.policies, "added", {})
    expected = texts("window", workers=1)
    assert texts(f"{file}:Newest", workers=1) == expected
    with pytest.raises(KvatlasError, match="Unknown policy 'newest'"):
        texts("newest")
    assert kvatlas.register(Newest) is Newest
    assert texts("newest", workers=1) == expected
    with pytest.raises(KvatlasError, match="the name is taken by kvatlas"):
        kvatlas.register(type("Other", (Newest,), {"name": "window"}))
    with pytest.raises(KvatlasError, match="cannot be registered"):
        kvatlas.register(int)  # type: ignore[arg-type]
    with pytest.raises(KvatlasError, match="has no policy 'Other'"):
        policies.from_setting(Setting.from_parameters(f"{file}:Other"))
    policies.permit(f"{tmp_path}/none.py:Other")
    with pytest.raises(KvatlasError, match="cannot be loaded"):
        policies.from_setting(Setting.from_parameters(f"{tmp_path}/none.py:Other"))


def test_two_threads_load_one_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text(f"import time\ntime.sleep(0.2)\n{SUMS}")
    policies.permit(f"{file}:Sum3")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(benchmarks.find, [f"{file}:Sum3"] * 2))
    assert [benchmark.name for benchmark in found] == ["SUM3", "SUM3"]


def test_the_key_of_a_file_follows_its_content(tmp_path: Path) -> None:
    file, model = tmp_path / "mine.py", models.find("embedded:tiny-llama")
    file.write_text(CODE)
    policies.permit(f"{file}:Newest")
    policy = policies.from_setting(Setting.from_parameters(f"{file}:Newest", kv_budget=150, local_window=8, ratio=0.3))
    before = policy.identity(model)
    file.write_text(CODE + "\n# changed\n")
    # The code that runs is that of the file as it was.
    with pytest.raises(KvatlasError, match="was changed after it was loaded; start again"):
        policy.identity(model)
    class_files.run_file.cache_clear()
    assert policy.identity(model) != before
    file.unlink()
    with pytest.raises(KvatlasError, match="cannot be read"):
        policy.identity(model)


def test_the_key_of_a_file_follows_the_modules_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that only another module or a function imports; no others."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package").mkdir()
    files = {
        "mine.py": f"import own_first\n{CODE}",
        "own_first.py": "def late():\n    from own_package import second\n    return second\n",
        "own_package/__init__.py": "",
        "own_package/second.py": "VALUE = 1\n",
        "beside.py": "VALUE = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    model = models.find("embedded:tiny-llama")
    policies.permit(f"{tmp_path / 'mine.py'}:Newest")

    def key() -> dict[str, Any]:
        class_files.run_file.cache_clear()
        setting = Setting.from_parameters(f"{tmp_path / 'mine.py'}:Newest", kv_budget=150, local_window=8, ratio=0.3)
        return policies.from_setting(setting).identity(model)

    before = key()
    assert set(before["modules"]) == files.keys() - {"mine.py", "beside.py"}
    for name in files:
        (tmp_path / name).write_text("# changed\n" + files[name])
        assert (key() == before) is (name == "beside.py")
        (tmp_path / name).write_text(files[name])
    assert key() == before


def test_templates_and_system_messages_are_options_of_a_model(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}")
    plain = models.find("embedded:tiny-llama")
    changed = models.find("embedded:tiny-llama", template=str(template), system="be brief")
    assert changed.prompt("x") == "[system: be brief][user: x]"
    assert changed.conversation([{"role": "system", "content": "own"}]) == "[system: own]"
    assert changed.prompt_identity != replace(changed, options=replace(changed.options, system="")).prompt_identity
    assert "system" not in plain.prompt_identity
    with pytest.raises(KvatlasError, match="template: 'gone' cannot be read"):
        _ = models.find("embedded:tiny-llama", template="gone").tokenizer


def test_folders_need_no_prefix_and_recipes_no_file() -> None:
    folder = str(EMBEDDED / "tiny-llama")
    assert models.find(folder).weights_digest == models.find("embedded:tiny-llama").weights_digest
    assert read_spec(Path("demo-quick")).problems == 6


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def job(device: str) -> Job:
        model = models.find(str(EMBEDDED / "tiny-llama"), device=device)
        return Job(model, "", (), (), Sampling(), 0)

    assert usual_workers(job("auto")) == 2
    assert [share.model.device for share in shares(job("cuda"), 3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [share.model.device for share in shares(job("cuda:1"), 2)] == ["cuda:1"] * 2
    assert devices(job("cpu")) == ["cpu"]


def test_a_setting_without_a_choice_is_refused_in_a_run_and_named_in_a_sweep() -> None:
    values = {"kv_budget": 150, "local_window": 8, "ratio": 0.1, "ratio_over": "older"}
    with pytest.raises(
        KvatlasError, match="keeps the same tokens under every policy on all problems of CHAIN6; choose"
    ):
        kvatlas.run("embedded:tiny-llama", "CHAIN6", policy="window", problems=1, **values)
    spec = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "problems": 1}
    plan = make_plan(parse_spec({**spec, "baseline": {"policy": "window", **values}}))
    assert any("all policies keep the same tokens" in sentence for sentence in plan.warnings)
    assert plan.spec.sampling.max_new_tokens == 1152


def test_a_file_of_the_same_name_in_another_folder_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder of the process changes, as in a notebook."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(CODE.replace("keeps the newest tokens", folder))
        monkeypatch.chdir(tmp_path / folder)
        policies.permit("mine.py:Newest")
        assert policies.policies.get("mine.py:Newest").summary == folder


def test_code_that_nobody_permitted_is_not_loaded(tmp_path: Path) -> None:
    """Wherever its name comes from: a run, a log, a request."""
    file = tmp_path / "theirs.py"
    file.write_text(f"{CODE}\nopen(__file__ + '.ran', 'w')\n")
    setting = Setting.from_parameters(f"{file}:Newest", kv_budget=150, local_window=8, ratio=0.3)
    spec = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "baseline": [{"policy": setting.policy}]}
    for load in (
        lambda: policies.policies.get(setting.policy),
        lambda: policies.from_setting(setting),
        lambda: policies.describe_policy(setting.policy),
        lambda: make_plan(parse_spec(spec)),
    ):
        with pytest.raises(KvatlasError, match=r"code of the file .*; if you trust that file add --allow-code"):
            load()
    assert not Path(f"{file}.ran").exists()


def test_a_file_that_the_user_named_needs_no_permission_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another command that finds it in a run; changed, it does."""
    file = tmp_path / "mine.py"
    (tmp_path / "beside_it.py").write_text("VALUE = 1\n")
    file.write_text(f"import beside_it\n{CODE}")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{file}:Newest"
    policies.permit(name)
    class_files.load_file(str(file))

    def load_in_another_command() -> None:
        monkeypatch.setattr(class_files, "_permitted", set())
        class_files.run_file.cache_clear()
        class_files.load_file(str(file))

    load_in_another_command()
    for changed in (tmp_path / "beside_it.py", file):
        changed.write_text(f"{changed.read_text()}\n# changed\n")
        with pytest.raises(KvatlasError, match=r", which was changed since you allowed it; .* add --allow-code"):
            load_in_another_command()
        policies.permit(name)
        class_files.run_file.cache_clear()
        class_files.load_file(str(file))
    monkeypatch.setattr(class_files, "_permitted", set())
    copied = tmp_path / "received"
    copied.mkdir()
    (copied / "mine.py").write_bytes(file.read_bytes())
    with pytest.raises(KvatlasError, match="add --allow-code"):
        class_files.load_file(str(copied / "mine.py"))


def test_the_class_of_a_policy_may_be_left_out_where_a_file_has_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    values = {"kv_budget": 150, "local_window": 8, "ratio": 0.3}
    data = {"models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN6"], "baseline": {"policy": str(file), **values}}
    policies.permit(str(file))
    (setting, _), *_ = parse_spec(data).cells()
    assert setting == Setting.from_parameters(f"{file}:Newest", **values)
    assert policies.from_setting(Setting.from_parameters(str(file), **values)).setting_name == f"{file}:Newest"

    two = tmp_path / "two.py"
    two.write_text(f"{CODE}\n\nclass Other(Newest):\n    pass\n")
    policies.permit(str(two))
    with pytest.raises(KvatlasError, match=r"it has Newest, Other; name one, as .*two.py:Newest"):
        policies.policies.get(str(two))


def test_a_benchmark_comes_from_a_file_or_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    options: dict[str, Any] = {"problems": 2, "max_new_tokens": 20}
    run = kvatlas.run("embedded:tiny-llama", f"{file}:Sum3", workers=1, out=tmp_path / "run", **options)
    assert {trace.benchmark for trace in run.traces()} == {"SUM3"}
    with pytest.raises(KvatlasError, match=r"behind the class, as in .*sums.py:Sum12"):
        benchmarks.find(str(file))
    with pytest.raises(KvatlasError, match="has no benchmark 'Total'; it has Sum"):
        benchmarks.find(f"{file}:Total")

    monkeypatch.setattr(benchmarks.families, "added", {})
    module = class_files.load_file(str(file))[0]
    with pytest.raises(KvatlasError, match="needs a name"):
        kvatlas.register(module.Sum)
    kvatlas.register(module.Sum, "SUM")
    again = kvatlas.run("embedded:tiny-llama", "SUM3", workers=1, **options)
    assert [trace.text for trace in again.traces()] == [trace.text for trace in run.traces()]


def test_a_class_without_a_family_is_a_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    body = SUMS.replace("    @classmethod\n    def named", "    @classmethod\n    def of").replace(
        "size: int", "size: int = 4"
    )
    file.write_text(body.partition("assert Sum")[0])
    policies.permit(str(file))
    assert benchmarks.find(str(file)).name == "SUM4"
    with pytest.raises(KvatlasError, match="'9' behind its class"):
        benchmarks.find(f"{file}:Sum9")

    file = tmp_path / "half.py"
    file.write_text(
        "class Half:\n    name = 'HALF'\n    def problems(self, limit=None): ...\n    def grade(self): ...\n"
    )
    policies.permit(str(file))
    with pytest.raises(KvatlasError, match="its class Half lacks version, typical_output_tokens, prompt"):
        benchmarks.find(str(file))
    file = tmp_path / "derived.py"
    without_grade = body.partition("    def grade")[0].replace("class Sum:", "class Sum(Benchmark):")
    file.write_text(f"from kvatlas.benchmarks import Benchmark\n{without_grade}")
    policies.permit(str(file))
    for name in (file, f"{file}:Sum"):
        with pytest.raises(KvatlasError, match="its class Sum lacks grade"):
            benchmarks.find(str(name))


#: A benchmark of nine problems, which does not use its limit.
NINE = """
from kvatlas.core import Grade, Problem, Status

class Nine:
    name = "NINE"
    version = 1
    typical_output_tokens = 20

    def problems(self, limit=None):
        return [Problem(f"nine-{i}", f"{i} + {i} =", str(i + i)) for i in range(9)]

    def prompt(self, problem):
        return problem.question

    def grade(self, problem, answer):
        return Grade(False, 0.0, None, Status.OK)
"""


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('f"nine-{i}", f"', '"nine", f"', "has 9 problems with the id 'nine'"),
        ("str(i + i)) for", "i + i) for", "answer of the problem 'nine-0' is 0; expected a text"),
        (
            'Problem(f"nine-{i}", f"{i} + {i} =", str(i + i))',
            "{}",
            "has the problem '{}'; expected a kvatlas.core.Problem",
        ),
        ("range(9)", "range(0)", "has no problems"),
        ('f"{i} + {i} ="', 'str(__import__("random").random())', "gives other problems .* with random.Random"),
        ("range(9)", "{}['rows']", r"cannot give its problems \(there is no 'rows', line 10 of nine.py"),
        ("(self, limit=None)", "(self)", "cannot give its problems"),
        (
            "problem.question",
            "problem.about['text']",
            r"the prompt of 'nine-0' \(there is no 'text', line 13 of nine.py",
        ),
        ("problem.question", "None", "the prompt of 'nine-0' .it is None, expected a text"),
        ("problem.question", "' '", "the prompt of 'nine-0' .it is ' ', expected a text"),
        ("version = 1", "version = '1'", "its version is '1'; expected an integer"),
        ("tokens = 20", "tokens = 0", "its typical_output_tokens is 0; expected a number above 0"),
        ('"NINE"', "''", "its name is ''; expected a text"),
    ],
)
def test_a_benchmark_whose_problems_cannot_be_asked_is_refused_in_a_sentence(
    tmp_path: Path, right: str, wrong: str, sentence: str
) -> None:
    file = tmp_path / "nine.py"
    assert right in NINE
    file.write_text(NINE.replace(right, wrong, 1))
    policies.permit(str(file))
    spec = {"models": ["embedded:tiny-llama"], "benchmarks": [str(file)]}
    for read in (lambda: make_plan(parse_spec(spec)), lambda: list(check_benchmark(benchmarks.find(str(file))))):
        with pytest.raises(KvatlasError, match=sentence):
            read()


@pytest.mark.parametrize("problems", ["return [", "yield from ["])
def test_the_first_problems_of_a_benchmark_are_those_of_the_limit(tmp_path: Path, problems: str) -> None:
    file = tmp_path / "nine.py"
    file.write_text(NINE.replace("return [", problems))
    policies.permit(str(file))
    first = benchmarks.problems_of(benchmarks.find(str(file)), 2)
    assert [problem.id for problem in first] == ["nine-0", "nine-1"]


def test_a_parameter_of_a_class_without_its_decorator_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE.replace("    def score", "    sinks: int = 4\n\n    def score"))
    policies.permit(str(file))
    with pytest.raises(KvatlasError, match=r"its sinks is no parameter .*; write @dataclass\(frozen=True\) above it"):
        policies.from_setting(Setting.from_parameters(str(file), kv_budget=64, sinks=8))


def test_the_key_of_a_benchmark_follows_the_code_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    policies.permit(f"{file}:Sum3")
    before = benchmarks.identity(benchmarks.find(f"{file}:Sum3"))
    file.write_text(f"{SUMS}\n# changed\n")
    with pytest.raises(KvatlasError, match="was changed after it was loaded; start again"):
        benchmarks.identity(benchmarks.find(f"{file}:Sum3"))
    class_files.run_file.cache_clear()
    assert benchmarks.identity(benchmarks.find(f"{file}:Sum3")) != before


def test_a_worker_refuses_a_benchmark_whose_file_was_replaced(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    policies.permit(f"{file}:Sum3")
    model = models.find("embedded:tiny-llama")
    job = Job(model, "", (benchmarks.find(f"{file}:Sum3"),), (), Sampling(), 0)
    pickled = pickle.dumps(job)
    assert pickle.loads(pickled).benchmarks == job.benchmarks
    file.write_text(f"{SUMS}\n# changed\n")
    class_files.run_file.cache_clear()
    with pytest.raises(KvatlasError, match="was replaced after the sweep began"):
        pickle.loads(pickled)


def test_the_file_of_a_benchmark_runs_only_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is read without the code of its benchmark; grading it again needs a permission."""
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    folder = tmp_path / "run"
    kvatlas.run("embedded:tiny-llama", f"{file}:Sum3", out=folder, problems=2, max_new_tokens=20, workers=1)

    monkeypatch.setattr(class_files, "_permitted", set())
    file.write_text(f"{SUMS}\nopen(__file__ + '.ran', 'w')\n")
    class_files.run_file.cache_clear()
    run = kvatlas.open_run(folder)
    run.report(tmp_path / "report.html")
    spec = {"models": ["embedded:tiny-llama"], "benchmarks": [f"{file}:Sum3"]}
    for refused in (lambda: regrade(folder), lambda: make_plan(parse_spec(spec))):
        with pytest.raises(KvatlasError, match="if you trust that file add --allow-code"):
            refused()
    assert not Path(f"{file}.ran").exists()
    assert regrade(folder, allow_code=True)
    assert Path(f"{file}.ran").exists()


def test_a_grade_that_cannot_be_stored_is_told_by_a_check(tmp_path: Path) -> None:
    file = tmp_path / "nine.py"
    file.write_text(NINE.replace("Grade(False, 0.0, None, Status.OK)", "answer == problem.answer"))
    policies.permit(str(file))
    with pytest.raises(KvatlasError, match=r"cannot grade an answer to 'nine-0' .its grade returned True; expected "):
        list(check_benchmark(benchmarks.find(str(file))))


def test_a_policy_of_a_file_is_checked_by_its_file(tmp_path: Path, kvatlas: Call) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    first, scope, second = kvatlas.succeed("check", file).splitlines()
    assert first == "ok       policy          keeps the newest tokens; parameters of its own: none"
    assert "global: one choice for all layers and heads; another is declared, as scope = Scope.HEAD" in scope
    assert re.fullmatch(r"ok +compresses +\d+ times in 200 tokens of embedded:tiny-llama", second)
    file = tmp_path / "faulty.py"
    file.write_text(CODE.replace("return cached", "cached"))
    code, _, err = kvatlas("check", file)
    assert (code, "scored its tokens with a NoneType" in err) == (2, True)
    file = tmp_path / "loose.py"
    file.write_text(CODE.replace("class Newest(CompressingPolicy)", "class Newest"))
    assert "Newest has a score; a policy has the base kvatlas.policies.Comp" in kvatlas.refuse("check", file)


@pytest.mark.parametrize(
    ("first_line", "sentence"),
    [
        ("from .beside import VALUE", "imports a module of its folder"),
        ("import beside", "imports a module of its folder"),
        ("from kvatlas.policies import policies; policies.get(__file__)", "uses itself while it is loaded"),
    ],
)
def test_a_file_that_cannot_be_loaded_alone_is_told_what_to_do(tmp_path: Path, first_line: str, sentence: str) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    file = tmp_path / "mine.py"
    file.write_text(f"{first_line}\n{CODE}")
    policies.permit(str(file))
    with pytest.raises(KvatlasError, match=sentence):
        policies.policies.get(str(file))

"""Wrong input at the command line: each ends in one sentence that names what is wrong, soon."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas import cli
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec
from tests.command_line import Call
from tests.stats.synthetic import trace

MODEL = "embedded:tiny-llama"
SPEC = f"models: [{MODEL}]\nbenchmarks: [CHAIN3]\nproblems: 2\nsamples: 1\nsampling: {{max_new_tokens: 20}}\n"
HEAD = "model,benchmark,local_window,ratio,pass_at_1\n"
MAP = HEAD + "M,AIME24,500,0.1,40\nM,AIME24,500,0.2,41\nM,AIME24,1000,0.1,42\nM,AIME24,1000,0.2,43\n"
MANY = f"[{', '.join(str(number) for number in range(1, 1001))}]"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
#: Specs, by what is wrong with them, that `plan` refuses; some with a part of the sentence.
SPECS: dict[str, tuple[str | bytes, str]] = {
    "unknown key": (SPEC + "oops: 1\n", "Unknown key 'oops'"),
    "unknown model": (SPEC.replace(MODEL, "embedded:none"), "Unknown model 'embedded:none'"),
    "unknown benchmark": (SPEC.replace("CHAIN3", "AIME99"), "Unknown benchmark 'AIME99'"),
    "unknown policy": (SPEC + "settings: {policy: none}\n", "Unknown policy 'none'"),
    "ratio above 1": (
        SPEC + "settings: {policy: window, kv_budget: 90, local_window: 4}\naxes: {ratio: [1.5]}\n",
        "ratio is 1.5; expected shares from 0 to 1",
    ),
    "budget below a prompt": (
        SPEC + "settings: {policy: window, kv_budget: 20, local_window: 4, ratio: 0.5}\n", "expected budgets above",
    ),
    "seed of 5,000 digits": (SPEC + f"seed: {'9' * 5000}\n", ""),
    "seed of 30 digits": (SPEC + f"seed: {'9' * 30}\n", ""),
    "deep list": ("models: " + "[" * 20_000, ""),
    "deep mapping": ("models: " + "{a: " * 5000 + "1" + "}" * 5000, ""),
    "alias bomb": (BOMB + SPEC, ""),
    "alias bomb in a list of models": (BOMB + SPEC.replace(f"[{MODEL}]", "*a11"), ""),
    "alias to itself": ("models: &m [*m]\nbenchmarks: [CHAIN3]\n", ""),
    "merge keys": ("x: &x {a: 1}\n" + SPEC.replace("problems: 2", "<<: [*x, *x]\nproblems: 2"), ""),
    "a billion problems": (SPEC.replace("problems: 2", "problems: 1000000000"), ""),
    "problems in scientific notation": (SPEC.replace("problems: 2", "problems: 1.0e+9"), ""),
    "a billion samples": (SPEC.replace("samples: 1", "samples: 1000000000"), ""),
    "grid of 10^12": (
        SPEC + "settings: {policy: window, ratio: 0.5}\naxes:\n"
        + "".join(f"  {name}: {MANY}\n" for name in ("local_window", "kv_budget", "ratio_over", "keep_prompt")), "",
    ),
    "key twice": (SPEC + "problems: 3\n", ""),
    "key twice within": (SPEC.replace("max_new_tokens: 20", "max_new_tokens: 20, max_new_tokens: 30"), ""),
    "digits of another script": (SPEC.replace("problems: 2", "problems: ٣"), ""),
    "digits of another script in a name": (SPEC.replace("CHAIN3", "CHAIN٣"), ""),
    "infinite temperature": (SPEC.replace("max_new_tokens: 20", "temperature: .inf"), ""),
    "temperature nan": (SPEC.replace("max_new_tokens: 20", "temperature: .nan"), ""),
    "infinite axis": (
        SPEC + "settings: {policy: window, local_window: 4, ratio: 0.5}\naxes: {kv_budget: [.inf]}\n", "",
    ),
    "axis nan": (SPEC + "settings: {policy: window, kv_budget: 90, local_window: 4}\naxes: {ratio: [.nan]}\n", ""),
    "margin nan": (SPEC + "lose_at_most: .nan\n", ""),
    "surrogate": (SPEC.replace(MODEL, '"\\ud800"'), ""),
    "surrogate in a column": (SPEC + 'expected_output_tokens: "\\udfff"\n', ""),
    "null byte in a file": (SPEC.replace("[CHAIN3]", '[{name: X, file: "a\\0.csv"}]'), ""),
    "file of 5,000 characters": (SPEC.replace("[CHAIN3]", f"[{{name: X, file: {'x' * 5000}.csv}}]"), ""),
    "binary": (bytes(range(256)) * 20, ""),
    "UTF-16": (SPEC.encode("utf-16"), ""),
    "date": (SPEC.replace("problems: 2", "problems: 2001-01-01"), ""),
    "impossible date": (SPEC.replace("problems: 2", "problems: 2001-99-99"), ""),
    "list as key": ("? [1, 2]\n: 3\n" + SPEC, ""),
    "mapping as key": ("? {a: 1}\n: 3\n" + SPEC, ""),
    "python object": (SPEC + "x: !!python/object/apply:os.system [touch executed]\n", ""),
    "list as parameter": (SPEC + "baseline: {policy: window, kv_budget: [1], local_window: 4, ratio: 0.5}\n", ""),
    "mapping as parameter": (SPEC + "baseline: {policy: {a: 1}}\n", ""),
    "set as models": (SPEC.replace(f"[{MODEL}]", "!!set {a}"), ""),
    "tokens of 10^30": (SPEC.replace("max_new_tokens: 20", f"max_new_tokens: {10**30}"), ""),
    "name of 10^6 characters": (SPEC.replace("CHAIN3", "C" * 10**6), ""),
}  # fmt: skip
#: CSV maps that `describe` refuses.
MAPS: dict[str, tuple[str | bytes, str]] = {
    "missing cell": (MAP.replace("M,AIME24,1000,0.2,43\n", ""), "lacks 1 of 4 cells (local_window 1000, ratio 0.2)"),
    "cell twice": (MAP.replace("1000,0.2", "1000,0.1"), "comes twice"),
    "no percentage": (MAP.replace(",43", ",430"), "it must be a percentage from 0 to 100"),
    "unknown column": (MAP.replace("local_window", "lokal_windo"), "Did you mean lokal_windo for local_window?"),
    "unequal axes": (MAP + "M,AMC23,500,0.1,4\nM,AMC23,1000,0.1,5\n", "have unequal axes"),
    "nan": (MAP.replace(",43", ",nan"), "it must be a number"),
    "infinite": (MAP.replace(",43", ",inf"), "it must be a number"),
    "empty": ("", "is empty"),
    "unquoted comma": (HEAD + "R1, the large one,AIME24,10,0.5,40\n", ""),
    "too few fields": (HEAD + "R1,AIME24,10,0.5\n", ""),
    "digits of another script": (HEAD + "R1,AIME24,١٠,0.5,٤٠\n", ""),
    "underscore": (HEAD + "R1,AIME24,1_0,0.5,4_0\n", ""),
    "null byte": (HEAD + "R1\0,AIME24,10,0.5,40\n", ""),
    "binary": (bytes(range(256)) * 20, ""),
    "field of 10^6 characters": (HEAD + f"{'R' * 10**6},AIME24,10,0.5,40\n", ""),
    "huge window": (HEAD + "R1,AIME24,1e308,0.5,40\n", ""),
    "huge problems": (HEAD.replace("\n", ",problems\n") + "R1,AIME24,10,0.5,40,1e300\n", ""),
    "only a header": (HEAD, ""),
}
#: Files of problems that `benchmarks show` refuses.
PROBLEMS: dict[str, str | bytes] = {
    "deep.json": "[" * 100_000,
    "deep.jsonl": '{"question": ' + "[" * 100_000,
    "number_of_5000_digits.jsonl": '{"question": "q", "answer": ' + "9" * 5000 + "}\n",
    "nan.jsonl": '{"question": "q", "answer": NaN}\n',
    "surrogate.jsonl": '{"question": "\\ud800", "answer": "1"}\n',
    "unquoted_comma.csv": "question,answer\nWhat is 1,000 + 1?,1001\n",
    "no_answer.csv": "question,answer\nWhat is 1 + 1?,2\nWhat is 2 + 2?\n",
    "binary.csv": bytes(range(256)) * 20,
    "no.parquet": b"PAR1" + bytes(200),
    "no.csv.gz": b"\x1f\x8b" + bytes(200),
    "empty.json": "",
    "number.json": "3",
}
RUN = f"run {MODEL} CHAIN3 --problems 1"
WINDOW = "--policy window --kv-budget 90 --local-window 8"
QWEN = "published:dynts_r1_qwen"
#: Command lines, some with a part of the sentence; `good.yaml` is a spec, `folder` empty, `new` is not there.
WORDS: dict[str, str] = {
    "plan nowhere.yaml": "cannot be read",
    "sweep good.yaml --out good.yaml": "is a file; name a folder",
    "sweep good.yaml --out new --executor slurm": "Unknown executor 'slurm'",
    "run embedded:none CHAIN4": "Unknown model 'embedded:none'",
    "run hf:folder CHAIN4": "is no folder with a config.json",
    f"run {MODEL} CHAIN99": "expected CHAIN3 to CHAIN26",
    f"{RUN} --policy window --ratio 1.5 --kv-budget 64": "local_window",
    f"{RUN} --set ratio": "--set: expected NAME=VALUE, got 'ratio'",
    f"{RUN} --set sinks=4": "has no parameter 'sinks'",
    f"{RUN} --model-option dtype=int4": "expected auto, float32",
    f"{RUN} --policy window --set x=[": "",
    f"{RUN} --policy window --set kv_budget=[1]": "",
    f"{RUN} --policy window --set strict_budget={'[' * 5000}": "",
    f"{RUN} --seed {'9' * 5000}": "",
    f"{RUN} --max-new-tokens {10**30}": "",
    f"{RUN} --out {'x' * 300}": "",
    f"{RUN} --out good.yaml/run": "",
    f"{RUN} --samples 1000000000": "",
    f"run {MODEL} file:a\udcff.csv": "",
    f"run hf:{'x' * 5000} CHAIN3": "",
    f"run {MODEL} CHAIN3 --problems 1000000000": "",
    "map folder --out a.png": "is no run",
    "map nowhere.csv --out a.png": "nowhere.csv",
    f"map {QWEN} --out a.gif": "must end in",
    f"map {QWEN} --out {'x' * 300}.png": "",
    f"map {QWEN} --out good.yaml/a.png": "",
    "map bad.csv --out a.png": "lacks 1 of 4 cells",
    "check bad.csv bad.csv": "lacks 1 of 4 cells",
    "describe published:nothing": "published:dynts_r1_llama",
    f"describe {QWEN} {QWEN}": "was given twice",
    f"describe {'x' * 5000}": "",
    f"report {'x' * 5000} --out a.html": "",
    "report folder --out x.html": "is no run",
    "report folder --out a.pdf": "A report is a page and cannot be written as 'a.pdf'; the name must end in .html",
    "export folder --out x.csv": "is no run",
    "export folder --format parquet": "parquet cannot go to standard output; name it with --out",
    "export folder --out a.x --format xml": "",
    "compare folder --out a.png": "is no run",
    "maze CHAIN4 --out a.png": "'CHAIN4' has no mazes",
    "maze SEQBENCH-5x5 --problem x --out a.png": "has no maze 'x'; its first is SEQBENCH-5x5-0000",
    "maze SEQBENCH-6x6-L14 --out m.png --problem 999999999": "",
    f"maze SEQBENCH-6x6-L14 --out m.png --problem {'9' * 5000}": "",
    "policies none": "Unknown policy 'none'",
    "models check hf:nowhere/at/all": "is not there",
    "benchmarks show AIME24@nowhere.jsonl": "The problem file 'nowhere.jsonl' is not there",
    "benchmarks show nothing": "Unknown benchmark 'nothing'",
    "benchmarks show CHAIN3 --problem 999999999": "",
    "benchmarks show SEQBENCH-6x6-L14 --problem 999999999": "",
    f"predictor eval none.safetensors --model {MODEL} --benchmark CHAIN4": "'none.safetensors' is not there",
    f"predictor train --model {MODEL} --benchmark CHAIN4 --out head.bin": "expected a name that ends in .safetensors",
    "import a.eval new": "",
    f"serve {MODEL} --top-k -1": "",
    f"plan {'x' * 5000}": "",
    "plan good.yaml/x": "",
    "plan \udcff.yaml": r"'\udcff.yaml' cannot be read",
    **{f"plan good.yaml --memory {value}": "" for value in ("nan", "inf", "-1", "0", "1e400")},
    **{f"plan good.yaml --tokens-per-second {value}": "" for value in ("nan", "inf", "-1", "0", "1e400")},
    **{f"plan good.yaml --detect {value}": "" for value in ("nan", "inf", "-1", "0", "101")},
    **{f"plan good.yaml --detect 3 --discordance {value}": "" for value in ("nan", "inf", "-1", "0", "101")},
    **{f"{RUN} --temperature {value}": "" for value in ("nan", "inf", "1e400")},
    **{f"{RUN} {WINDOW} --ratio {value}": "" for value in ("nan", "inf", "1e400")},
    **{f"serve {MODEL} --grace {value}": "" for value in ("nan", "inf", "1e400")},
    **{f"serve {MODEL} --top-p {value}": "" for value in ("nan", "inf", "1e400")},
    **{f"describe {QWEN} --lose-at-most {value}": "" for value in ("nan", "inf", "1e400")},
}


def cases() -> Iterator[Any]:
    for name, (text, sentence) in SPECS.items():
        yield pytest.param("plan spec.yaml", {"spec.yaml": text}, sentence, id=f"spec: {name}")
    text, sentence = SPECS["unknown policy"]
    yield pytest.param("sweep spec.yaml --out new", {"spec.yaml": text}, sentence, id="sweep: unknown policy")
    for name, (text, sentence) in MAPS.items():
        yield pytest.param("describe map.csv", {"map.csv": text}, sentence, id=f"map: {name}")
    for name, text in PROBLEMS.items():
        yield pytest.param(f"benchmarks show file:{name}", {name: text}, "", id=f"problems: {name}")
    files = {"good.yaml": SPEC, "bad.csv": MAPS["missing cell"][0], "a.eval": "PK\3\4 no"}
    for words, sentence in WORDS.items():
        yield pytest.param(words, files, sentence, id=words[:60].encode("ascii", "replace").decode())


@pytest.mark.parametrize(("words", "files", "sentence"), cases())
def test_wrong_input_ends_in_one_sentence(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, files: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    began = time.process_time()
    err = kvatlas.refuse(*shlex.split(words))
    assert (err.startswith("kvatlas: ") and err.count("\n") == 1) or "Invalid value" in err
    assert sentence in err
    assert len(err) < 3000
    assert sorted(tmp_path.iterdir()) == before
    # Ten times of what imports and the longest of these take.
    assert time.process_time() - began < 60


def test_a_problem_far_on_is_drawn_alone(kvatlas: Call) -> None:
    """It was drawn with all before it, which took minutes for mazes."""
    began = time.process_time()
    assert "Alice is in room" in kvatlas("benchmarks", "show", "SEQBENCH-6x6-L14", "--problem", "99999")[1]
    assert time.process_time() - began < 60


def options_of(words: Sequence[str]) -> set[str]:
    """The options of the command that these words begin with."""
    command: Any = cli.command()
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(
    "words",
    [
        *["map run --out x.png", "report run --out x.html", "describe run", "export run", "compare run --out x.png"],
        *["curves run --out x.png", "deploy export run --to r-kv-vllm --out x"],
        "deploy verify http://127.0.0.1:9 --against run --out x",
        *["benchmarks check odd.jsonl", "benchmarks show odd.jsonl", f"run {MODEL} odd.jsonl"],
        f"run {MODEL} CHAIN4 --out run",
        *["plan odd.yaml", "sweep odd.yaml --out x", "screen odd.yaml --out x", "sweep seed.yaml --out run"],
    ],
)
def test_options_that_an_error_names_are_there(kvatlas: Call, unfinished: Path, words: str) -> None:
    """Of the command that was called, or of those that the sentence names."""
    err = kvatlas.refuse(*words.split())
    sentence = err.splitlines()[-1]
    commands = [words.split(), *(name.split() for name in re.findall(r"kvatlas ([a-z-]+(?: [a-z-]+)?)", sentence))]
    known = set().union(*(options_of(name) for name in commands))
    assert set(re.findall(r"--[a-z][a-z-]+", sentence)) <= known, sentence


@pytest.fixture
def unfinished(tmp_path: Path, spec_data: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that misses traces, specs, and a problem file with unusual columns."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(parse_spec(spec_data()))
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(plan.manifest())
        cell = plan.manifest().expected[0]
        store.add(cell.run_key, trace(cell, cell.problems[0], 0, True))
    (tmp_path / "odd.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n')
    odd = {"name": "odd", "file": "odd.jsonl"}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(spec_data(benchmarks=[odd])))
    (tmp_path / "seed.yaml").write_text(yaml.safe_dump(spec_data(seed=9)))
    return tmp_path

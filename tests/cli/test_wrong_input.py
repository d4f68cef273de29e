"""Wrong input at the command line, and missing extras: one sentence that names what is wrong, soon."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas import cli
from kvatlas.cli import options
from tests.approve import check_sentence
from tests.command_line import Call
from tests.stored import decode_run

ROOT = Path(__file__).parents[2]
MODEL = "embedded:tiny-llama"
SPEC = f"models: [{MODEL}]\nbenchmarks: [CHAIN3]\nproblems: 2\nsamples: 1\nsampling: {{max_new_tokens: 20}}\n"
HEAD = "model,benchmark,local_window,ratio,pass_at_1\n"
MAP = HEAD + "M,AIME24,500,0.1,40\nM,AIME24,500,0.2,41\nM,AIME24,1000,0.1,42\nM,AIME24,1000,0.2,43\n"
MANY = f"[{', '.join(str(number) for number in range(1, 1001))}]"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
#: Specs, by what is wrong with them, that `plan` refuses.
SPECS: dict[str, str | bytes] = {
    "unknown policy": SPEC + "settings: {policy: none}\n",
    "ratio above 1": SPEC + "settings: {policy: window, kv_budget: 90, local_window: 4}\naxes: {ratio: [1.5]}\n",
    "budget below a prompt": SPEC + "settings: {policy: window, kv_budget: 20, local_window: 4, ratio: 0.5}\n",
    "seed of 5,000 digits": SPEC + f"seed: {'9' * 5000}\n",
    **{
        f"{name} of thousands of digits": SPEC + f"settings: {{policy: window, {values}}}\n"
        for name, values in (
            ("kv_budget", f"kv_budget: {'9' * 5000}MiB, local_window: 4, ratio: 0.5"),
            ("local_window", f"kv_budget: 90, local_window: {'9' * 4000}, ratio: 0.5"),
        )
    },
    "deep list": "models: " + "[" * 20_000,
    "alias bomb": BOMB + SPEC,
    "alias to itself": "models: &m [*m]\nbenchmarks: [CHAIN3]\n",
    "merge keys": "x: &x {a: 1}\n" + SPEC.replace("problems: 2", "<<: [*x, *x]\nproblems: 2"),
    "a billion problems": SPEC.replace("problems: 2", "problems: 1000000000"),
    "grid of 10^12": SPEC
    + "settings: {policy: window, ratio: 0.5}\naxes:\n"
    + "".join(f"  {name}: {MANY}\n" for name in ("local_window", "kv_budget", "ratio_over", "keep_prompt")),
    "key twice": SPEC + "problems: 3\n",
    "infinite temperature": SPEC.replace("max_new_tokens: 20", "temperature: .inf"),
    "infinite axis": SPEC + "settings: {policy: window, local_window: 4, ratio: 0.5}\naxes: {kv_budget: [.inf]}\n",
    "surrogate": SPEC.replace(MODEL, '"\\ud800"'),
    "null byte in a file": SPEC.replace("[CHAIN3]", '[{name: X, file: "a\\0.csv"}]'),
    "binary": bytes(range(256)) * 20,
    "list as key": "? [1, 2]\n: 3\n" + SPEC,
    "python object": SPEC + "x: !!python/object/apply:os.system [touch executed]\n",
    "list as parameter": SPEC + "baseline: {policy: window, kv_budget: [1], local_window: 4, ratio: 0.5}\n",
}
#: CSV maps that `describe` refuses.
MAPS: dict[str, str | bytes] = {
    "missing cell": MAP.replace("M,AIME24,1000,0.2,43\n", ""),
    "unquoted comma": HEAD + "R1, the large one,AIME24,10,0.5,40\n",
    "digits of another script": HEAD + "R1,AIME24,١٠,0.5,٤٠\n",
    "binary": bytes(range(256)) * 20,
}
#: Files of problems that `benchmarks show` refuses.
PROBLEMS: dict[str, str | bytes] = {
    "deep.json": "[" * 100_000,
    "nan.jsonl": '{"question": "q", "answer": NaN}\n',
    "surrogate.jsonl": '{"question": "\\ud800", "answer": "1"}\n',
    "unquoted_comma.csv": "question,answer\nWhat is 1,000 + 1?,1001\n",
    "binary.csv": bytes(range(256)) * 20,
    "no.parquet": b"PAR1" + bytes(200),
}
RUN = f"run {MODEL} CHAIN3 --problems 1"
WINDOW = "--policy window --kv-budget 90 --local-window 8"
QWEN = "published:dynts_r1_qwen"
#: Command lines; `good.yaml` is a spec, `folder` empty, `new` is not there.
WORDS = [
    "sweep good.yaml --out good.yaml",
    "sweep good.yaml --out new --executor slurm",
    "run embedded:none CHAIN4",
    "run hf:folder CHAIN4",
    f"{RUN} --set ratio",
    f"{RUN} --set sinks=4",
    f"{RUN} --policy window --set strict_budget={'[' * 5000}",
    f"{RUN} --seed {'9' * 5000}",
    f"{RUN} --out {'x' * 300}",
    f"run {MODEL} file:a\udcff.csv",
    "map folder --out a.png",
    f"map {QWEN} --out a.gif",
    f"map {QWEN} --out a.svg --metric passs",
    "map bad.csv --out a.png",
    f"describe {QWEN} {QWEN}",
    "export folder --format parquet",
    "check hf:nowhere/at/all",
    "list benchmarks AIME24@nowhere.jsonl",
    "list benchmarks nothing",
    "list benchmarks SEQBENCH-6x6-L14 --problem 999999999",
    f"predictor train head.bin {MODEL} CHAIN4",
    "import a.eval new",
    "plan \udcff.yaml",
    *(f"plan good.yaml --memory {value}" for value in ("nan", "inf", "0")),
    *(f"plan good.yaml --tokens-per-second {value}" for value in ("nan", "inf", "0")),
    *(f"plan good.yaml --detect {value}" for value in ("nan", "101")),
    *(f"{RUN} --temperature {value}" for value in ("nan", "1e400")),
    *(f"{RUN} {WINDOW} --ratio {value}" for value in ("nan", "1e400")),
    *(f"serve {MODEL} --grace {value}" for value in ("nan", "1e400")),
    *(f"describe {QWEN} --lose-at-most {value}" for value in ("nan", "1e400")),
]


def cases() -> Iterator[Any]:
    for name, text in SPECS.items():
        yield pytest.param("plan spec.yaml", {"spec.yaml": text}, id=f"spec: {name}")
    yield pytest.param("sweep spec.yaml --out new", {"spec.yaml": SPECS["unknown policy"]}, id="sweep: unknown policy")
    for name, text in MAPS.items():
        yield pytest.param("describe map.csv", {"map.csv": text}, id=f"map: {name}")
    for name, text in PROBLEMS.items():
        yield pytest.param(f"list benchmarks file:{name}", {name: text}, id=f"problems: {name}")
    files = {"good.yaml": SPEC, "bad.csv": MAPS["missing cell"], "a.eval": "PK\3\4 no"}
    for words in WORDS:
        name = words if len(words) < 90 else f"{words[:60]}..."
        yield pytest.param(words, files, id=name.encode("ascii", "replace").decode())


#: Mistakes of newcomers: the command line, the words that name the field and the value, and those of the way out.
MISTAKES: list[tuple[str, tuple[str, ...], str]] = [
    (f"{RUN} --kv-budget 272", ("kv_budget", "272"), "--policy rkv"),
    (f"{RUN} --ratio 0.3", ("ratio", "0.3"), "--policy rkv"),
    (f"{RUN} --policy snapkv", ("kv_budget", "snapkv"), "kv_budget=512"),
    (f"{RUN} --policy 'snapkv kv_budget=90 local_window=4 compression_ratio=0.7'", ("compression_ratio",), "ratio=0.3"),
    (f"{RUN} --policy Streaming-LLM", ("Streaming-LLM",), "is here 'streaming'"),
    (f"{RUN} --policy R-KV", ("R-KV",), "is here 'rkv'"),
    (f"{RUN} --policy window --ratio 30%", ("--ratio", "30%"), "0.3"),
    (f"run {MODEL} CHAIN3 --problems ten", ("--problems", "ten"), "integer"),
    ("plan good.yaml --memory 8GB", ("--memory", "8GB"), "GiB"),
    ("plan good.yaml --set ratio=0.3", ("ratio", "good.yaml"), "axes.ratio"),
    ("plan model.yaml", ("'models'", "model.yaml"), "'model'"),
    ("plan indented.yaml", ("indented.yaml", "line 3"), "expected <block end>"),
    ("sweep mine.jsonl --out new", ("mine.jsonl", "a spec"), "plan --suggest MODEL mine.jsonl"),
    ("describe mine.jsonl", ("mine.jsonl", "a run or a CSV map"), "kvatlas run MODEL mine.jsonl"),
    ("export mine.jsonl", ("mine.jsonl", "a run"), "kvatlas run MODEL mine.jsonl"),
    ("run mine.jsonl CHAIN3", ("mine.jsonl", "a model"), f"kvatlas run {MODEL} mine.jsonl"),
    ("run ./nowhere CHAIN3", ("./nowhere",), "config.json"),
    ("check notes.txt", ("notes.txt",), ".jsonl"),
    ("check mine.json", ("mine.json",), "'mine.jsonl'"),
    (f"{RUN} --policy two.py", ("two.py",), "two.py:One"),
    (f"{RUN} --policy two.py:Onne", ("two.py", "'Onne'"), "'One'"),
    ("deploy export folder --to vllm", ("'vllm'",), "kvpress"),
    ("deploy export folder --to kvpress", ("--out",), "--out engine"),
    ("sweep good.yaml", ("--out",), "--out runs/mine"),
    ("view folder --out report.pdf", ("report.pdf",), "'report.html'"),
    (f"run {MODEL}", ("BENCHMARK",), "CHAIN9"),
]
#: Files beside a newcomer's commands.
FILES = {
    "good.yaml": SPEC,
    "model.yaml": SPEC.replace("models", "model"),
    "indented.yaml": SPEC.replace("problems", "  problems"),
    "mine.jsonl": '{"question": "1 + 1", "answer": "2"}\n',
    "notes.txt": "notes",
    "two.py": "from kvatlas.policies import CompressingPolicy as P\n\nclass One(P): pass\n\nclass Two(P): pass\n",
}


@pytest.mark.parametrize(("words", "field", "way_out"), [pytest.param(*case, id=case[0]) for case in MISTAKES])
def test_a_mistake_gets_its_field_its_value_and_a_way_out(
    kvatlas: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    words: str,
    field: tuple[str, ...],
    way_out: str,
) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    err = kvatlas.refuse(*shlex.split(words))
    parser = re.search("(Invalid value for|Missing) .*?(?= *│)", err)
    sentence = parser[0] if parser else err.removeprefix("kvatlas: ").removesuffix("\n")
    for part in (*field, way_out):
        assert part in sentence
    check_sentence(f"mistake: {request.node.callspec.id}", sentence.replace(str(tmp_path), "FOLDER"))


LOCAL = "http://localhost:9"
#: Further mistakes, by structure alone: the command line, the words for field and value, and those for the way out.
MORE_MISTAKES: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (f"{RUN} --policy rkvv --kv-budget 90", ("policy", "'rkvv'"), ("'rkv'",)),
    (f"{RUN} --policy nowhere.py:One", ("nowhere.py:One",), ("No such file",)),
    (f"{RUN} --policy broken.py:One", ("broken.py:One",), ("line 1",)),
    (f"{RUN} {WINDOW} --ratio 1.5", ("ratio", "1.5"), ("from 0 to 1",)),
    (f"{RUN} --policy 'rkv kv_budget=90 local_window=900 ratio=0.5'", ("local_window", "900"), ("1 to 89",)),
    (f"{RUN} --policy 'rkv kv_budget=5k local_window=8 ratio=0.5'", ("kv_budget", "'5k'"), ("integer", "12MiB")),
    (f"run {MODEL} AIME2024", ("benchmark", "'AIME2024'"), ("'AIME24'",)),
    ("run tiny-lama CHAIN3", ("model", "'tiny-lama'"), ("'embedded:tiny-llama'",)),
    ("run meta-llama/Llama-3-8B CHAIN3", ("model", "'meta-llama/Llama-3-8B'"), ("'hf:meta-llama/Llama-3-8B'",)),
    ("run", ("'model'",), (MODEL,)),
    ("plan no_settings.yaml", ("no_settings.yaml", "axes"), ("settings: {policy: rkv",)),
    ("plan ratio_key.yaml", ("ratio_key.yaml", "'ratio'"), ("a key of settings or of axes",)),
    ("plan typo.yaml", ("'rkv'", "'kv_budgt'"), ("'kv_budget'",)),
    ("plan percent.yaml", ("ratio", "30"), ("from 0 to 1",)),
    ("plan samples.yaml", ("samples.yaml", "samples", "'many'"), ("expected an integer, given",)),
    ("plan set.yaml --set seed=-1", ("seed", "given -1"), ("expected a number >= 0",)),
    ("plan set.yaml --set sampling=1", ("sampling", "'1'"), ("expected a mapping, as {temperature: 0.6}",)),
    ("plan set.yaml --set 'benchmarks=[{name: [a]}]'", ("benchmarks.0.name", "['a']"), ("expected a text",)),
    ("plan set.yaml --set strict_budget=maybe", ("strict_budget", "'maybe'"), ("expected true or false",)),
    ("plan set.yaml --set models=[]", ("models", "[]"), ("at least 1 of them",)),
    ("plan margin.yaml", ("lose_at_most", "'3%'"), ("points, as 3",)),
    ("plan claim.yaml", ("claim", "'all'"), ("'these_problems'", "'problems_like_these'")),
    ("plan tab.yaml", ("tab.yaml", "line 3"), ("indent with spaces",)),
    ("plan nowhere.yaml", ("'nowhere.yaml'",), ("recipes are", "--suggest MODEL PROBLEMS")),
    ("plan demo-quik", ("'demo-quik'",), ("'demo-quick'",)),
    (f"plan --suggest {MODEL}", ("PROBLEMS",), ("with --suggest MODEL as CHAIN9",)),
    (f"plan --suggest mine.jsonl {MODEL}", ("'mine.jsonl'", "a model"), ("comes first",)),
    ("check no_answer.jsonl", ("no_answer.jsonl", "row 1", "solution"), ("--column answer=NAME",)),
    ("check broken.jsonl", ("broken.jsonl", "line 2"), ("Expecting value",)),
    ("check empty.jsonl", ("empty.jsonl",), ("expected a row for each", '"question"')),
    ("list recipes dmeo", ("'dmeo'",), ("'demo'",)),
    ("list benchmarks GSM8", ("'GSM8'",), ("'GSM8K'",)),
    ("list policies streamingllm", ("'streamingllm'",), ("'streaming'",)),
    (f"serve {MODEL} --policy rkv", ("'rkv'", "kv_budget"), ("kv_budget=512",)),
    (f"serve {MODEL} --port 99999", ("--port", "'99999'"), ("65535",)),
    ("sweep good.yaml --out mine.jsonl", ("'mine.jsonl'",), ("name a folder",)),
    ("sweep good.yaml --out new --executor slurm", ("executor", "'slurm'"), ("local or ray", "docs/scaling.md")),
    (
        f"serve {MODEL} --host 192.0.2.1",
        (f"Loading {MODEL}.", "192.0.2.1:8000", "no address of this machine"),
        ("--host 127.0.0.1",),
    ),
    ("sweep good.yaml --out new --workers 0", ("--workers", "'0'"), ("greater than or equal to 1",)),
    ("gate before.csv", ("AFTER",), ("after.csv",)),
    ("gate before.csv other.csv", ("'p1'", "'p2'"), ("in common",)),
    ("gate before.csv no_correct.csv", ("'no_correct.csv'", "right"), ("'correct' and 'score'",)),
    ("gate before.csv before.csv", ("before.csv",), ("other seeds",)),
    ("gate localhost:8000 http://localhost:9 CHAIN3", ("before", "'localhost:8000'"), ("http://HOST:PORT/v1",)),
    ("gate http://localhost:9 localhost:8000/v1 CHAIN3", ("after", "'localhost:8000/v1'"), ("http://HOST:PORT/v1",)),
    ("gate before.csv http://localhost:9 CHAIN3", ("'before.csv'",), ("--against RUN", "a second endpoint")),
    ("gate http://localhost:9/v2 http://localhost:9/v3 CHAIN3", ("localhost:9/v2",), ("http://HOST:PORT/v1",)),
    ("gate before.csv other.csv gsm8k", ("(gsm8k)", "two endpoints"), ("--task gsm8k",)),
    ("import notes.txt new", ("'notes.txt'",), (".eval",)),
    ("describe folder", ("'folder'", "run.sqlite"), ("kvatlas sweep",)),
    ("describe rnu", ("'rnu'",), ("'run'",)),
    ("describe run --lose-at-most 5%", ("--lose-at-most", "'5%'"), ("a number of points, as 3",)),
    ("describe run --claim these", ("--claim", "'these'"), ("'these_problems'",)),
    ("map run", ("--out",), ("--out map.pdf",)),
    ("map run --out map.doc", ("'map.doc'",), (".png, .svg, .pdf",)),
    ("map run --policy rkv --out a.png", ("policy", "'rkv'"), ("dynts, random",)),
    ("map run --metric accuracy --out a.png", ("metric", "'accuracy'"), ("pass@1",)),
    ("map run --fix ratio=0.4 --out a.png", ("ratio", "0.4"), ("0.1, 0.3",)),
    ("map run --look colums=2 --out a.png", ("'colums'",), ("'columns'",)),
    ("map run --look columns=3 --out a.png", ("--look columns", "3"), ("1 or 2",)),
    ("view run --out report.pdf", ("'report.pdf'",), ("a folder without a suffix",)),
    ("export run --out traces.xls", ("'traces.xls'",), (".csv", ".jsonl")),
    ("export run --format excel --out x", ("format", "'excel'"), ("csv, cells, jsonl",)),
    (
        "compare run 'dynts local_window=17 ratio=0.1' random --out p.png",
        ("local_window=17",),
        ("4, 8",),
    ),
    ("autopsy run --policy dynts", ("dynts", "4 settings"), ("local_window=8",)),
    ("gate run other.csv", ("'run'", "9 cells"), ("'run@full'",)),
    ("deploy verify localhost --against run --out new", ("'localhost'",), ("http://HOST:PORT",)),
    (
        f"deploy export run --to kvpress --policy '{MODEL} dynts local_window=4 ratio=0.1' --out new",
        ("kvpress", "'dynts'"),
        ("snapkv", "random"),
    ),
    ("grade run --grader gpt4", ("CHAIN3", "'gpt4'"), ("leave --grader out",)),
    # What another program, or another command, calls otherwise.
    (f"{RUN} --device cuda", ("No such option", "--device"), ("--model-option device=cuda",)),
    ("sweep good.yaml --out new --device cuda", ("--device",), ("--set 'models=[{model: NAME, device: cuda}]'",)),
    ("sweep good.yaml --out new --temperature 0", ("--temperature",), ("--set sampling.temperature=0.6",)),
    ("run --model embedded:tiny-llama CHAIN3", ("--model",), ("run MODEL BENCHMARK|FILE..., without --model",)),
    ("autopsy run --policy dynts --problems 1", ("--problems",), ("--most 20",)),
    ("map run --problems 1 --out a.png", ("--problems",), ("--policy, --metric",)),
    ("map run --ratio 0.3 --out a.png", ("--ratio",), ("--fix ratio=0.3",)),
    ("gate run run --tolerance 2", ("--tolerance",), ("--lose-at-most 3",)),
    ("draw run", ("No such command", "draw"), ("kvatlas map",)),
    ("evaluate run", ("evaluate",), ("demo, plan, run, sweep",)),
    ("deploy verfy run", ("verfy",), ("deploy verify",)),
    ("export run other", ("unexpected", "(other)"), ("expected RUN",)),
    ("run gpt2 CHAIN3", ("model", "'gpt2'"), ("hf:OWNER/NAME (as hf:Qwen/Qwen3-0.6B)",)),
    ("run https://huggingface.co/Qwen/Qwen3-0.6B/tree/main CHAIN3", ("model",), ("mean 'hf:Qwen/Qwen3-0.6B'?",)),
    ("plan policies.yaml", ("'policies'", "policies.yaml"), ("'settings'", "settings: [{policy: rkv")),
    ("check latin.jsonl", ("latin.jsonl", "0xf6"), ("save it as UTF-8",)),
    ("check mypol.py", ("mypol.py", "its name is None"), ("name = 'mine'",)),
    ("run embedded:tiny-llama mypol.py", ("mypol.py", "one benchmark"), ("Mine is a policy; give it with --policy",)),
    (f"{RUN} --policy mine_sums.py", ("mine_sums.py", "policy"), ("Sums is a benchmark",)),
    ("map", ("'RUN|CSV...'",), ("runs/mine",)),
    ("autopsy", ("'RUN'",), ("runs/mine",)),
    ("autopsy run", ("'--policy'",), ("--policy 'dynts ratio=0.3'",)),
    ("gate run", ("'AFTER'",), ("'runs/mine@dynts ratio=0.3'",)),
    # Other files, folders, keys and values than expected.
    ("demo quick", ("unexpected", "(quick)"), ("Did you mean --quick?",)),
    (f"{RUN} --temp 0", ("--temp",), ("--temperature or ",)),
    ("view run --out", ("--out",), ("needs a value: FILE.html|FOLDER",)),
    ("plan text_setting.yaml", ("settings.0", "'rkv'"), ("a mapping, as {policy: rkv, kv_budget: 512}",)),
    ("plan no_baseline.yaml", ("baseline", "'none'"), ("[{policy: full}], or [] for none",)),
    (
        "deploy verify http://localhost:9 --against run@full --out x",
        ("'run@full'",),
        ("the run 'run'", "--policy 'full'"),
    ),
    ("check object.json", ("object.json", "keys data"), ("a list of objects",)),
    ("plan several.yaml", ("kv_budget", "[90, 100]"), ("axes: {kv_budget: ...}",)),
    ("plan name_as_key.yaml", ("'settings.0.policy'", "rkv there"), ("write it as policy: rkv",)),
    ("plan run", ("'run' is a folder",), ("kvatlas describe run",)),
    ("export rnu", ("'rnu'",), ("'run'",)),
    ("describe run/run.sqlite", ("store of a run",), ("its folder, 'run'",)),
    ("view before.csv", ("before.csv' is a CSV file",), ("the folder of a run",)),
    ("describe text_setting.yaml", ("text_setting.yaml' is a spec",), ("kvatlas sweep text_setting.yaml --out",)),
    (
        "autopsy text_setting.yaml --policy rkv",
        ("text_setting.yaml' is a spec",),
        ("kvatlas sweep text_setting.yaml --out",),
    ),
    (
        "import no_reference.csv new --axis kv --reference kv=bf16",
        ("no row has kv=bf16",),
        ("there are kv=auto; kv=fp8",),
    ),
    (
        "autopsy run --policy 'dynts ratio=0.1'",
        ("names 2",),
        ("dynts local_window=4 ratio=0.1; dynts local_window=8 r",),
    ),
    ("compare run rkv", ("'rkv' fits none of the systems; there are",), ("dynts, random",)),
    ("compare run dynts", ("there is 1 (dynts",), ("name another",)),
    ("import folder new", ("'folder' is a folder",), ("name the logs in it",)),
    ("import other.csv new --axis ratio", ("'other.csv'", "ratio"), ("(problem, correct)",)),
    ("gate no_problem.csv other.csv", ("'problem'", "id, correct"), ("rename the one of the problems",)),
    ("check list.jsonl", ("row 1", "['1 + 1', '2']"), ('as {"question"',)),
    ("check facts.json", ("column 'context'", "['Ann']"), ("--column question=question",)),
    ("check unanswered.jsonl", ("unanswered.jsonl", "'answer'"), ("--column answer=NAME",)),
    ("check options.jsonl", ("the answer 'E'",), ("(red, blue), its letter, or its index from 0 to 1",)),
    ("check rkv", ("'rkv' is a policy",), ("kvatlas list policies rkv", "FILE.py")),
    ("check gpu", ("'gpu'",), ("this machine cpu or cuda",)),
    ("check ./nowhere-0.6B", ("no folder './nowhere-0.6B'",), ("config.json",)),
    ("check quetions.xlsx", ("no file 'quetions.xlsx'",), ("'questions.xlsx'", ".jsonl")),
    (f"run {MODEL} nowhere.xlsx", ("no file 'nowhere.xlsx'",), (".jsonl", "list benchmarks")),
    ("check lora", ("'lora' is an adapter",), ("--model-option adapter=lora",)),
    ("check pointer.gguf", ("'pointer.gguf' is a pointer of git-lfs",), ("git lfs pull",)),
    ("check pointer.csv", ("'pointer.csv' is a pointer of git-lfs",), ("git lfs pull",)),
    ("run pointers CHAIN3", ("model.safetensors' is a pointer of git-lfs",), ("git lfs pull",)),
    ("check stateful", ("'num_attention_heads'", "'mamba'"), ("a causal language model with attention",)),
    ("plan two_models.yaml", (f"models: '{MODEL}' is named twice",), ("name it once",)),
    ("plan two_values.yaml", ("ratio 0.3 is named twice",), ("name it once",)),
    ("plan all_tokens.yaml", ("sampling.top_k", "-1"), ("0 is all tokens",)),
    ("plan policy_axis.yaml", ("'policy'",), ("settings: [{policy: window}",)),
    ("plan control.yaml", ("controls", "windw"), ("Did you mean 'window'?",)),
    ("plan temp.yaml", ("'sampling.temp'",), ("Did you mean 'temperature'?",)),
    ("plan top_temp.yaml", ("'temp'",), ("sampling: {temperature: 0.6}",)),
    ("plan environment.yaml", ("'enviroment'",), ("'env' of a model",)),
    ("run hf:Qwen CHAIN3", ("'hf:Qwen'",), ("OWNER/NAME of the hub",)),
    ("grade run --measure nothing", ("measure", "'nothing'"), ("FILE.py:NAME",)),
    (f"{RUN} --policy no_class.py", ("no_class.py", "it has none"), ("the guide on adding a policy",)),
    ("list policy", ("'policy'",), ("'policies'",)),
    ("plan spec.toml", ("spec.toml", "TOML"), ("YAML or JSON",)),
    ("plan seed.yaml", ("'sampling.seed'",), ("'seed' at the top",)),
    ("plan reference.yaml", ("reference", "'full'"), ("{options: --kv-cache-dtype auto}", "without this key")),
    (f"{RUN} --policy list_default.py", ("list_default.py", "layers"), ("a number, a text, true or false",)),
    (f"{RUN} --policy mypol", ("'mypol'",), ("FILE.py or FILE.py:CLASS, as mypol.py.",)),
    (f"{RUN} --policy mypol.Mine", ("'mypol.Mine'",), ("as mypol.py.",)),
    (f"{RUN} --policy mypol.py::Mine", ("'mypol.py::Mine'",), ("as mypol.py.",)),
    ("check broken.py", ("The file broken.py cannot be loaded",), ("line 1",)),
    ("check nowhere.py", ("The file nowhere.py cannot be loaded",), ("No such file",)),
    ("check undecorated.py", ("its sinks",), ("write @dataclass(frozen=True) above it",)),
    ("check unquoted.jsonl", ("unquoted.jsonl", "line 1", '2"}'), ("quotes on both sides",)),
    ("check tiny-llama", ("'tiny-llama'",), ("Did you mean 'embedded:tiny-llama'?",)),
    (f"predictor train {MODEL} CHAIN6 head.safetensors", (f"'{MODEL}'", "comes first"), ("train head.safetensors",)),
    (
        f"predictor calibrate {MODEL} CHAIN6 a.safetensors",
        (f"'{MODEL}'", "comes first"),
        ("calibrate head.safetensors",),
    ),
    ("check thawed.py", ("thawed.py", "cannot inherit"), ("write @dataclass(frozen=True)",)),
    ("check choices.py", ("['max', 'avg']",), ("one by one, as ('max', 'avg')",)),
    ("plan own_axis.yaml", ("'window'", "'sinks'"), ("to settings: {policy: streaming, sinks: 0}",)),
    ("autopsy alone --policy window", ("alone", "no answers of the full cache"), ("CHAIN3 --out alone",)),
    # Specs of servers.
    ("plan served.yaml --set settings=served", ("settings.0", "'served'"), ("a mapping, as {policy: served}",)),
    ("plan served.yaml --set settings=[served]", ("settings.0", "'served'"), ("a mapping, as {policy: served}",)),
    ("plan served.yaml --set settings.policy=serve", ("'serve'",), ("{policy: served}",)),
    ("plan served.yaml --set settings.policy=Served", ("'Served'",), ("{policy: served}",)),
    ("plan served.yaml --set reference=http://gpu7:8000/v1", ("reference",), ("as {endpoint: http://gpu7:8000/v1}",)),
    ("plan unnamed_axis.yaml", ("unnamed_axis.yaml, commands of a: options", "{v}"), ("An axis, or a value",)),
    ("plan open_brace.yaml", ("open_brace.yaml", "line 8"), ("the bracket of line 7 is not closed before",)),
    ("compare run dynts ratio=0.3 random", ("'ratio=0.3'",), ('stands in quotes, as "dynts ratio=0.3"',)),
    ("plan dashes.yaml", ("dashes.yaml", "'serve-cmd'"), ("Did you mean 'serve_cmd'?",)),
    ("plan words.yaml", ("words.yaml, models.0: serve_cmd", "one text"), ("serve_cmd: vllm serve",)),
    ("plan served.yaml --set settings.control=ture", ("settings.0: control", "'ture'"), ("true or false",)),
    ("plan served.yaml --set reference.env=A", ("served.yaml, reference: env", "'A'"), ("{NAME: '1'}",)),
    ("plan served.yaml --set reference.kv_bytes=x", ("served.yaml, reference: kv_bytes", "'x'"), ("a whole number",)),
    ("plan no_port.yaml", ("no_port.yaml, commands of a: serve_cmd",), ("write --port {port}",)),
    ("plan set.yaml --set benchmarks=[../led.jsonl]", ("'../led.jsonl'",), ("from the folder of the command",)),
    ("plan set.yaml --set benchmarks=[led.xlsx]", ("'led.xlsx'",), ("from the folder of the command",)),
    # Files of problems, benchmarks and exports.
    ("export run --out mine.jsonl", ("'mine.jsonl'", "no export"), ("name another file",)),
    (f"predictor train h.safetensors {MODEL} CHAIN3", ("'h.safetensors'", "no file of kvatlas"), ("another file",)),
    ("map traces.jsonl --out a.png", ("traces.jsonl' is an export",), ("the folder of their run",)),
    (f"check {MODEL} ask.jsonl --column question=gold --column answer=none", ("'none'",), ("ask, gold",)),
    ("check unnamed.csv", ("unnamed.csv", "column for the question"), ("the first line names the columns",)),
    ("check mine.jsonl:Mine", ("'mine.jsonl:Mine'", ":CLASS"), ("name mine.jsonl alone",)),
    ("check mine.jsonl --column gold=answer", ("'gold=answer'",), ("Did you mean answer=gold?",)),
    ("check mine.jsonl --column ask=question", ("'ask=question'",), ("Did you mean question=ask?",)),
    ("check ask.jsonl --column question=ask,answer=gold", ("question=ask,answer=gold",), ("Repeat --column for each",)),
    ("check no_version.py:Mine", ("lacks version",), ("version: ClassVar[int] = 1",)),
    (f"run {MODEL} mine.jsonl --prompt notes.txt", ("'notes.txt'",), ("Give the text of the file",)),
    ("plan name_of_baseline.yaml", ("baseline.0", "'full'"), ("{policy: full}",)),
    ("plan dash.yaml", ("'settings.1.policy'", "kv_budget"), ("beside the policy before it",)),
    ("plan spaced_claim.yaml", ("claim", "'problems like these'"), ("mean 'problems_like_these'?",)),
    ("describe run --claim 'problems like these'", ("'problems like these'",), ("mean 'problems_like_these'?",)),
    ("gate logs/results_1.json mine.jsonl", ("logs/results_1.json",), ("name the folder 'logs'",)),
    # Sides of a gate, logs and addresses in other places than expected.
    ("gate plain before.csv", ("'plain'", "b.jsonl is no sample of lm-eval"), ("name the file",)),
    (f"gate {LOCAL} {LOCAL}8 CHAIN3 --answers logs", ("'logs'", "samples_a_1.jsonl"), ("name a new folder",)),
    ("sweep good.yaml --out logs", ("'logs'", "samples_a_1.jsonl"), ("name a new folder",)),
    (f"gate {LOCAL} {LOCAL}8 CHAIN3 --temperature 0 --samples 4", ("--samples 4", "copies"), ("--temperature 0.6",)),
    (f"gate mine.jsonl {LOCAL} {LOCAL}8", ("addresses come first",), (f"gate {LOCAL} {LOCAL}8 mine.jsonl",)),
    (f"gate {LOCAL} mine.jsonl {LOCAL}8", ("addresses come first",), (f"gate {LOCAL} {LOCAL}8 mine.jsonl",)),
    (
        "gate before.csv better.csv --allow missing,version",
        ("--allow missing,version",),
        ("each with its own --allow",),
    ),
    ("gate epochs.csv before.csv", ("1 answers", "twice"), ("another name than 'sample'",)),
    ("gate from_0.csv from_1.csv", ("from 0 to 2", "from 1 to 3"), ("Number them alike", "a column 'question'")),
    ("import logs/samples_a_1.jsonl new", ("Samples of lm-eval",), ("kvatlas gate BEFORE AFTER",)),
    ("import run mine.jsonl", ("'mine.jsonl' is a file",), ("kvatlas import mine.jsonl RUN",)),
]
SERVED = (
    "models: [{name: a, serve_cmd: 'vllm serve --port {port}'}]\nbenchmarks: [CHAIN3]\nsettings: {policy: served}\n"
    "sampling: {max_new_tokens: 20}\naxes: {kv_cache_dtype: [fp8]}\n"
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
#: Files beside these.
MORE_FILES: dict[str, str | bytes] = {
    **FILES,
    "set.yaml": SPEC,
    "served.yaml": SERVED,
    "dashes.yaml": SERVED.replace("serve_cmd", "serve-cmd"),
    "words.yaml": SERVED.replace("'vllm serve --port {port}'", "[vllm, serve]"),
    "no_port.yaml": SERVED.replace("{port}", "8000"),
    "open_brace.yaml": SPEC + "settings:\n  - {policy: window, kv_budget: 90\n  - {policy: random}\n",
    "unnamed_axis.yaml": SERVED.replace("served}", "served, options: '--v {v}'}"),
    "policies.yaml": SPEC + "policies: [rkv]\n",
    "latin.jsonl": '{"question": "Größe", "answer": "2"}\n'.encode("latin-1"),
    "text_setting.yaml": SPEC + "settings: [rkv]\n",
    "no_baseline.yaml": SPEC + "baseline: none\n",
    "object.json": '{"data": []}',
    "several.yaml": SPEC + "settings: [{policy: rkv, kv_budget: [90, 100], local_window: 8, ratio: 0.3}]\n",
    "name_as_key.yaml": SPEC + "settings: {rkv: {kv_budget: 90}}\n",
    "no_problem.csv": "id,correct\np1,1\n",
    "list.jsonl": '["1 + 1", "2"]\n',
    "facts.json": '[{"question": "Who?", "answer": "Ann", "context": {"names": ["Ann"]}}]',
    "unanswered.jsonl": '{"question": "1 + 1", "answer": ""}\n',
    "options.jsonl": '{"question": "Which?", "options": ["red", "blue"], "answer": "E"}\n',
    "no_class.py": "def score(view): return 1\n",
    "mypol.py": "from kvatlas.policies import CompressingPolicy\n\nclass Mine(CompressingPolicy): pass\n",
    "mine_sums.py": "from kvatlas.benchmarks import Benchmark\n\nclass Sums(Benchmark): pass\n",
    "no_settings.yaml": SPEC + "axes: {ratio: [0.3]}\n",
    "ratio_key.yaml": SPEC + "settings: {policy: rkv, kv_budget: 90}\nratio: [0.3]\n",
    "typo.yaml": SPEC + "settings: {policy: rkv, kv_budgt: 90}\n",
    "percent.yaml": SPEC + "settings: {policy: rkv, kv_budget: 90, local_window: 8}\naxes: {ratio: [30]}\n",
    "samples.yaml": SPEC.replace("samples: 1", "samples: many"),
    "margin.yaml": SPEC + "lose_at_most: 3%\n",
    "claim.yaml": SPEC + "claim: all\n",
    "tab.yaml": SPEC.replace("problems", "\tproblems"),
    "no_answer.jsonl": '{"question": "1 + 1", "solution": "2"}\n',
    "broken.jsonl": '{"question": "1 + 1", "answer": "2"}\n{"question": "1 + 2", "answer": \n',
    "empty.jsonl": "",
    "broken.py": "class One(:\n",
    "before.csv": "problem,correct\np1,1\n",
    "better.csv": "problem,correct\np1,1\n",
    "questions.xlsx": b"PK",
    "lora/adapter_config.json": "{}",
    "pointer.gguf": POINTER,
    "pointer.csv": POINTER,
    "pointers/config.json": (ROOT / "src/kvatlas/models/embedded/tiny-llama/config.json").read_bytes(),
    "pointers/model.safetensors": POINTER,
    "stateful/config.json": '{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}',
    "two_models.yaml": SPEC.replace(MODEL, f"{MODEL}, {MODEL}"),
    "two_values.yaml": SPEC + "settings: {policy: window, kv_budget: 90}\naxes: {ratio: [0.3, 0.3]}\n",
    "all_tokens.yaml": SPEC.replace("max_new_tokens: 20", "top_k: -1"),
    "policy_axis.yaml": SPEC
    + "settings: {policy: window, kv_budget: 90, local_window: 4, ratio: 0.5}\naxes: {policy: [window, random]}\n",
    "control.yaml": SPEC + "settings: {policy: window, kv_budget: 90}\ncontrols: [windw]\n",
    "temp.yaml": SPEC.replace("max_new_tokens: 20", "temp: 1"),
    "top_temp.yaml": SPEC + "temp: 1\n",
    "environment.yaml": SPEC + "enviroment: {A: '1'}\n",
    "other.csv": "problem,correct\np2,1\n",
    "no_reference.csv": "problem,kv,correct\np1,auto,1\np1,fp8,1\n",
    "no_correct.csv": "problem,right\np1,1\n",
    "spec.toml": f'models = ["{MODEL}"]\n\n[axes]\nratio = [0.3]\n',
    "seed.yaml": SPEC.replace("max_new_tokens: 20", "seed: 1"),
    "reference.yaml": SPEC + "reference: full\n",
    "list_default.py": "from dataclasses import dataclass\n\nfrom kvatlas.policies import CompressingPolicy\n\n\n"
    "@dataclass(frozen=True)\nclass Mine(CompressingPolicy):\n    layers: list[int] = [0]\n",
    "undecorated.py": "from kvatlas.policies import CompressingPolicy, int_param\n\n\n"
    "class Mine(CompressingPolicy):\n    name = 'mine'\n    summary = 'mine'\n    sinks: int = int_param(4)\n\n"
    "    def score(self, cached):\n        return cached.positions\n",
    "unquoted.jsonl": '{"question": "1 + 1", "answer": 2"}\n',
    "thawed.py": "from dataclasses import dataclass\n\nfrom kvatlas.policies import CompressingPolicy\n\n\n"
    "@dataclass\nclass Mine(CompressingPolicy):\n    layers: int = 0\n",
    "choices.py": "from kvatlas.policies import choice_param\n\nMODE = choice_param(['max', 'avg'])\n",
    "own_axis.yaml": SPEC + "settings: [{policy: streaming}, {policy: window}]\n"
    "axes: {kv_budget: [90], local_window: [8], ratio: [0.3], sinks: [0, 4]}\n",
    "unnamed.csv": "1 + 1,2\n1 + 2,3\n",
    "h.safetensors": b"weights of a user",
    "traces.jsonl": '{"problem": "p1", "answer": "2", "run_key": "a"}\n',
    "ask.jsonl": '{"ask": "1 + 1", "gold": "2"}\n',
    "no_version.py": "class Mine:\n    name = 'mine'\n    typical_output_tokens = 9\n"
    "    problems = prompt = grade = lambda self, *others: None\n",
    "name_of_baseline.yaml": SPEC + "baseline: [full]\n",
    "dash.yaml": SPEC + "settings:\n  - policy: random\n  - kv_budget: 96\n",
    "spaced_claim.yaml": SPEC + "claim: problems like these\n",
    "logs/results_1.json": '{"results": {}, "configs": {}, "n-shot": {}}',
    "logs/samples_a_1.jsonl": "",
    "plain/b.jsonl": '{"problem": "p1", "correct": 1}\n',
    "epochs.csv": "problem,epoch,correct\np1,0,1\np1,1,1\n",
    "from_0.csv": "problem,correct\n0,1\n1,1\n2,1\n",
    "from_1.csv": "problem,correct\n1,1\n2,1\n3,1\n",
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two policies over two axes."""
    policies = [{"policy": name, "kv_budget": 90} for name in ("dynts", "random")]
    axes = {"local_window": [4, 8], "ratio": [0.1, 0.3]}
    spec = yaml.safe_load(SPEC) | {"settings": policies, "axes": axes}
    return decode_run(spec, tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one setting, without the full cache."""
    setting = {"policy": "window", "kv_budget": 60, "local_window": 8, "ratio": 0.3}
    spec = yaml.safe_load(SPEC) | {"problems": 1, "settings": setting, "baseline": []}
    return decode_run(spec, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(
    ("words", "field", "way_out"), [pytest.param(*case, id=f"{case[0][:60]}") for case in MORE_MISTAKES]
)
def test_a_mistake_of_any_command_has_a_way_out(
    kvatlas: Call,
    finished_run: Path,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    field: tuple[str, ...],
    way_out: tuple[str, ...],
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").symlink_to(finished_run)
    (tmp_path / "alone").symlink_to(alone)
    for name, text in MORE_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    err = kvatlas.refuse(*shlex.split(words))
    for part in (*field, *way_out):
        assert part in err
    assert "A model is" not in err or "--column" not in words
    assert "Value error" not in err
    assert "the first line names" not in err or ".csv" in words
    # What a user wrote stays.
    assert (tmp_path / "mine.jsonl").read_text() == FILES["mine.jsonl"]


def test_each_required_argument_and_option_has_an_example() -> None:
    def commands(group: Any) -> Iterator[Any]:
        for command in getattr(group, "commands", {}).values():
            yield command
            yield from commands(command)

    required = [param for command in commands(cli.command()) for param in command.params if param.required]
    assert len(required) > 20
    for param in required:
        assert "Give it, as " in options._with_way_out("Missing", param, None), param.name


@pytest.mark.parametrize(
    "words", ["describe latin.csv", "gate latin.csv latin.csv", "plan latin.yaml", "import latin.json new"]
)
def test_a_file_in_another_encoding_is_to_be_saved_as_utf_8(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    for suffix in ("csv", "yaml", "json"):
        (tmp_path / f"latin.{suffix}").write_bytes(MORE_FILES["latin.jsonl"])
    monkeypatch.chdir(tmp_path)
    assert "0xf6, is not UTF-8; save it as UTF-8" in kvatlas.refuse(*words.split())


def test_a_margin_that_looks_like_a_share_is_asked_about(kvatlas: Call) -> None:
    assert "was 5 meant" in kvatlas("describe", QWEN, "--lose-at-most", "0.05")[2]
    assert "meant" not in kvatlas("describe", QWEN, "--lose-at-most", "5")[2]


@pytest.mark.parametrize(("words", "files"), list(cases()))
def test_wrong_input_ends_in_one_sentence(
    kvatlas: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    words: str,
    files: dict[str, Any],
) -> None:
    """The accepted one: `python -m tests.approve`."""
    (tmp_path / "folder").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    # The width of what the parser of the command line prints.
    monkeypatch.setenv("COLUMNS", "200")
    began = time.process_time()
    err = kvatlas.refuse(*shlex.split(words))
    assert len(err) < 3000
    # What the parser of the command line refuses stands in a frame.
    invalid = re.search("Invalid value for .*?(?= *│)", err)
    sentence = invalid[0] if invalid else err.removeprefix("kvatlas: ").removesuffix("\n")
    assert invalid or err == f"kvatlas: {sentence}\n"
    assert "\n" not in sentence
    check_sentence(request.node.callspec.id, sentence.replace(str(tmp_path), "FOLDER"))
    assert sorted(tmp_path.iterdir()) == before
    # Ten times of what imports and the longest of these take.
    assert time.process_time() - began < 60


def test_a_problem_far_on_is_drawn_alone(kvatlas: Call) -> None:
    """It was drawn with all before it, which took minutes for mazes."""
    began = time.process_time()
    name = "SEQBENCH-6x6-L14"
    assert "Alice is in room" in kvatlas("list", "benchmarks", name, "--problem", f"{name}-99999")[1]
    assert time.process_time() - began < 60


@pytest.mark.parametrize(
    ("hidden", "words", "what", "extra"),
    [
        ("inspect_ai", "import LOG.json run", "Reading Inspect logs needs", "inspect"),
        ("pyarrow", "check file:x.parquet", "Reading x.parquet needs", "parquet"),
        ("fastapi", "serve embedded:tiny-llama", "Serving needs", "serve"),
        ("gguf", "check x.gguf", "Reading x.gguf needs", "gguf"),
        ("accelerate", "check x.gguf", "Reading x.gguf needs", "gguf"),
    ],
)
def test_a_missing_extra_is_named(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str, words: str, what: str, extra: str
) -> None:
    (tmp_path / "LOG.json").write_text("{}")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    # As if neither it nor what imports it had been imported before.
    for name in list(sys.modules):
        if name.partition(".")[0] == hidden or name.startswith(("kvatlas.integrations.", "kvatlas.serve.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, hidden, None)
    said = kvatlas.refuse(*words.split()).strip()
    assert said.startswith(f"kvatlas: {what} the module '{hidden}")
    assert said.endswith(f"', which is missing: pip install 'kvatlas[{extra}]'.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "full kv_bits=8 kv_bits=4"), "--policy: 'kv_bits' is given twice"),
        (("--set", "kv_bits=8", "--set", "kv_bits=4"), "--set: 'kv_bits' is given twice"),
        (("--policy", "full kv_bits=8", "--set", "kv_bits=4"), "kv_bits is given twice ('8' and '4')"),
        (("--policy", "window ratio=0.3", "--ratio", 0.5), "ratio is given twice ('0.3' and '0.5')"),
        (("--set", "policy=window"), "policy is given twice ('full' and 'window')"),
        (("--template", "a", "--model-option", "template=b"), "template is given twice ('b' and 'a')"),
        (("--model-option", "revision=main"), "revision is 'main', and 'embedded:tiny-llama' is in"),
    ],
)
def test_what_is_given_twice_or_has_no_meaning_is_refused(kvatlas: Call, words: tuple[Any, ...], sentence: str) -> None:
    assert sentence in kvatlas.refuse("run", MODEL, "CHAIN3", *words)


def test_a_cache_that_cannot_be_allocated_is_said(kvatlas: Call) -> None:
    policy = f"snapkv kv_budget=96 local_window=8 ratio=0.5 queries={2**31 - 1}"
    words = ("run", MODEL, "CHAIN8", "--problems", 1, "--workers", 1, "--batch-size", 4096, "--quiet")
    assert "queries each cannot be allocated (" in kvatlas.refuse(*words, "--samples", 4096, "--policy", policy)


def test_huge_numbers_of_rows_and_of_shown_traces_are_as_many_as_there_are(kvatlas: Call) -> None:
    began = time.perf_counter()
    words = ("run", MODEL, "CHAIN3", "--problems", 1, "--workers", 1, "--max-new-tokens", 20, "--quiet")
    kvatlas.succeed(*words, "--batch-size", 10**30, "--show", 10**30)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("code", [0, 3])
def test_code_of_others_that_ends_a_command_does_not_end_it_in_silence(
    kvatlas: Call, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("kvatlas.sweeps.make_plan", lambda *_: sys.exit(code))
    sentence = kvatlas.refuse("run", MODEL, "CHAIN3")
    assert f"Code outside kvatlas ended this command (it called sys.exit({code}))." in sentence


def test_a_reader_that_closes_the_pipe_ends_a_command_in_silence() -> None:
    command = [sys.executable, "-m", "kvatlas", "list", "policies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1

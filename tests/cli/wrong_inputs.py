"""Wrong input at the command line: files, options and numbers that no run can be made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MODEL = "embedded:tiny-llama"
SPEC = "models: [embedded:tiny-llama]\nbenchmarks: [CHAIN3]\nproblems: 2\nsamples: 1\nsampling: {max_new_tokens: 20}\n"
HEAD = "model,benchmark,local_window,ratio,pass_at_1\n"


@dataclass(frozen=True)
class Case:
    """One command line with the files that it reads; `words` may name them, and `{out}`, a folder that is not there."""

    name: str
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)


def specs() -> Iterator[tuple[str, str | bytes]]:
    """Specs that are to be refused."""
    yield "seed of 5,000 digits", SPEC + f"seed: {'9' * 5000}\n"
    yield "seed of 30 digits", SPEC + f"seed: {'9' * 30}\n"
    yield "deep list", "models: " + "[" * 20_000
    yield "deep mapping", "models: " + "{a: " * 5000 + "1" + "}" * 5000
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    yield "alias bomb", bomb + SPEC
    yield "alias bomb in a list of models", bomb + SPEC.replace("[embedded:tiny-llama]", "*a11")
    yield "alias to itself", "models: &m [*m]\nbenchmarks: [CHAIN3]\n"
    yield "merge keys", "x: &x {a: 1}\n" + SPEC.replace("problems: 2", "<<: [*x, *x]\nproblems: 2")
    yield "a billion problems", SPEC.replace("problems: 2", "problems: 1000000000")
    yield "problems in scientific notation", SPEC.replace("problems: 2", "problems: 1.0e+9")
    yield "a billion samples", SPEC.replace("samples: 1", "samples: 1000000000")
    many = f"[{', '.join(str(number) for number in range(1, 1001))}]"
    grid = "settings: {policy: window, ratio: 0.5}\naxes:\n"
    axes = "".join(f"  {name}: {many}\n" for name in ("local_window", "kv_budget", "ratio_over", "keep_prompt"))
    yield "grid of 10^12", SPEC + grid + axes
    yield "key twice", SPEC + "problems: 3\n"
    yield "key twice within", SPEC.replace("max_new_tokens: 20", "max_new_tokens: 20, max_new_tokens: 30")
    yield "digits of another script", SPEC.replace("problems: 2", "problems: ٣")
    yield "digits of another script in a name", SPEC.replace("CHAIN3", "CHAIN٣")
    yield "infinite temperature", SPEC.replace("max_new_tokens: 20", "temperature: .inf")
    yield "temperature nan", SPEC.replace("max_new_tokens: 20", "temperature: .nan")
    yield "infinite axis", SPEC + "settings: {policy: window, local_window: 4, ratio: 0.5}\naxes: {kv_budget: [.inf]}\n"
    yield "axis nan", SPEC + "settings: {policy: window, kv_budget: 90, local_window: 4}\naxes: {ratio: [.nan]}\n"
    yield "margin nan", SPEC + "lose_at_most: .nan\n"
    yield "surrogate", SPEC.replace("embedded:tiny-llama", '"\\ud800"')
    yield "surrogate in a column", SPEC + 'expected_output_tokens: "\\udfff"\n'
    yield "null byte in a file", SPEC.replace("[CHAIN3]", '[{name: X, file: "a\\0.csv"}]')
    yield "file of 5,000 characters", SPEC.replace("[CHAIN3]", f"[{{name: X, file: {'x' * 5000}.csv}}]")
    yield "binary", bytes(range(256)) * 20
    yield "UTF-16", SPEC.encode("utf-16")
    yield "date", SPEC.replace("problems: 2", "problems: 2001-01-01")
    yield "date that is none", SPEC.replace("problems: 2", "problems: 2001-99-99")
    yield "list as key", "? [1, 2]\n: 3\n" + SPEC
    yield "mapping as key", "? {a: 1}\n: 3\n" + SPEC
    yield "python object", SPEC + "x: !!python/object/apply:os.system [touch executed]\n"
    yield "list as parameter", SPEC + "baseline: {policy: window, kv_budget: [1], local_window: 4, ratio: 0.5}\n"
    yield "mapping as parameter", SPEC + "baseline: {policy: {a: 1}}\n"
    yield "set as models", SPEC.replace("[embedded:tiny-llama]", "!!set {a}")
    yield "tokens of 10^30", SPEC.replace("max_new_tokens: 20", f"max_new_tokens: {10**30}")
    yield "name of 10^6 characters", SPEC.replace("CHAIN3", "C" * 10**6)


def maps() -> Iterator[tuple[str, str | bytes]]:
    """CSV maps that are to be refused."""
    yield "unquoted comma", HEAD + "R1, the large one,AIME24,10,0.5,40\n"
    yield "too few fields", HEAD + "R1,AIME24,10,0.5\n"
    yield "nan", HEAD + "R1,AIME24,10,0.5,nan\n"
    yield "infinite", HEAD + "R1,AIME24,10,0.5,inf\n"
    yield "digits of another script", HEAD + "R1,AIME24,١٠,0.5,٤٠\n"
    yield "underscore", HEAD + "R1,AIME24,1_0,0.5,4_0\n"
    yield "null byte", HEAD + "R1\0,AIME24,10,0.5,40\n"
    yield "binary", bytes(range(256)) * 20
    yield "field of 10^6 characters", HEAD + f"{'R' * 10**6},AIME24,10,0.5,40\n"
    yield "huge window", HEAD + "R1,AIME24,1e308,0.5,40\n"
    yield "huge problems", HEAD.replace("\n", ",problems\n") + "R1,AIME24,10,0.5,40,1e300\n"
    yield "only a header", HEAD
    yield "empty", ""


def problem_files() -> Iterator[tuple[str, str, str | bytes]]:
    """Files of problems that are to be refused, with their names."""
    yield "deep JSON", "p.json", "[" * 100_000
    yield "deep JSON lines", "p.jsonl", '{"question": ' + "[" * 100_000
    yield "number of 5,000 digits", "p.jsonl", '{"question": "q", "answer": ' + "9" * 5000 + "}\n"
    yield "nan as answer", "p.jsonl", '{"question": "q", "answer": NaN}\n'
    yield "surrogate", "p.jsonl", '{"question": "\\ud800", "answer": "1"}\n'
    yield "unquoted comma", "p.csv", "question,answer\nWhat is 1,000 + 1?,1001\n"
    yield "row without an answer", "p.csv", "question,answer\nWhat is 1 + 1?,2\nWhat is 2 + 2?\n"
    yield "binary", "p.csv", bytes(range(256)) * 20
    yield "no Parquet", "p.parquet", b"PAR1" + bytes(200)
    yield "no gzip", "p.csv.gz", b"\x1f\x8b" + bytes(200)
    yield "empty", "p.json", ""
    yield "a number", "p.json", "3"


def cases() -> Iterator[Case]:
    """All of them."""
    for name, text in specs():
        yield Case(f"spec: {name}", ("plan", "spec.yaml"), {"spec.yaml": text})
    for name, text in maps():
        yield Case(f"map: {name}", ("describe", "map.csv"), {"map.csv": text})
    for name, file, text in problem_files():
        yield Case(f"problems: {name}", ("benchmarks", "show", f"file:{file}"), {file: text})
    good, run = {"spec.yaml": SPEC}, ("run", MODEL, "CHAIN3", "--problems", "1")
    for value in ("nan", "inf", "-1", "0", "1e400"):
        yield Case(f"plan --memory {value}", ("plan", "spec.yaml", "--memory", value), good)
        yield Case(f"plan --tokens-per-second {value}", ("plan", "spec.yaml", "--tokens-per-second", value), good)
    for value in ("nan", "inf", "-1", "0", "101"):
        yield Case(f"plan --detect {value}", ("plan", "spec.yaml", "--detect", value), good)
        yield Case(f"plan --discordance {value}", ("plan", "spec.yaml", "--detect", "3", "--discordance", value), good)
    for value in ("nan", "inf", "1e400"):
        yield Case(f"run --temperature {value}", (*run, "--temperature", value))
        window = ("--policy", "window", "--kv-budget", "90", "--local-window", "8")
        yield Case(f"run --ratio {value}", (*run, *window, "--ratio", value))
        yield Case(f"serve --grace {value}", ("serve", MODEL, "--grace", value))
        yield Case(f"serve --top-p {value}", ("serve", MODEL, "--top-p", value))
        yield Case(f"describe --lose-at-most {value}", ("describe", "published:dynts_r1_qwen", "--lose-at-most", value))
    yield Case("run --seed of 5,000 digits", (*run, "--seed", "9" * 5000))
    yield Case("run --set [", (*run, "--policy", "window", "--set", "x=["))
    yield Case("run --set of a list", (*run, "--policy", "window", "--set", "kv_budget=[1]"))
    yield Case("run --set deep", (*run, "--policy", "window", "--set", "strict_budget=" + "[" * 5000))
    yield Case("run --max-new-tokens of 10^30", (*run, "--max-new-tokens", str(10**30)))
    yield Case("run --out of 300 characters", (*run, "--out", "x" * 300))
    yield Case("run --out below a file", (*run, "--out", "spec.yaml/run"), good)
    yield Case("run a benchmark with a null byte", ("run", MODEL, "file:a\udcff.csv"))
    yield Case("run a model of 5,000 characters", ("run", "hf:" + "x" * 5000, "CHAIN3"))
    yield Case("run --problems 10^9", ("run", MODEL, "CHAIN3", "--problems", "1000000000"))
    yield Case("run --samples 10^9", (*run, "--samples", "1000000000"))
    yield Case("show --problem 999999999", ("benchmarks", "show", "CHAIN3", "--problem", "999999999"))
    yield Case("show a maze 999999999", ("benchmarks", "show", "SEQBENCH-6x6-L14", "--problem", "999999999"))
    yield Case("draw a maze 999999999", ("maze", "SEQBENCH-6x6-L14", "--out", "m.png", "--problem", "999999999"))
    yield Case("draw a maze of 5,000 digits", ("maze", "SEQBENCH-6x6-L14", "--out", "m.png", "--problem", "9" * 5000))
    yield Case("path of 5,000 characters", ("plan", "x" * 5000))
    yield Case("path below a file", ("plan", "spec.yaml/x"), good)
    yield Case("path not in UTF-8", ("plan", "\udcff.yaml"))
    yield Case("run folder of 5,000 characters", ("describe", "x" * 5000))
    yield Case("report of 5,000 characters", ("report", "x" * 5000, "--out", "a.html"))
    yield Case("executor", ("sweep", "spec.yaml", "--out", "{out}", "--executor", "slurm"), good)
    yield Case("--out is a file", ("sweep", "spec.yaml", "--out", "spec.yaml"), good)
    yield Case("suffix of a figure", ("map", "published:dynts_r1_qwen", "--out", "a.gif"))
    yield Case("figure of 300 characters", ("map", "published:dynts_r1_qwen", "--out", "x" * 300 + ".png"))
    yield Case(
        "figure in a folder that is a file", ("map", "published:dynts_r1_qwen", "--out", "spec.yaml/a.png"), good
    )
    yield Case("log that is no archive", ("import", "a.eval", "{out}"), {"a.eval": "PK\3\4 no"})
    yield Case("export format", ("export", "{out}", "--out", "a.x", "--format", "xml"))

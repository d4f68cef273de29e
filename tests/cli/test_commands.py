import csv
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvatlas import open_run
from kvatlas.core import Setting
from kvatlas.models import ModelHandle
from kvatlas.policies import PRESETS, policies
from kvatlas.predictor.calibration import statistics_of_queries
from kvatlas.results import Store
from kvatlas.stats.run_data import RunData
from tests.command_line import Call
from tests.r1 import AIME
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run


def test_lists_as_tables_and_as_data(kvatlas: Call) -> None:
    for command, name in [("benchmarks", "CHAIN"), ("policies", "full"), ("models", "embedded:tiny-llama")]:
        out = kvatlas.succeed("list", command)
        assert name in out
        rows = json.loads(kvatlas("list", command, "--json")[1])
        assert next(iter(rows[0])) == "name"
        assert rows[0]["name"] == name


def test_a_model_is_checked_line_by_line(kvatlas: Call) -> None:
    words = ("--max-new-tokens", 4)
    out = kvatlas.succeed("check", "embedded:tiny-llama", *words, "--problems", 2)
    assert {line.split()[0] for line in out.splitlines()} == {"ok"}
    code, out, _ = kvatlas("check", "embedded:tiny-llama", f"AIME24@{AIME}", *words, "--json")
    rows = json.loads(out)
    assert code == 2
    assert list(rows[0]) == ["name", "status", "message", "advice"]
    (unknown,) = [row for row in rows if row["name"] == "unknown tokens"]
    assert unknown["status"] == "failed"
    assert "smollm2-135m-think" in unknown["advice"]


def test_the_exact_text_of_a_problem(kvatlas: Call, tmp_path: Path) -> None:
    code, out, err = kvatlas("list", "benchmarks", f"AIME24@{AIME}", "--problem", "AIME24-003")
    assert code == 0
    assert out == (
        "There exist real numbers $x$ and $y$, both greater than 1, such that "
        "$\\log_x\\left(y^x\\right)=\\log_y\\left(x^{4y}\\right)=10$. Find $xy$.\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}.\n"
    )
    assert err == "AIME24-003: 025\n"
    (problem,) = json.loads(kvatlas.succeed("list", "benchmarks", "CHAIN4", "--json"))
    assert (problem["problem"], list(problem)) == ("CHAIN4-0000", ["problem", "prompt", "answer"])
    out = kvatlas.succeed("list", "benchmarks", "CHAIN4", "--model", "embedded:tiny-llama")
    assert out.startswith("<|user|>")
    assert out.endswith("<|assistant|><think>\n")
    err = kvatlas.refuse("list", "benchmarks", f"AIME24@{AIME}", "--problem", "AIME24-009")
    assert err.endswith(" has no problem 'AIME24-009'; its first is AIME24-001.\n")


def test_plan(kvatlas: Call, write_spec: Callable[..., Path]) -> None:
    estimate = json.loads(kvatlas("plan", write_spec(), "--json")[1])
    known = {"settings", "traces", "decoded_tokens", "kv_bytes_per_sequence", "batch_size", "peak_bytes", "seconds"}
    assert set(estimate) == known | {"seconds_with_loops", "budget_audit", "warnings", "provable", "claim"}
    assert set(estimate["peak_bytes"]) == {"weights", "slots", "snapshots", "workspace", "total"}
    assert estimate["traces"] == 108
    # A few steps were timed.
    assert 0 < estimate["seconds"] < 3600
    out = kvatlas.succeed("plan", write_spec(), "--tokens-per-second", 100, "--memory", 2)
    assert "108" in out
    assert re.search(r"memory of a worker +[\d.]+ [KMG]iB  ", out)
    assert re.search(r"time +[\d.]+ (seconds|minutes|hours)  \(at 100 tokens/s\)", out)


def test_plan_prints_its_budget_audit_and_warns(kvatlas: Call, write_spec: Callable[..., Path]) -> None:
    settings = [{"policy": name, "kv_budget": 64, "ratio_over": "older"} for name in ("window", "random")]
    spec = write_spec(settings=settings, expected_output_tokens=80)
    lines = kvatlas("plan", spec)[1].splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith("budget audit of"))
    assert "kv_budget 64" in lines[start]
    assert lines[start + 1].split("  ")[0] == "local window"
    assert lines[start + 1].split()[2:] == ["ratio", "CHAIN4", "CHAIN5"]
    assert lines[start + 2].split()[:7] == ["4", "0.2", "0", "/", "0", "(100", "%)"]
    # Four cells, whatever the number of policies.
    assert lines[start + 6] == ""
    assert lines[-1].startswith("Warning: In 6 of 8 cells all policies keep the same tokens in ")


def test_a_sweep_says_before_and_after_what_it_cannot_show(
    kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    settings = [{"policy": "window", "kv_budget": 900, "ratio_over": "thinking"}]
    spec = write_spec(settings=settings, benchmarks=["CHAIN4"], problems=1, samples=1)
    code, _, err = kvatlas("sweep", spec, "--out", tmp_path / "run", "--workers", 1)
    assert code == 0
    assert "Warning: 4 of 4 settings with a KV budget compress nothing on CHAIN4" in err
    assert "Warning: CHAIN4: 0 of 4 traces under a KV budget were compressed" in err
    kvatlas.succeed("map", tmp_path / "run", "--out", tmp_path / "map.svg")
    assert "Can show no loss: none of the 4 traces under a" in (tmp_path / "map.svg").read_text()


def test_a_spec_is_changed_on_the_command_line_and_the_run_says_so(
    kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec()
    changes = ("--problems", 1, "--samples", 1, "--set", "axes.ratio=[0.5]", "--set", "sampling.max_new_tokens=60")
    plan = json.loads(kvatlas.succeed("plan", spec, *changes, "--tokens-per-second", 100, "--json"))
    assert (plan["settings"], plan["traces"]) == (5, 10)
    kvatlas.succeed("sweep", spec, "--out", tmp_path / "run", "--workers", 1, "--quiet", *changes)
    run = RunData.open(tmp_path / "run")
    assert run.manifest.spec["sampling"]["max_new_tokens"] == 60
    assert run.manifest.provenance["changes"] == {
        "axes.ratio": "[0.5]", "sampling.max_new_tokens": "60", "problems": "1", "samples": "1"
    }  # fmt: skip
    for words, sentence in [
        (["--set", "prblems=3"], "Unknown key 'prblems'"),
        (["--set", "models.name=x"], "--set models.name=x: models is"),
        (["--set", "axes.ratio=[0.5"], "--set axes.ratio=[0.5: expected a value in YAML"),
        (["--set", "problems=3", "--problems", 4], "problems is given twice"),
        (["--set", "samples=few"], "samples: expected an integer, given 'few'"),
    ]:
        assert sentence in kvatlas.refuse("plan", spec, *words)


def test_a_verbose_sweep_says_each_trace(kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path) -> None:
    spec = write_spec(problems=1, samples=1, benchmarks=["CHAIN4"])
    _, _, err = kvatlas("sweep", spec, "--out", tmp_path / "run", "--workers", 1, "-v")
    assert err.count("CHAIN4-0000, sample 0: ") == 9
    assert err.count("1 worker of up to ") == 1
    assert "9/9 traces" in err


def test_a_run_draws_from_other_tokens_and_asks_another_way(kvatlas: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "a = 3 . ? a", "answer": 3}))
    words = ("--top-k", 1, "--top-p", 0.5, "--prompt", "{question}", "--max-new-tokens", 20, "--workers", 1, "--quiet")
    kvatlas.succeed("run", "embedded:tiny-llama", path, *words, "--out", tmp_path / "run")
    spec = RunData.open(tmp_path / "run").manifest.spec
    assert (spec["sampling"]["top_k"], spec["sampling"]["top_p"]) == (1, 0.5)
    assert spec["benchmarks"][0]["prompt"] == "{question}"


@pytest.mark.usefixtures("forked")
def test_a_run_says_its_workers_and_memory_before_it_decodes(
    kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    spec = write_spec(problems=2, samples=1, benchmarks=["CHAIN4"])
    code, _, err = kvatlas("sweep", spec, "--out", tmp_path / "run", "--workers", 2)
    assert code == 0
    said = next(line for line in err.splitlines() if " workers of up to " in line)
    assert re.search(r": 2 workers of up to \d+ sequences at a time, at most [\d.]+ [MG]iB of memory in all", said)
    assert err.index(said) < err.index(" traces, ")


def test_a_quiet_command_hides_progress_and_no_warning(kvatlas: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"question": f"a = {n} . ? a", "answer": answer} for n, answer in ((3, 3), (3, 4), (5, None))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("run", "embedded:tiny-llama", path, "--max-new-tokens", 5, "--workers", 1, "--quiet")
    code, _, err = kvatlas(*words)
    assert code == 0
    for warning in ("left out: 1 without one", "1 of them with different reference answers", "2 of 2 traces are"):
        assert warning in err
    assert "workers" not in err
    assert " traces, " not in err


def test_a_budget_without_room_is_advised_another(
    kvatlas: Call, write_spec: Callable[..., Path], tmp_path: Path
) -> None:
    def spec(budget: int) -> Path:
        settings = [{"policy": "window", "kv_budget": budget, "local_window": 8, "ratio": 0.5}]
        return write_spec(settings=settings, axes={}, benchmarks=["CHAIN4"])

    err = kvatlas.refuse("plan", spec(30))
    assert "expected budgets above" in err
    (advised, new) = map(int, re.search(r"a kv_budget of (\d+) leaves (\d+) new tokens between two", err).groups())
    assert new >= 64
    narrow = kvatlas("plan", spec(40), "--tokens-per-second", 100)[1]
    assert "compress again after fewer than 8 tokens on CHAIN4 with" in narrow
    assert "compress again" not in kvatlas("plan", spec(advised), "--tokens-per-second", 100)[1]


def test_own_problems_are_run_in_one_step_and_told_as_data(kvatlas: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"q": f"a = {n} . ? a", "a": n, "why": "so"}) + "\n" for n in (3, 4)))
    words = ("run", "embedded:tiny-llama", path, "--max-new-tokens", 20, "--workers", 1, "--quiet")
    err = kvatlas.refuse(*words)
    assert "no column for the question; there are: q, a, why" in err
    assert "--column" in err
    code, out, err = kvatlas(*words, "--column", "question=q", "--column", "answer=a", "--json")
    assert (code, "2 of 2 traces are without an answer (0) or truncated (2)" in err) == (0, True)
    document = json.loads(out)
    assert (document["model"], document["setting"]) == ("embedded:tiny-llama", {"policy": "full"})
    (row,) = document["benchmarks"]
    assert (row["benchmark"], row["problems"], sum(row["verdicts"].values())) == ("mine", 2, 2)
    assert row["low"] <= row["value"] <= row["high"]
    (trace,) = document["traces"]
    assert (trace["problem"], trace["output_tokens"] <= 20, bool(trace["text"])) == ("mine-001", True, True)
    refused = kvatlas.refuse("run", "embedded:tiny-llama", "CHAIN4", "--column", "question=q")
    assert "'CHAIN4' takes no columns" in refused


def test_runs_that_mean_other_problems_by_the_same_names_are_not_compared(kvatlas: Call, tmp_path: Path) -> None:
    plan = manifest(grid("window"), benchmarks=["CHAIN6"], problems=3)
    for run, content in (("first", "same"), ("second", "same"), ("third", "other")):
        store_run(tmp_path / run, replace(plan, contents={"CHAIN6": {"p0": content, "p1": "same"}}))
    kvatlas.succeed("compare", tmp_path / "first", tmp_path / "second")
    refused = kvatlas.refuse("compare", tmp_path / "first", tmp_path / "third")
    assert "The runs have other contents of 1 of 2 problems of CHAIN6 (p0); compare runs of the same" in refused


def test_an_export_goes_to_standard_output_or_is_a_run(kvatlas: Call, finished: Path, tmp_path: Path) -> None:
    out = kvatlas.succeed("export", finished, "--format", "run", "--out", tmp_path / "copy")
    assert (out, kvatlas("compare", finished, tmp_path / "copy")[0]) == (f"{tmp_path / 'copy'}: 108 traces\n", 0)
    for format_ in ("csv", "cells", "jsonl"):
        file = tmp_path / format_
        kvatlas.succeed("export", finished, "--format", format_, "--out", file)
        assert kvatlas("export", finished, "--format", format_) == (0, file.read_text(), "")
    assert (tmp_path / "jsonl").read_text().count("\n") == 108
    kvatlas.succeed("export", finished, "--format", "parquet", "--out", tmp_path / "out.parquet")


def test_settings_without_two_axes_are_exported_as_a_table(kvatlas: Call, tmp_path: Path) -> None:
    settings = [Setting.from_parameters("random", kv_budget=budget) for budget in (64, 96)]
    store_run(tmp_path / "run", manifest(settings, axes=(), benchmarks=["CHAIN6"]))
    assert "no map of two axes; --format cells writes" in kvatlas.refuse("export", tmp_path / "run")
    rows = list(csv.DictReader(kvatlas.succeed("export", tmp_path / "run", "--format", "cells").splitlines()))
    assert [(row["policy"], row["kv_budget"]) for row in rows] == [("random", "64"), ("random", "96"), ("full", "")]
    frame = open_run(tmp_path / "run").cells()
    assert [float(row["value"]) for row in rows] == frame["value"].tolist()


def test_an_axis_that_is_held_is_held_in_every_output(kvatlas: Call, tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", manifest(grid("window"), benchmarks=["CHAIN6"], problems=2))
    text = kvatlas.succeed("export", run, "--format", "cells", "--fix", "local_window=8")
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["local_window"] for row in rows] == ["8", "8", "8", ""]
    assert len(open_run(run, fix={"local_window": 8}).cells()) == 4
    # Also where the value that is not there would leave no map.
    for command in (("describe",), ("export", "--format", "cells")):
        assert "cannot be fixed to 9" in kvatlas.refuse(*command, run, "--fix", "local_window=9")
    for option in ("--fix=local_window=8", "--metric=progress"):
        assert "is for --format csv and cells" in kvatlas.refuse("export", run, "--format", "jsonl", option)


MAP = "model,benchmark,local_window,ratio,pass_at_1\n" + "".join(
    f"M,AIME24,{window},{ratio},{40 + number}\n"
    for number, (window, ratio) in enumerate((w, r) for w in (500, 1000) for r in (0.1, 0.2))
)


@pytest.mark.parametrize(
    "source",
    [
        MAP,
        MAP.replace("AIME24", "MINE"),
        MAP.replace("1\n", "1,problems,samples\n", 1).replace(",4", ",4,30,1"),
        MAP.splitlines()[0] + "\n" + "".join(f"M,AIME24,{w},{r},100\n" for w in (500, 1000) for r in (0.1, 0.2)),
        MAP.splitlines()[0] + "\n" + "".join(f"M,AIME24,{w},{r},0\n" for w in (500, 1000) for r in (0.1, 0.2)),
        MAP.splitlines()[0] + "\nM,AIME24,500,0.1,40\n",
        *((problems, chance) for problems in (1, 12) for chance in (0.0, 1.0)),
    ],
)
def test_poor_data_are_described_without_a_warning_or_a_nan(
    kvatlas: Call, tmp_path: Path, source: str | tuple[int, float], recwarn: pytest.WarningsRecorder
) -> None:
    """Unknown sizes, one sample, values alike, all right, all wrong, one cell, one problem: never a NaN."""
    path = tmp_path / "data.csv"
    if isinstance(source, str):
        path.write_text(source)
    else:
        problems, chance = source
        store_run(path, manifest(grid("dynts", "random"), problems=problems, samples=1), lambda _: chance)
    out = kvatlas.succeed("describe", path, "--json", err="")
    first = json.loads(out, parse_constant=lambda name: pytest.fail(name))["maps"][0]
    assert first["cells"] in (1, 4, 9)
    assert isinstance(source, str) or first["evidence_of_difference"] is False
    assert "nan" not in kvatlas.succeed("describe", path, err="").lower().replace("finan", "")
    assert [str(item.message) for item in recwarn] == []


def test_options_that_no_source_can_take_are_refused(kvatlas: Call, tmp_path: Path) -> None:
    path = tmp_path / "map.csv"
    path.write_text(MAP)
    assert "shows pass@1 and no 'progress'" in kvatlas.refuse("describe", path, "--metric", "progress")
    figure = ("--out", tmp_path / "map.png")
    for command in (("describe", path), ("map", path, *figure)):
        assert "only maps were given" in kvatlas.refuse(*command, "--fix", "ratio=0.1")
    run = store_run(tmp_path / "run", manifest(grid("window"), benchmarks=["CHAIN6"], problems=2))
    assert "only runs were given" in kvatlas.refuse("describe", run, "--problems", "1")
    kvatlas.succeed("describe", run, path, "--problems", "30", "--fix", "local_window=8")


def test_no_space_ends_in_one_sentence_and_the_next_start_goes_on(
    write_spec: Callable[..., Path], tmp_path: Path, kvatlas: Call
) -> None:
    """The file size limit stands for the full disk: the same write fails in the same place."""
    words = ("sweep", write_spec(), "--out", tmp_path / "run", "--workers", 1, "--quiet")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        said = kvatlas.refuse(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (said.startswith("kvatlas: The store"), said.count("\n")) == (True, 1)
    assert "the same command goes on from there" in said
    with Store.open(tmp_path / "run") as store:
        before = store.keys()
    assert 0 < len(before) < 108
    kvatlas.succeed(*words)
    with Store.open(tmp_path / "run") as store:
        assert before < store.keys()
        assert len(store.keys()) == 108


def test_help_is_quick_and_complete(kvatlas: Call) -> None:
    assert kvatlas.succeed("--version") == f"kvatlas {version('kvatlas')}\n"
    out = kvatlas.succeed("--help")
    for name in ("demo", "plan", "run", "sweep", "map", "describe", "check", "view", "export", "list"):
        assert name in out
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvatlas", "--help"], capture_output=True, text=True, check=True
    ).stderr
    for heavy in ("torch", "transformers", "matplotlib", "scipy", "pydantic"):
        assert f" {heavy}\n" not in imported


# Policies.

RUN = ("run", "embedded:tiny-llama", "CHAIN4", "--problems", "2")
GOOD = ("--kv-budget", "80", "--local-window", "8", "--ratio", "0.3")
TRIATTENTION = ("--policy", "triattention", *GOOD, "--set")


def test_the_list_has_every_policy_with_what_a_user_asks_for(kvatlas: Call) -> None:
    rows = json.loads(kvatlas("list", "policies", "--json")[1])
    assert [row["name"] for row in rows] == [*policies.names(), *PRESETS]
    by_name = {row["name"]: row for row in rows}
    assert by_name["h2o"]["observes"] == ["attention"]
    assert by_name["tova"]["scope"] == "layer"
    assert by_name["snapkv"]["parameters"]["queries"] == 32
    assert by_name["snapkv"]["published"]["kernel"] == "7 on LongBench, 5 on others"
    # Our policies are methods of papers; those of plug-ins need none.
    assert all("arXiv" in row["paper"] or "openreview.net" in row["paper"] for row in rows if row["name"] != "full")
    assert [row["name"] for row in rows if row["preset"]] == list(PRESETS)
    preset = by_name["h2o@dynts-paper"]
    assert preset["preset"]["policy"] == "tova"
    assert preset["preset"]["values"] == {"ratio_over": "older", "keep_prompt": False, "scope": "global"}
    assert "Robin930/DynTS" in preset["preset"]["source"]
    assert (preset["parameters"]["keep_prompt"], preset["scope"]) == (False, "global")
    out = kvatlas.succeed("list", "policies")
    for name in policies.names():
        assert f"\n{name} " in out
    assert all(name in out for name in PRESETS)
    assert len(out.splitlines()) < len(policies.names()) + 6


def test_one_policy_is_explained(kvatlas: Call) -> None:
    out = kvatlas.succeed("list", "policies", "rkv")
    for words in ("arXiv 2505.24133", "observes: queries; one choice for: head", "mix = 0.1   (published: 0.1)"):
        assert words in out
    assert "local_window: newest tokens that always stay" in out
    (row,) = json.loads(kvatlas("list", "policies", "rkv", "--json")[1])
    assert row["description"].startswith("Importance less redundancy")
    out = kvatlas.succeed("list", "policies", "h2o@dynts-paper")
    assert "tova with ratio_over=older, keep_prompt=False, scope=global" in out


def test_a_preset_is_run_by_its_name(kvatlas: Call) -> None:
    words = (*GOOD[2:], "--kv-budget", "60", "--max-new-tokens", "90", "--workers", "1", "--quiet")
    out = kvatlas.succeed(*RUN, "--policy", "sepllm@dynts-paper", *words)
    assert "Pass@1" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--policy", "h2o@unknown", *GOOD), "Unknown preset 'h2o@unknown'; expected: dynts@dynts-paper"),
        (("--policy", "h2o@dynts-paper", *GOOD, "--set", "keep_prompt=true"), "fixes keep_prompt = False"),
        (("--policy", "h2o", *GOOD, "--set", "scope=model"), "scope is 'model'; expected 'head', 'global', 'layer'"),
        (("--policy", "rkv", *GOOD, "--set", "mix=2"), "mix is 2; expected a number from 0 to 1"),
        (("--policy", "dynts-bottom", *GOOD, "--set", "predictor=no.safetensors"), "there is no file"),
        ((*TRIATTENTION, "statistics=no.safetensors"), "made by `kvatlas predictor calibrate`"),
        ((*TRIATTENTION, "statistics=FOLDER/README"), "cannot be read as those of queries"),
        ((*TRIATTENTION, "statistics=FOLDER/OTHER"), "the model 'embedded:tiny-llama' has"),
    ],
)
def test_wrong_policies_are_refused_in_one_sentence(
    kvatlas: Call, random_models: dict[str, ModelHandle], tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "README").write_text("hello")
    model = random_models["llama"]
    save_file(statistics_of_queries(model, model.load(), [(5, 6, 7)]), tmp_path / "OTHER")
    given = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert sentence in kvatlas.refuse(*RUN, *given, "--workers", "1", "--quiet")


def test_calibrate_writes_what_triattention_reads(kvatlas: Call, tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    words = ("embedded:tiny-llama", "CHAIN3", "--problems", "2", "--max-new-tokens", "60")
    out = kvatlas.succeed("predictor", "calibrate", file, *words)
    assert "means over the queries of" in out
    assert load_file(file)["norm"].shape == (4, 4, 16)
    # In a model's folder it lies where the policy looks.
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    kvatlas.succeed("predictor", "calibrate", tmp_path / "model" / file.name, *words)
    assert (tmp_path / "model" / "kvatlas" / file.name).read_bytes() == file.read_bytes()
    options = ("--policy", "triattention", *GOOD[2:], "--kv-budget", "60", "--set", f"statistics={file}")
    kvatlas.succeed(*RUN, *options, "--max-new-tokens", "90", "--workers", "1", "--quiet")
    half = tmp_path / "half.safetensors"
    kvatlas.succeed("predictor", "calibrate", half, *words, "--model-option", "dtype=bfloat16")
    assert not torch.equal(load_file(half)["norm"], load_file(file)["norm"])
    err = kvatlas.refuse("predictor", "calibrate", half, *words, "--model-option", "dtype=float33")
    assert "The model option dtype is 'float33'; expected auto, float32" in err
    half_precision = ("--model-option", "dtype=float16", "--model-option")
    for value, expected in (("half", "'half'; expected auto, bfloat16, int8"), ("bfloat16", "expected float32 on cpu")):
        err = kvatlas.refuse(*RUN, *half_precision, f"weights={value}")
        assert "The model option weights is" in err
        assert expected in err
    err = kvatlas.refuse("predictor", "calibrate", tmp_path / "nowhere" / "x.safetensors", *words)
    assert "name a file in an existing folder" in err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "MODEL", "CHAIN3"),
        ("predictor", "train", "head.safetensors", "MODEL", "CHAIN3", "--held-out", "1"),
    ],
)
def test_values_of_the_template_reach_the_model(
    kvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [word.replace("MODEL", "embedded:tiny-llama") for word in words]
    err = kvatlas.refuse(*given, "--problems", "2", "--template-values", "loud=true")
    assert "does not read 'loud' of template_values" in err


def test_check_names_the_values_of_the_template(kvatlas: Call, r1_model: Callable[..., ModelHandle]) -> None:
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}{{ effort }}"
    name = r1_model(template=template).name
    out = kvatlas("check", name, "CHAIN4", "--template-values", "loud=true", "--template-values", "effort=high")[1]
    assert re.search(r"template values +effort=high; loud=True\n", out)

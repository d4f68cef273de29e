"""Sweeps over servers: each setting is the command of a real process."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas import open_run, sweep
from kvatlas.core import AGAIN, KvatlasError, Setting
from kvatlas.results import Store
from kvatlas.stats.controls import sessions_reason
from kvatlas.stats.run_data import RunData
from kvatlas.sweeps import parse_spec, read_spec
from kvatlas.sweeps.served import REFERENCE, make_served_plan, sweep_servers
from tests.command_line import Call
from tests.engines import forked_server
from tests.engines.forked_server import fork_servers
from tests.engines.standing import completion, standing

FAKE = Path(__file__).parents[1] / "engines" / "fake_server.py"
COMMAND = f"{sys.executable} {FAKE} --port {{port}}"


def fake_spec(**changes: Any) -> dict[str, Any]:
    """Return a spec of the fake server as data, with further keys."""
    spec = {
        "models": [{"name": "fake", "serve_cmd": COMMAND}],
        "benchmarks": ["CHAIN8"],
        "problems": 4,
        "sampling": {"temperature": 0, "max_new_tokens": 64},
        "settings": {"policy": "served"},
        "axes": {"kv_cache_dtype": ["fp8", "bf16"]},
        "concurrency": 2,
    }
    return spec | changes


def run_sweep(spec: dict[str, Any], folder: Path, **options: Any) -> list[str]:
    """Run the sweep of a spec of servers; return what it said."""
    said: list[str] = []
    plan = make_served_plan(parse_spec(spec), folder.parent)
    sweep_servers(plan, folder, on_message=said.append, on_start=said.append, **options)
    return said


def stored(folder: Path) -> list[tuple[str, str, int, str]]:
    """Return setting, problem, sample and text of each stored answer of a run."""
    with Store.open(folder) as store:
        return sorted((str(t.setting), t.problem, t.sample, t.text) for _, t in store.traces())


def processes_of(folder: Path) -> list[str]:
    """Return the commands of the living processes that have a folder in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if str(folder).encode() in (process / "environ").read_bytes() and state not in "ZX":
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def test_each_setting_is_asked_of_its_own_server_and_the_reference_twice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_sweep(fake_spec(), folder)
    texts = {(setting, text.rpartition(" ")[2]) for setting, *_, text in stored(folder)}
    assert texts == {
        ("reference", "auto"),
        ("again", "auto"),
        ("served(kv_cache_dtype=fp8)", "fp8"),
        ("served(kv_cache_dtype=bf16)", "bf16"),
    }
    with Store.open(folder) as store:
        sessions = store.manifest().provenance["sessions"]
    assert [one["setting"] for one in sessions] == [
        REFERENCE.id,
        Setting.from_parameters("served", kv_cache_dtype="fp8").id,
        Setting.from_parameters("served", kv_cache_dtype="bf16").id,
        AGAIN.id,
    ]
    assert {one["version"] for one in sessions} == {"1.2.3"}
    assert all(not list(folder.glob(pattern)) for pattern in ("servers/*/live.json", "**/*.part"))

    # A second start has nothing to ask and starts nothing.
    assert run_sweep(fake_spec(), folder) == []


@pytest.mark.parametrize(
    "change",
    [
        {"models": [{"name": "fake", "serve_cmd": COMMAND.replace(sys.executable, "no-such-program")}]},
        {"models": [{"name": "fake", "serve_cmd": f"{COMMAND} --x {{nowhere}}"}]},
        {"models": [{"name": "fake", "serve_cmd": COMMAND, "env": {"API_KEY": "abc12345"}}]},
        {"models": [{"name": "fake", "serve_cmd": COMMAND, "colour": "red"}]},
        {"models": [{"serve_cmd": COMMAND}]},
        {"models": [{"name": "fake", "serve_cmd": COMMAND}, "embedded:tiny-llama"]},
        {"models": ["embedded:tiny-llama"]},
        {"axes": {"kv_cache_dtype": []}},
        {"axes": {}},
        {"settings": {"policy": "served", "options": ""}},
        {"settings": {"policy": "served", "env": {"X": "1"}, "options": "--kv-cache-dtype auto"}},
        {"settings": {"policy": "dynts", "kv_budget": 144}},
        {"reference": {"colour": "red"}},
        {"serve_params": "kv.json"},
        {"sampling": {"temperature": 0}},
        {"baseline": [{"policy": "window", "kv_budget": 144}]},
        {"models": [{"name": "fake", "serve_cmd": COMMAND, "kv_bytes": "many"}]},
        {"settings": {"policy": "served", "kv_bytes": {"kv_cache_dtype": {"fp9": 512}}}},
        {"settings": {"policy": "served", "kv_bytes": {"kv_dtype": {"fp8": 512}}}},
        {"settings": {"policy": "served", "control": "ture"}},
    ],
)
def test_a_wrong_spec_is_one_sentence_before_anything_is_started(
    change: dict[str, Any], tmp_path: Path, kvatlas: Call
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec(**change)))
    kvatlas.refuse("sweep", file, "--out", tmp_path / "run")
    assert not (tmp_path / "run" / "servers").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"models": [{"name": "a", "serve_cmd": f"{COMMAND} --kv_cache_dtype=fp9"}]}, "--kv-cache-dtype fp9"),
        (
            {"models": [{"name": "a", "serve_cmd": f"bash -c '{COMMAND} --kv-cache-dtype fp9 {{options}}'"}]},
            "--kv-cache-dtype fp9",
        ),
        (
            {
                "models": [{"name": "a", "serve_cmd": f"{COMMAND} -ctk q4"}],
                "settings": {"policy": "served", "options": "-ctk {kv_cache_dtype}"},
            },
            "-ctk q4",
        ),
        ({"models": [{"name": "a", "serve_cmd": f"{COMMAND} --kv-cache-dtype auto --other fp9"}]}, ""),
        (
            {
                "models": [{"name": "a", "serve_cmd": f"{COMMAND} --kv-cache-dtype fp9"}],
                "reference": {"options": "--kv-cache-dtype auto"},
            },
            "",
        ),
    ],
)
def test_an_option_of_the_reference_that_settings_change_is_warned_of(
    change: dict[str, Any], named: str, tmp_path: Path, kvatlas: Call
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec(**change)))
    said = kvatlas.succeed("plan", file)
    assert ("Warning: The reference of" in said) == bool(named)
    assert named in said.partition("Warning")[2]


def test_one_setting_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    spec = fake_spec(
        models=[{"name": "fake", "serve_cmd": f"{COMMAND} {{options}}"}],
        settings={"policy": "served", "options": "{words}"},
        axes={"words": ["--mode=ends-at-once", "--kv-cache-dtype=fp8"]},
    )
    said: list[str] = []
    with pytest.raises(KvatlasError, match="1 of 4 failed") as error:
        sweep_servers(make_served_plan(parse_spec(spec), tmp_path), folder, on_message=said.append)
    # The end of the log is shown once.
    assert f"{said} {error.value}".count("ValueError: fp9 is no dtype") == 1
    settings = {setting for setting, *_ in stored(folder)}
    assert settings == {"reference", "served(words=--kv-cache-dtype=fp8)", "again"}
    # What could be served is read without the one that could not, and that one is named.
    described = str(open_run(folder).describe())
    assert "Values" in described
    assert "the run has none beside its reference" not in described
    assert "| served(words=--kv-cache-dtype=fp8) |" in described
    assert re.search(r"fake .*ends-at-once.* is left out of the run: \S", described)


def test_without_a_setting_that_started_it_is_said_that_none_was_measured(tmp_path: Path) -> None:
    options = {"policy": "served", "options": "--mode {mode}"}
    with pytest.raises(KvatlasError, match="1 of 3 failed"):
        run_sweep(fake_spec(settings=options, axes={"mode": ["ends-at-once"]}), tmp_path / "run")
    described = str(open_run(tmp_path / "run").describe())
    assert "No setting can be recommended: the run has none beside its reference." in described
    assert "without traces of a full cache" not in described


def test_a_resumed_setting_says_its_place_and_its_answers(tmp_path: Path) -> None:
    run_sweep(fake_spec(problems=2), tmp_path / "run")
    said = "\n".join(run_sweep(fake_spec(), tmp_path / "run"))
    assert "Starting the server of fake kv_cache_dtype=fp8 (2 of 4, 2 of its answers are there): " in said


def test_running_servers_are_settings_by_a_part_of_their_address(tmp_path: Path) -> None:
    reply = completion("A: 3", model="tiny")
    with standing(lambda _: reply) as (first, _), standing(lambda _: reply) as (second, asked):
        port = int(second.split(":")[2].partition("/")[0])
        spec = fake_spec(
            models=[{"name": "tiny", "endpoint": second.replace(str(port), "{port2}")}],
            reference={"endpoint": first},
            axes={"port2": [port]},
        )
        run_sweep(spec, tmp_path / "run")
    assert len([path for path, *_ in asked if path.endswith("completions")]) > 4
    assert {setting for setting, *_ in stored(tmp_path / "run")} == {"reference", "again", f"served(port2={port})"}


def fields_of_again(folder: Path) -> tuple[str, int]:
    """Return the run key of the reference asked again, and the number of its starts."""
    with Store.open(folder) as store:
        manifest = store.manifest()
    (cell,) = (cell for cell in manifest.expected if cell.setting == AGAIN)
    return cell.run_key, sum(one["setting"] == AGAIN.id for one in manifest.provenance["sessions"])


def test_a_repaired_setting_is_asked_and_the_reference_again_after_it(tmp_path: Path) -> None:
    def spec(mode: str) -> dict[str, Any]:
        options = f"--kv-cache-dtype {{kv_cache_dtype}} --mode {mode}"
        settings = [
            {"policy": "served", "kv_cache_dtype": "fp8"},
            {"policy": "served", "kv_cache_dtype": "bf16", "options": options},
        ]
        return fake_spec(settings=settings, axes={})

    folder = tmp_path / "run"
    # All questions of a setting may fail as well as its start.
    with pytest.raises(KvatlasError, match="questions failed"):
        run_sweep(spec("short-prompts"), folder)
    assert "fake kv_cache_dtype=bf16 is left out of the run: 4 questions failed" in str(open_run(folder).describe())
    earlier, starts = fields_of_again(folder)
    assert starts == 1

    said = run_sweep(spec("fine"), folder)
    assert said[0].startswith("The commands of 1 setting are others than before")
    assert [sentence.partition(":")[0] for sentence in said[1:]] == [
        "Starting the server of fake kv_cache_dtype=bf16 (3 of 4)",
        "Starting the server of fake again (4 of 4)",
    ]
    assert len(stored(folder)) == 4 * 4
    described = str(open_run(folder).describe())
    assert "bf16" in described
    assert "left out" not in described
    later, starts = fields_of_again(folder)
    assert (later != earlier, starts) == (True, 2)
    assert run_sweep(spec("fine"), folder) == []


def test_a_run_whose_reference_cannot_be_asked_again_is_not_whole(tmp_path: Path) -> None:
    serve_cmd = f"bash -c 'test ! -e {tmp_path}/gone && exec {COMMAND}'"
    spec = fake_spec(
        models=[{"name": "fake", "serve_cmd": serve_cmd}],
        settings={"policy": "served", "env": {"S": "{s}"}},
        axes={"s": ["1"]},
    )

    def end_servers(sentence: str) -> None:
        if "fake again" in sentence:
            (tmp_path / "gone").touch()

    folder = tmp_path / "run"
    with pytest.raises(KvatlasError, match="fake again"):
        sweep_servers(make_served_plan(parse_spec(spec), tmp_path), folder, on_start=end_servers)
    with pytest.raises(KvatlasError, match="4 of 12 traces are missing"):
        open_run(folder).describe()
    (tmp_path / "gone").unlink()
    run_sweep(spec, folder)
    open_run(folder).describe()


def test_settings_are_not_compared_with_the_reference_of_another_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_sweep(fake_spec(), folder)
    changed = fake_spec(models=[{"name": "fake", "serve_cmd": f"{COMMAND} --say hi"}], axes={"kv_cache_dtype": ["fp8"]})
    before = stored(folder)
    with pytest.raises(KvatlasError, match=r"another command of the reference.*bf16"):
        run_sweep(changed, folder)
    assert stored(folder) == before

    # With all settings, or in place of them, nothing is left to compare wrongly.
    said = run_sweep(changed | {"axes": {"kv_cache_dtype": ["fp8", "bf16"]}}, folder)
    assert "The commands of 4 settings are others than before, so these are asked anew." in said[0]
    with Store.open(folder) as store:
        commands = store.manifest().provenance["commands"].values()
    assert all("--say hi" in command for command in commands)
    assert len(stored(folder)) == 4 * 4
    run_sweep(fake_spec(axes={"kv_cache_dtype": ["fp8"]}), folder, replace_run=True)
    with Store.open(folder) as store:
        sessions = store.manifest().provenance["sessions"]
    assert not [one for one in sessions if "bf16" in one["setting"]]


def test_the_reference_fails_first_and_alone(tmp_path: Path) -> None:
    spec = fake_spec(models=[{"name": "fake", "serve_cmd": f"{COMMAND} --mode ends-at-once"}])
    with pytest.raises(KvatlasError, match="server of reference ended with code 2"):
        run_sweep(spec, tmp_path / "run")


def test_of_two_models_the_other_is_asked_when_a_reference_fails(tmp_path: Path) -> None:
    models = [{"name": "bad", "serve_cmd": f"{COMMAND} --mode ends-at-once"}, {"name": "fake", "serve_cmd": COMMAND}]
    with pytest.raises(KvatlasError, match="Without its reference nothing else is asked of bad"):
        run_sweep(fake_spec(models=models), tmp_path / "run")
    assert len(stored(tmp_path / "run")) == 4 * 4


def test_of_several_models_that_of_the_spec_is_asked(tmp_path: Path) -> None:
    """A server of many models lists first whatever it likes."""
    run_sweep(fake_spec(models=[{"name": "fake", "serve_cmd": f"{COMMAND} --mode more-models"}]), tmp_path / "run")
    with Store.open(tmp_path / "run") as store:
        assert {one["model"] for one in store.manifest().provenance["sessions"]} == {"fake"}
    other = [{"name": "unknown", "serve_cmd": f"{COMMAND} --mode more-models"}]
    with pytest.raises(KvatlasError, match="several models; name the model of the spec as one of them: another, fake"):
        run_sweep(fake_spec(models=other), tmp_path / "other")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("hands-on", "4 are of another model than was asked, by name: 4 'stranger'. It is left out."),
        ("odd-finish", "4 have a finish reason other than stop and length"),
        ("constant", "one text for all seeds"),
        ("no-top-k", "refuses top_k"),
    ],
)
def test_what_is_odd_in_one_setting_is_said(mode: str, said: str, tmp_path: Path) -> None:
    spec = fake_spec(
        settings={"policy": "served", "options": "--kv-cache-dtype {dtype} --mode {mode}"},
        axes={},
        sampling={"temperature": 0.6, "max_new_tokens": 64},
    )
    spec["settings"] = [
        {**spec["settings"], "dtype": "a", "mode": "fine"},
        {**spec["settings"], "dtype": "b", "mode": mode},
    ]
    sentences: list[str] = []
    plan = make_served_plan(parse_spec(spec), tmp_path)
    folder = tmp_path / "run"
    with contextlib.suppress(KvatlasError):
        sweep_servers(plan, folder, on_message=sentences.append)
    about = [sentence for sentence in sentences if said in sentence]
    assert len(about) == 1
    run = RunData.open(folder)
    assert (len(run.manifest.expected) == 3) == (mode == "hands-on")
    assert (run.refused == "the server writes one text for all seeds") == (mode == "constant")
    is_unlike = "more than one set of refused sampling fields" in sessions_reason(run.manifests, "fake")
    assert is_unlike == (mode == "no-top-k")


def test_a_server_that_dies_while_it_answers_is_started_again_twice(tmp_path: Path) -> None:
    dying = [{"name": "fake", "serve_cmd": f"{COMMAND} --answers 3"}]
    said = run_sweep(fake_spec(models=dying, problems=3, axes={"kv_cache_dtype": ["fp8"]}), tmp_path / "run")
    assert sum("It is started again" in sentence for sentence in said) >= 3
    assert len(stored(tmp_path / "run")) == 9

    dying = [{"name": "fake", "serve_cmd": f"{COMMAND} --answers 1"}]
    with pytest.raises(KvatlasError):
        run_sweep(fake_spec(models=dying, problems=8), tmp_path / "other")


def test_a_server_of_another_version_is_refused_until_its_answers_are_asked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_sweep(fake_spec(), folder)
    with Store.create(folder, {}) as store:
        manifest = store.manifest()
        sessions = [{**one, "version": "1.2.2"} for one in manifest.provenance["sessions"]]
        store.put_manifest(manifest.with_cells([], sessions=sessions))
    more = fake_spec(problems=6)
    with pytest.raises(KvatlasError, match="--replace asks all of its answers anew"):
        run_sweep(more, folder)
    run_sweep(more, folder, replace_run=True)
    assert len(stored(folder)) == 24
    with Store.open(folder) as store:
        assert {one["version"] for one in store.manifest().provenance["sessions"]} == {"1.2.3"}


def test_a_setting_that_reads_other_prompts_is_left_out(tmp_path: Path) -> None:
    # Its prompts are longer by one word.
    folder = tmp_path / "run"
    spec = fake_spec(
        settings={"policy": "served", "options": "--kv-cache-dtype {dtype}"}, axes={"dtype": ["a", "longer"]}
    )
    with pytest.raises(KvatlasError, match="other prompts than the reference on 4 problems"):
        run_sweep(spec, folder)
    assert "served(dtype=longer)" not in {setting for setting, *_ in stored(folder)}


def test_the_order_of_a_list_changes_nothing_that_is_said(tmp_path: Path) -> None:
    said = []
    for values in (["fp8", "int8", "bf16"], ["int8", "fp8", "bf16"], ["bf16", "fp8", "int8"]):
        folder = tmp_path / "-".join(values)
        run_sweep(fake_spec(axes={"kv_cache_dtype": values}), folder)
        lines = str(open_run(folder).describe()).splitlines()
        said.append(sorted(line for line in lines if line.startswith("- ")))
    assert len(said[0]) > 1
    assert said[0] == said[1] == said[2]


def test_no_secret_of_a_spec_is_in_a_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvatlas: Call
) -> None:
    """Also where the server repeats it: in its log, its version, its models and its answers' fields."""
    marker = "m4rker-53cret-value"
    monkeypatch.setenv("OTHER_KEY", marker)
    folder = tmp_path / "run"
    model = {
        "name": "fake",
        "serve_cmd": f"{COMMAND} --api-key $OTHER_KEY --say $OTHER_KEY --mode tells-key --pid-file {{folder}}/pid",
        "env": {"HF_TOKEN": "$OTHER_KEY", "B": "x$OTHER_KEY"},
        "stop_cmd": "bash -c 'kill $(cat {folder}/pid) && echo $OTHER_KEY'",
    }
    served = {"policy": "served", "env": {"A_TOKEN": "$OTHER_KEY"}, "answers": 1000}
    living = [served | {"kv_cache_dtype": dtype} for dtype in ("fp8", "bf16")]
    # One setting dies, and its last words are those of its log.
    dying = served | {"kv_cache_dtype": "fp8", "answers": 1}
    reference = {"env": {"A_SECRET": "$OTHER_KEY"}}
    spec = fake_spec(models=[model], settings=[*living, dying], reference=reference, axes={})
    with pytest.raises(KvatlasError) as error:
        run_sweep(spec, folder)
    assert marker not in str(error.value)
    assert "the engine died" in str(error.value)
    run_sweep(spec | {"settings": living}, folder, replace_run=True)
    for words in (("--out", tmp_path / "page.html"), ("--out", tmp_path / "site")):
        kvatlas.succeed("view", folder, *words)
    kvatlas.succeed("export", folder, "--format", "cells", "--out", tmp_path / "cells.csv")
    assert marker not in kvatlas.succeed("describe", folder, "--json")
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    assert marker not in kvatlas.succeed("plan", file) + kvatlas.succeed("plan", file, "--json")
    assert (folder / "servers" / "001-reference" / "server.log").read_text().startswith("$OTHER_KEY")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert marker.encode() not in file.read_bytes(), file


def test_commands_read_such_a_run(tmp_path: Path, kvatlas: Call) -> None:
    folder = tmp_path / "run"
    run_sweep(
        fake_spec(
            axes={"kv_cache_dtype": ["fp8", "bf16"], "seed": [1, 2]},
            settings={"policy": "served", "env": {"S": "{seed}"}},
        ),
        folder,
    )
    kvatlas.succeed("describe", folder)
    kvatlas.succeed("map", folder, "--out", tmp_path / "map.png")
    kvatlas.succeed("export", folder, "--format", "csv", "--out", tmp_path / "map.csv")
    compared = ["served kv_cache_dtype=fp8 seed=1", "served kv_cache_dtype=bf16 seed=1"]
    kvatlas.succeed("compare", folder, *compared, "--out", tmp_path / "p.png")
    code, out, err = kvatlas("gate", f"{folder}@reference", f"{folder}@{compared[0]}")
    assert (code, err) == (3, ""), out + err
    # Categories stay in the order of the spec.
    document = json.loads(kvatlas.succeed("describe", folder, "--json"))
    assert document["maps"][0]["axes"]["kv_cache_dtype"] == ["fp8", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(5))])
def test_a_sweep_that_is_killed_leaves_no_process_and_loses_no_answer(seed: int, tmp_path: Path) -> None:
    """Ten times at random moments, in every second round together with the guard of its server.

    By turns at once, after a server was started, and after an answer was stored.
    """
    folder = tmp_path / "run"
    command = f"{COMMAND} --seconds 0.1 --answer-seconds 0.02 --mode forks"
    # Servers and guards have the folder in their environment.
    model = {"name": "fake", "serve_cmd": command, "env": {"RUN_FOLDER": str(folder)}}
    spec = fake_spec(models=[model], problems=80)
    # Each driver is forked from this process, which has imported all.
    forking = multiprocessing.get_context("fork")
    draw = random.Random(seed)

    def start() -> Any:
        process = forking.Process(target=run_sweep, args=(spec, folder))
        process.start()
        return process

    def is_reached(moment: int, notes: set[Path], answers: int) -> bool:
        if moment == 0:
            return True
        if moment == 1:
            return not set(folder.glob("servers/*/live.json")) <= notes
        return len(stored(folder)) > answers

    before: set[tuple[str, str, int, str]] = set()
    for number in range(10):
        driver = start()
        notes = set(folder.glob("servers/*/live.json"))
        until = time.monotonic() + 20
        while not is_reached(number % 3, notes, len(before)):
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        for process in Path("/proc").glob("[0-9]*") if number % 2 else ():
            if is_guard(process, folder):
                os.kill(int(process.name), signal.SIGKILL)
        driver.kill()
        driver.join()
        assert driver.exitcode == -signal.SIGKILL
        # Before its first server a run may be empty.
        if list(folder.glob("servers/*")):
            now = set(stored(folder))
            assert before <= now
            before = now
    assert len(list(folder.glob("servers/*"))) >= 6
    assert before

    driver = start()
    driver.join()
    assert driver.exitcode == 0
    answers = stored(folder)
    assert before <= set(answers)
    assert len(answers) == len({answer[:3] for answer in answers}) == 80 * 4
    until = time.monotonic() + 10
    while processes_of(folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_of(folder) == []
    assert not list(folder.glob("servers/*/live.json"))


def is_guard(process: Path, folder: Path) -> bool:
    """Return whether a process is the guard of a server of this run."""
    with contextlib.suppress(OSError):
        is_of_run = str(folder).encode() in (process / "environ").read_bytes()
        return is_of_run and b"guard.py" in (process / "cmdline").read_bytes()
    return False


@pytest.fixture
def forked_program(tmp_path: Path) -> Iterator[str]:
    """The beginning of a command of kvatlas whose process is a fork of this one."""
    address = tmp_path / "forks"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        process = multiprocessing.get_context("fork").Process(target=fork_servers, args=(listening,))
        process.start()
        yield f"{sys.executable} -S {forked_server.__file__} {address}"
        process.kill()
        process.join()


def test_texts_of_kvatlas_serve_are_those_of_the_native_sweep(tmp_path: Path, forked_program: str) -> None:
    """Greedy texts are equal up to the tags of thinking and white space; draws at a temperature are not."""
    native = {
        "models": ["embedded:tiny-qwen"],
        "benchmarks": ["LEDGER12"],
        "problems": 4,
        "sampling": {"temperature": 0, "max_new_tokens": 400},
        "settings": [{"policy": "dynts", "kv_budget": 128}],
        # With a window of 8 tokens the texts are no longer those of the full cache.
        "axes": {"local_window": [8], "ratio": [0.3]},
    }
    sweep(native, tmp_path / "native")
    serve = f"{forked_program} serve embedded:tiny-qwen --host {{host}} --port {{port}}"
    served = native | {
        "models": [{"name": "tiny-qwen", "serve_cmd": serve}],
        "settings": {
            "policy": "served",
            "options": "--policy dynts --kv-budget 128 --local-window {local_window} --ratio {ratio}",
        },
    }
    run_sweep(served, tmp_path / "served")

    def written(folder: Path) -> dict[tuple[str, str], str]:
        texts = {}
        for setting, problem, _, text in stored(folder):
            values = re.search(r"local_window=.*?ratio=[\d.]+", setting)
            name = values[0].replace(" ", "") if values else setting.replace("reference", "full")
            texts[name, problem] = "".join(re.sub(r"</?think>", "", text).split())
        return texts

    expected = written(tmp_path / "native")
    found = {place: text for place, text in written(tmp_path / "served").items() if place[0] != "again"}
    assert len(found) == len(expected) == 2 * 4
    assert found == expected
    assert len(set(found.values())) > 4


def test_a_plan_prints_the_commands_and_starts_nothing(tmp_path: Path, kvatlas: Call) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec()))
    said = kvatlas.succeed("plan", file, "--tokens-per-second", "100")
    assert "--kv-cache-dtype fp8" in said
    # The first that it says of the problems: they are too few.
    assert "\nWith 4 problems 3 points cannot be proven: take at least 122. " in said
    document = json.loads(kvatlas.succeed("plan", file, "--json"))
    assert document["questions"] == 4 * 4
    assert [one["setting"] for one in document["settings"]] == [
        "reference",
        "kv_cache_dtype=fp8",
        "kv_cache_dtype=bf16",
        "again",
    ]


def test_a_plan_says_what_this_machine_lacks_and_that_controls_alone_prove_nothing(
    tmp_path: Path, kvatlas: Call
) -> None:
    file = tmp_path / "spec.yaml"
    models = [{"name": "fake", "serve_cmd": "no-such-program --port {port}"}]
    file.write_text(yaml.safe_dump(fake_spec(models=models, settings={"policy": "served", "control": "true"})))
    code, out, err = kvatlas("plan", file)
    assert (code, err) == (
        0,
        "fake reference cannot be started here. serve_cmd: there is no program 'no-such-program' on this machine.\n",
    )
    assert "Warning: All settings are controls: nothing is tested or recommended." in out


def test_the_log_of_a_server_that_fails_a_check_stays(
    tmp_path: Path, kvatlas: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec(models=[{"name": "fake", "serve_cmd": f"{COMMAND} --mode ends-at-once"}])))
    log = re.search(r"Its log '(.*?)'", kvatlas("check", file)[2])
    assert log is not None
    assert Path(log[1]).is_file()


def test_a_check_says_whether_seeds_are_honoured(tmp_path: Path, kvatlas: Call) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec(sampling={"temperature": 0.6, "max_new_tokens": 64})))
    rows = json.loads(kvatlas.succeed("check", file, "--json"))
    assert {row["name"]: row["status"] for row in rows} == {"server": "ok", "seeds": "ok", "sampling": "ok"}


def test_a_file_of_vllms_sweep_names_the_settings(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(json.dumps([{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bf16"}]))
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(fake_spec(axes={}, serve_params="kv.json")))
    plan = make_served_plan(read_spec(file), tmp_path)
    assert [served.label for served in plan.settings] == [
        "reference",
        "kv_cache_dtype=fp8",
        "kv_cache_dtype=bf16",
        "again",
    ]


def test_declared_bytes_are_those_of_the_settings(tmp_path: Path) -> None:
    spec = fake_spec(
        models=[{"name": "fake", "serve_cmd": COMMAND, "kv_bytes": 2048}],
        settings={"policy": "served", "kv_bytes": {"kv_cache_dtype": {"fp8": 512, "bf16": 1024}}},
    )
    plan = make_served_plan(parse_spec(spec), tmp_path)
    assert [served.kv_bytes for served in plan.settings] == [2048, 512, 1024, None]


def test_a_server_that_writes_one_text_for_all_seeds_proves_nothing_on_these_problems(tmp_path: Path) -> None:
    spec = fake_spec(
        models=[{"name": "fake", "serve_cmd": f"{COMMAND} --mode constant"}],
        samples=2,
        sampling={"temperature": 0.6, "max_new_tokens": 64},
    )
    said = run_sweep(spec, tmp_path / "run")
    assert any("one text for all seeds" in sentence for sentence in said)
    assert RunData.open(tmp_path / "run").refused == "the server writes one text for all seeds"


def test_declared_bytes_of_keys_and_values_are_added(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(json.dumps([{"k": "q8", "v": "q8"}, {"k": "q8", "v": "q4"}, {"k": "q4"}]))
    spec = fake_spec(
        settings={"policy": "served", "kv_bytes": {"k": {"q8": 100, "q4": 50}, "v": {"q8": 1000}}},
        axes={},
        serve_params="kv.json",
    )
    plan = make_served_plan(parse_spec(spec), tmp_path)
    # Of one value nothing is declared, and one setting lacks an axis.
    assert [served.kv_bytes for served in plan.settings] == [None, 1100, None, None, None]

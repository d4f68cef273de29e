"""Commands of servers: layers, parameters as flags, names in braces, refusals, identity, secrets."""

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvatlas.core import KvatlasError
from kvatlas.engines.command import Command, check_distinct, flag, read_serve_params

SPECS = Path(__file__).parent / "specs"
SERVE = "vllm serve org/name --port {port}"
NAMES = {"port": "8001", "host": "127.0.0.1", "index": "2", "folder": "/f", "spec_folder": "/s", "name": "kvatlas-001"}


def rendered(values: dict[str, Any], **layer: Any) -> Command:
    return Command.layered({"serve_cmd": SERVE}, layer).render(values)


def commands_of(spec: dict[str, Any]) -> tuple[Command, dict[str, Command]]:
    """Return the rendered reference and settings of a spec."""
    (model,) = spec["models"]
    axes = spec.get("axes", {})
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if "serve_params" in spec:
        points = read_serve_params(SPECS / spec["serve_params"])
    reference = Command.layered(model, spec.get("reference", {})).render({})
    settings = {str(point): Command.layered(model, spec["settings"]).render(point) for point in points}
    return reference, settings


@pytest.mark.parametrize("file", sorted(SPECS.glob("*.yaml")), ids=lambda file: file.stem)
def test_specs_of_five_engines_render(file: Path) -> None:
    """No axis is lost, no name is left in braces, and all settings differ from the reference."""
    reference, settings = commands_of(yaml.safe_load(file.read_text("utf-8")))
    check_distinct(reference, settings)
    for command in (reference, *settings.values()):
        launch = command.launch(NAMES, {"HF_TOKEN": "hf_secret"})
        texts = [*launch.arguments, *launch.stop_arguments, *launch.files.values(), *launch.environment.values()]
        assert "8001" in " ".join(texts)
        assert not any(f"{{{name}}}" in text for text in texts for name in (*NAMES, "options", "budget", "kv_budget"))


def test_what_specs_render_to() -> None:
    def last(name: str) -> Command:
        _, settings = commands_of(yaml.safe_load((SPECS / f"{name}.yaml").read_text("utf-8")))
        return list(settings.values())[-1]

    assert last("r-kv-vllm").env["VLLM_V1_R_KV_BUDGET"] == "256"
    assert last("r-kv-vllm").serve_cmd.endswith("--no-enable-prefix-caching --generation-config vllm")
    assert "budget: 1024, beta: 128" in last("tensorrt-llm").files["engine.yaml"]
    docker = last("docker-ssh").launch(NAMES, {})
    assert docker.arguments[6:10] == ("--gpus", "device=2", "-p", "127.0.0.1:8001:8000")
    assert docker.arguments[-2:] == ("--kv-cache-dtype", "fp8_e4m3")
    assert docker.stop_arguments == ("docker", "stop", "-t", "20", "kvatlas-001")


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("kv_cache_dtype", "fp8", ["--kv-cache-dtype", "fp8"]),
        ("max_num_seqs", 32, ["--max-num-seqs", "32"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("hf_overrides", {"sliding_window": 256}, ["--hf-overrides", '{"sliding_window": 256}']),
        ("compilation_config.use_inductor_graph", True, ["--compilation-config.use_inductor_graph=true"]),
        ("compilation_config.level", 3, ["--compilation-config.level", "3"]),
    ],
)
def test_values_are_flags_as_in_vllms_sweep(name: str, value: Any, arguments: list[str]) -> None:
    assert flag(name, value) == arguments
    assert shlex.split(rendered({name: value}).serve_cmd) == [*shlex.split(SERVE), *arguments]


@pytest.mark.parametrize(
    ("options", "values", "result"),
    [
        ("--kv-cache-dtype auto --seed 1", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 --seed 1"),
        ("--kv_cache_dtype auto --seed 1", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 --seed 1"),
        ("--kv-cache-dtype=auto --seed 1", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 --seed 1"),
        ("--x a --seed 1 --x b", {"x": "c"}, "--x c --seed 1"),
        ("--enforce-eager --seed 1", {"enforce_eager": False}, "--no-enforce-eager --seed 1"),
        ("--no-enforce-eager --seed 1", {"enforce_eager": True}, "--enforce-eager --seed 1"),
        ("--x.y 1 --seed 1", {"x.y": 2}, "--x.y 2 --seed 1"),
    ],
)
def test_an_option_that_the_command_has_is_replaced(options: str, values: dict[str, Any], result: str) -> None:
    """Programs take the last of two: an option that stayed would leave the setting without effect, or hide it."""
    command = Command.layered({"serve_cmd": f"{SERVE} {options}"}).render(values)
    assert command.serve_cmd == f"{SERVE} {result}"


def test_options_are_written_out_and_put_in_their_place() -> None:
    command = Command.layered({"serve_cmd": "llama-server {options} --port {port}"}, {"options": "-ctk {k} -ctv {v}"})
    assert command.render({"k": "q8_0", "v": "q4_0"}).serve_cmd == "llama-server -ctk q8_0 -ctv q4_0 --port {port}"
    script = Command.layered({"serve_cmd": "bash -c 'vllm serve m --port {port} {options} | tee log'"})
    arguments = shlex.split(script.render({"hf_overrides": {"window": 2}}).serve_cmd)
    assert arguments[2] == """vllm serve m --port {port} --hf-overrides '{"window": 2}' | tee log"""


def test_the_nearer_layer_wins_entry_by_entry() -> None:
    model = {"serve_cmd": SERVE, "env": {"A": "1", "B": "1"}, "ready_path": "/health", "name": "ignored"}
    command = Command.layered(model, {"env": {"B": "2"}, "options": "", "serve_cmd": None})
    assert command.env == {"A": "1", "B": "2"}
    assert (command.serve_cmd, command.options, command.ready_path) == (SERVE, "", "/health")


def test_backslashes_at_the_ends_of_lines_join_them() -> None:
    for end in ("\\\n", "\\ \n", "\\ "):
        command = Command.layered({"serve_cmd": f"vllm serve m {end}  --port {{port}} {end} --x 'a\\nb'"}).render({})
        assert shlex.split(command.serve_cmd) == ["vllm", "serve", "m", "--port", "{port}", "--x", "a\\nb"]


def test_other_braces_stay() -> None:
    json_text = """--hf-overrides '{"sliding_window": 256, "a": {"b": [1]}}' --format '{{json}}' --x ${HOME}"""
    command = Command.layered({"serve_cmd": f"{SERVE} {json_text}"}).render({})
    assert shlex.split(command.serve_cmd) == shlex.split(f"{SERVE} {json_text}")
    nested = rendered({"budget": 7}, files={"a.yaml": "x: {algorithm: a, budget: {budget}}"}, options="")
    assert nested.files == {"a.yaml": "x: {algorithm: a, budget: 7}"}


def test_rendering_a_rendered_command_changes_nothing() -> None:
    command = rendered({"hf_overrides": {"a b": "it's"}}, env={"A": "b c"}, stop_cmd="docker stop {name}")
    assert command.render({}) == command


@pytest.mark.parametrize(
    ("layer", "values", "sentence"),
    [
        ({"env": {"A": "{budgt}"}}, {"budget": 1}, r"env A: \{budgt\} has no value here.*Did you mean 'budget'"),
        ({"serve_cmd": f"{SERVE} {{kv}}"}, {}, r"serve_cmd: \{kv\} has no value here"),
        ({"options": ""}, {"budget": 1}, r"changes nothing: write \{budget\} into options, env, files or serve_cmd"),
        ({}, {"port": 1}, "No parameter can be named 'port'"),
        ({}, {"sizes": [1, 2]}, r"sizes: expected a text.*\[1, 2\] was given"),
        ({"options": "--x {budgte}"}, {"budget": 1}, r"options: \{budgte\} has no value here.*Did you mean 'budget'"),
        ({"serve_cmd": "C:\\serve\\run --port {port}"}, {}, "a backslash outside of quotes.*write / in paths"),
        ({"serve_cmd": f"{SERVE} | tee log"}, {}, "needs a shell for '.', and.*bash -c"),
        ({"serve_cmd": f"{SERVE} && true"}, {}, "needs a shell"),
        ({"serve_cmd": f"{SERVE} > log"}, {}, "needs a shell"),
        ({"serve_cmd": f"A=1 {SERVE}"}, {}, "needs a shell.*env"),
        ({"serve_cmd": f"{SERVE} 'open"}, {}, "cannot be split"),
        ({"serve_cmd": f"bash -c '{SERVE}'"}, {"x": 1}, r"write \{options\} where they belong"),
        ({"serve_cmd": "vllm serve m --port 8000"}, {}, r"there is no \{port\} in it"),
        ({"serve_cmd": ""}, {}, "needs serve_cmd, or the endpoint"),
        ({"serve_cmd": "", "endpoint": "http://a:1/v1"}, {"x": 1}, "x would change nothing: .* Give serve_cmd"),
        ({"serve_cmd": ["vllm", "serve"]}, {}, "serve_cmd: expected one text"),
        ({"ready_path": "http://a:1/health"}, {}, "ready_path: expected a path, as /health, 'http://a:1/health' was "),
        ({"endpoint": "http://user:pw@a/v1"}, {}, "expected http://HOST:PORT/v1 without user"),
        ({"env": ["A"]}, {}, "env: expected texts by name"),
        ({}, {"/Kv:Type": "fp8"}, r"write flags of another form out, as options: "),
        ({"files": {"../a": "x"}}, {}, "expected a name inside"),
        ({"env": {"HF_TOKEN": "hf_12345678"}}, {}, r"env HF_TOKEN is a secret in clear; write \$NAME"),
        ({"serve_cmd": f"{SERVE} --api-key abcdefgh"}, {}, "serve_cmd: --api-key is a secret in clear"),
        ({"serve_cmd": f"{SERVE} --api-key=abcdefgh"}, {}, "serve_cmd: --api-key is a secret in clear"),
        ({}, {"api_key": "abcdefgh"}, "serve_cmd: --api-key is a secret in clear"),
        ({}, {"hf_overrides": {"token": "abcdefgh"}}, "serve_cmd: token is a secret in clear"),
        ({"env": {"A_KEY": "{a}"}}, {"a": "abcdefgh"}, "env A_KEY is a secret in clear"),
        ({"endpoint": "gpu7:8000"}, {}, "expected http://HOST:PORT/v1.*'gpu7:8000' was given"),
        ({}, {"--kv-cache-dtype": "fp8"}, "'--kv-cache-dtype': expected kv_cache_dtype"),
        ({}, {"-ctk": "q8_0"}, "'-ctk'; write flags of another form out"),
        (
            {"serve_cmd": "docker run -p {port}:1 i", "env": {"B": "1"}},
            {},
            "env B would reach docker and not the server",
        ),
        ({"stop_cmd": "curl -H 'Authorization: Bearer abcdefgh' x"}, {}, "stop_cmd: Authorization is a secret"),
        ({"files": {"a.yaml": "password: abcdefgh"}}, {}, "files a.yaml: password is a secret in clear"),
    ],
)
def test_faults_are_sentences_before_anything_starts(
    layer: dict[str, Any], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KvatlasError, match=sentence) as error:
        rendered(values, **layer)
    assert "abcdefgh" not in str(error.value)


def test_a_program_and_a_variable_that_are_not_there(tmp_path: Path) -> None:
    for program in ("no-such-engine", "./engine", "{spec_folder}/engine"):
        with pytest.raises(KvatlasError, match=r"there is no program .*engine'"):
            Command.layered({"serve_cmd": f"{program} {{port}}"}).render({}).check(tmp_path, {"PATH": "/bin"})
    (tmp_path / "engine").touch(mode=0o755)
    command = Command.layered({"serve_cmd": "{spec_folder}/engine {port} --api-key $KEY"}).render({})
    with pytest.raises(KvatlasError, match="the variable KEY of the environment is not set"):
        command.check(tmp_path, {"PATH": "/bin"})
    command.check(tmp_path, {"PATH": "/bin", "KEY": "abcdefgh"})


def test_one_command_for_two_settings_is_refused() -> None:
    reference = rendered({"kv_cache_dtype": "auto"})
    with pytest.raises(KvatlasError, match=r"fp8 and the reference are one command.*name reference: \{options"):
        check_distinct(reference, {"fp8": rendered({}, options="--kv-cache-dtype auto")})
    running = Command.layered({"endpoint": "http://gpu7:{server}"})
    with pytest.raises(KvatlasError, match=r"s and the reference are one endpoint.*give the reference another server"):
        check_distinct(running.render({"server": 8001}), {"s": running.render({"server": 8001})})
    with pytest.raises(KvatlasError, match=r"The reference has no values of axes: name reference: \{endpoint"):
        running.render({})
    with pytest.raises(KvatlasError, match="b and a are one command"):
        check_distinct(reference, {"a": rendered({"x": 1}), "b": rendered({"x": "1"})})


def test_the_identity_lacks_what_changes_from_start_to_start() -> None:
    """Another port, host, folder or value of a secret asks nothing again; another variable or file does."""
    command = rendered({"x": 1}, env={"HF_TOKEN": "$HF_TOKEN"}, files={"a": "b"})
    identity = command.identity()
    assert identity["env"] == {"HF_TOKEN": "$HF_TOKEN"}
    for serve in ("vllm serve org/name --port 9 --host h", "vllm serve org/name --host {host} --port {port}"):
        layer = {"serve_cmd": serve, "endpoint": "http://h:9", "stop_cmd": "true", "ready_path": "/a"}
        assert rendered({"x": 1}, **layer, env=command.env, files=command.files).identity() == identity
    assert rendered({"x": 1}, env={**command.env, "A": "1"}, files=command.files).identity() != identity
    assert rendered({"x": 1}, env=command.env, files={"a": "c"}).identity() != identity
    assert json.loads(json.dumps(identity)) == identity


def test_variables_are_filled_at_the_start_alone() -> None:
    command = rendered({}, serve_cmd=f"{SERVE} --api-key $KEY", env={"TOKEN": "${KEY}", "PATH": "/a:$PATH"})
    launch = command.launch(NAMES, {"KEY": "hf_12345678", "PATH": "/bin"})
    assert launch.arguments[-1] == launch.api_key == launch.environment["TOKEN"] == "hf_12345678"
    assert launch.environment["PATH"] == "/a:/bin"
    assert "hf_12345678" not in f"{command} {launch} {command.identity()}"
    assert launch.mask("a hf_12345678 b") == "a $KEY b"


def test_the_shell_of_a_script_fills_its_variables() -> None:
    command = rendered({}, serve_cmd="bash -c 'a --port {port} --api-key $MINE --x $x'")
    launch = command.launch(NAMES, {"MINE": "abcdefgh"})
    assert launch.arguments[2] == "a --port 8001 --api-key $MINE --x $x"
    assert launch.mask("abcdefgh") == "$MINE"


def test_secrets_are_masked_by_their_names_and_nothing_else_is() -> None:
    secrets = {"LONG": "abcdefgh-ij", "A_KEY": "abcd", "MODE": "auto", "SIZE": "4096", "PEM": "line one\nline two"}
    launch = replace(Command().launch({}, {}), secrets=secrets)
    assert launch.mask("auto 4096 abcdefgh-ij abcd\nline two") == "auto 4096 $LONG $A_KEY\n$PEM"
    assert "abcd" not in repr(launch)


def test_the_file_of_vllms_sweep_is_read(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    settings: list[dict[str, Any]] = [{"kv_cache_dtype": "fp8"}, {"enforce_eager": True, "hf_overrides": {"a": 1}}]
    file.write_text(json.dumps([{"_benchmark_name": "a", **settings[0]}, settings[1]]))
    assert read_serve_params(file) == settings
    file.write_text(json.dumps({"a": settings[0], "b": settings[1]}))
    assert read_serve_params(file) == settings
    for text, sentence in (
        ("[", "cannot be read"),
        ("[]", "expected a list of mappings"),
        ("[1]", "expected a list of mappings"),
        ('[{"a": [1]}]', "a: expected a text"),
    ):
        file.write_text(text)
        with pytest.raises(KvatlasError, match=sentence):
            read_serve_params(file)
    with pytest.raises(KvatlasError, match="cannot be read"):
        read_serve_params(tmp_path / "none.json")

"""The command of a server: what a spec says of it, the command of each setting, and what is started.

    model = {"serve_cmd": "vllm serve org/name --port {port}", "env": {"HF_TOKEN": "$HF_TOKEN"}}
    reference = Command.layered(model).render({})
    setting = Command.layered(model, {"options": None}).render({"kv_cache_dtype": "fp8"})
    check_distinct(reference, {"fp8": setting})
    launch = setting.launch({"port": "8000", ...}, os.environ)

Nothing is started here. `{name}` with a bare name is a parameter or one of `START_NAMES`; other braces, as those of
JSON, stay as they are. `$NAME` is a variable of the environment: its value is in nothing that is stored.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path, PurePath
from typing import Any

from kvatlas.core import KvatlasError, canonical, refusal
from kvatlas.core.secrets import is_secret, secret_arguments
from kvatlas.text import did_you_mean

Value = int | float | str | bool | Mapping[str, Any]
#: Names that are filled in at each start.
START_NAMES = ("port", "host", "index", "folder", "spec_folder", "name")
OPTIONS = "{options}"
#: The name of an entry in a file of `vllm bench sweep serve`, which is no parameter.
ENTRY_NAME = "_benchmark_name"
#: `{name}`; neither `{{name}}`, which templates have, nor `${NAME}` of a shell.
_BRACES = re.compile(r"(?<![{$])\{([A-Za-z_]\w*)\}|(?<!\$)\{([A-Za-z_]\w*)\}(?!\})")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_IN_QUOTES = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_QUOTED = re.compile(rf"{_IN_QUOTES}|\\.")
_SHELL_SYNTAX = re.compile(r"[|&;<>`]|\$\(|^\s*\w+=\S*\s")
#: Programs whose environment the server does not get.
ELSEWHERE = ("docker", "podman", "ssh")
_SHELLS = ("bash", "sh", "zsh", "dash")


@dataclass(frozen=True)
class Launch:
    """All that one start needs, with the values of the environment in it: nothing of it is stored.

    `secrets` are values of the environment by their names.
    """

    arguments: tuple[str, ...] = field(repr=False)
    stop_arguments: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    files: Mapping[str, str]
    endpoint: str
    secrets: Mapping[str, str] = field(repr=False)

    @property
    def api_key(self) -> str | None:
        """The key that the server asks for, else the one that kvatlas sends to endpoints."""
        for argument, following in zip_longest(self.arguments, self.arguments[1:]):
            option, equals, value = argument.partition("=")
            if option in ("--api-key", "--api_key"):
                return value if equals else following
        return self.environment.get("VLLM_API_KEY") or self.environment.get("KVATLAS_API_KEY")

    def mask(self, text: str) -> str:
        """Return a text that may be stored and shown, with `$NAME` in place of a secret."""
        names: dict[str, str] = {}
        for name, value in self.secrets.items():
            for line in map(str.strip, value.splitlines()):
                # Numbers and short words stand in any text.
                shortest = 4 if is_secret(name, line) else 8
                if len(line) >= shortest and is_secret("key", line):
                    names.setdefault(line, name)
        for line in sorted(names, key=len, reverse=True):
            text = text.replace(line, f"${names[line]}")
        return text


@dataclass(frozen=True)
class Command:
    """The keys of a spec that make a server. `options` None: parameters become flags by the rules of vLLM's sweep."""

    serve_cmd: str = ""
    options: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stop_cmd: str = ""
    endpoint: str = ""
    ready_path: str = ""

    @classmethod
    def layered(cls, *layers: Mapping[str, Any]) -> Command:
        """Return the command of mappings with keys of a spec, as those of a model and then of a setting.

        The later one wins, in `env` and `files` entry by entry; other keys are ignored. Raises KvatlasError for a value
        that is no text.
        """
        values: dict[str, Any] = {}
        for layer, key in product(layers, [one.name for one in fields(cls)]):
            value = layer.get(key)
            if value is None:
                continue
            if key in ("env", "files"):
                if not isinstance(value, Mapping):
                    raise KvatlasError(f"{key}: expected texts by name, as {{NAME: '1'}}, {value!r} was given.")
                texts = {str(name): _text(f"{key} {name}", text) for name, text in value.items()}
                values[key] = {**values.get(key, {}), **texts}
            elif isinstance(value, list):
                line = shlex.join(map(str, value))
                raise KvatlasError(f"{key}: expected one text; {value} was given: write one line, {key}: {line}.")
            else:
                values[key] = _text(key, value)
        if "://" in values.get("ready_path", ""):
            raise KvatlasError(f"ready_path: expected a path, as /health, {values['ready_path']!r} was given.")
        return cls(**values)

    # -- rendering ----------------------------------------------------------------------------------------------------

    def render(self, values: Mapping[str, Value]) -> Command:
        """Return the command with these values of parameters; only `START_NAMES` are left to fill in.

        Raises KvatlasError for an unused value, an unknown name in braces, a command that needs a shell, a secret in
        clear, and a command without a port.
        """
        for name in values:
            if name in (*START_NAMES, "options"):
                fault = f": {{{name}}} in a command means another thing"
            elif re.fullmatch(r"--\w[\w.-]*", name):
                plain = name.lstrip("-").replace("-", "_")
                fault = f": expected {plain}, a name without dashes before it"
            elif not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
                fault = '; write flags of another form out, as options: "/Kv:Type={kv_type}"'
            else:
                continue
            raise KvatlasError(f"No parameter can be named {name!r}{fault}.")

        texts = {name: _text(name, value) for name, value in values.items()}

        filled = partial(_filled, values=texts, later=START_NAMES)
        used = _names_in(text for _, text in self._texts())
        flags = {name: value for name, value in values.items() if name not in used}
        if flags and (self.options is not None or not self.serve_cmd):
            for place, text in self._texts():
                # A misspelt name is the likely cause.
                filled(text, place)
            if not self.serve_cmd:
                raise KvatlasError(
                    f"{', '.join(flags)} would change nothing: kvatlas sets no options of a server that runs. Give "
                    "serve_cmd; or a server for each setting, as endpoint: http://HOST:{port2}/v1 with an axis port2, "
                    "and reference: {endpoint: ...} beside models; or compare two: `kvatlas gate URL URL BENCHMARK`."
                )
            names = ", ".join(f"{{{name}}}" for name in flags)
            raise KvatlasError(f"A value that changes nothing: write {names} into options, env, files or serve_cmd.")

        arguments = _split(self.serve_cmd, "serve_cmd")
        options = [filled(argument, "options") for argument in _split(self.options or "", "options")]
        for name, value in flags.items():
            new = flag(name, value)
            arguments, is_there = _replaced(arguments, name, new)
            if not is_there:
                options += new
        arguments = _with_options(arguments, options)
        rendered = replace(
            self,
            serve_cmd=_joined(filled(argument, "serve_cmd") for argument in arguments),
            options=None,
            env={name: filled(text, f"env {name}") for name, text in self.env.items()},
            files={name: filled(text, f"files {name}") for name, text in self.files.items()},
            stop_cmd=_joined(filled(argument, "stop_cmd") for argument in _split(self.stop_cmd, "stop_cmd")),
            endpoint=filled(self.endpoint, "endpoint"),
        )
        rendered._check_texts()
        return rendered

    def _texts(self) -> list[tuple[str, str]]:
        """Return all texts with their places."""
        named = {"serve_cmd": self.serve_cmd, "options": self.options or "", "stop_cmd": self.stop_cmd}
        env = {f"env {name}": text for name, text in self.env.items()}
        files = {f"files {name}": text for name, text in self.files.items()}
        return [*named.items(), ("endpoint", self.endpoint), *env.items(), *files.items()]

    def _check_texts(self) -> None:
        """Raise KvatlasError for the faults of a rendered command's texts."""
        for name in self.files:
            path = PurePath(name)
            if path.is_absolute() or ".." in path.parts or not path.name:
                raise KvatlasError(f"files {name!r}: expected a name inside {{folder}}.")

        way_out = "write $NAME, which is taken from the environment and not stored"
        for name, text in self.env.items():
            if is_secret(name, text):
                raise KvatlasError(f"env {name} is a secret in clear; {way_out}.")
        for place, text in self._texts():
            secrets = secret_arguments(text)
            if secrets:
                raise KvatlasError(f"{place}: {secrets[0]} is a secret in clear; {way_out}.")
        if self.endpoint and re.fullmatch(r"https?://[^@\s]+", self.endpoint) is None:
            # A password is not repeated.
            given = "" if "@" in self.endpoint else f", {self.endpoint!r} was given"
            raise KvatlasError(f"endpoint: expected http://HOST:PORT/v1 without user and password{given}.")

        if self.serve_cmd and not self.endpoint and "port" not in _names_in(text for _, text in self._texts()):
            raise KvatlasError(
                "serve_cmd: there is no {port} in it; write --port {port}, or name the endpoint where it answers."
            )
        program = PurePath(next(iter(shlex.split(self.serve_cmd)), "")).name
        missing = [name for name in self.env if program in ELSEWHERE and name not in self.serve_cmd]
        if missing:
            raise KvatlasError(
                f"env {missing[0]} would reach {program} and not the server that it starts; name it in serve_cmd, as "
                f"docker run -e {missing[0]} does."
            )
        if not self.serve_cmd and not self.endpoint:
            raise KvatlasError("A served model needs serve_cmd, or the endpoint of a server that runs.")

    # -- the rendered command -----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The command as `plan` shows it: variables, then arguments."""
        variables = [f"{name}={shlex.quote(text)}" for name, text in self.env.items()]
        return " ".join([*variables, self.serve_cmd or self.endpoint])

    def identity(self) -> dict[str, Any]:
        """Return plain data that tells a rendered command from others: without port, host, folder, index and name."""
        if not self.serve_cmd:
            return {"endpoint": self.endpoint}
        arguments = shlex.split(self.serve_cmd)
        for option in ("port", "host"):
            arguments, _ = _replaced(arguments, option, [])
        return {"arguments": arguments, "env": dict(self.env), "files": dict(self.files)}

    def check(self, spec_folder: Path, environment: Mapping[str, str]) -> None:
        """Raise KvatlasError if a rendered command cannot be started here: no such program, no such variable."""
        names = {**dict.fromkeys(START_NAMES, "0"), "spec_folder": str(spec_folder)}
        launch = self.launch(names, environment)
        for place, arguments in (("serve_cmd", launch.arguments), ("stop_cmd", launch.stop_arguments)):
            if arguments and shutil.which(arguments[0], path=launch.environment.get("PATH")) is None:
                raise KvatlasError(f"{place}: there is no program {arguments[0]!r} on this machine.")

    def launch(self, names: Mapping[str, str], environment: Mapping[str, str]) -> Launch:
        """Return what a start needs; `names` are the values of `START_NAMES`.

        Raises KvatlasError for a variable that is not set.
        """
        referred: dict[str, str] = {}

        def filled(text: str, place: str, is_script: bool = False) -> str:
            def value_of(match: re.Match[str]) -> str:
                name = match[1] or match[2]
                if name in environment:
                    referred[name] = environment[name]
                elif not is_script:
                    raise KvatlasError(f"{place}: the variable {name} of the environment is not set.")
                # The variables of a script are its shell's.
                return match[0] if is_script else environment[name]

            return _VARIABLE.sub(value_of, _filled(text, place, names))

        def arguments_of(command: str, place: str) -> tuple[str, ...]:
            arguments = shlex.split(command)
            return tuple(filled(argument, place, _is_script(arguments)) for argument in arguments)

        env = {name: filled(text, f"env {name}") for name, text in self.env.items()}
        child_environment = {**environment, **env}
        inherited = {name: value for name, value in child_environment.items() if is_secret(name, value)}
        return Launch(
            arguments=arguments_of(self.serve_cmd, "serve_cmd"),
            stop_arguments=arguments_of(self.stop_cmd, "stop_cmd"),
            environment=child_environment,
            files={name: _filled(text, f"files {name}", names) for name, text in self.files.items()},
            endpoint=filled(self.endpoint, "endpoint"),
            secrets={**referred, **inherited},
        )


def check_distinct(reference: Command, settings: Mapping[str, Command]) -> None:
    """Raise KvatlasError if a rendered command is that of the reference, or of another setting; all by their names."""
    seen = {canonical(reference.identity()): "the reference"}
    for name, command in settings.items():
        other = seen.setdefault(canonical(command.identity()), name)
        if other != name:
            kind = "endpoint"
            change = "give the reference another server, as reference: {endpoint: ...}"
            if command.serve_cmd:
                kind = "command"
                change = "take what it sets out of the model's command, or name reference: {options: ...}"
            way_out = f"{change} beside models" if other == "the reference" else "name each once"
            raise KvatlasError(
                f"{name} and {other} are one {kind}, so that nothing would differ ({command}); {way_out}."
            )


def options_of_both(reference: Command, setting: Command) -> dict[str, str]:
    """Return the options that two rendered commands have with other values, by those of the first."""
    texts = _option_texts(setting)
    return {
        option: text for option, text in _option_texts(reference).items() if option in texts and texts[option] != text
    }


def _option_texts(command: Command) -> dict[str, str]:
    """Return the options of a rendered command with their values, by names with dashes; of two the last counts."""
    texts: dict[str, str] = {}
    option = ""
    arguments = shlex.split(command.serve_cmd)
    if _is_script(arguments):
        arguments = " ".join(arguments).split()
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):
            name, equals, value = argument.partition("=")
            option = name.replace("_", "-")
            texts[option] = f"{option} {value}".strip()
            if equals:
                option = ""
        elif option:
            texts[option] = f"{option} {argument}"
            option = ""
    return texts


def read_serve_params(path: Path) -> list[dict[str, Value]]:
    """Return the values of each setting in a file of `vllm bench sweep serve --serve-params`.

    It is a list of mappings, or mappings by name. Raises KvatlasError for anything else.
    """
    with refusal(f"serve_params: {str(path)!r} cannot be read", OSError, ValueError):
        data = json.loads(path.read_text("utf-8"))

    entries: list[dict[str, Value]] = list(data.values()) if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise KvatlasError(f"serve_params: {str(path)!r}: expected a list of mappings, or mappings by name.")
    for values in entries:
        values.pop(ENTRY_NAME, None)
        for name, value in values.items():
            _text(name, value)
    return entries


def flag(name: str, value: Value) -> list[str]:
    """Return a parameter as arguments, by the rules of `vllm bench sweep serve`.

    `kv_cache_dtype: fp8` is `--kv-cache-dtype fp8`, true `--name`, false `--no-name`, a mapping its JSON. After a dot
    names stay as they are, and true is `--outer-name.inner_name=true`.
    """
    outer, dot, inner = name.partition(".")
    option = outer.replace("_", "-") + dot + inner
    if not isinstance(value, bool):
        return [f"--{option}", _text(name, value)]
    if dot:
        return [f"--{option}={_text(name, value)}"]
    return [f"--{option}" if value else f"--no-{option}"]


def _replaced(arguments: list[str], name: str, new: list[str]) -> tuple[list[str], bool]:
    """Return the arguments with new ones in place of an option, and whether the option was there.

    It may be written with `_` and `-`, with `=`, and as its opposite `--no-name`. Of an option that is there twice both
    go, since programs take the last.
    """
    outer, dot, inner = name.partition(".")
    spellings = {outer, outer.replace("_", "-"), outer.replace("-", "_")}
    options = {f"--{spelling}{dot}{inner}" for spelling in spellings}
    opposites = {f"--no-{spelling}" for spelling in spellings}
    is_switch = len(new) == 1
    replaced: list[str] = []
    is_there = False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, _ = argument.partition("=")
        if option not in options | opposites:
            replaced.append(argument)
            continue
        has_value = option in options and not equals and not is_switch
        if has_value and rest and not rest[0].startswith("--"):
            rest.pop(0)
        if not is_there:
            replaced += new
        is_there = True
    return replaced, is_there


def _with_options(arguments: list[str], options: list[str]) -> list[str]:
    """Return the arguments with these at `{options}`, by default at the end."""
    if OPTIONS in arguments:
        place = arguments.index(OPTIONS)
        return [*arguments[:place], *options, *arguments[place + 1 :]]
    if any(OPTIONS in argument for argument in arguments):
        # Inside the script of a shell.
        return [argument.replace(OPTIONS, _joined(options)) for argument in arguments]
    if options and _is_script(arguments):
        raise KvatlasError("serve_cmd: a script takes no options at its end; write {options} where they belong.")
    return [*arguments, *options]


def _is_script(arguments: list[str]) -> bool:
    return bool(arguments) and PurePath(arguments[0]).name in _SHELLS


def _split(command: str, place: str) -> list[str]:
    """Return the arguments of a command. Raises KvatlasError if it needs a shell, or if its quotes are not closed."""
    syntax = _SHELL_SYNTAX.search(_QUOTED.sub("", command))
    if syntax:
        raise KvatlasError(
            f"{place} needs a shell for {syntax[0].strip()!r}, and is started without one: write bash -c "
            "'...' around it; variables belong into env."
        )
    if re.search(r"\\\w", re.sub(_IN_QUOTES, "", command)):
        raise KvatlasError(
            f"{place} has a backslash outside of quotes, which would vanish: write / in paths, or quotes around it."
        )
    with refusal(f"{place} cannot be split into arguments", ValueError):
        # Those at the ends of lines join the lines, as in a shell.
        return shlex.split(re.sub(r"\\\s+", " ", command))


def _joined(arguments: Iterable[str]) -> str:
    """Return a command that `shlex.split` splits into these arguments, with quotes only where they are needed."""
    return " ".join(
        argument if re.fullmatch(r"[\w@%+=:,./{}$-]+", argument) else shlex.quote(argument) for argument in arguments
    )


def _text(name: str, value: object) -> str:
    """Return a value as commands have it. Raises KvatlasError for a list, and for nothing."""
    if isinstance(value, bool | Mapping):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise KvatlasError(f"{name}: expected a text, a number, true, false or a mapping, {value!r} was given.")
    return str(value)


def _names_in(texts: Iterable[str]) -> set[str]:
    names = set()
    for text in texts:
        names |= {match[1] or match[2] for match in _BRACES.finditer(text)}
    return names


def _filled(text: str, place: str, values: Mapping[str, str], later: Iterable[str] = ()) -> str:
    """Return the text with values in place of `{name}`; names of `later` stay. Raises KvatlasError for another name."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in later:
            return match[0]
        if name not in values:
            names = [*later, *values]
            guess = did_you_mean(name, names)
            if not guess and not values and place == "endpoint":
                guess = " The reference has no values of axes: name reference: {endpoint: ...} beside models."
            raise KvatlasError(
                f"{place}: {{{name}}} has no value here; expected one of {', '.join(names)}.{guess} An axis, or a "
                "value beside policy: served, adds a name."
            )
        return values[name]

    return _BRACES.sub(value_of, text)

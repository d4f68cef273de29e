"""Sweeps over servers: a setting is a command (docs/engines.md).

`make_served_plan` renders the command of each setting and starts nothing. `sweep_servers` starts one server after
another: first the reference, then the settings in the order of the spec, at last the reference again. Each answer is
stored when it arrives, so that a second start asks only what is missing.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvatlas import __version__, benchmarks, models
from kvatlas.core import AGAIN, KvatlasError, Setting, digest
from kvatlas.engines.asking import (
    AskedCell,
    ask_missing,
    differing_prompts,
    finish_faults,
    other_models,
    probe_seeds,
    questions_of,
    stored_answers,
)
from kvatlas.engines.client import Endpoint
from kvatlas.engines.command import Command, check_distinct, options_of_both, read_serve_params
from kvatlas.engines.server import READY_SECONDS, Server, ServerError, end_orphans
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.regrade import start_measuring
from kvatlas.stats.orders import TestedSetting
from kvatlas.sweeps.planned_problems import PlannedProblems, other_run, with_limit
from kvatlas.sweeps.spec import SERVED, SERVED_SETTING_KEYS, SettingSpec, Spec, Value
from kvatlas.text import counted, number

#: The setting that all others are compared with.
REFERENCE = Setting.from_parameters("reference")
#: The folder of the servers' logs within a run.
SERVERS = "servers"
#: How often a server that ends while it answers is started.
STARTS = 3
#: Part of every run key of an answer; rises with every change of its meaning.
KEY_VERSION = 1
#: What two starts of one setting must share.
_SAME = ("version", "model", "max_model_len")
#: Values of options that leave a KV cache as it is.
_FULL_CACHE = ("auto", "bfloat16", "float16", "bf16", "fp16", "f16")
#: What is said of servers that do not draw by the seed of a request.
SEEDS = {
    "ignored": (
        "The server ignores seeds: settings draw different random numbers, and about three times as many problems are "
        "needed (SGLang: --enable-deterministic-inference)."
    ),
    "constant": "The server writes one text for all seeds, so that samples are copies of each other.",
}
#: The endpoint of answers that are only read.
NOWHERE = Endpoint("http://127.0.0.1:1")
#: An absolute path within a text, but for its last part.
_FOLDER = re.compile(r"(?<![\w:/.}])/(?:[^\s/'\",=]+/)+")


@dataclass(frozen=True)
class ServedSetting:
    """One setting of a model: its rendered command, and what the spec says of it."""

    model: str
    setting: Setting
    command: Command
    samples: int
    control: bool = False
    kv_bytes: int | None = None

    @property
    def label(self) -> str:
        """The setting in the words of a command line: its values, or `reference`, or `again`."""
        values = [f"{name}={value}" for name, value in self.setting.values.items()]
        return " ".join(values) or self.setting.policy

    @property
    def kv_byte_pair(self) -> tuple[int, int] | None:
        """The bytes of a token and those of a sequence, None if they are unknown."""
        return None if self.kv_bytes is None else (self.kv_bytes, 0)

    @property
    def title(self) -> str:
        """The setting with its model, in words."""
        return f"{self.model} {self.label}"


@dataclass(frozen=True, kw_only=True)
class ServedPlan(PlannedProblems):
    """A checked spec of served models. `settings` are those of all models, each model's reference first, again last."""

    settings: tuple[ServedSetting, ...]
    axes: Mapping[str, Sequence[Value]]
    weights: Mapping[str, str]
    ready_seconds: Mapping[str, float]
    spec_folder: Path

    @property
    def questions(self) -> int:
        """The number of questions of the sweep."""
        return sum(self.problem_counts) * sum(served.samples for served in self.settings)

    @property
    def warnings(self) -> list[str]:
        """Sentences on settings that are all controls, and on options of a reference that settings change."""
        sentences = []
        if all(one.control for one in self.settings if one.setting.policy == SERVED):
            sentences.append("All settings are controls: nothing is tested or recommended.")
        if self.spec.reference.keys() & {"serve_cmd", "options"}:
            return sentences
        references = {one.model: one.command for one in self.settings if one.setting == REFERENCE}
        for served in self.settings:
            for option, text in options_of_both(references[served.model], served.command).items():
                if text.rpartition(" ")[2] not in _FULL_CACHE:
                    sentences.append(
                        f"The reference of {served.model} has {text} of its own, and all settings are compared with "
                        f"it; if the full cache is meant, take {option} out of serve_cmd, or name reference: "
                        f"{{options: ...}} beside models."
                    )
        return list(dict.fromkeys(sentences))

    def tested_settings(self) -> tuple[list[TestedSetting], list[str]]:
        first = self.settings[0].model
        claimed = [one for one in self.settings if one.setting.policy == SERVED and not one.control]
        tested = [TestedSetting(one.setting, one.kv_byte_pair) for one in claimed if one.model == first]
        return tested, [name for name, values in self.axes.items() if len(values) > 1]

    def key(self, served: ServedSetting, benchmark: benchmarks.Benchmark, attempt: int = 0) -> str:
        """Return the hash of all that can change an answer, besides problem and sample."""
        return digest(
            {
                "served": KEY_VERSION,
                "command": served.command.identity(),
                "setting": served.setting.id if served.setting == AGAIN else "",
                "model": served.model,
                "weights": self.weights.get(served.model, ""),
                "benchmark": benchmarks.identity(benchmark),
                "sampling": self.spec.sampling.model_dump(),
                "seed": self.spec.seed,
                "attempt": attempt,
            }
        )[:32]

    def expected(self, served: ServedSetting, attempt: int = 0) -> Iterator[Expected]:
        """Yield the cells of a setting, one for each benchmark; an `attempt` asks all anew."""
        for benchmark in self.benchmarks:
            yield Expected(
                model=served.model,
                benchmark=benchmark.name,
                setting=served.setting,
                run_key=self.key(served, benchmark, attempt),
                problems=tuple(problem.id for problem in self.problems[benchmark.name]),
                samples=served.samples,
                baseline=served.setting in (REFERENCE, AGAIN),
                kv_bytes=served.kv_byte_pair,
                control=served.control,
            )

    def manifest(self, attempts: Mapping[str, int]) -> Manifest:
        """Return the manifest of a run with this plan alone; paths of this machine are not in it."""
        expected: list[Expected] = []
        for served in self.settings:
            expected += self.expected(served, attempts.get(_name(served), 0))
        commands = {_name(served): _without_folders(str(served.command)) for served in self.settings}
        provenance = {"kvatlas": __version__, "commands": commands, "attempts": dict(attempts)}
        manifest = self.promise(expected, self.axes, provenance)
        return replace(manifest, spec=_without_folders(manifest.spec))


def make_served_plan(spec: Spec, spec_folder: Path, source: str = "spec") -> ServedPlan:
    """Return the plan of a spec of served models; `spec_folder` holds the files that it names.

    Nothing is started. Raises KvatlasError for the first fault; `source` names the spec there.
    """
    found_benchmarks = tuple(entry.find() for entry in spec.benchmarks)
    if not spec.sampling.max_new_tokens:
        if not all(entry.model for entry in spec.models):
            raise KvatlasError(
                f"The key 'sampling.max_new_tokens' is missing in {source}: name the most tokens of an answer, as "
                "sampling: {max_new_tokens: 16384}; a served model does not say its positions."
            )
        spec = with_limit(spec, [models.find(entry.model).positions for entry in spec.models])

    # Each layer of the commands by itself, so that its place is named.
    layers: dict[str, Mapping[str, Any]] = {"reference": spec.reference}
    layers |= {f"models.{index}": entry.model_extra or {} for index, entry in enumerate(spec.models)}
    layers |= {f"settings.{index}": entry.fixed_values for index, entry in enumerate(spec.settings)}
    for place, layer in layers.items():
        with _at(place, source):
            Command.layered(layer)
            _flag("control", layer.get("control", False))
            if not isinstance(layer.get("kv_bytes"), Mapping):
                _positive("kv_bytes", layer.get("kv_bytes"))

    settings: list[ServedSetting] = []
    weights: dict[str, str] = {}
    ready_seconds: dict[str, float] = {}
    axes: dict[str, list[Value]] = {}
    for index, entry in enumerate(spec.models):
        with _at(f"models.{index}", source):
            name = entry.name or Path(entry.model).name
            if not name:
                raise KvatlasError("A served model needs a name, as name: Qwen3-8B.")
            if name in ready_seconds:
                raise KvatlasError(f"Two entries of the spec are the model {name!r}; name it once.")
            extra = entry.model_extra or {}
            seconds = _positive("server_ready_timeout", extra.get("server_ready_timeout"), "seconds")
            ready_seconds[name] = seconds or READY_SECONDS
            # Weights of another machine, or of no name, are not known.
            is_here = bool(entry.model) and Path(entry.model).expanduser().is_dir()
            weights[name] = models.find(entry.model).weights_digest if is_here else ""
        # Their parts come from the model, the reference, settings and axes.
        with _at(f"commands of {name}", source):
            settings += _settings_of_model(spec, name, extra, spec_folder, axes)
    return ServedPlan(
        spec=spec,
        benchmarks=found_benchmarks,
        problems={benchmark.name: benchmarks.problems_of(benchmark, spec.problems) for benchmark in found_benchmarks},
        settings=tuple(settings),
        axes=axes,
        weights=weights,
        ready_seconds=ready_seconds,
        spec_folder=spec_folder,
    )


@contextmanager
def _at(place: str, source: str) -> Iterator[None]:
    """Put a place within a spec before the errors of its values."""
    try:
        yield
    except KvatlasError as error:
        raise KvatlasError(f"Wrong value in {source}, {place}: {error}") from error


def _settings_of_model(
    spec: Spec, name: str, model: Mapping[str, Any], spec_folder: Path, axes: dict[str, list[Value]]
) -> list[ServedSetting]:
    """Return the settings of a model, the reference first and last; add the values of their parameters to `axes`."""
    # Options of a model name the values of settings, which the reference lacks.
    of_model = {key: value for key, value in model.items() if key != "options"}
    reference = Command.layered(of_model, spec.reference).render({})
    bytes_of_reference = spec.reference.get("kv_bytes", model.get("kv_bytes"))
    samples = spec.full_samples or spec.samples
    first = ServedSetting(name, REFERENCE, reference, samples, kv_bytes=_positive("kv_bytes", bytes_of_reference))

    settings: dict[str, ServedSetting] = {}
    for entry in spec.settings or [SettingSpec(policy=SERVED)]:
        layer = {key: value for key, value in entry.fixed_values.items() if key in SERVED_SETTING_KEYS}
        fixed = {key: value for key, value in entry.fixed_values.items() if key not in SERVED_SETTING_KEYS}
        points: list[dict[str, Value]] = []
        for point in read_serve_params(spec_folder / spec.serve_params) if spec.serve_params else spec.points(entry):
            # A mapping is its JSON in a setting.
            plain = {key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in point.items()}
            points.append({**plain, **fixed})
        _check_bytes(layer.get("kv_bytes"), points)
        for values in points:
            if not values:
                raise KvatlasError("A setting has no value: name axes, serve_params, or values beside policy: served.")
            for axis, value in values.items():
                of_axis = axes.setdefault(axis, list(spec.axes.get(axis, ())))
                if value not in of_axis:
                    of_axis.append(value)
            served = ServedSetting(
                model=name,
                setting=Setting.from_parameters(SERVED, **values),
                command=Command.layered(model, layer).render(values),
                samples=spec.samples,
                control=_flag("control", layer.get("control", False)),
                kv_bytes=_bytes_of_setting(layer.get("kv_bytes"), values),
            )
            if served.label in settings:
                raise KvatlasError(f"Two settings have the same values, {served.label}; name each once.")
            settings[served.label] = served
    check_distinct(reference, {label: served.command for label, served in settings.items()})
    return [first, *settings.values(), ServedSetting(name, AGAIN, reference, 1)]


def _check_bytes(declared: Any, points: Sequence[Mapping[str, Value]]) -> None:
    """Raise KvatlasError if declared KV bytes name an axis or a value that none of these settings has."""
    for axis, by_value in declared.items() if isinstance(declared, Mapping) else ():
        axis_values = {str(values[axis]).lower() for values in points if axis in values}
        if not axis_values or not isinstance(by_value, Mapping):
            names = sorted(set().union(*points))
            raise KvatlasError(
                f"kv_bytes: expected a number, or bytes by the values of an axis, as {{AXIS: {{VALUE: 65536}}}}; "
                f"{axis!r} is no axis of {', '.join(names)}."
            )
        unknown = [value for value in by_value if str(value).lower() not in axis_values]
        if unknown:
            raise KvatlasError(
                f"kv_bytes: {axis} has no value {unknown[0]!r}; expected {', '.join(sorted(axis_values))}."
            )


def _bytes_of_setting(declared: Any, values: Mapping[str, Value]) -> int | None:
    """Return the declared KV bytes of a token: a number, or by the values of axes (`{axis: {value: bytes}}`).

    Of several axes, as of keys and of values, it is the sum; None if the bytes of one are not declared.
    """
    if not isinstance(declared, Mapping):
        return _positive("kv_bytes", declared)
    total = 0
    for axis, by_value in declared.items():
        found = {str(value).lower(): of_value for value, of_value in by_value.items()}
        of_axis = _positive("kv_bytes", found.get(str(values.get(axis)).lower()))
        if of_axis is None:
            return None
        total += of_axis
    return total or None


def _flag(key: str, given: Any) -> bool:
    """Return a spec's true or false."""
    if str(given).lower() not in ("true", "false"):
        raise KvatlasError(f"{key}: expected true or false, {given!r} was given.")
    return str(given).lower() == "true"


def _positive(key: str, given: Any, unit: str = "bytes") -> int | None:
    """Return a whole number above 0 of a spec, None for one that is not named."""
    value = number(given) if isinstance(given, str) else given
    if value is not None and (type(value) is not int or value < 1):
        raise KvatlasError(f"{key}: expected a whole number of {unit} above 0, {given!r} was given.")
    return value


def _without_folders(value: Any) -> Any:
    """Return plain data with `.../` in place of the folders of this machine, at every depth."""
    if isinstance(value, Mapping):
        return {key: _without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(entry) for entry in value]
    return _FOLDER.sub(".../", value) if isinstance(value, str) else value


def _name(served: ServedSetting) -> str:
    """Return the name of a setting of a model in the provenance of a run."""
    return f"{served.model} {served.setting.id}"


def _of_another_reference(now: Manifest, earlier: Manifest) -> str:
    """Return as a clause that settings of an earlier sweep were compared with another reference than now, or ""."""
    others = now.others(earlier)
    run_keys = {cell.name: cell.run_key for cell in now.expected if cell.setting == REFERENCE}
    if not others or all(run_keys.get(cell.name, cell.run_key) == cell.run_key for cell in earlier.expected):
        return ""
    return f"another command of the reference, beside settings that this spec lacks ({others[0].setting})"


# -- the sweep --------------------------------------------------------------------------------------------------------


def sweep_servers(
    plan: ServedPlan,
    folder: Path,
    *,
    replace_run: bool = False,
    on_trace: Callable[[int, int], None] = lambda done, total: None,
    on_message: Callable[[str], None] = lambda _: None,
    on_start: Callable[[str], None] = lambda _: None,
) -> None:
    """Ask the missing questions of a plan, and store the answers in the run in `folder`.

    A setting whose server fails leaves the others alone. With `replace_run` the manifest has this plan alone, and a
    setting whose server has another version is asked anew. Raises KvatlasError before anything is started for a
    command that cannot be, for a run of other models, benchmarks or sampling, and at the end if a setting failed.
    """
    for served in plan.settings:
        served.command.check(plan.spec_folder, os.environ)
    with Store.create(folder, {"kvatlas": __version__}) as store:
        for sentence in plan.warnings:
            on_message(f"Warning: {sentence}")
        driver = _Driver(plan, store, folder / SERVERS, replace_run, on_trace, on_message, on_start)
        for sentence in end_orphans(folder / SERVERS):
            on_message(sentence)
        driver.run()


def server_of(plan: ServedPlan, served: ServedSetting, folder: Path) -> Server:
    """Return the server of a setting, which `with` starts."""
    seconds = plan.ready_seconds[served.model]
    return Server(served.command, folder, served.label, plan.spec_folder, served.model, seconds)


def probe(server: Server, sampling: Mapping[str, Any]) -> dict[str, str]:
    """Return the sampling fields that a server refuses, as `left_out`, and what it makes of `seeds`, where it draws.

    Raises ServerError if it does not answer.
    """
    endpoint = server.endpoint
    facts = {}
    try:
        endpoint.ask("Say a word.", {**sampling, "max_new_tokens": 1}, 0, server.ended)
        if sampling["temperature"]:
            shorter = {**sampling, "max_new_tokens": min(50, sampling["max_new_tokens"])}
            facts["seeds"] = probe_seeds(endpoint, "Name ten things that people forget.", shorter, server.ended)
    except KvatlasError as error:
        raise ServerError(f"The server of {server.name} is ready and does not answer: {error}") from error
    return {**facts, "left_out": ", ".join(endpoint.refused_fields) or "none"}


@dataclass
class _Driver:
    """One start of a sweep over servers. `failures` are sentences on settings that are not whole, by their names."""

    plan: ServedPlan
    store: Store
    folder: Path
    replace_run: bool
    on_trace: Callable[[int, int], None]
    on_message: Callable[[str], None]
    on_start: Callable[[str], None]
    manifest: Manifest = field(init=False)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        earlier = self.store.manifest(empty=self.plan.manifest({}))
        attempts = earlier.provenance.get("attempts", {})
        now = self.plan.manifest(attempts)
        if not self.replace_run:
            changed = [earlier.changed_problems(name, problems) for name, problems in self.plan.problems.items()]
            unlike = now.unlike(earlier) or ", ".join(filter(None, changed)) or _of_another_reference(now, earlier)
            if unlike:
                raise other_run(self.folder.parent, unlike)
            now = now.merge_with(earlier)
        # Starts of settings that --replace drops tell nothing of this run.
        promised = {(cell.model, cell.setting.id) for cell in now.expected}
        sessions = earlier.provenance.get("sessions", ())
        kept = [one for one in sessions if (one["served"], one["setting"]) in promised]
        earlier_commands = earlier.provenance.get("commands", {})
        commands = {**earlier_commands, **now.provenance["commands"]}
        changed_count = sum(commands[name] != command for name, command in earlier_commands.items())
        if changed_count:
            self.on_message(
                f"The commands of {counted(changed_count, 'setting')} are others than before, so these are asked anew. "
                "Their earlier answers stay in the folder and count again when the spec is put back."
            )
        for sentence in self.plan.kept_beside(now):
            self.on_message(sentence)
        self.manifest = now
        start_measuring(self.store, now, self.plan.measures)
        self._promise(sessions=kept, commands=commands, left_out={})

    def _promise(self, cells: Sequence[Expected] = (), **provenance: Any) -> None:
        """Store the manifest with these cells in place of those of the same names, and with further provenance."""
        self.manifest = self.manifest.with_cells(cells, **provenance)
        self.store.put_manifest(self.manifest)

    def run(self) -> None:
        """Ask each setting what it lacks. Raises KvatlasError at the end for those that are not whole."""
        without_reference: set[str] = set()
        for served in self.plan.settings:
            if served.model in without_reference:
                continue
            try:
                self._ask(served)
            except ServerError as error:
                if served.setting == REFERENCE:
                    without_reference.add(served.model)
                elif served.setting != AGAIN and not self._has_answers(served):
                    # Of a setting that cannot be served the maps of the others say nothing.
                    # The log stays on this machine: the first line alone goes into the run.
                    self._leave_out(served, str(error).partition("\n")[0])
                self._fail(served, str(error))

        if self.failures:
            listed = "\n".join(f"{name}: {sentence}" for name, sentence in self.failures.items())
            if without_reference:
                listed += f"\nWithout its reference nothing else is asked of {', '.join(without_reference)}."
            raise KvatlasError(
                f"{len(self.failures)} of {len(self.plan.settings)} failed (counted are settings, and the reference "
                "twice); the answers of the others are kept, and the same command asks what is missing.\n"
                f"{listed}"
            )

    def _fail(self, served: ServedSetting, sentence: str) -> None:
        self.failures[served.title] = sentence
        # The end of the log stands in the error at the end.
        self.on_message(sentence.partition("\n")[0])

    def _cells(self, served: ServedSetting, endpoint: Endpoint = NOWHERE) -> list[AskedCell]:
        """Return what is asked of a setting, one cell for each benchmark; none of a setting that is left out."""
        plan = self.plan
        sampling = plan.spec.sampling.model_dump()
        of_plan = {one.name: one for one in plan.benchmarks}
        return [
            AskedCell(endpoint, cell, of_plan[cell.benchmark], plan.problems[cell.benchmark], sampling, plan.spec.seed)
            for cell in self.manifest.expected
            if (cell.model, cell.setting) == (served.model, served.setting) and cell.benchmark in of_plan
        ]

    def _lacks_answers(self, served: ServedSetting) -> bool:
        stored = self.store.keys()
        return any(question.key not in stored for question in questions_of(self._cells(served)))

    def _has_answers(self, served: ServedSetting) -> bool:
        return any(True for _ in stored_answers(self.store, self._cells(served)))

    def _ask(self, served: ServedSetting) -> None:
        """Ask what a setting lacks; its server is started again if it ends meanwhile. Raises ServerError."""
        failure: KvatlasError | None = None
        ended: ServerError | None = None
        for start in range(1, STARTS + 1):
            if not self._lacks_answers(served):
                break
            doing = "Asking" if served.command.endpoint else "Starting"
            count = f"{self.plan.settings.index(served) + 1} of {len(self.plan.settings)}"
            if stored := sum(1 for _ in stored_answers(self.store, self._cells(served))):
                count += f", {stored:,} of its answers are there"
            self.on_start(f"{doing} the server of {served.title} ({count}): {_without_folders(str(served.command))}")
            with server_of(self.plan, served, self.folder) as server:
                failure = self._ask_server(served, server)
                ended = server.failure()
            if ended is None:
                break
            if start < STARTS:
                self.on_message(f"{ended}\nIt is started again.")

        error = ended or failure
        if error is not None and self._lacks_answers(served):
            if ended or not self._has_answers(served):
                raise ServerError(str(error))
            self._fail(served, str(error))
        self._check_answers(served)

    def _ask_server(self, served: ServedSetting, server: Server) -> KvatlasError | None:
        """Ask a server that is ready what its setting lacks; return a failure."""
        concurrency = self.plan.spec.concurrency
        names = {"setting": served.setting.id, "served": served.model}
        session = {**names, **server.session, "concurrency": concurrency}
        self._check_session(served, session)
        try:
            session |= probe(server, self.plan.spec.sampling.model_dump())
        except ServerError as error:
            return error

        if session.get("seeds") in SEEDS:
            self.on_message(f"{served.title}: {SEEDS[session['seeds']]}")
        if session["left_out"] != "none":
            self.on_message(f"{served.title}: the server refuses {session['left_out']}, so it is not sent.")
        self._promise(sessions=[*self.manifest.provenance["sessions"], session])
        again = next(one for one in self.plan.settings if one.model == served.model and one.setting == AGAIN)
        if served.setting != AGAIN and self._has_answers(again):
            # It is asked last, so that it sees what changed until then.
            self._ask_anew(again)
        cells = self._cells(served, server.endpoint)
        answers = ask_missing(self.store, cells, concurrency=concurrency, on_trace=self.on_trace, stopped=server.ended)
        if answers.failures:
            return KvatlasError(f"{counted(len(answers.failures), 'question')} failed: {answers.failures[0]}")
        return None

    def _check_session(self, served: ServedSetting, session: Mapping[str, Any]) -> None:
        """Check that a server is that of its setting. Raises ServerError for another model, or another version.

        With `replace_run` a setting whose server has another version is asked anew.
        """
        sessions = self.manifest.provenance["sessions"]
        for earlier in sessions:
            same_setting = (earlier["served"], earlier["setting"]) == (served.model, served.setting.id)
            names = _SAME if same_setting else ("model",)
            unlike = [name for name in names if earlier.get(name) != session.get(name)]
            if earlier["served"] != served.model or not unlike:
                continue
            clause = ", ".join(f"{one} {session.get(one)!r} in place of {earlier.get(one)!r}" for one in unlike)
            if not same_setting:
                raise ServerError(
                    f"The server of {served.label} has {clause}: it is another model than the others', unless "
                    "serve_cmd gives both one name."
                )
            if not self.replace_run:
                raise ServerError(f"The server of {served.label} has {clause}; --replace asks all of its answers anew.")
            name = (served.model, served.setting.id)
            self._promise(sessions=[one for one in sessions if (one["served"], one["setting"]) != name])
            self._ask_anew(served)
            return

    def _ask_anew(self, served: ServedSetting) -> None:
        """Give the cells of a setting keys of another attempt, under which nothing is stored."""
        attempts = {**self.manifest.provenance.get("attempts", {})}
        attempts[_name(served)] = attempts.get(_name(served), 0) + 1
        cells = []
        for cell in self._cells(served):
            run_key = self.plan.key(served, cell.benchmark, attempts[_name(served)])
            cells.append(replace(cell.expected, run_key=run_key))
        self._promise(cells, attempts=attempts)

    def _check_answers(self, served: ServedSetting) -> None:
        """Say what is odd in the answers of a setting. Raises ServerError for those that cannot be compared.

        These are answers of another model, and to other prompts than the reference's, as with another chat template.
        """
        answers = list(stored_answers(self.store, self._cells(served)))
        odd = finish_faults(answers, self.plan.spec.sampling.max_new_tokens)
        if odd:
            self.on_message(f"{served.title}: {odd}")
        asked = [one["model"] for one in self.manifest.provenance["sessions"] if one["served"] == served.model]
        fault = other_models(answers, asked[-1] if asked else "")

        reference = next(one for one in self.plan.settings if one.model == served.model)
        differing = differing_prompts([*stored_answers(self.store, self._cells(reference)), *answers])
        if differing:
            benchmark, problem = differing[0]
            fault = (
                f"It read other prompts than the reference on {len(differing):,} problems (first {problem} of "
                f"{benchmark}), as with another chat template."
            )
        if fault:
            self._leave_out(served, fault)
            raise ServerError(f"{fault} It is left out.")

    def _leave_out(self, served: ServedSetting, fault: str) -> None:
        """Take a setting out of what the run promises, and note why; a later start promises it again."""
        name = (served.model, served.setting)
        kept = tuple(cell for cell in self.manifest.expected if (cell.model, cell.setting) != name)
        reasons = {**self.manifest.provenance["left_out"], served.title: fault.rstrip(".")}
        self.manifest = replace(self.manifest, expected=kept)
        self._promise(left_out=reasons)

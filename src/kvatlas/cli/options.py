"""Options that several commands share, and the reading of NAME=VALUE."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException

from kvatlas.cli.output import note
from kvatlas.core import Claim, KvatlasError, Setting
from kvatlas.figures.style import FigureOptions
from kvatlas.text import did_you_mean, margin_question, number, parse_yaml, scalar

F = TypeVar("F", bound=Callable[..., Any])


class CommandOnce(TyperCommand):
    """A command whose refusals have a way out.

    It refuses an option that is given twice, of which the last one would count in silence, and empty paths.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            parsed, _, given = self.make_parser(ctx).parse_args(args=list(args))
        except TyperException as error:
            name = vars(error).get("option_name", "")
            if error.message.startswith("No such option"):
                self._refuse_option(ctx, name)
            if error.message.endswith("requires an argument."):
                param = next(param for param in self.get_params(ctx) if name in param.opts)
                error.message = f"{name} needs a value: {_usage([param])}."
            raise
        for option, count in Counter(given).items():
            if count > 1 and isinstance(option, TyperOption) and not (option.multiple or option.is_flag):
                ctx.fail(f"{option.opts[0]} is given {count} times; give it once.")
        # Python takes an empty path for the current folder, whose name is a dot.
        has_empty = "" in args and "." not in args
        try:
            left = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None:
                error.message = _with_way_out(error.message, error.param, parsed.get(error.param.name))
            raise
        except TyperException as error:
            if error.message.startswith("Got unexpected extra"):
                usage = _usage([param for param in self.get_params(ctx) if isinstance(param, TyperArgument)])
                error.message += f"; expected {usage or 'options alone'}, and a text with spaces in quotes."
                word = error.message.partition("(s) (")[2].partition(")")[0]
                near = get_close_matches(f"--{word}", self._long_options(ctx), n=1, cutoff=0.8)
                error.message += f" Did you mean {near[0]}?" if near else ""
            raise
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            paths = value if isinstance(value, list | tuple) else [value]
            is_empty_name = isinstance(param, TyperArgument) and "" in paths
            if is_empty_name or (has_empty and Path() in paths):
                ctx.fail(f"{param.opts[0]} is empty; expected a name or a path.")
        return left

    def _long_options(self, ctx: Any) -> list[str]:
        names = chain.from_iterable(param.opts for param in self.get_params(ctx))
        return [name for name in names if name.startswith("--")]

    def _refuse_option(self, ctx: Any, name: str) -> None:
        """Refuse an option that the command does not have, with what it has in its place."""
        options = self._long_options(ctx)
        arguments = [param for param in self.get_params(ctx) if isinstance(param, TyperArgument)]
        # The first that the command has: an argument of this name, a known way, or an option of a like name.
        instead = []
        if any(name.strip("-") in (param.name, param.name.removesuffix("s")) for param in arguments):
            instead.append(f"{ctx.command_path} {_usage(arguments)}, without {name}")
        instead += [
            text for text in _ways_out("instead").get(name, ()) if text.split()[0] in (*options, ctx.command.name)
        ]
        instead += [option for option in options if option.startswith(name)] or get_close_matches(name, options, n=1)
        # The options that a beginning fits are alike.
        instead = instead if instead and instead[0].startswith(name) else instead[:1]
        way_out = f"Did you mean {' or '.join(instead)}?" if instead else f"Expected one of {', '.join(options)}."
        ctx.fail(f"No such option: {name}. {way_out}")


def _usage(arguments: Sequence[Any]) -> str:
    """Return arguments as the help writes them."""
    return " ".join(param.metavar or param.name.upper() for param in arguments)


class CommandGroup(TyperGroup):
    """A group of commands that names them where one is not there."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            names = self.list_commands(ctx)
            instead = [*_ways_out("instead").get(name, ()), *get_close_matches(name, names, n=1)]
            way_out = f"Did you mean {ctx.command_path} {instead[0]}?" if instead else f"Expected {', '.join(names)}."
            ctx.fail(f"No such command: {name}. {way_out}")
        return super().resolve_command(ctx, args)


#: The most characters of a value that an error sentence repeats.
LONGEST_VALUE = 60


@cache
def _ways_out(kind: str) -> Mapping[str, Any]:
    """Return units, examples, or what stands instead of a name, of `ways_out.yaml`."""
    text = resources.files("kvatlas.cli").joinpath("ways_out.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = parse_yaml(text)
    return found[kind]


def _with_way_out(message: str, param: Any, value: Any) -> str:
    """Return the message on an option or argument with its unit and value, or with an example where it is missing."""
    if value is None:
        example = _ways_out("examples").get(param.metavar or param.name)
        option = f"{param.opts[0]} " if isinstance(param, TyperOption) else ""
        return f"Give it, as {option}{example}." if example else message
    text = str(value)
    given = repr(text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ...")
    expected = _ways_out("units").get(param.name)
    if expected and isinstance(number(text), str):
        return f"expected {expected}, got {given}."
    message = message.removeprefix("Value error, ")
    if param.name == "claim":
        return f"{message}{did_you_mean(text, [claim.value for claim in Claim])}"
    # Our own checks say whole sentences, with the value.
    return message if message.endswith(".") else f"{message}, got {given}."


def margin(points: float | None) -> float | None:
    """Return a margin in points; a share, which somebody took for points, is asked about."""
    if question := margin_question(points):
        note(question.replace("lose_at_most", "--lose-at-most"))
    return points


class Commands(typer.Typer):
    """A group of commands of the class `CommandOnce`."""

    def __init__(self, **named: Any) -> None:
        super().__init__(cls=CommandGroup, **named)

    def command(self, name: str | None = None, **named: Any) -> Callable[[F], F]:
        return super().command(name, cls=CommandOnce, **named)


def finite_option(value: float | None) -> float | None:
    """Return the value of an option; BadParameter if it is infinite or not a number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def positive(value: float | None) -> float | None:
    """Return the value of an option; BadParameter if it is infinite, not a number, 0 or negative."""
    if finite_option(value) is not None and value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say each trace.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress, warnings alone.")]

# A model and its problems.
Model = Annotated[str, typer.Argument(help="embedded:NAME, a folder, FILE.gguf or hf:OWNER/NAME.")]
ModelOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="dtype, device, revision, think_close, ...")
]
TemplateValues = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Variable of the chat template, as enable_thinking=true. Repeat it."),
]
Template = Annotated[str, typer.Option(metavar="FILE", help="Jinja chat template, for a base model.")]
System = Annotated[str, typer.Option(metavar="TEXT", help="System message of every prompt.")]
Benchmarks = Annotated[
    list[str],
    typer.Argument(metavar="BENCHMARK|FILE...", help="Names, FILE.py:CLASS, or files: JSON lines, JSON, CSV, Parquet."),
]
Column = Annotated[
    list[str] | None, typer.Option(metavar="question|answer=NAME", help="Column of a problem file with other names.")
]
FirstProblems = Annotated[int | None, typer.Option(min=1, help="Only the first problems of each benchmark.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value for a key of the spec, as axes.ratio=[0.3,0.5]."),
]
SpecSamples = Annotated[int | None, typer.Option("--samples", min=1, help="Generations for each problem.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed gives other traces.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Share of the likelihood that tokens are drawn from; default 0.95.")]
TopK = Annotated[int | None, typer.Option(help="Likeliest tokens to draw from; 0: all; default 20.")]
Prompt = Annotated[
    str, typer.Option(metavar="NAME|TEXT", help="r1, plain, dynts, line, or a text with {question}; default: r1.")
]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Default: what fits the model, at most 16384.")]

# A cell: one setting of a policy.
Policy = Annotated[str, typer.Option(help="A policy, FILE.py or FILE.py:CLASS, or a cell as 'dynts ratio=0.3'.")]
KvBudget = Annotated[
    str | None, typer.Option(metavar="N", help="Cache length at which a compression fires: tokens, or bytes as 12MiB.")
]
LocalWindow = Annotated[
    str | None,
    typer.Option(metavar="N", help="Newest tokens that a compression always keeps, or a share of the budget as 25%."),
]
Ratio = Annotated[float | None, typer.Option(help="Share of the older thinking tokens that a compression keeps.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the policy.")]
Cell = Annotated[str, typer.Option("--policy", help="The cell, as 'dynts ratio=0.3'; default: the recommended one.")]

# Decoding.
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes; default: what pays, one for each GPU.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences in a batch; default: what fits, 64 on CPUs.")]
Replace = Annotated[bool, typer.Option("--replace", help="Show only this in the run; other traces stay stored.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run code of files that only the run names.")]

# Runs and maps.
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")]
Inputs = Annotated[list[str], typer.Argument(metavar="RUN|CSV...", help="Runs, CSV maps, or published:NAME.")]
Metric = Annotated[str, typer.Option(help="pass@1, progress, pass@K, maj@K, or one of the benchmark itself.")]
Partial = Annotated[bool, typer.Option("--partial", help="Accept missing traces; maps and figures say so.")]
Fix = Annotated[list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Hold an axis to one value.")]
OnlyPolicy = Annotated[str | None, typer.Option("--policy", help="Only this policy's maps.")]
RunsAndSystems = Annotated[
    list[str],
    typer.Argument(metavar="RUN... [SYSTEM...]", help="Runs, then systems, as 'R1-Qwen full' or 'dynts ratio=0.3'."),
]
LoseAtMost = Annotated[
    float | None, typer.Option(callback=margin, metavar="POINTS", help="Margin; default: the sweep's own, 3.")
]
ClaimOption = Annotated[
    Claim | None, typer.Option("--claim", help="What the numbers speak of; default: as the spec decided.")
]
FigureFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="PNG, SVG or PDF by its suffix.")]
LookOption = Annotated[
    list[str] | None,
    typer.Option(
        "--look",
        metavar="NAME=VALUE",
        help="columns=1|2, width=INCHES, font=NAME, title=TEXT, dark=true, intervals=true|false, "
        "plain=true, or NAME=TEXT to rename what a figure shows. Repeat it.",
    ),
]


#: The options of a figure's look: their types, and the values to expect.
_LOOK: Mapping[str, tuple[tuple[type, ...], str]] = {
    "columns": ((int,), "1 or 2"),
    "width": ((int, float), "a number of inches"),
    **dict.fromkeys(("dark", "intervals", "plain"), ((bool,), "true or false")),
}
#: Those that are texts.
_LOOK_TEXTS = ("title", "font")


def figure_options(texts: Sequence[str] | None) -> FigureOptions:
    """Return the options of a figure; names that are not options are labels."""
    labels = assignments("--look", texts)
    values: dict[str, Any] = {name: labels.pop(name) for name in _LOOK_TEXTS if name in labels}
    for name, (kinds, expected) in _LOOK.items():
        if name not in labels:
            continue
        value = parse_yaml(labels.pop(name))
        # True is an int, and no number of columns.
        if type(value) not in kinds:
            raise KvatlasError(f"--look {name}: expected {expected}, got {str(value)!r}.")
        values[name] = value
    return FigureOptions(**values, labels=labels)


def assignments(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the names and values of an option that is given as NAME=VALUE."""
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise KvatlasError(f"{option}: expected NAME=VALUE, got {text!r}.")
        if name.strip() in pairs:
            raise KvatlasError(f"{option}: {name.strip()!r} is given twice; give it once.")
        pairs[name.strip()] = value
    return pairs


def joined_values(*options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of several options by name; KvatlasError for a name that two of them give."""
    values: dict[str, Any] = {}
    for option_values in options:
        twice = next((name for name in option_values if name in values), None)
        if twice is not None:
            raise KvatlasError(
                f"{twice} is given twice ({values[twice]!r} and {option_values[twice]!r}); give it once."
            )
        values |= option_values
    return values


def cell(
    policy: str,
    kv_budget: str | None,
    local_window: str | None,
    ratio: float | None,
    texts: Sequence[str] | None,
) -> Setting:
    """Return the setting that `--policy` and its parameters name, each value read by its declared type."""
    from kvatlas.policies import permit, policies, read_parameter, with_class

    name, *words = policy.split() or [""]
    permit(name)
    name = with_class(name)
    options = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    given = {key: str(value) for key, value in options.items() if value is not None}
    pairs = (assignments("--policy", words), assignments("--set", texts), given)
    named = joined_values({"policy": name}, *pairs)
    owner = policies.get(named.pop("policy"))
    return Setting.from_parameters(name, **{key: read_parameter(owner, key, text) for key, text in named.items()})


def model_options(
    texts: Sequence[str] | None, values: Sequence[str] | None = None, template: str = "", system: str = ""
) -> dict[str, Any]:
    """Return the options of a model from `--model-option`, `--template-values`, `--template` and `--system`."""
    template_values = {name: scalar(value) for name, value in assignments("--template-values", values).items()}
    given = {"template": template, "system": system, "template_values": template_values}
    named = {name: value for name, value in given.items() if value}
    return joined_values(assignments("--model-option", texts), named)


def spec_changes(texts: Sequence[str] | None, problems: int | None, samples: int | None) -> dict[str, str]:
    """Return the values for keys of a spec that `--problems`, `--samples` and `--set` give, as texts in YAML."""
    numbers = {"problems": problems, "samples": samples}
    given = {name: str(value) for name, value in numbers.items() if value is not None}
    return joined_values(assignments("--set", texts), given)


def file_columns(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the column names of a problem file as an option of its benchmark."""
    names = assignments("--column", texts)
    contents = ("context", "question", "answer")
    for name, column in names.items():
        if name not in contents or any(f",{content}=" in column for content in contents):
            guess = f"Did you mean {column}={name}?" if column in contents else "Repeat --column for each."
            expected = "expected context=NAME, question=NAME or answer=NAME"
            raise KvatlasError(f"--column: {expected}, got '{name}={column}'. {guess}")
    return {"columns": names} if names else {}

"""Policies of others: their errors, and their calls of sys.exit, become sentences wherever a policy is used."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvatlas as package
from kvatlas import policies
from kvatlas.columns import CELL_COLUMNS
from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import ModelHandle
from kvatlas.serve.service import ClosedError, GenerationRequest, Service, find_policy
from tests.command_line import Call
from tests.stored import traces_of

#: Statements of a plug-in, with the exception that the sentence names.
FAULTS = {
    "sys.exit(0)": "SystemExit: it called sys.exit(0)",
    "sys.exit(3)": "SystemExit: it called sys.exit(3)",
    "raise SystemExit": "SystemExit: it called sys.exit(None)",
    "raise ValueError('boom \\x1b[31m')": "ValueError: boom",
    "raise KeyError('words')": "KeyError: 'words'",
}
#: The methods of a policy that its author may write.
METHODS = {
    "score": "cached",
    "observe": "step",
    "slots_used": "cached, protected, quota",
    "check": "model",
    "bind": "model",
    "identity": "model",
    "check_prompt": "prompt_length, where",
}
CELL = ("--kv-budget", 96, "--local-window", 8, "--ratio", 0.5)
SETTING: dict[str, Any] = {"kv_budget": 96, "local_window": 8, "ratio": 0.5, "workers": 1}


#: A policy with a method and its statement to be filled in.
PLUGIN = """
import sys
from dataclasses import dataclass

from kvatlas.policies import CompressingPolicy, Signal


@dataclass(frozen=True)
class Faulty(CompressingPolicy):
    name = "faulty"
    summary = "keeps the newest tokens"
    observes = frozenset({{Signal.HIDDEN}})

    def score(self, cached):
        return cached.positions

    def {method}(self, {arguments}):
        {statement}
        {otherwise}
"""


def write_plugin(folder: Path, method: str, statement: str, otherwise: str = "return None") -> str:
    """Write a policy whose method has this statement, and return its name."""
    file = folder / "faulty.py"
    words = {"method": method, "arguments": METHODS[method], "statement": statement, "otherwise": otherwise}
    file.write_text(PLUGIN.format(**words))
    return f"{file}:Faulty"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise ValueError('boom \\x1b[31m')"])
def test_an_error_in_a_method_is_one_sentence_that_names_policy_method_and_exception(
    tmp_path: Path, kvatlas: Call, method: str, statement: str
) -> None:
    policy = write_plugin(tmp_path, method, statement)
    code, out, err = kvatlas(
        "run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--workers", 1, "--quiet"
    )
    assert (code, out) == (2, "")
    (sentence,) = err.splitlines()
    assert f"The policy '{policy}' failed in {method} ({FAULTS[statement]}" in sentence
    assert "\x1b" not in sentence


@pytest.mark.parametrize(
    ("statement", "way_out"),
    [
        ("return self.ratio", "; expected self.budget.ratio."),
        ("return self.kv_bits", "; expected self.precision.kv_bits."),
        ("return cached.key(9)", "; layers are 0 to 3 (cached.each_layer goes over all), cached tokens 0 to 95."),
    ],
)
def test_an_error_in_a_score_has_a_way_out(tmp_path: Path, kvatlas: Call, statement: str, way_out: str) -> None:
    policy = write_plugin(tmp_path, "score", statement)
    code, _, err = kvatlas(
        "run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--workers", 1, "--quiet"
    )
    assert code == 2
    assert way_out in err


def test_a_note_of_another_shape_is_refused(tmp_path: Path, kvatlas: Call) -> None:
    policy = write_plugin(tmp_path, "observe", "step.enter('seen', step.hidden.norm())")
    file = tmp_path / "faulty.py"
    file.write_text(file.read_text().replace("summary =", "columns = ('seen',)\n    summary ="))
    sentence = kvatlas.refuse(
        "run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--workers", 1, "--quiet"
    )
    assert "step.enter('seen', ...): expected values [rows, entered], [1, " in sentence
    assert "[] was given" in sentence


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("statement", "workers"),
    [
        ("sys.exit(0)", 2),
        *(
            pytest.param(statement, 1, marks=[] if statement.startswith(("raise S", "raise V")) else pytest.mark.deep)
            for statement in FAULTS
        ),
    ],
)
def test_the_traces_that_were_finished_are_kept(
    tmp_path: Path, kvatlas: Call, write_spec: Any, statement: str, workers: int
) -> None:
    policy = write_plugin(tmp_path, "score", f"if cached.prompt_length > 60: {statement}", "return cached.positions")
    spec = write_spec(
        models=["embedded:tiny-llama"],
        benchmarks=["CHAIN3", "CHAIN9"],
        settings=[{"policy": policy, "kv_budget": 96, "ratio_over": "thinking"}],
        samples=1,
        sampling={"temperature": 0, "max_new_tokens": 200},
        axes={"local_window": [4], "ratio": [0.2]},
    )
    words = "sweep", spec, "--out", tmp_path / "run", "--workers", workers, "--batch-size", 1, "--quiet"
    code, out, err = kvatlas(*words)
    assert (code, out) == (2, ""), err
    # After a warning that little is compressed, which --quiet leaves.
    sentence = err.splitlines()[-1]
    assert f"The policy '{policy}' failed in score ({FAULTS[statement]}" in sentence
    assert traces_of(tmp_path / "run")


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise ValueError('boom')"])
def test_a_file_that_ends_the_process_when_it_is_loaded_is_refused(
    tmp_path: Path, kvatlas: Call, statement: str
) -> None:
    policy = write_plugin(tmp_path, "score", "return cached.positions")
    file = tmp_path / "faulty.py"
    file.write_text(f"import sys\n{statement}\n{file.read_text()}")
    sentence = kvatlas.refuse("run", "embedded:tiny-llama", "CHAIN8", "--policy", policy, *CELL)
    reason = FAULTS.get(statement, "boom, line 2 of faulty.py").removeprefix("SystemExit: ")
    assert f"The policy {policy} cannot be loaded ({reason})." in sentence


def test_a_policy_that_cannot_be_made_is_refused(tmp_path: Path, kvatlas: Call) -> None:
    policy = write_plugin(tmp_path, "score", "return cached.positions")
    file = tmp_path / "faulty.py"
    code = file.read_text()
    file.write_text(code + "\n    def __new__(cls, **values):\n        sys.exit(0)\n")
    sentence = kvatlas.refuse("run", "embedded:tiny-llama", "CHAIN8", "--policy", policy, *CELL)
    assert f"The policy '{policy}' cannot be made (it called sys.exit(0))." in sentence
    other = tmp_path / "other.py"
    other.write_text(code + "\n    def __post_init__(self):\n        sys.exit(0)\n")
    sentence = kvatlas.refuse("run", "embedded:tiny-llama", "CHAIN8", "--policy", f"{other}:Faulty", *CELL)
    assert "failed in __post_init__ (SystemExit: it called sys.exit(0))." in sentence


def test_the_values_of_a_policy_with_a_beginning_of_its_own_are_checked(tmp_path: Path, kvatlas: Call) -> None:
    policy = write_plugin(tmp_path, "score", "return cached.positions")
    file = tmp_path / "faulty.py"
    file.write_text(file.read_text() + "\n    def __post_init__(self):\n        pass\n")
    few_bits = ("--set", "kv_bits=4", "--set", "residual=64")
    sentence = kvatlas.refuse("run", "embedded:tiny-llama", "CHAIN8", "--policy", policy, *CELL, *few_bits)
    assert "residual is 64, more than the local_window 8" in sentence


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise ValueError('boom')"])
def test_generate_raises_the_sentence(tmp_path: Path, tiny_llama: ModelHandle, statement: str) -> None:
    policy = write_plugin(tmp_path, "score", statement)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama.folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama.folder)
    inputs = tokenizer("a = 1 . " * 5, return_tensors="pt")
    setting = {"kv_budget": 64, "local_window": 8, "ratio": 0.5, "policy": policy, "think_close": "</think>"}
    with pytest.raises(KvatlasError, match=re.escape(f"'{policy}' failed in score (")):
        model.generate(**inputs, do_sample=False, max_new_tokens=60, custom_generate=package.generate, **setting)


def service(model: ModelHandle, policy: str) -> Service:
    policies.permit(policy)
    values = {"kv_budget": 64, "local_window": 8, "ratio": 0.5}
    return Service(model, find_policy(model, policy, values), Sampling(), batch_size=2)


@pytest.mark.parametrize("statement", ["sys.exit(0)", "raise ValueError('boom')"])
def test_a_service_ends_its_requests_with_the_sentence(tmp_path: Path, tiny_llama: ModelHandle, statement: str) -> None:
    policy = write_plugin(tmp_path, "score", statement)
    own = service(tiny_llama, policy).start()
    prompt = tiny_llama.tokens("a = 1 . " * 5)
    (handle,) = own.ask([GenerationRequest(prompt, Sampling(max_new_tokens=60), stream=1)])
    with pytest.raises(ClosedError, match=re.escape(f"'{policy}' failed in score (")):
        handle.generation.result(60)
    own.close()


def test_out_of_memory_in_a_score_halves_the_batch(tmp_path: Path, tiny_llama: ModelHandle) -> None:
    full = 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'
    memory = f"if not hasattr(sys, 'was_full'): sys.was_full = True; raise {full}"
    policy = write_plugin(tmp_path, "score", memory, "return cached.positions")
    own = service(tiny_llama, policy).start()
    prompt = tiny_llama.tokens("a = 1 . " * 5)
    (handle,) = own.ask([GenerationRequest(prompt, Sampling(max_new_tokens=60), stream=1)])
    assert handle.generation.result(60).tokens
    assert own.rows == 1
    own.close()


def test_an_interrupt_in_a_finalizer_ends_the_command(tmp_path: Path, kvatlas: Call, write_spec: Any) -> None:
    body = "type('Ends', (), {'__del__': lambda _: __import__('signal').raise_signal(2)})(); "
    policy = write_plugin(tmp_path, "score", f"{body}__import__('time').sleep(0.2)", "return cached.positions")
    out = tmp_path / "run"
    words = ("run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--out", out)
    code, _, err = kvatlas(*words, "--workers", 1, "--quiet")
    assert code == 130
    assert err == f"Stopped. Finished traces, if there are any, are in {out}; the same command goes on from there.\n"


#: Members of a class that is no policy, with a part of the sentence.
MEMBERS = {
    "queries = -1": "its queries is -1; expected an integer >= 0",
    "queries = None": "its queries is None; expected an integer >= 0",
    "version = object()": "its version is <object object",
    "columns = 3": "its columns is 3; expected a tuple of different texts",
    "columns = ('norm')": "its columns is 'norm'; expected a tuple of different texts; write columns = ('norm',)",
    "def score(self, cached): import torch; torch.load('w.pt')": "No such file or directory: 'w.pt', line 7 of odd.py",
    "def score(self, cached): import kvatlas; raise kvatlas.KvatlasError": "failed in score (KvatlasError, line 7 of",
    "columns = ('a', 'a')": "its columns is ('a', 'a'); expected a tuple of different texts",
    "random = 'maybe'": "its random is 'maybe'; expected true or false",
    "budget = None": "its budget is a part of every policy; expected another name",
    "keep_prompt: bool = False": "its keep_prompt is a part of every policy; expected another name, or a default in",
    "setting = 3": "its setting is 3; expected a method or a property",
    "def observe(self, step): pass": "it has observe, and observes no signal; expected those that it reads: ",
    "score = None": "its score is None; expected a method or a property",
    "def bind(self, model): return None": "returned None from bind; expected an object of Odd",
    "def identity(self, model): return {'x': object()}": "from identity; expected a dictionary of numbers and texts",
    "def identity(self, model): return None": "returned None from identity; expected a dictionary",
    "def slots_used(self, *_): return -5": "uses -5 slots; expected an integer from 0 to ",
    "def slots_used(self, *_): return 2.5": "uses 2.5 slots; expected an integer from 0 to ",
    "def score(self, cached): import torch; return torch.rand(cached.positions.shape)": "draw random numbers with ",
    "def score(self, cached): return cached.attention": "has no 'attention'; it has columns, each_layer, ",
    "def score(self, cached): return cached.columns['x']": "the column 'x' is not declared; the policy has",
    "def score(self, cached): return cached.query(0)": "with observes = {Signal.QUERIES}",
    "observes = {'attention'}": "its observes is {'attention'}; expected a set of kvatlas.policies.Signal: HIDDEN, ",
    "observes = ['hidden', 'attn']": "; write frozenset({Signal.ATTENTION, Signal.HIDDEN})",
    "observes = Signal.QUERIES": "; write frozenset({Signal.QUERIES})",
    "observes = {'entropy'}": "Signal: HIDDEN, ATTENTION, QUERIES).",
    "observes = None": "its observes is None; expected a set of",
    "observes = property(lambda self: {Signal.HIDDEN})": "its observes is <property ",
    "scope = 'head'": "its scope is 'head'; expected a kvatlas.policies.Scope: GLOBAL, LAYER, HEAD, ",
    "scope = 'Head'": "KV_HEAD, UNION; write Scope.HEAD).",
    "scope = 'kv-head'": "; write Scope.KV_HEAD).",
    "scope = 'per_head'": "; write Scope.HEAD).",
    "scope = 3": "LAYER, HEAD, KV_HEAD, UNION).",
    "observes = frozenset({Signal.HIDDEN})\n    def observe(self, step): step.attention.sum()": "without Signal.A",
    "def score(self, cached): self.preset = 1": "'preset', line 7 of odd.py); a policy keeps no state of its own",
    "def __post_init__(self): self.budget = 1": "failed in __post_init__ (FrozenInstanceError: cannot assign to ",
    "def score(self, cached): return -cached.key(0).norm(dim=-1)": "since its scope is global: return cached.",
    "scope = Scope.HEAD; score = lambda self, cached: cached.key(0)[..., 0]": ", which scores every layer.",
    "def score(self, cached): raise GeneratorExit": "failed in score (GeneratorExit, line 7 of odd.py).",
    "def score(self, cached): raise type('E', (Exception,), {'__str__': lambda _: 1 / 0})": "failed in score (E,",
    "def score(self, cached): return cached.positions.float().to_sparse()": "with the layout torch.sparse_coo",
    "def score(self, cached): return cached.positions > 3": "with a tensor of torch.bool",
    "def score(self, cached): self.last = 1": "'last', line 7 of odd.py); a policy keeps no state of its own",
    "def score(self, cached): cached.key(0).sum().backward()": "within torch.enable_grad() alone",
    "def score(cached): pass": "its score: too many positional arguments; expected def score(self, cached)",
    "score = property(lambda self: 3)": "its score: a property; expected def score(self, cached)",
    "def keep_scored(self, cached): pass": "it has no score; expected def score(self, cached)",
    "def Score(self, cached): pass": "it has Score, and no score, which was perhaps meant",
    "observes = {Signal.HIDDEN}\n    def observ(self, step): pass": "it has observ, and no observe, which was perhaps",
    "observes = {Signal.HIDDEN}; columns = ('a',)": "has the columns ('a',), and no observe; expected def observe",
    "observes = {Signal.QUERIES}": "its queries is 0, and it observes ['queries']; expected both, as in",
    "queries = 8": "its queries is 8, and it observes []; expected both, as in",
    "def check(self, model): return False": "returned False from check; expected nothing: notes go in columns",
    "def identity(self, model): return {}": "returned {} from identity; expected a dictionary of numbers and texts",
    "def __init__(self): pass": "it has an __init__ of its own; expected none",
    "rule_defaults = {'window': 3}": "its rule_defaults is {'window': 3}; expected values by names of kv_budget, ",
    "unnamed = ['sinks']": "its unnamed is ['sinks']; expected values by names of parameters",
}


#: Fields of a dataclass that is no policy.
FIELDS = {
    "paper: str = 'arXiv'": "its paper has a type, and would be a parameter; expected paper = ..., without a type",
    "policy: str = 'a'": "its policy is a part of every policy; expected another name",
    "sinks: int = int_param(4, least=8)": "the default of its sinks is 4; expected an integer >= 8",
    "words: list = field(default_factory=list)": "the default of its words is []; expected a number, a text, true or f",
    "value: int = 3": "its value is a column of tables; expected another name",
    "mean_kv_tokens: int = 3": "its mean_kv_tokens is a column of tables; expected another name",
    "seed: int = 3": "its seed is an argument of kvatlas.run; expected another name",
    "weight: float": "needs a value for weight, as weight=VALUE.",
}


def write_class(folder: Path, member: str) -> str:
    """Write a policy with this member and return its name."""
    head = "from kvatlas.policies import CompressingPolicy, Scope, Signal, int_param\n"
    head += "from dataclasses import dataclass, field\n" if member in FIELDS else ""
    head += f"\n{'@dataclass(frozen=True)' if member in FIELDS else ''}\nclass Odd(CompressingPolicy):\n"
    lines = ["name = 'odd'", "summary = 'keeps the newest tokens'", member]
    if "score" not in member.lower():
        lines.insert(2, "def score(self, cached): return cached.positions")
    (folder / "odd.py").write_text(head + "".join(f"    {line}\n" for line in lines))
    return f"{folder / 'odd.py'}:Odd"


def test_no_parameter_has_the_name_of_an_argument_of_run() -> None:
    columns = {name for column in CELL_COLUMNS for name in (column.name, column.key)}
    others = {"model", "benchmark", "policy", "parameters", *columns}
    assert {*inspect.signature(package.run).parameters} - others == policies._OF_RUN


def test_a_column_that_is_not_declared_is_named_where_it_is_written(tmp_path: Path, kvatlas: Call) -> None:
    policy = write_plugin(tmp_path, "observe", "step.enter('norm', step.hidden.norm(dim=-1))")
    words = ("run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--workers", 1)
    assert "the column 'norm' is not declared; the policy has columns = ()" in kvatlas.refuse(*words, "--quiet")


@pytest.mark.parametrize("member", [*MEMBERS, *FIELDS])
def test_a_class_that_is_no_policy_is_refused(tmp_path: Path, kvatlas: Call, member: str) -> None:
    policy = write_class(tmp_path, member)
    words = ("run", "embedded:tiny-llama", "CHAIN8", "--problems", 1, "--policy", policy, *CELL, "--workers", 1)
    sentence = kvatlas.refuse(*words, "--quiet")
    assert {**MEMBERS, **FIELDS}[member] in sentence
    assert policy in sentence


def test_a_score_that_works_in_place_changes_nothing_of_the_cache(tmp_path: Path) -> None:
    def decoded(member: str, out: str) -> list[Any]:
        folder = tmp_path / out
        folder.mkdir()
        policy = write_class(folder, member)
        run = package.run("embedded:tiny-llama", "CHAIN8", problems=1, policy=policy, out=folder / "run", **SETTING)
        return [(trace.tokens, trace.eviction_trace) for trace in run.traces()]

    plain = decoded("def score(self, cached): return cached.positions.float()", "plain")
    in_place = "def score(self, cached): score = cached.positions.float(); cached.positions.zero_(); return score"
    assert decoded(in_place, "in place") == plain

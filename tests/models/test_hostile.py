"""Models whose files are damaged or mean harm: each is refused in a sentence that names what is wrong."""

import contextlib
import gc
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Sampling, Setting, reason
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle, chat
from kvatlas.models.checks import Claims
from tests.command_line import Call
from tests.r1 import FIRST_TEMPLATE, TEMPLATE, copied, edit, save_model

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(random_models: dict[str, ModelHandle], tmp_path: Path) -> ModelHandle:
    """A copy of a model, to be damaged."""
    return copied(random_models["llama"], tmp_path / "model")


def damage(model: ModelHandle, value: float | None) -> None:
    """Write one value of a tensor, or leave the tensor out."""
    from safetensors.torch import load_file, save_file

    file = model.folder / "model.safetensors"
    weights = load_file(file)
    if value is None:
        del weights[TENSOR]
    else:
        weights[TENSOR][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})


def test_a_value_beyond_the_type_in_which_the_model_runs_is_named(model: ModelHandle) -> None:
    damage(model, 1e30)
    assert model.load() is not None
    with pytest.raises(KvatlasError, match=f"'{TENSOR}' .* no finite numbers in float16"):
        models.find(model.name, dtype="float16").load()


def reconfigure(model: ModelHandle, **changes: object) -> ModelHandle:
    edit(model.folder, "config.json", **changes)
    return models.find(model.name)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda model: damage(model, None), f"lack the tensor {TENSOR!r}"),
        (lambda model: reconfigure(model, intermediate_size=48), "mlp.down_proj.weight' with the sizes ("),
        (lambda model: damage(model, math.nan), f"{TENSOR!r} that are no finite numbers"),
        (lambda model: damage(model, -math.inf), "no finite numbers"),
        (lambda model: reconfigure(model, hidden_act="nonsense"), "cannot be loaded ("),
        (lambda model: (model.folder / "model.safetensors").write_bytes(b"no tensors"), "is no safetensors file ("),
        (lambda model: reconfigure(model, quantization_config={"quant_method": "gptq", "bits": 4}), "cannot be loaded"),
    ],
)
def test_a_run_of_weights_that_cannot_be_loaded_ends_in_one_sentence(
    model: ModelHandle, harm: Callable[[ModelHandle], object], sentence: str, kvatlas: Call
) -> None:
    harm(model)
    words = ("run", model.name, "CHAIN4", "--problems", 1, "--samples", 1, "--max-new-tokens", 4)
    code, _, said = kvatlas(*words)
    assert code == 2
    assert sentence in said
    assert "newly initialized" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("file", "changes"),
    [("tokenizer_config.json", {"tokenizer_class": "Evil"}), ("config.json", {"model_type": "evil", "head_dim": None})],
)
def test_code_that_comes_with_a_model_is_never_run(
    model: ModelHandle, file: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = model.folder / "ran"
    (model.folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    code = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}
    edit(model.folder, file, auto_map=code, **changes)
    agreeing = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", agreeing)
    harmful = models.find(model.name)
    for use in (lambda: harmful.shape, lambda: harmful.tokenizer, harmful.load):
        with contextlib.suppress(KvatlasError):
            use()
    assert not ran.exists()
    assert agreeing.tell() == 0


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_kernels_that_a_model_names_are_never_fetched(model: ModelHandle, key: str) -> None:
    assert reconfigure(model, **{key: "owner/repository"}).load().config._attn_implementation == "sdpa"


def retold(model: ModelHandle, template: str) -> ModelHandle:
    (model.folder / "chat_template.jinja").write_text(template)
    return models.find(model.name)


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for",
        "{{ raise_exception('no system messages') }}",
    ],
)
def test_a_template_that_fails_is_refused_in_a_sentence(model: ModelHandle, template: str) -> None:
    hostile = retold(model, template)
    with pytest.raises(KvatlasError, match=r"^The chat template of .* refuses these messages \(.+\)\.$") as caught:
        hostile.prompt("a")
    assert "\n" not in str(caught.value)
    # The next one is not affected.
    assert retold(model, "{{ messages[0].content }}").prompt("a") == "a"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = j %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ 9 ** 99999999 }}",
        "{% set s = namespace(n=9) %}{% for i in range(60) %}{% set s.n = s.n * s.n %}{% endfor %}{{ s.n > 0 }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{% set s = namespace(x='x') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
        "{% set s = namespace(x=[1]) %}{% for i in range(40) %}{% set s.x = s.x + s.x %}{% endfor %}{{ s.x }}",
        "{% set s = namespace(x='x') %}{% for i in range(40) %}{% set s.x = s.x.replace('x', 'xx') %}{% endfor %}",
    ],
)
@pytest.mark.parametrize("is_main_thread", [True, False])
def test_a_template_that_does_not_end_is_refused(
    model: ModelHandle, template: str, is_main_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers render in other threads."""
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.2)
    monkeypatch.setattr(chat, "TEMPLATE_BYTES", 2**20)
    hostile = retold(model, template)
    began = time.process_time()
    with ThreadPoolExecutor() as pool:
        refused = pytest.raises(
            KvatlasError, match=r"\((it did not end within 0\.2 s|it needs more than 1 M|a (product|power) ).*\)"
        )
        with refused:
            hostile.prompt("a") if is_main_thread else pool.submit(hostile.prompt, "a").result()
    assert time.process_time() - began < 5
    assert retold(model, "{{ messages[0].content * 2 }} {{ 2 ** 3 * 4 }}").prompt("a") == "aa 32"


QWEN = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- '<|im_start|>' + content.split('</think>')[-1].lstrip('\n') }}{%- endgeneration %}
    {%- elif loop.last and not loop.first %}
        {%- continue %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role + '\n' ~ content | trim ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools is none and add_generation_prompt %}{{ {"say": "<é>"} | tojson(indent=1) }}{{ namespace(a=1).a }}
{% endif %}"""


class _Cleaned:
    """An object whose finalizer, which the garbage collector may run in the middle of a template, counts."""

    cleaned = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(10):
            _Cleaned.cleaned += 1


def test_the_limit_of_a_template_interrupts_no_other_code(model: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 0.0)
    with chat._limits():
        _Cleaned()
        gc.collect()
    assert _Cleaned.cleaned == 10
    with pytest.raises(KvatlasError, match="did not end"):
        retold(model, "{{ messages[0].content }}").prompt("a")


@pytest.mark.parametrize("template", [TEMPLATE, FIRST_TEMPLATE, QWEN])
def test_texts_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    model = save_model("llama", tmp_path / "model", template=template)
    messages = [{"role": role, "content": f" {role}: é\n<b> "} for role in ("user", "assistant", "user", "system")]
    for answering in (True, False):
        theirs = model.tokenizer.apply_chat_template(messages, add_generation_prompt=answering, tokenize=False)
        assert model.render(messages, answering=answering) == theirs


def test_templates_that_ask_for_the_date_get_the_same_one_every_day(model: ModelHandle) -> None:
    dated = retold(model, "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    assert dated.prompt("a") == "26 Jul 2024: a"
    assert models.find(model.name, date="2031-02-03").prompt("a") == "03 Feb 2031: a"
    with pytest.raises(KvatlasError, match=r"The model option date is 'today'; expected days as YYYY-MM-DD\."):
        models.find(model.name, date="today")


def test_a_link_is_digested_by_what_it_leads_to(model: ModelHandle) -> None:
    before = model.weights_digest
    target = model.folder.parent / ("0" * 64)
    (model.folder / "model.safetensors").rename(target)
    (model.folder / "model.safetensors").symlink_to(target)
    assert models.find(model.name).weights_digest == before
    damage(model, 0.5)
    assert models.find(model.name).weights_digest != before


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": [1, null]}', '{"eos_token_id": -1}'])
def test_a_generation_config_that_cannot_be_read_is_refused(model: ModelHandle, text: str) -> None:
    (model.folder / "generation_config.json").write_text(text)
    with pytest.raises(KvatlasError, match=r"generation_config\.json|expected token ids"):
        _ = model.stops


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": 7}, r"config\.json of the model .* cannot be read \(.*: .*"),
        ({"rms_norm_eps": "small"}, r"config\.json of the model .* cannot be read \(.*'rms_norm_eps': .*"),
    ],
)
def test_faults_of_a_config_are_not_those_of_the_tokenizer(
    model: ModelHandle, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KvatlasError, match=sentence) as caught:
        _ = reconfigure(model, **changes).tokenizer
    assert not str(caught.value).rstrip(").").endswith(":")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": 5},
        {"layer_types": [["full_attention"]]},
        {"architectures": "LlamaForCausalLM"},
        {"rope_scaling": [1]},
        {"quantization_config": 5},
        {"model_type": ["llama"]},
        {"text_config": {"layer_types": 5}},
    ],
)
def test_a_config_of_another_form_is_refused_with_its_entry(model: ModelHandle, changes: dict[str, Any]) -> None:
    (entry,) = changes.get("text_config", changes)
    with pytest.raises(KvatlasError, match=rf"config\.json \(it has a wrong '{entry}"):
        reconfigure(model, **changes).check()


def test_a_tokenizer_that_reads_nothing_is_refused(tiny_llama: ModelHandle, tmp_path: Path) -> None:
    model = copied(tiny_llama, tmp_path / "model")
    file = model.folder / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["model"]["vocab"] = {}
    file.write_text(json.dumps(content), "utf-8")
    with pytest.raises(KvatlasError, match="tokenizer of the model"):
        model.check()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ValueError("Couldn't make one of:\n  (1) a file\n  (2) a class"),
            "Couldn't make one of: (1) a file (2) a class",
        ),
        (ValueError("\nno JSON\nat all"), "no JSON"),
        (ValueError("ends:\n\n"), "ends:"),
        (KeyError("nope"), "there is no 'nope'"),
        (KeyError("The model type is unknown."), "The model type is unknown."),
        (ValueError(), "ValueError"),
    ],
)
def test_the_reason_of_an_error_is_one_clause_that_says_something(error: Exception, sentence: str) -> None:
    assert reason(error) == sentence


def test_weights_in_integers_are_refused(model: ModelHandle) -> None:
    from safetensors.torch import load_file, save_file

    file = model.folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].to(torch.int64)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(KvatlasError, match=r"'model\.embed_tokens\.weight' in I64; expected"):
        models.find(model.name).load()


@pytest.mark.parametrize("backend", ["reference", "flex"])
@pytest.mark.parametrize("new", [False, True])
def test_logits_that_are_no_numbers_end_the_run(model: ModelHandle, backend: str, new: bool) -> None:
    """Of a token of the prompt, or of a new one, which a step of a fixed shape reads; they were sampled from."""
    loaded, policy, sampling = (
        model.load(),
        policies.from_setting(Setting.from_parameters("full")),
        Sampling(temperature=0, max_new_tokens=4),
    )
    own = replace(sampling, temperature=0.5)
    requests = [Request(0, (5, 6, 7), 1, (policy,)), Request(1, (5, 8), 2, (policy,), sampling=own)]

    def run() -> tuple[int, ...]:
        engine = Engine(model, loaded, [policy], sampling, backend=backend)
        return next(generation.tokens for generation in engine.run(requests) if generation.key == 0)

    bad = run()[0] if new else 6
    assert not new or bad not in (5, 6, 7, 8)
    with torch.no_grad():
        loaded.get_input_embeddings().weight[bad] = math.nan
    with pytest.raises(KvatlasError, match="logits that are no finite numbers in float32"):
        run()


def test_a_pipe_in_place_of_weights_is_refused_and_not_waited_for(model: ModelHandle) -> None:
    (model.folder / "model.safetensors").unlink()
    os.mkfifo(model.folder / "model.safetensors")
    found = models.find(model.name)
    with pytest.raises(KvatlasError, match=r"model.safetensors' is no safetensors file \(it is no regular file\)"):
        _ = found.weights_digest


def test_a_template_that_is_no_file_is_refused(model: ModelHandle) -> None:
    with pytest.raises(KvatlasError, match=r"template: '/dev/zero' cannot be read \(it is no regular file\)"):
        _ = models.find(model.name, template="/dev/zero").tokenizer


def test_a_config_with_a_billion_layers_is_refused_at_once(model: ModelHandle) -> None:
    with pytest.raises(KvatlasError, match="num_hidden_layers 1000000000; expected at most 10,000"):
        _ = reconfigure(model, num_hidden_layers=10**9).shape


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"CHAIN": 3}', '{"CHAIN": {"n": [3]}}', '{"CHAIN": {"n": [3, null]}}', "\ufeff{}"]
)
def test_claims_of_another_form_are_refused(model: ModelHandle, text: str, kvatlas: Call) -> None:
    (model.folder / "kvatlas_claims.json").write_text(text, "utf-8")
    sentence = kvatlas.refuse("run", model.name, "CHAIN4", "--problems", 1)
    assert "kvatlas_claims.json' does not hold ranges of problems such as" in sentence


def test_claims_about_another_kind_of_size_take_every_problem_for_outside(model: ModelHandle) -> None:
    (model.folder / "kvatlas_claims.json").write_text('{"CHAIN": {"n": ["4x4", "6x6"]}}')
    assert Claims.read(model.folder).outside("CHAIN4", find("CHAIN4").problems(3)) == 3


def test_files_are_read_as_utf_8_whatever_the_locale_is(model: ModelHandle, tmp_path: Path) -> None:
    edit(model.folder, "config.json", note="x")
    config = model.folder / "config.json"
    config.write_text(config.read_text("utf-8").replace('"x"', '"π"'), "utf-8")
    words = f"import sys; from kvatlas import models; print(models.find({model.name!r}).weights_digest)"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    digests = [
        subprocess.run([sys.executable, "-c", words], env=os.environ | own, capture_output=True, text=True).stdout
        for own in ({}, plain)
    ]
    assert digests[0].strip() == digests[1].strip() == models.find(model.name).weights_digest

"""Checks of this machine and of a model before a sweep.

Machine: versions, device, kernels, decoded tokens. Model: tokenizer, tags, layers, one step against transformers, a
generation.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvatlas import benchmarks, models, policies
from kvatlas.answers.reading import HARMONY, NEXT_MESSAGE, PUBLISHED
from kvatlas.core import Check, CheckResult, KvatlasError, Sampling, Setting, first_difference, reason
from kvatlas.cpu import native
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle
from kvatlas.models.checks import check_tokenizer
from kvatlas.models.load_options import Options
from kvatlas.noise import stream_key
from kvatlas.sweeps.plan import FULL

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvatlas.engine import Engine, Generation

PACKAGES = ("torch", "triton", "transformers", "numpy")
#: Steps that are decoded with and without kernels.
STEPS = 64
#: The question for a model without a benchmark, with words, numbers, lines and LaTeX.
PROBE = (
    "Let $x$ and $y$ be real numbers with $x + y = 12$ and $xy \\le 35$.\n\nWhat is the largest value of "
    "$\\frac{x}{y}$? Please reason step by step, and put your final answer within \\boxed{}."
)
#: The benchmark of the embedded models, which have a vocabulary of their own.
EMBEDDED_BENCHMARK = "CHAIN8"
#: A token that may be a think tag.
_THINKS = re.compile("think|thought|reason", re.IGNORECASE)
#: Texts of a test conversation; the template writes the end of a turn after the answer.
_ANSWER = "the answer of a test conversation"
_THOUGHT = "the thinking of a test conversation"


def check_machine(where: str = "auto") -> Iterator[CheckResult]:
    """Yield findings about this machine and the device `where` (values of the model option `device`)."""
    import torch

    model = models.find("embedded:tiny-llama", device=Options(device=where).resolved_device())
    # Without stop tokens traces go on to the limit.
    model = replace(model, overrides=models.ENDLESS)
    device = torch.device(model.device)

    versions = [f"kvatlas {version('kvatlas')}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    yield CheckResult("versions", Check.OK, f"{', '.join(versions)}; {platform.platform()}")
    yield from _device_and_kernels(device)

    try:
        yield from _decoding(model, model.load())
    except (KvatlasError, RuntimeError) as error:
        yield CheckResult("tokens", Check.FAILED, reason(error))


def _device_and_kernels(device: torch.device) -> Iterator[CheckResult]:
    import torch

    free = free_memory(str(device))
    memory = "memory unknown" if free is None else f"{free / 2**30:.1f} GiB free"
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        message = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, "
            f"{memory} of {properties.total_memory / 2**30:.1f}; GPUs: {torch.cuda.device_count()}"
        )
        yield CheckResult("device", Check.OK, message)
        yield CheckResult("kernels", Check.OK, "FlexAttention, compiled by Triton for this GPU")
        return

    processor = platform.processor() or platform.machine()
    yield CheckResult("device", Check.OK, f"CPU ({processor}, {os.cpu_count()} cores), {memory}; no GPU in use")
    kernels = native.load()
    if kernels is None:
        why_not = (native.why_not() or "").rstrip(".")
        yield CheckResult("kernels", Check.WARNING, why_not, "torch computes instead, slower")
    else:
        yield CheckResult("kernels", Check.OK, f"native, for {kernels.target}")


def _decoding(handle: ModelHandle, model: PreTrainedModel) -> Iterator[CheckResult]:
    """Compare the tokens of the fastest backend with plain torch; on a GPU also report CUDA graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, fast = _decode_greedily(handle, model, None)
    _, plain = _decode_greedily(handle, model, "reference")

    graphs = engine.graphs
    if graphs is not None and (graphs.broken or not graphs.steps):
        why = graphs.broken or "no step could be captured"
        yield CheckResult("CUDA graphs", Check.WARNING, f"off: {why}", "decoding works without them, slower")
    elif graphs is not None:
        yield CheckResult("CUDA graphs", Check.OK, f"captured: {graphs.steps} of {engine.passes} passes")

    name = f"{engine.backend.name} against reference, {handle.name.removeprefix('embedded:')} in {handle.dtype}"
    first_differences = map(first_difference, fast, plain)
    differ = [index + 1 for index in first_differences if index is not None]
    if differ:
        message = f"{len(differ)} of {len(fast)} sequences differ, the first from new token {min(differ)} on ({name})"
        yield CheckResult("tokens", Check.FAILED, message, "do not trust this machine's traces; please report this")
    else:
        yield CheckResult("tokens", Check.OK, f"equal in {len(fast)} sequences of {STEPS} steps ({name})")


def _decode_greedily(
    handle: ModelHandle, model: PreTrainedModel, backend: str | None
) -> tuple[Engine, list[tuple[int, ...]]]:
    """Decode under the full cache and two policies that compress; return the engine and the new tokens."""
    from kvatlas.engine import Engine, Request

    values = {"kv_budget": 48, "local_window": 8, "ratio": 0.3, "ratio_over": "thinking"}
    compressing = [Setting.from_parameters(name, **values) for name in ("window", "random")]
    chosen = [FULL, *map(policies.from_setting, compressing)]
    engine = Engine(handle, model, chosen, Sampling(temperature=0, max_new_tokens=STEPS), 16, backend)

    # Prompts that differ from row to row, without the first five tokens of the vocabulary.
    requests = []
    for row in range(3):
        prompt = tuple(5 + (7 * row + 3 * position) % (handle.vocabulary - 5) for position in range(8 + row))
        requests.append(Request(row, prompt, row, tuple(chosen)))
    generated = {(one.key, one.policy.setting.id): one.tokens for one in engine.run(requests)}
    return engine, [generated[key] for key in sorted(generated)]


def messages_for(handle: ModelHandle, names: Sequence[str], count: int, **options: Any) -> list[str]:
    """Return the messages of the first `count` problems of each benchmark with its options, or one for the model."""
    if not names and handle.name in models.embedded():
        names = [EMBEDDED_BENCHMARK]
    messages = []
    for name in names:
        benchmark = benchmarks.for_model(benchmarks.find(name, **options), handle.reads)
        messages += [benchmarks.prompt_of(benchmark, problem) for problem in benchmarks.problems_of(benchmark, count)]
    return messages or [PROBE]


def check_model(handle: ModelHandle, messages: Sequence[str], new_tokens: int) -> Iterator[CheckResult]:
    """Yield findings about a model; the generation answers the first of the `messages` of a user.

    A failed check ends before decoding. Raises KvatlasError if the model has no configuration or tokenizer.
    """
    shape = handle.shape
    # The first prompt loads the tokenizer.
    prompts = [handle.prompt(message) for message in messages]
    try:
        handle.check()
    except KvatlasError as error:
        yield CheckResult("model", Check.FAILED, str(error).rstrip("."))
        return

    kinds = ", ".join(handle.config.get("architectures") or [str(handle.config.get("model_type"))])
    stored = handle.stored_dtype or "unknown"
    short = "" if handle.precision == handle.dtype else f", linear layers in {handle.precision}"
    layers = (
        f"{shape.layers} layers with a KV cache, of {shape.heads} query heads on {shape.kv_heads} KV heads of size "
        f"{shape.head_dim}; {handle.kv_bytes_per_token:,} bytes of keys and values a token"
    )
    findings = [
        CheckResult("model", Check.OK, f"{kinds} in {handle.dtype}{short} on {handle.device} (stored in {stored})"),
        CheckResult("layers", Check.OK, layers),
        *check_tokenizer(handle, prompts),
    ]
    # The variables of the chat template that the user sets, and those left to the template.
    values = dict(handle.options.template_values)
    unset = sorted(handle.template_variables - set(values))
    texts = [f"{name}={value}" for name, value in values.items()]
    if unset:
        texts.append(f"not set, left to the template: {', '.join(unset)}")
    if texts:
        findings.append(CheckResult("template values", Check.OK, "; ".join(texts)))

    findings += [_tags_check(handle), _stop_tokens(handle)]
    yield from findings
    if any(finding.status is Check.FAILED for finding in findings):
        return

    try:
        generation = _generate(handle, handle.load(), handle.tokens(prompts[0]), new_tokens)
    except KvatlasError as error:
        yield CheckResult("weights", Check.FAILED, str(error).rstrip("."))
        return

    # An engine compares prompts and single tokens with transformers before it decodes.
    yield CheckResult("one step", Check.OK, "logits are those of transformers, up to rounding")
    yield _end_of_generation(handle, generation, new_tokens)


def _tags_check(model: ModelHandle) -> CheckResult:
    name = "think tags"
    tags = model.thinking
    if not tags.close:
        message = "none: the whole output is the answer"
        added = [token for token in model.tokenizer.added_tokens_encoder if _THINKS.search(token)]
        if added:
            advice = "name the text that ends thinking with think_close"
            return CheckResult(name, Check.WARNING, f"{message}, although {added[0]!r} is a token of its own", advice)
        return CheckResult(name, Check.OK, message)

    tokens = model.tokens(f"so{tags.close}7")
    if model.split(tokens) is None:
        message = f"{tags.close!r} is not found in its own tokens, which are {model.text(tokens)!r} when decoded"
        return CheckResult(name, Check.FAILED, message, "name the text that ends thinking with think_close")

    how = "one token" if model.think_close is not None else "found in the text"
    message = f"{tags.open!r} to {tags.close!r} ({how})"
    if model.prompt("x").rstrip().endswith(tags.close):
        variables = ", ".join(sorted(model.template_variables))
        advice = f"template_values set what the template reads: {variables}" if variables else ""
        status = Check.OK if model.options.template_values else Check.WARNING
        return CheckResult(name, status, f"{message}, closed by the prompt: the model does not think", advice)
    opened = "opened by the prompt" if model.opens_thinking else "to be opened by the model"
    return CheckResult(name, Check.OK, f"{message}, {opened}")


def _stop_tokens(model: ModelHandle) -> CheckResult:
    name = "stop tokens"
    tokenizer = model.tokenizer
    texts = [str(tokenizer.decode([token])) for token in sorted(model.stops)]

    # A conversation as the template writes it, unless it refuses. Templates know thinking by several names.
    thought = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), _THOUGHT)
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER, **thought}]
    try:
        conversation = model.render(turns, answering=False)
    except KvatlasError:
        conversation = ""

    # The special token that the template writes after an answer.
    after = model.tokens(conversation.partition(_ANSWER)[2].lstrip())
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    turn = after[0] if after and after[0] in special else None

    # One that also ends a message inside a turn would, as a stop token, end traces after thinking.
    between = conversation.partition(_THOUGHT)[2].partition(_ANSWER)[0]
    if model.thinking.close == HARMONY[1]:
        between += NEXT_MESSAGE
    if turn is not None and turn not in model.stops and str(tokenizer.decode([turn])) not in between:
        message = f"{' '.join(texts)}, but the chat template ends a turn with {tokenizer.decode([turn])}"
        advice = f"add {turn} to eos_token_id in generation_config.json if answers run on"
        return CheckResult(name, Check.WARNING, message, advice)
    return CheckResult(name, Check.OK, " ".join(texts))


def _generate(handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], new_tokens: int) -> Generation[int]:
    """Return a generation under the full cache. Raises KvatlasError if its logits are not those of transformers."""
    from kvatlas.engine import Engine, Request

    engine = Engine(handle, model, [FULL], Sampling(max_new_tokens=new_tokens), 1)
    (generation,) = engine.run([Request(0, prompt, stream_key("check", 0), (FULL,))])
    return generation


def _end_of_generation(model: ModelHandle, generation: Generation[Any], new_tokens: int) -> CheckResult:
    name = "generation"
    tags = model.thinking
    text = model.text(generation.tokens)
    count = len(generation.tokens)
    model_tags = (tags.open, tags.close.strip())
    foreign_tags = [tag for tag in itertools.chain(*PUBLISHED) if tag in text and tag not in model_tags]
    if foreign_tags:
        advice = f"name the text that ends thinking with think_close, {foreign_tags[-1]!r} perhaps"
        return CheckResult(
            name, Check.WARNING, f"it wrote {foreign_tags[0]!r}, which is not one of its think tags", advice
        )

    ended = f"ended after {count} tokens" if generation.finished else f"went on for {count} tokens"
    if not tags.close:
        return CheckResult(name, Check.OK, ended)
    if generation.thinking_end is not None:
        return CheckResult(name, Check.OK, f"{tags.close!r} after {generation.thinking_end} tokens; {ended}")
    if not model.thinking_tokens(generation.tokens, None):
        advice = f"think_open={tags.open!r} opens it in the prompt"
        return CheckResult(name, Check.WARNING, f"thinking was not opened, so that all is answer; {ended}", advice)
    if generation.finished:
        advice = "such traces have no answer; set think_close to the text that the model writes"
        return CheckResult(name, Check.WARNING, f"{ended} without {tags.close!r}", advice)
    return CheckResult(name, Check.OK, f"still thinking after {new_tokens} tokens (--max-new-tokens waits longer)")

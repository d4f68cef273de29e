"""What `kvatlas models check` looks at: tokenizer, tags, layers, one step against transformers' own, a generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvatlas import policies
from kvatlas.core import Check, Finding, KvatlasError, Sampling, Setting
from kvatlas.models import ModelHandle
from kvatlas.models.thinking import TAGS
from kvatlas.models.tokenizer_check import check_tokenizer
from kvatlas.noise import stream_key

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvatlas.engine import Generation

#: Steps whose logits are compared: the prompt's, and of single tokens after it.
STEPS = 4
#: The largest differences of logits, in their standard deviations, that are roundings, and that might be.
ROUNDING = {"float32": (1e-3, 0.03), "bfloat16": (0.15, 0.6), "float16": (0.03, 0.2)}
#: A conversation whose last turn is over: what the template writes there ends a turn.
_TURN = "kvatlas looks for what follows this"


def check_model(handle: ModelHandle, messages: Sequence[str], new_tokens: int) -> Iterator[Finding]:
    """Findings about a model as they are made; `messages` are a user's, the first is what the generation answers.

    Nothing is decoded where something before it failed. Raises KvatlasError if there is nothing to look at.
    """
    _ = handle.shape, handle.tokenizer
    prompts = [handle.prompt(message) for message in messages]
    known = [
        _guarded("model", lambda: _model(handle)),
        _layers(handle),
        *check_tokenizer(handle, prompts),
        _guarded("think tags", lambda: _tags(handle)),
        _guarded("stop tokens", lambda: _stops(handle)),
        _context(handle, prompts),
    ]
    yield from known
    if any(finding.status is Check.FAILED for finding in known):
        return
    try:
        model = handle.load()
    except KvatlasError as error:
        yield Finding("weights", Check.FAILED, _without_stop(error))
        return
    yield _attention(handle, model)
    try:
        logits, generation = _generate(handle, model, handle.tokens(prompts[0]), new_tokens)
    except KvatlasError as error:
        yield Finding("one step", Check.FAILED, _without_stop(error))
        return
    yield _step(handle, model, handle.tokens(prompts[0]), logits, generation)
    yield _generation(handle, generation, new_tokens)


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except KvatlasError as error:
        return Finding(name, Check.FAILED, _without_stop(error))


def _without_stop(error: KvatlasError) -> str:
    return str(error).rstrip(".")


def _model(model: ModelHandle) -> Finding:
    model.check()
    stored = model.config.get("dtype") or model.config.get("torch_dtype") or "unknown"
    kind = ", ".join(model.config.get("architectures") or [str(model.config.get("model_type"))])
    return Finding("model", Check.OK, f"{kind} in {model.dtype} on {model.device} (stored in {stored})")


def _layers(model: ModelHandle) -> Finding:
    shape = model.shape
    return Finding(
        "layers",
        Check.OK,
        f"{shape.layers} layers of {shape.heads} query heads on {shape.kv_heads} KV heads of size {shape.head_dim}; "
        f"{model.kv_bytes_per_token:,} bytes of keys and values a token",
    )


def _tags(model: ModelHandle) -> Finding:
    name, tags = "think tags", model.thinking
    if not tags.close:
        return Finding(name, Check.OK, "none: the whole output is the answer")
    tokens = model.tokens(f"so{tags.close}7")
    if model.split(tokens) is None:
        message = f"{tags.close!r} is not found in its own tokens, which are {model.text(tokens)!r} when decoded"
        return Finding(name, Check.FAILED, message, "name the text that ends thinking with think_close")
    how = "one token" if tags.token is not None else "found in the text"
    opened = "opened by the prompt" if model.opens_thinking else "to be opened by the model"
    return Finding(name, Check.OK, f"{tags.open!r} to {tags.close!r} ({how}), {opened}")


def _stops(model: ModelHandle) -> Finding:
    name, tokenizer = "stop tokens", model.tokenizer
    texts = [str(tokenizer.decode([token])) for token in sorted(model.stops)]
    turn = _end_of_turn(model)
    if turn is not None and turn not in model.stops:
        message = f"{' '.join(texts)}, but the chat template ends a turn with {tokenizer.decode([turn])}"
        advice = f"add {turn} to eos_token_id in generation_config.json if answers run on"
        return Finding(name, Check.WARNING, message, advice)
    return Finding(name, Check.OK, " ".join(texts))


def _end_of_turn(model: ModelHandle) -> int | None:
    """The special token that the template writes behind an answer; None if it writes none or takes no answers."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _TURN}]
    try:
        text = model.rendered(turns, answering=False)
    except KvatlasError:
        return None
    after = model.tokens(text.partition(_TURN)[2].lstrip())
    special = set(model.tokenizer.all_special_ids) | set(model.tokenizer.added_tokens_decoder)
    return after[0] if after and after[0] in special else None


def _context(model: ModelHandle, prompts: Sequence[str]) -> Finding:
    longest, known = max(len(model.tokens(prompt)) for prompt in prompts), model.positions
    if known is None:
        message = "config.json does not say how many positions there are"
        return Finding("context", Check.WARNING, message, "see that prompt and max_new_tokens are not more")
    if longest >= known:
        return Finding("context", Check.FAILED, f"{known:,} positions, and a prompt has {longest:,} tokens")
    return Finding("context", Check.OK, f"{known:,} positions; the longest prompt has {longest:,} tokens")


def _attention(handle: ModelHandle, model: PreTrainedModel) -> Finding:
    """Which layers see all tokens and which a window, and the factor of the products of queries and keys."""
    layers: dict[int, tuple[str, float]] = {}
    refused = set()
    for module in model.get_decoder().modules():
        layer, scale = getattr(module, "layer_idx", None), getattr(module, "scaling", None)
        if isinstance(layer, int) and isinstance(scale, float):
            window = getattr(module, "sliding_window", None)
            layers[layer] = (f"a window of {window:,}" if window else "all tokens", scale)
            refused |= {word for word in ("sinks", "attn_logit_softcapping") if getattr(module, word, None) is not None}
    if refused:
        return Finding("attention", Check.FAILED, f"layers have {', '.join(sorted(refused))}", "take another model")
    if len(layers) != handle.shape.layers:
        message = f"{len(layers)} of {handle.shape.layers} layers tell their attention scale"
        return Finding("attention", Check.WARNING, message, "trust only the step against transformers")
    kinds = ", ".join(
        f"{count} layers see {kind}" for kind, count in Counter(kind for kind, _ in layers.values()).items()
    )
    usual = handle.shape.head_dim**-0.5
    scales = sorted({scale for _, scale in layers.values()})
    same = all(abs(scale - usual) < 1e-6 for scale in scales)
    which = "head size ** -0.5" if same else f"not head size ** -0.5, which is {usual:.4g}"
    return Finding("attention", Check.OK, f"{kinds}; scale {', '.join(f'{scale:.4g}' for scale in scales)} ({which})")


def _generate(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], new_tokens: int
) -> tuple[list[Tensor], Generation[int]]:
    """A generation with the full cache, and the logits of its first steps [vocabulary]."""
    from kvatlas.engine import Engine, Request

    logits: list[Tensor] = []

    def keep(_: Sequence[int], row: Tensor) -> Tensor:
        if len(logits) < STEPS:
            logits.append(row.detach().float().clone())
        return row

    full = policies.of(Setting.of("full"))
    engine = Engine(handle, model, [full], Sampling(max_new_tokens=new_tokens), 1)
    request = Request(0, prompt, stream_key("check", 0), (full,), logits_processor=keep)
    (generation,) = engine.run([request])
    return logits, generation


def _step(
    handle: ModelHandle,
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    logits: list[Tensor],
    generation: Generation[int],
) -> Finding:
    """The largest difference between the engine's logits and those of transformers' own pass over the same tokens."""
    import torch

    tokens = [*prompt, *generation.tokens[: len(logits) - 1]]
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        own = model(input_ids=ids, use_cache=False, logits_to_keep=len(logits)).logits[0, -len(logits) :].float()
    difference = float(((torch.stack(logits) - own).abs().amax(-1) / own.std(-1)).max())
    message = (
        f"logits differ from transformers' own by at most {difference:.1e} standard deviations ({len(logits)} steps)"
    )
    surely, perhaps = ROUNDING[handle.dtype]
    if difference <= surely:
        return Finding("one step", Check.OK, message)
    failed = not difference <= perhaps
    return Finding("one step", Check.FAILED if failed else Check.WARNING, message, "report this model to kvatlas")


def _generation(model: ModelHandle, generation: Generation[Any], new_tokens: int) -> Finding:
    name, tags, text = "generation", model.thinking, model.text(generation.tokens)
    count = len(generation.tokens)
    unknown = model.tokenizer.unk_token_id
    if unknown is not None and unknown not in model.stops and generation.tokens.count(unknown) * 5 >= count:
        return Finding(name, Check.FAILED, f"{generation.tokens.count(unknown)} of {count} new tokens are unknown")
    other = [tag for pair in TAGS for tag in pair if tag in text and tag not in (tags.open, tags.close.strip())]
    if other:
        advice = f"name the text that ends thinking with think_close, {other[-1]!r} perhaps"
        return Finding(name, Check.WARNING, f"it wrote {other[0]!r}, which is none of its think tags", advice)
    ended = f"ended after {count} tokens" if generation.finished else f"went on for {count} tokens"
    if not tags.close:
        return Finding(name, Check.OK, ended)
    if generation.thinking_end is not None:
        return Finding(name, Check.OK, f"{tags.close!r} after {generation.thinking_end} tokens; {ended}")
    if not model.thinking_tokens(generation.tokens, None):
        advice = f"think_open={tags.open!r} opens it in the prompt"
        return Finding(name, Check.WARNING, f"thinking was not opened, so that all is answer; {ended}", advice)
    if generation.finished:
        advice = "such traces have no answer; see that think_close is what the model writes"
        return Finding(name, Check.WARNING, f"{ended} without {tags.close!r}", advice)
    return Finding(name, Check.OK, f"still thinking after {new_tokens} tokens (--max-new-tokens waits longer)")

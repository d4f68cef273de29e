"""Token selection in transformers' own `generate` and pipelines.

    model.generate(**inputs, custom_generate=kvatlas.generate, policy="dynts", kv_budget=..., local_window=..., ...)

The engine decodes; transformers prepares prompts, generation config, logits processors and stopping criteria as usual.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin, GenerationMode
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping

from kvatlas.core import LARGEST_INTEGER, KvatlasError, Sampling, python_number, shortened
from kvatlas.cpu.packing import pack_model
from kvatlas.engine import Engine, Request
from kvatlas.models.handle import handle_for
from kvatlas.policies import parameters, permit, policies
from kvatlas.policies.parameter_types import is_integer_within
from kvatlas.serve.service import find_policy, next_stream, room_for

#: Processors that do not run: the engine does the same, in this order, with their values.
_OURS = (processing.TemperatureLogitsWarper, processing.TopKLogitsWarper, processing.TopPLogitsWarper)
#: Processors that treat each row by its own tokens and logits: they get one padded row.
_ROWWISE = (
    processing.ExponentialDecayLengthPenalty,
    processing.ForcedBOSTokenLogitsProcessor,
    processing.ForcedEOSTokenLogitsProcessor,
    processing.InfNanRemoveLogitsProcessor,
    processing.LogitNormalization,
    processing.MinLengthLogitsProcessor,
    processing.MinNewTokensLengthLogitsProcessor,
    processing.NoRepeatNGramLogitsProcessor,
    processing.RepetitionPenaltyLogitsProcessor,
    processing.SequenceBiasLogitsProcessor,
    processing.SuppressTokensAtBeginLogitsProcessor,
    processing.SuppressTokensLogitsProcessor,
)
#: The parameters of our policies.
_PARAMETERS = {item.name for item in chain.from_iterable(map(parameters, map(policies.get, policies.ours)))}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: processing.LogitsProcessorList,
    stopping_criteria: stopping.StoppingCriteriaList,
    generation_config: GenerationConfig,
    policy: str = "full",
    kv_budget: int | str | None = None,
    local_window: int | str | None = None,
    ratio: float | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    batch_size: int = 64,
    think_tokenizer: PreTrainedTokenizerBase | None = None,
    think_close: str | None = None,
    **prepared: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Generate as `custom_generate` of transformers: sequences [rows, prompt + new], padded, or an output object.

    `policy`, `kv_budget`, `local_window` and `ratio` are the setting, `settings` further parameters of the policy.
    Sampling uses the engine's counter-based noise under `seed`: the n-th row with the same prompt gets the n-th sample,
    independent of the rest of the batch; the default seed comes from torch's generator (`transformers.set_seed`). Up to
    `batch_size` rows are decoded together. `think_tokenizer` is needed for a model that was not loaded from a folder,
    `think_close` if the end of thinking cannot be found. Processors and criteria are called for one row at a time, with
    its padding, criteria without scores. transformers passes no tokenizer or assistant to functions like this one.
    Raises KvatlasError for unsupported arguments.
    """
    _refuse_streamer()
    seed = python_number(seed)
    is_tokenizer = isinstance(think_tokenizer, PreTrainedTokenizerBase | None)
    for name, value, is_right, expected in (
        ("policy", policy, isinstance(policy, str), "a name, as 'rkv', FILE.py, or that of register(CLASS)"),
        ("settings", settings, isinstance(settings, Mapping | None), "a mapping, as {'queries': 8}"),
        ("seed", seed, seed is None or is_integer_within(seed, 0, LARGEST_INTEGER), "an integer >= 0"),
        ("batch_size", batch_size, is_integer_within(batch_size, 1), "an integer >= 1"),
        ("think_tokenizer", think_tokenizer, is_tokenizer, "a tokenizer, as AutoTokenizer.from_pretrained gives"),
    ):
        if not is_right:
            raise KvatlasError(f"{name} is {shortened(value)}; expected {expected}.")
    _check_supported(generation_config, logits_processor)

    # Ids of the tokens at which generation ends.
    ends: set[int] = set()
    for criterion in stopping_criteria:
        if isinstance(criterion, stopping.EosTokenCriteria):
            ends.update(map(int, criterion.eos_token_id.flatten().tolist()))
    handle = handle_for(model, think_tokenizer, frozenset(ends), think_close=think_close)
    permit(policy)
    misplaced = next((name for name in prepared if name in _PARAMETERS), None)
    if misplaced is not None:
        raise KvatlasError(
            f"{misplaced} is given beside the policy; expected settings={{{misplaced!r}: {prepared[misplaced]!r}}}, "
            "which has all parameters but kv_budget, local_window and ratio."
        )
    values = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    twice = [name for name in settings or {} if values.get(name) is not None]
    if twice:
        raise KvatlasError(f"{twice[0]} is given twice, as an argument and in settings; expected one of them.")
    setting = find_policy(handle, policy, {**values, **(settings or {})})
    sampling = _generation_sampling(generation_config, logits_processor, stopping_criteria, input_ids.shape[1])
    if seed is None and generation_config.do_sample:
        seed = int(torch.randint(2**62, ()).item())

    # Each row has the processors and criteria whose work the engine does not do itself.
    done_here = stopping.MaxLengthCriteria | stopping.EosTokenCriteria
    processors = [processor for processor in logits_processor if not isinstance(processor, _OURS)]
    criteria = [criterion for criterion in stopping_criteria if not isinstance(criterion, done_here)]
    seen: Counter[tuple[int, ...]] = Counter()
    requests = []
    for index, mask in enumerate(_token_mask(input_ids, prepared)):
        prompt = tuple(input_ids[index][mask].tolist())
        room_for(handle, setting, prompt, sampling.max_new_tokens)
        row_processors = [_processor_of_row(processor, index, len(input_ids)) for processor in processors]
        row = _PaddedRow(input_ids[index], prompt, row_processors, criteria)
        stops = row.stops if criteria else None
        process = row.processed if processors else None
        stream = next_stream(seed or 0, prompt, seen)
        requests.append(Request(index, prompt, stream, (setting,), stopping_criterion=stops, logits_processor=process))

    training = model.training
    engine = Engine(handle, model.eval(), [setting], sampling, min(batch_size, len(requests)))
    try:
        with pack_model(model):
            written = {generation.key: generation.tokens for generation in engine.run(requests)}
    finally:
        model.train(training)
    sequences = _padded_sequences(input_ids, written, generation_config)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _signature() -> inspect.Signature:
    """Return the signature of `generate` with the parameters of our policies.

    transformers hands on the arguments that the signature names, and refuses others before `generate` is called.
    """
    signature = inspect.signature(generate)
    *arguments, prepared = signature.parameters.values()
    names = sorted(_PARAMETERS - signature.parameters.keys())
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    return signature.replace(parameters=[*arguments, *more, prepared])


generate.__signature__ = _signature()  # type: ignore[attr-defined]


def _refuse_streamer() -> None:
    """Raise KvatlasError if `generate` was called with a streamer, and end the streamer.

    transformers keeps it to itself: its reader would wait for tokens for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        frame = frame.f_back
    streamer = frame.f_locals.get("streamer") if frame is not None else None
    if streamer is not None:
        streamer.end()
        raise KvatlasError(
            "streamer is not supported: transformers passes none to a custom_generate. `kvatlas serve` streams."
        )


def _check_supported(config: GenerationConfig, processors: Sequence[Any]) -> None:
    """Raise KvatlasError for a configuration or a processor that the engine cannot honour, with its argument."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise KvatlasError(
            f"num_beams is {config.num_beams}, and the generation mode {mode.value}; expected greedy search or "
            "sampling, as by num_beams=1 without penalty_alpha."
        )
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise KvatlasError(f"{name} is set; the engine gives sequences only.")
    if config.cache_implementation is not None:
        raise KvatlasError(
            f"cache_implementation is {config.cache_implementation!r}; the engine has a cache of its own."
        )
    if config.use_cache is False:
        raise KvatlasError("use_cache is False; token selection needs the cache.")

    # Temperature, top_k and top_p, which the engine does last, come once each in this order.
    done = 0
    for processor in processors:
        name = type(processor).__name__
        is_supported = isinstance(processor, (*_OURS, *_ROWWISE))
        if type(processor).__module__.startswith("transformers.") and not is_supported:
            raise KvatlasError(
                f"The logits processor {name} is not supported; expected one that treats each row alone, before "
                "temperature, top_k and top_p, which the engine does itself."
            )
        place = next((place for place, kind in enumerate(_OURS, 1) if isinstance(processor, kind)), 0)
        if done and place <= done and not isinstance(processor, processing.LogitNormalization):
            raise KvatlasError(
                f"The logits processor {name} comes after {_OURS[done - 1].__name__}; expected "
                "temperature, top_k and top_p once each, in this order, after all others."
            )
        done = max(done, place)


def _token_mask(input_ids: Tensor, prepared: Mapping[str, Any]) -> Tensor:
    """Return a mask [rows, length] of the tokens without padding. Raises KvatlasError for inputs without effect.

    The inputs of `generate` itself are recognised by type, since names differ between versions: an empty cache, the
    positions of the tokens, and single values, which change nothing here.
    """
    mask = prepared.get("attention_mask")
    visible = torch.ones_like(input_ids, dtype=torch.bool)
    if isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape:
        visible = mask.bool()

    positions = visible.long().cumsum(-1) - 1
    for name, value in prepared.items():
        if isinstance(value, Cache):
            ignored = value.get_seq_length() > 0
        elif isinstance(value, torch.Tensor) and value.shape[-2:] == input_ids.shape:
            ignored = value is not mask and bool((value[..., visible] != positions[visible]).any())
        else:
            ignored = value is not None and not isinstance(value, bool | int | float)
        if ignored:
            raise KvatlasError(
                f"{name} is given; the engine decodes from input_ids and an attention_mask of their shape alone."
            )
    return visible


def _generation_sampling(
    config: GenerationConfig, processors: Sequence[Any], criteria: Sequence[Any], length: int
) -> Sampling:
    """Return the sampling of a call of `generate`; max_length counts padded prompts of `length` tokens."""
    most = min(item.max_length for item in criteria if isinstance(item, stopping.MaxLengthCriteria)) - length
    if not config.do_sample:
        return Sampling(temperature=0, top_k=0, top_p=1.0, max_new_tokens=most)
    by_type = {type(processor): processor for processor in processors if isinstance(processor, _OURS)}
    temperature, top_k, top_p = (by_type.get(kind) for kind in _OURS)
    return Sampling(
        temperature=float(temperature.temperature) if temperature else 1.0,
        top_k=int(top_k.top_k) if top_k else 0,
        top_p=float(top_p.top_p) if top_p else 1.0,
        max_new_tokens=most,
    )


def _processor_of_row(processor: Any, row: int, rows: int) -> Any:
    """Return a processor for one of `rows` alone: a repetition penalty ignores the padding of each row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    # `num_return_sequences` rows after one another share an entry.
    index = row * len(ignored) // rows
    row_processor = copy.copy(processor)
    row_processor.prompt_ignore_length = ignored[index : index + 1]
    return row_processor


@dataclass(frozen=True)
class _PaddedRow:
    """One row as the processors and criteria of transformers see it: `ids` with padding, then its new tokens."""

    ids: Tensor
    prompt: tuple[int, ...]
    processors: Sequence[Any]
    criteria: Sequence[Any]

    def stops(self, new: Sequence[int]) -> bool:
        ids = self._with_new_tokens(new)
        # transformers accepts a bool in place of a tensor, too.
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria)

    def processed(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        ids = self._with_new_tokens(tokens[len(self.prompt) :]).to(logits.device)
        scores = logits[None].float().clone()
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores[0]

    def _with_new_tokens(self, new: Sequence[int]) -> Tensor:
        return torch.cat([self.ids, self.ids.new_tensor(new)])[None]


def _padded_sequences(input_ids: Tensor, written: Mapping[int, Sequence[int]], config: GenerationConfig) -> Tensor:
    """Return the prompts with the tokens `written` after them, by the index of the row, padded to one length."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding = next((int(i) for i in (config.pad_token_id, *ends) if i is not None), 0)
    new = [input_ids.new_tensor(written[index]) for index in range(len(input_ids))]
    return torch.cat([input_ids, pad_sequence(new, batch_first=True, padding_value=padding)], dim=1)

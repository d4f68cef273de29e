"""Local models under token selection as models of Inspect: any of its tasks runs on `kvatlas/MODEL`.

    inspect eval TASK --model kvatlas/hf:OWNER/NAME -M policy=dynts -M kv_budget=5000 -M local_window=1000 -M ratio=0.3

Requests that are there at the same time share batches of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import asdict, fields
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from kvatlas.core import KvatlasError, Sampling
from kvatlas.models import Options, find
from kvatlas.serve.service import (
    GenerationRequest,
    LengthError,
    RequestHandle,
    Service,
    find_policy,
    room_for,
    sampling_with,
    stream_of,
)
from kvatlas.serve.text import split_text

#: Fields of GenerateConfig that would change answers and are not honoured.
REFUSED = (
    *("best_of", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("reasoning_tokens", "reasoning_effort", "effort", "response_schema", "modalities", "extra_body"),
)
#: Inspect bounds how many requests are made at once; all of them may wait here.
_LINE = 100_000
_log = logging.getLogger("kvatlas")


@modelapi(name="kvatlas")
def kvatlas() -> type[ModelAPI]:
    """The provider, for Inspect's registry."""
    return SelectedModel


class SelectedModel(ModelAPI):
    """A model of ours under one setting.

    Arguments (`-M`): `policy`, `kv_budget`, `local_window`, `ratio` and every other parameter of the policy; the model
    options (`dtype`, `device`, `think_close`, ...); `batch_size`; `seed`. The n-th time that a prompt is asked it gets
    the n-th sample under the seed (the config's, else this one), so that epochs differ and the whole can be repeated.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        policy: str = "full",
        batch_size: int = 32,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        known = {field.name for field in fields(Options)}
        model = find(model_name, **{name: value for name, value in arguments.items() if name in known})
        model.check()
        for sentence in model.notes:
            _log.warning(sentence)
        values = {name: value for name, value in arguments.items() if name not in known}
        self.seed = seed
        self.service = Service(model, find_policy(model, policy, values), Sampling(), batch_size, _LINE).start()
        self._asked: Counter[tuple[int, ...]] = Counter()

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002 (Inspect's name)
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """One answer or several (`num_choices`) to a conversation.

        Raises KvatlasError for what is not honoured: tools, images, and the fields in REFUSED.
        """
        _refuse(tools, config)
        service = self.service
        model = service.model
        prompt = model.tokens(model.conversation([_message(message) for message in input]))
        try:
            room = room_for(model, service.policy, prompt, None)
        except LengthError as error:
            return ModelOutput.from_content(self.model_name, "", stop_reason="model_length", error=str(error))
        sampling = sampling_with(
            service.sampling,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=min(room, config.max_tokens or room),
        )
        seed = self.seed if config.seed is None else config.seed
        asks = [
            GenerationRequest(
                prompt, sampling, stream_of(seed, prompt, self._sample(prompt)), tuple(config.stop_seqs or ())
            )
            for _ in range(config.num_choices or 1)
        ]
        handles = service.ask(asks)
        await asyncio.gather(*(handle.finished() for handle in handles))
        # Tokens that the model had room for, but the user did not want, end as `max_tokens`.
        positions = model.positions
        at_end = positions is not None and sampling.max_new_tokens == positions - len(prompt)
        cut: StopReason = "model_length" if at_end else "max_tokens"
        return self._output(handles, cut)

    def _sample(self, prompt: tuple[int, ...]) -> int:
        self._asked[prompt] += 1
        return self._asked[prompt] - 1

    def _output(self, handles: list[RequestHandle], cut: StopReason) -> ModelOutput:
        usages = [handle.generation.result().usage for handle in handles]
        setting = self.service.policy.setting
        read, wrote = usages[0].prompt_tokens, sum(usage.output_tokens for usage in usages)
        return ModelOutput(
            model=self.model_name,
            choices=[_choice(self.model_name, handle, cut) for handle in handles],
            usage=ModelUsage(
                input_tokens=read,
                output_tokens=wrote,
                total_tokens=read + wrote,
                reasoning_tokens=sum(usage.thinking_tokens for usage in usages),
            ),
            metadata={
                "peak_kv_tokens": max(usage.peak_kv_tokens for usage in usages),
                "compressions": sum(usage.compressions for usage in usages),
                # What `kvatlas import` reads: of one answer, for several have several costs.
                "kvatlas": {
                    "setting": {"policy": setting.policy, "values": setting.values},
                    "usage": asdict(usages[0]) if len(usages) == 1 else None,
                },
            },
        )

    async def aclose(self) -> None:
        """End the engine."""
        await asyncio.to_thread(self.service.close)

    def max_connections(self) -> int:
        """As many requests at once as have a row."""
        return self.service.batch_size


def _choice(name: str, handle: RequestHandle, cut: StopReason) -> ChatCompletionChoice:
    thinking, answer = split_text(handle.model, handle.generation.result().tokens, handle.ask.stop)
    content: list[Any] = [ContentReasoning(reasoning=thinking)] if thinking else []
    message = ChatMessageAssistant(content=[*content, ContentText(text=answer)], model=name, source="generate")
    return ChatCompletionChoice(message=message, stop_reason="stop" if handle.reason() == "stop" else cut)


def _refuse(tools: list[ToolInfo], config: GenerateConfig) -> None:
    if tools:
        raise KvatlasError("kvatlas models call no tools; expected tasks without tools.")
    for name in REFUSED:
        if getattr(config, name, None):
            raise KvatlasError(f"{name} is set; kvatlas models do not honour it.")


def _message(message: ChatMessage) -> dict[str, str]:
    parts = [] if isinstance(message.content, str) else message.content
    others = [part for part in parts if not isinstance(part, ContentText | ContentReasoning)]
    if message.role == "tool" or others:
        what = "a tool's message" if message.role == "tool" else f"content of type {others[0].type!r}"
        raise KvatlasError(f"The conversation holds {what}; expected text.")
    return {"role": message.role, "content": message.text}

"""The entry point of Inspect: our local models under token selection, and our benchmarks as tasks.

    inspect eval TASK --model kvatlas/hf:OWNER/NAME -M policy=dynts -M kv_budget=5000 -M local_window=1000 -M ratio=0.3
    inspect eval kvatlas/benchmark --model openai/gpt-5-mini -T name=SEQBENCH-40x40-L100-B2 --epochs 5
    inspect eval kvatlas/benchmark --model google/gemini-2.5-flash -T name=CHAIN12 --limit 50

Concurrent requests to a local model share batches of the engine. `kvatlas import LOG.eval RUN` imports a log into a
run. API keys stay in the environment, where Inspect reads them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import Any

from inspect_ai import Task, task
from inspect_ai import model as inspect
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate
from inspect_ai.tool import ToolChoice, ToolInfo

from kvatlas import benchmarks
from kvatlas.answers import reading
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import KvatlasError, Sampling
from kvatlas.integrations.inspect_logs import CUT
from kvatlas.serve import service

#: Fields of GenerateConfig that would change answers and are not supported.
REFUSED = (
    "best_of",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "reasoning_tokens",
    "reasoning_effort",
    "effort",
    "response_schema",
    "modalities",
    "extra_body",
)
#: Inspect limits the number of concurrent requests; all of them may wait here.
_LINE = 100_000


@task
def benchmark(name: str, problems: int | None = None) -> Task:
    """Any benchmark by its name, and the number of its problems (its standard number by default)."""
    # The metadata is compared when a log is imported.
    asked = benchmarks.find(name)
    samples = [
        Sample(id=problem.id, input=asked.prompt(problem), target=problem.answer, metadata={"about": {**problem.about}})
        for problem in asked.problems(problems)
    ]
    return Task(
        dataset=MemoryDataset(samples, name=asked.name),
        solver=generate(),
        scorer=graded(asked.name, problems),
        version=asked.version,
        metadata={"kvatlas_benchmark": asked.name, "kvatlas_version": asked.version},
    )


@scorer(metrics={"*": [mean(), stderr()]})
def graded(name: str, problems: int | None) -> Scorer:
    """Our grader: correct, progress and the benchmark's further numbers; its words are in the score's metadata."""
    graded_by = benchmarks.find(name)
    by_id = {problem.id: problem for problem in graded_by.problems(problems)}

    async def score(state: TaskState, target: Target) -> Score:
        output = state.output
        read = reading.read_text(output.completion, cut=output.stop_reason in CUT)
        grade = grade_reading(graded_by, by_id[str(state.sample_id)], read, all_metrics=True)
        numbers = {key: value for key, value in grade.metrics.items() if not isinstance(value, str)}
        words: dict[str, Any] = {key: value for key, value in grade.metrics.items() if isinstance(value, str)}
        return Score(
            value={"correct": float(grade.correct), "progress": grade.progress, **numbers},
            answer=grade.answer,
            metadata={"status": grade.status.value, **words},
        )

    return score


@inspect.modelapi(name="kvatlas")
class SelectedModel(inspect.ModelAPI):
    """A local model under one setting.

    Arguments (`-M`): `policy`, `kv_budget`, `local_window`, `ratio` and every other parameter of the policy; the model
    options (`dtype`, `device`, `think_close`, ...); `batch_size`; `seed`. The n-th request with the same prompt gets
    the n-th sample under the seed (the config's, else this one), so that epochs differ and all of them can be repeated.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: inspect.GenerateConfig | None = None,
        policy: str = "full",
        batch_size: int = 32,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or inspect.GenerateConfig())
        self.seed = seed
        both = service.model_and_policy(model_name, policy, arguments)
        self.service = service.Service(*both, Sampling(), batch_size, _LINE).start()
        self._requests: Counter[tuple[int, ...]] = Counter()

    async def generate(
        self,
        input: list[inspect.ChatMessage],  # noqa: A002 (Inspect's name)
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: inspect.GenerateConfig,
    ) -> inspect.ModelOutput:
        """Return one answer or several (`num_choices`) to a conversation.

        Raises KvatlasError for unsupported requests: tools, images, and the fields in REFUSED.
        """
        _check_supported(tools, config)
        model = self.service.model
        policy = self.service.policy
        prompt = model.tokens(model.chat.conversation([_message(message) for message in input]))
        try:
            room = service.room_for(model, policy, prompt, None)
        except service.LengthError as error:
            return inspect.ModelOutput.from_content(self.model_name, "", stop_reason="model_length", error=str(error))
        sampling = service.sampling_with(
            self.service.sampling,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=min(room, config.max_tokens or room),
        )
        seed = self.seed if config.seed is None else config.seed
        stop = tuple(config.stop_seqs or ())
        streams = [service.next_stream(seed, prompt, self._requests) for _ in range(config.num_choices or 1)]
        handles = self.service.ask(service.GenerationRequest(prompt, sampling, stream, stop) for stream in streams)
        await asyncio.gather(*(handle.finished() for handle in handles))
        return self._output(handles)

    def _output(self, handles: list[service.RequestHandle]) -> inspect.ModelOutput:
        """Return the finished answers to one prompt, with their cost."""
        setting = self.service.policy.setting
        usages = [handle.generation.result().usage for handle in handles]
        # All answers have the same prompt, which counts once.
        prompt_tokens = usages[0].prompt_tokens
        output_tokens = sum(usage.output_tokens for usage in usages)
        return inspect.ModelOutput(
            model=self.model_name,
            choices=[_choice(self.model_name, handle) for handle in handles],
            usage=inspect.ModelUsage(
                input_tokens=prompt_tokens,
                output_tokens=output_tokens,
                total_tokens=prompt_tokens + output_tokens,
                reasoning_tokens=sum(usage.thinking_tokens for usage in usages),
            ),
            metadata={
                "peak_kv_tokens": max(usage.peak_kv_tokens for usage in usages),
                "compressions": sum(usage.compressions for usage in usages),
                # For `kvatlas import`: the cost of one answer, since several have several costs.
                "kvatlas": {
                    "setting": {"policy": setting.policy, "values": setting.values},
                    "usage": asdict(usages[0]) if len(usages) == 1 else None,
                },
            },
        )

    async def aclose(self) -> None:
        await asyncio.to_thread(self.service.close)

    def max_connections(self) -> int:
        return self.service.batch_size


def _check_supported(tools: list[ToolInfo], config: inspect.GenerateConfig) -> None:
    """Raise KvatlasError for tools, and for fields that would change answers and are not supported."""
    if tools:
        raise KvatlasError("kvatlas models call no tools; expected tasks without tools.")
    for name in REFUSED:
        if getattr(config, name, None):
            raise KvatlasError(f"{name} is set; kvatlas models do not honour it.")


def _choice(name: str, handle: service.RequestHandle) -> inspect.ChatCompletionChoice:
    thinking, answer = handle.text()
    content = [inspect.ContentReasoning(reasoning=thinking)] if thinking else []
    content.append(inspect.ContentText(text=answer))
    message = inspect.ChatMessageAssistant(content=content, model=name, source="generate")
    return inspect.ChatCompletionChoice(
        message=message, stop_reason="stop" if handle.reason() == "stop" else "max_tokens"
    )


def _message(message: inspect.ChatMessage) -> dict[str, str]:
    contents = [] if isinstance(message.content, str) else message.content
    readable = inspect.ContentText | inspect.ContentReasoning
    others = [content for content in contents if not isinstance(content, readable)]
    if message.role == "tool" or others:
        kind = "a tool's message" if message.role == "tool" else f"content of type {others[0].type!r}"
        raise KvatlasError(f"The conversation holds {kind}; expected text.")
    return {"role": message.role, "content": message.text}

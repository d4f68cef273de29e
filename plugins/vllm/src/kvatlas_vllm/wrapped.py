"""The functions of vLLM that are wrapped: four of the model runner, three of the scheduler and its cache.

The scheduler's lists of blocks and the runner's block tables change together: the runner compresses after a step, and
its output tells the scheduler. A request that was preempted is computed again up to each of its compressions by itself,
so that its tokens see what they saw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas_vllm.compressor import Compression, Compressor

#: The name of the setting in vLLM's additional configuration, and of what is added to its objects.
NAME = "kvatlas"


def wrap(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a function that gets the old method first."""

    def replace(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def method(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        setattr(owner, name, method)

    return replace


def refused(config: Any, kv_cache_config: Any) -> list[str]:
    """Return what is configured and cannot be combined with compressed caches, by the names of vLLM's options."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    is_full = len(groups) == 1 and type(spec) is FullAttentionSpec and spec.sliding_window is None
    parallel = config.parallel_config
    faults = {
        "prefix caching (--no-enable-prefix-caching)": config.cache_config.enable_prefix_caching,
        "speculative decoding (--speculative-config)": config.speculative_config is not None,
        "a hybrid model, or one with sliding windows": not is_full,
        "asynchronous scheduling (--no-async-scheduling)": config.scheduler_config.async_scheduling,
        "the second model runner (VLLM_USE_V2_MODEL_RUNNER=0)": config.use_v2_model_runner,
        "several workers (tensor, pipeline or context parallel)": parallel.world_size > 1,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "keys and values of 8 bits (--kv-cache-dtype)": config.cache_config.cache_dtype.startswith("fp8"),
    }
    return [name for name, is_configured in faults.items() if is_configured]


@cache
def wrap_functions() -> None:
    """Wrap the functions, once in a process. Without a setting they do what they did."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_runner(GPUModelRunner)
    wrap_scheduler(Scheduler, KVCacheManager)


def wrap_runner(runner: type) -> None:
    """Wrap the model runner, whose attribute `kvatlas` is its compressor."""

    @wrap(runner, "initialize_kv_cache")
    def initialize_kv_cache(original: Any, self: Any, kv_cache_config: Any, *others: Any, **more: Any) -> None:
        original(self, kv_cache_config, *others, **more)
        values = self.vllm_config.additional_config.get(NAME)
        if values is None:
            return
        faults = refused(self.vllm_config, kv_cache_config)
        if faults:
            raise KvatlasError(f"kvatlas compresses no cache beside {', '.join(faults)}.")
        context = self.compilation_config.static_forward_context
        layers = [context[name] for name in kv_cache_config.kv_cache_groups[0].layer_names]
        setattr(self, NAME, Compressor(self, self.model_config.model, values, layers))

    @wrap(runner, "_update_states")
    def update_states(original: Any, self: Any, scheduler_output: Any) -> Any:
        compressor = getattr(self, NAME, None)
        if compressor is not None:
            resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
            for request_id in scheduler_output.finished_req_ids | resumed:
                compressor.forget(request_id)
        return original(self, scheduler_output)

    @wrap(runner, "_prepare_inputs")
    def prepare_inputs(original: Any, self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = original(self, scheduler_output, num_scheduled_tokens)
        compressor = getattr(self, NAME, None)
        if compressor is not None:
            compressor.shift_slots(scheduler_output.total_num_scheduled_tokens)
        return result

    @wrap(runner, "sample_tokens")
    def sample_tokens(original: Any, self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        output = original(self, grammar_output)
        compressor = getattr(self, NAME, None)
        if compressor is not None and state is not None:
            scheduled = state.scheduler_output.num_scheduled_tokens
            setattr(output, NAME, compressor.after_step(scheduled, state.hidden_states))
        return output


def wrap_scheduler(scheduler: type, manager: type) -> None:
    """Wrap the scheduler, whose requests get a list `kvatlas` of their compressions, and `evicted` since they began."""

    @wrap(manager, "allocate_slots")
    def allocate_slots(original: Any, self: Any, request: Any, *others: Any, **more: Any) -> Any:
        compressions = getattr(request, NAME, [])
        if not compressions:
            return original(self, request, *others, **more)
        # A request that begins again needs no room for tokens that it evicts on its way.
        more["full_sequence_must_fit"] = False
        computed = request.num_computed_tokens
        request.num_computed_tokens = computed - evicted_tokens(request)
        try:
            return original(self, request, *others, **more)
        finally:
            request.num_computed_tokens = computed

    @wrap(scheduler, "_reserve_prefill_lookahead")
    def limit_tokens(original: Any, self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens: int = original(self, request, num_computed_tokens, num_new_tokens)
        for compression in getattr(request, NAME, []):
            if compression.position > num_computed_tokens:
                return min(tokens, compression.position - num_computed_tokens)
        return tokens

    @wrap(scheduler, "update_from_output")
    def update_from_output(original: Any, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = original(self, scheduler_output, model_runner_output)
        for request_id, compression in getattr(model_runner_output, NAME, {}).items():
            request = self.requests.get(request_id)
            if request is not None:
                note_compression(self.kv_cache_manager, request, compression)
        return result


def evicted_tokens(request: Any) -> int:
    """Return the tokens of a request that were computed since it began, and lie in no block."""
    compressions: list[Compression] = getattr(request, NAME, [])
    passed = [each for each in compressions if each.position <= request.num_computed_tokens]
    return passed[-1].position - passed[-1].cached if passed else 0


def note_compression(manager: Any, request: Any, compression: Compression) -> None:
    """Note a compression of a request, and give its tail blocks back."""
    compressions = request.__dict__.setdefault(NAME, [])
    if compression not in compressions:
        compressions.append(compression)
    (groups,) = manager.coordinator.single_type_managers
    blocks = groups.req_to_blocks[request.request_id]
    first = -(-compression.cached // groups.block_size)
    tail = blocks[first:]
    del blocks[first:]
    manager.block_pool.free_blocks(reversed(tail))

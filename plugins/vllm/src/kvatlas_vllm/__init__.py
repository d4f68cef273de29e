"""kvatlas's policies inside vLLM 0.32 (v1, its first model runner).

Active where vLLM's additional configuration has a setting:

    --additional-config '{"kvatlas": {"policy": "window", "kv_budget": 256, "local_window": 64, "ratio": 0.5}}'

Read in this order: `compressor.py` (a request after a step), `layout.py` (keys and values in a backend's blocks),
`wrapped.py` (the functions of vLLM that are wrapped).
"""


def register() -> None:
    """Wrap vLLM's functions, once in each of its processes: the entry point of the plug-in."""
    from kvatlas_vllm.wrapped import wrap_functions

    wrap_functions()

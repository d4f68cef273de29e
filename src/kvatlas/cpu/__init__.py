"""CPU kernels, and models on them.

The rest of the package uses these alone: `native.load` (the kernels, or None) and `native.why_not`;
`packing.pack_model`, with `shared_weights.WeightsFile` for weights that processes share; in backends of attention the
batches and layers of `native` and `native.decoder`; for decoders of Llama's form, on GPUs too, `fused.FusedDecoder` and
`packing.is_plain_llama`.
"""

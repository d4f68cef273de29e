"""Decoding on GPUs: attention by FlexAttention, CUDA graphs, compiled layers.

The engine knows `flex.FlexBackend` alone, by name: it gives the engine compiled layers and the runner of graphs.
"""

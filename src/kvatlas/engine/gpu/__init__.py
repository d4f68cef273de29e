"""Decoding on GPUs: attention by FlexAttention, CUDA graphs, compiled layers."""

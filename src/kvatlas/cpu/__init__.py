"""Layers on native CPU kernels: kernels, packed weights, weights that processes share."""

"""Policies beside kvpress on a real model's activations; run on demand by `make conformance`."""

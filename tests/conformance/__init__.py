"""Policies beside kvpress on a real model's activations, graders on each other's test files: `make conformance`."""

"""Plug-ins for kvatlas: a policy, a benchmark, an executor."""

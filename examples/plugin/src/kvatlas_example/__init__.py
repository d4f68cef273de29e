"""Plug-ins for kvatlas: a policy and a benchmark."""

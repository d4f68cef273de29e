"""Adaptive sweeps: which settings get the next problems, and what their traces decide."""

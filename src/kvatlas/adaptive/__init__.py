"""Adaptive sweeps, which decode as many problems of each setting as the recommendation needs.

Read `decisions` (what traces decide), then `allocation` (which settings get the next problems).
"""

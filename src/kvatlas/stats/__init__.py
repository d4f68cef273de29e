"""Estimates with intervals, paired comparisons, and the maps of a run."""

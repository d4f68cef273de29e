"""Screens of a grid: every setting reads the traces of the full cache, without decoding."""

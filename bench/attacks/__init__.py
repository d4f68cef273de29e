"""The kinds of attack that `bench/attack.py` counts."""

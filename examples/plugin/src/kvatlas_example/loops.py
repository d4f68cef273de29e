"""A measure: loops in the thinking, by which compressed models often die."""

from kvatlas import Measure


def repeated_share(trace, reading):
    """Return the share of the runs of eight words that the thinking has had before; None if it is shorter."""
    words = reading.thinking.split()
    runs = [tuple(words[start : start + 8]) for start in range(len(words) - 7)]
    return 1 - len(set(runs)) / len(runs) if runs else None


repeated_8grams = Measure("repeated_8grams", repeated_share, title="repeated 8-grams", is_share=True)

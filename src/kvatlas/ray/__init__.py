"""The executor of a Ray cluster."""

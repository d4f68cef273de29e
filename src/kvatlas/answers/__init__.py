"""The grading of a text: the answer that it gives, and whether that equals the reference."""

"""What a map says: words, terminal, and the self-contained page."""

"""What a map can say: tests of all its cells, the plateau of the best, what to choose."""

"""Keys and values in fewer bits.

The rest of the package uses these alone: `storage.PackedRows`, by which the cache writes and reads its rows, and
`key_biases.find_key_biases` of a model.
"""

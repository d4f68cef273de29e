"""A setting for another engine, and proof that an endpoint serves it."""

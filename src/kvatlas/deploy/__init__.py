"""Export of a setting to another engine, and the check that an endpoint serves it."""

"""kvatlas: maps of what a reasoning model can forget under KV-cache token selection."""

__version__ = "0.1.0"

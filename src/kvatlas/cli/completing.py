"""What the shell completes besides commands and options: names of policies, models and benchmarks."""

from __future__ import annotations


def policies(incomplete: str) -> list[str]:
    """Policies whose names begin so."""
    from kvatlas.policies import PRESETS
    from kvatlas.policies import policies as registry

    return [name for name in (*registry.names(), *PRESETS) if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Models that ship with kvatlas, and how the names of others begin."""
    from kvatlas.models import embedded
    from kvatlas.models.gguf import PACKAGED

    return [name for name in (*embedded(), *PACKAGED, "hf:") if name.startswith(incomplete)]


def benchmarks(incomplete: str) -> list[str]:
    """Benchmarks, and families by how their names begin."""
    from kvatlas.benchmarks import families

    return [name for name in families.names() if name.startswith(incomplete)]

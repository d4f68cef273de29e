"""What the shell completes besides commands and options: names of policies, models, benchmarks, metrics and maps."""

from __future__ import annotations

from pathlib import Path


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


def metrics(incomplete: str) -> list[str]:
    """Metrics that every run has, `pass@2` for those of several samples."""
    from kvatlas.stats.estimates.metrics import METRICS, RULES

    names = [*METRICS, *(name.replace("K", "2") for name in RULES)]
    return [name for name in names if name.startswith(incomplete)]


def metrics_and_costs(incomplete: str) -> list[str]:
    """The same, and what settings cost."""
    from kvatlas.stats.estimates.metrics import COSTS

    return [*metrics(incomplete), *(name for name in COSTS if name.startswith(incomplete))]


def maps(incomplete: str) -> list[str]:
    """Published maps, and files and folders."""
    from kvatlas.results.csv_maps import PUBLISHED, published_names

    folder, _, begun = incomplete.rpartition("/")
    near = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".")
    paths = [
        f"{path}/" if path.is_dir() else str(path) for path in sorted(near.glob("*")) if path.name.startswith(begun)
    ]
    published = [PUBLISHED + name for name in published_names()]
    return [*paths, *(name for name in published if name.startswith(incomplete))]

"""What Inspect's entry point loads: our tasks, and our models."""

from kvatlas.integrations.inspect_provider import kvatlas
from kvatlas.integrations.inspect_tasks import benchmark, seqbench

__all__ = ["benchmark", "kvatlas", "seqbench"]

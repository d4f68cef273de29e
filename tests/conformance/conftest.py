"""The real model, its activations and the results, once for the whole suite."""

import platform
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.conformance.agreement import Results
from tests.conformance.environment import CACHE, ROOT
from tests.conformance.real import NAME, Activations, activations, real_model


@pytest.fixture(scope="session")
def real() -> Activations:
    """Activations of the real model on its own text."""
    return activations(real_model(CACHE / "smollm2"))


@pytest.fixture(scope="session")
def results(real: Activations, request: pytest.FixtureRequest) -> Iterator[Results]:
    """Every test adds to it; in bench/results/ where the whole suite passed."""
    model = real.model
    result = Results(
        {
            "model": {"name": model.name, "weights": model.weights_digest, "tokenizer": model.tokenizer_digest},
            "tokens": {"prompt": real.prompt_length, "all": len(real.tokens)},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("kvatlas", "torch", "transformers")},
            },
        }
    )
    yield result
    result.write(CACHE / "conformance.json")
    whole = result.facts.keys() >= {"kvpress", "generate"}
    # What an embedded model shows is no news of a real one.
    if whole and model.name == NAME and not request.session.testsfailed:
        result.write(ROOT / "bench" / "results" / "conformance.json")

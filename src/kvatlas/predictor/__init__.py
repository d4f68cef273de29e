"""Training of the DynTS importance head: labels from the answer's attention, the fit, and how good it is."""

from kvatlas.predictor.labels import Examples, answer_attention, examples
from kvatlas.predictor.training import Quality, evaluate, train

__all__ = ["Examples", "Quality", "answer_attention", "evaluate", "examples", "train"]

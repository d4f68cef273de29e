"""Training of the DynTS importance head: labels from the answer's attention, the fit, and how good it is."""

from kvatlas.predictor.labels import Examples, answer_attention, examples, label_trace
from kvatlas.predictor.training import Quality, evaluate, provenance_of, save_head, train

__all__ = [
    "Examples",
    "Quality",
    "answer_attention",
    "evaluate",
    "examples",
    "label_trace",
    "provenance_of",
    "save_head",
    "train",
]

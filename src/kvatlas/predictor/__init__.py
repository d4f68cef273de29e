"""Training of the DynTS importance head: labels from the answer's attention, the fit, and how good it is."""

from kvatlas.predictor.labels import REASONS, Examples, answer_attention, label_trace, left_out
from kvatlas.predictor.training import HeadLoss, Quality, evaluate, provenance_of, save_head, train

__all__ = ["REASONS", "Examples", "HeadLoss", "Quality", "answer_attention", "evaluate", "label_trace", "left_out"]
__all__ += ["provenance_of", "save_head", "train"]

"""One engine for many who ask at once: an answer is the same whoever else asks (server, Inspect, lm-eval)."""

from kvatlas.service.detokenizer import Decoder, Detokenizer, written
from kvatlas.service.logits import Steering, TokenLogprob
from kvatlas.service.request_validation import GenerationRequest, chosen, stream_of
from kvatlas.service.service import BusyError, ClosedError, RequestHandle, Service

__all__ = [
    "BusyError",
    "ClosedError",
    "Decoder",
    "Detokenizer",
    "GenerationRequest",
    "RequestHandle",
    "Service",
    "Steering",
    "TokenLogprob",
    "chosen",
    "stream_of",
    "written",
]

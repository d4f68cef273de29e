"""CPU kernels in C that every target computes to the same bits, or a sentence why there are none here."""

from kvatlas.native.library import LANES, Linear, Native, PagedBatch, load, pack, why_not

__all__ = ["LANES", "Linear", "Native", "PagedBatch", "load", "pack", "why_not"]

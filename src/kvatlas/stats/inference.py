"""Former module of tests and limits, whose documented names have other homes."""

from __future__ import annotations

from kvatlas.former_names import former_names

__getattr__ = former_names(
    __name__,
    {
        "Contrast": "kvatlas.stats.numerics.arrays:Contrast",
        "Test": "kvatlas.stats.verdicts:Test",
        "TestMethod": "kvatlas.stats.verdicts:TestMethod",
    },
)

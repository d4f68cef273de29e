"""The published maps of R1-Llama, and the texts of a figure."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from kvatlas.core import Map
from kvatlas.figures.style import save
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import with_binomial_bounds


@pytest.fixture(scope="session")
def llama() -> list[Map]:
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))


def texts(figure: Figure, folder: Path) -> list[str]:
    """Return the texts in an SVG of the figure."""
    path, *_ = save(figure, folder / "figure.svg")
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]

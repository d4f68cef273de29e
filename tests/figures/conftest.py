"""The published maps of R1-Llama, and the texts of a figure."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from kvatlas.core import Cell, Estimate, Map, Setting
from kvatlas.figures.style import save
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import with_binomial_bounds


@pytest.fixture(scope="session")
def llama() -> list[Map]:
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))


def dense(size: int) -> Map:
    """A map of many cells."""
    columns = tuple(n / 100 for n in range(1, size + 1))
    cells = {
        (w, r): Cell(Setting.from_parameters("p"), Estimate(0.5, 0.4, 0.6, 30, 1))
        for w in range(1, size + 1)
        for r in columns
    }
    return Map("m", "b", "pass@1", "p", (("local_window", tuple(range(1, size + 1))), ("ratio", columns)), cells)


def texts(figure: Figure, folder: Path) -> list[str]:
    """Return the texts in an SVG of the figure."""
    path, *_ = save(figure, folder / "figure.svg")
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]

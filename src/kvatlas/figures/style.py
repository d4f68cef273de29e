"""What all pictures share: colours, labels, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

from kvatlas.core import Cell, Estimate, Map

#: Colour maps of ColorBrewer (Brewer 2003) by the names of matplotlib: values, costs, differences (low is red). All are
#: perceptually ordered and safe for the colour-blind.
VALUES, COSTS, DIFFERENCES = "YlGnBu", "YlOrBr", "RdBu"
#: Distinct under all common colour deficiencies (Okabe and Ito 2008), for lines, and their markers.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
#: The same, lightened for a dark ground.
DARK_LINES = ("#56b4e9", "#f58b4c", "#2fc79a", "#e3a3c8", "#f0c04a", "#a9c8ff", "#a7adb3", "#e3e8ee")
MARKERS = "osD^vPX*"
DARK_TEXT = "#111111"
LIGHT_TEXT = "#ffffff"

LABELS: Mapping[str, str] = {
    "local_window": "Local Window Size",
    "ratio": "Ratio",
    "kv_budget": "KV Budget",
    "budget_over": "Budget Over",
    "every": "Compression Every (Tokens)",
    "pass@1": "Pass@1",
    "progress": "Progress Ratio",
    "policy": "Policy",
}


def label(name: str) -> str:
    """A parameter or metric as it stands on an axis: `local_window` is `Local Window Size`.

    What was graded again by a grader is `Pass@1 by GRADER`.
    """
    graded, _, grader = name.partition(":")
    if grader and graded == "graded":
        return f"Pass@1 by {grader}"
    return LABELS.get(name, name.replace("_", " ").title())


def model(name: str) -> str:
    """A model as titles show it: `embedded:tiny-llama` is `tiny-llama`, `hf:/models/R1-Llama` is `R1-Llama`."""
    kind, _, rest = name.partition(":")
    return rest.rstrip("/").rpartition("/")[2] if kind in ("embedded", "hf") and rest else name


def fixed(value: float, digits: int = 1) -> str:
    """A number with so many decimals; halves go away from 0, as on the page: 51.25 is `51.3`, -0.04 is `0.0`."""
    # To four decimals first, as exports and JSON are: 0.2875 is 28.8 everywhere, whatever its last binary digit.
    rounded = Decimal(round(value, 4)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{rounded or abs(rounded):f}"


def percent(value: float, digits: int = 1) -> str:
    """A share in [0, 1] as a percentage without the sign: 0.4933 is `49.3`."""
    return fixed(100 * value, digits)


def signed(value: float, digits: int = 1, minus: str = "−") -> str:
    """A number with its sign: 3.2 is `+3.2`, -3.2 is `−3.2` (a true minus, for text the hyphen), 0 is `0.0`."""
    text = fixed(value, digits)
    return text.replace("-", minus) if float(text) <= 0 else f"+{text}"


def difference(share: float) -> str:
    """A difference of shares in points, as text: 0.032 is `+3.2`."""
    return signed(100 * share, minus="-")


def interval(estimate: Estimate) -> str:
    """The interval as `32.6–65.4` in percent, empty where it is unknown."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{percent(estimate.low)}–{percent(estimate.high)}"


def baseline_texts(cells: Mapping[str, Cell]) -> tuple[tuple[str, str], ...]:
    """The baselines as texts, each with its interval: (`full 97.0`, `94.1–98.6`)."""
    return tuple((f"{name} {percent(cell.estimate.value)}", interval(cell.estimate)) for name, cell in cells.items())


def scale(maps: Sequence[Map]) -> tuple[float, float]:
    """The smallest and largest value of the maps' cells in percent, a point apart at least."""
    return span([100 * cell.estimate.value for shown in maps for cell in shown.cells.values()])


def span(values: Sequence[float], centred: bool = False, least: float = 1.0) -> tuple[float, float]:
    """From the smallest to the largest value, `least` apart at least; as far below 0 as above it if `centred`.

    What is widened stays within 0 to 100 where the values do: there are no percentages beyond.
    """
    low, high = min(values, default=0.0), max(values, default=100.0)
    if centred:
        reach = max(abs(low), abs(high), least)
        return -reach, reach
    if high - low >= least:
        return low, high
    start = (low + high - least) / 2
    if low >= 0 and high <= 100:
        start = min(max(start, 0.0), 100 - least)
    return start, start + least


def steps(colours: str) -> list[str]:
    """The colours, as `#rrggbb`, between which matplotlib's ColorBrewer map of that name mixes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    count = 11 if colours == DIFFERENCES else 9
    return [to_hex(colour) for colour in colormaps[colours].resampled(count)(range(count))]


def colour(value: float, low: float, high: float, colours: str = VALUES) -> str:
    """The colour of a value on the scale from low to high, as `#rrggbb`, by matplotlib's map of that name."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps[colours](min(max((value - low) / (high - low), 0.0), 1.0)))


def text_on(background: str) -> str:
    """The text colour, dark or light, with the higher contrast to a background (WCAG 2.2, relative luminance)."""
    from matplotlib.colors import to_rgb

    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return DARK_TEXT if (luminance + 0.05) ** 2 > 1.05 * 0.056 else LIGHT_TEXT

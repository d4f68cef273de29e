"""What all pictures share: colours, labels, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvatlas.core import Cell, Estimate, Map

#: Yellow-green-blue of ColorBrewer (Brewer 2003), nine steps: perceptually ordered, safe for the colour-blind.
YLGNBU = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
#: Yellow-orange-brown for costs, red-blue (low is red) for differences: ColorBrewer too, safe for the colour-blind.
YLORBR = ("#ffffe5", "#fff7bc", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02", "#993404", "#662506")
RDBU = ("#b2182b", "#d6604d", "#f4a582", "#fddbc7", "#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac")
#: Distinct under all common colour deficiencies (Okabe and Ito 2008), for lines.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
DARK_TEXT = "#111111"
LIGHT_TEXT = "#ffffff"

LABELS: Mapping[str, str] = {
    "local_window": "Local Window Size",
    "ratio": "Ratio",
    "kv_budget": "KV Budget",
    "pass@1": "Pass@1",
    "progress": "Progress Ratio",
    "policy": "Policy",
}


def label(name: str) -> str:
    """A parameter or metric as it stands on an axis: `local_window` is `Local Window Size`."""
    return LABELS.get(name, name.replace("_", " ").title())


def model(name: str) -> str:
    """A model as titles show it: `embedded:tiny-llama` is `tiny-llama`, `hf:/models/R1-Llama` is `R1-Llama`."""
    kind, _, rest = name.partition(":")
    return rest.rstrip("/").rpartition("/")[2] if kind in ("embedded", "hf") and rest else name


def percent(value: float, digits: int = 1) -> str:
    """A share in [0, 1] as a percentage without the sign: 0.4933 is `49.3`."""
    # Rounded twice, as exports and JSON are: 0.2875 is 28.8 everywhere, whatever its last binary digit.
    return f"{round(100 * value, 4):.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign, a true minus among them: -3.2 is `−3.2`, 0 is `0.0`."""
    text = f"{round(value, 4):+.{digits}f}".replace("-", "−")
    return text[1:] if not float(f"{abs(value):.{digits}f}") else text


def interval(estimate: Estimate) -> str:
    """The interval as `32.6–65.4` in percent, empty where it is unknown."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{percent(estimate.low)}–{percent(estimate.high)}"


def beside(cells: Mapping[str, Cell]) -> list[str]:
    """The baselines as texts: `full 97.0 (94.1–98.6)`, `window 12.0 (8.3–17.1)`."""
    return [
        f"{name} {percent(cell.estimate.value)}" + (f" ({between})" if (between := interval(cell.estimate)) else "")
        for name, cell in cells.items()
    ]


def scale(maps: Sequence[Map]) -> tuple[float, float]:
    """The smallest and largest value of the maps' cells in percent, a point apart at least."""
    return span([100 * cell.estimate.value for one in maps for cell in one.cells.values()])


def span(values: Sequence[float], centred: bool = False, least: float = 1.0) -> tuple[float, float]:
    """From the smallest to the largest value, `least` apart at least; as far below 0 as above it if `centred`."""
    low, high = min(values, default=0.0), max(values, default=100.0)
    if centred:
        reach = max(abs(low), abs(high), least)
        return -reach, reach
    return (low, high) if high - low >= least else ((low + high - least) / 2, (low + high + least) / 2)


def colour(value: float, low: float, high: float, steps: Sequence[str] = YLGNBU) -> str:
    """The colour of a value on the scale from low to high, as `#rrggbb`, mixed between `steps`."""
    place = min(max((value - low) / (high - low), 0.0), 1.0) * (len(steps) - 1)
    step = min(int(place), len(steps) - 2)
    mixed = (
        round(start + (end - start) * (place - step))
        for start, end in zip(_rgb(steps[step]), _rgb(steps[step + 1]), strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def text_on(background: str) -> str:
    """The text colour, dark or light, with the higher contrast to a background (WCAG 2.2, relative luminance)."""
    channels = (part / 255 for part in _rgb(background))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return DARK_TEXT if (luminance + 0.05) ** 2 > 1.05 * 0.056 else LIGHT_TEXT


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

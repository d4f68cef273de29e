"""Parts that all figures share: names and numbers as text, colours, options, the sheet of panels, and files."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

LABELS: Mapping[str, str] = {
    "local_window": "Local Window Size",
    "ratio": "Ratio",
    "kv_budget": "KV Budget",
    "kv_bits": "Bits",
    "key_bits": "Key Bits",
    "value_bits": "Value Bits",
    "budget_over": "Budget Over",
    "every": "Compression Every (Tokens)",
    "pass@1": "Pass@1",
    "progress": "Progress Ratio",
    "policy": "Policy",
}


def label(name: str) -> str:
    """A parameter or metric as it stands on an axis: `local_window` is `Local Window Size`.

    A metric that was graded again is `Pass@1 by GRADER`.
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


def sentence(text: str) -> str:
    """A text with a capital letter and a full stop; the name of a parameter stays as it is."""
    first = text[:1] if "=" in text.partition(" ")[0] else text[:1].upper()
    return f"{first}{text[1:]}{'' if text.endswith('.') else '.'}"


#: Colour maps of ColorBrewer (Brewer 2003) by the names of matplotlib: values, costs, counts, differences (low is red).
#: All are perceptually ordered and safe for the colour-blind.
VALUES, COSTS, COUNTS, DIFFERENCES = "YlGnBu", "YlOrBr", "Blues", "RdBu"
#: The pale part of each, on which black type has a contrast of 4.5 or more.
_PALE = {VALUES: (0.0, 0.62), COSTS: (0.0, 0.62), COUNTS: (0.05, 0.68), DIFFERENCES: (0.22, 0.78)}
#: The colour of text on any of them.
ON_COLOUR = "#111111"
#: Distinct under all common colour deficiencies (Okabe and Ito 2008), for lines, and their markers.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
MARKERS = "osD^vPX*"


class Palette(NamedTuple):
    """Colours of a figure on a light or on a dark ground."""

    ground: str
    ink: str
    #: Lesser text, and lines of a grid.
    soft: str
    #: Text that must not be missed.
    warning: str
    lines: Sequence[str]
    #: A missing cell and its hatching.
    missing: tuple[str, str]
    published: str


LIGHT = Palette(
    "#ffffff", "#111111", "#555555", "#a11a1a", LINES, ("#eeeeee", "#bbbbbb"), "#c4c4c4",
)  # fmt: skip
DARK = Palette(
    "#12161b", "#e3e8ee", "#aab4bf", "#ff9b90",
    ("#56b4e9", "#f58b4c", "#2fc79a", "#e3a3c8", "#f0c04a", "#a9c8ff", "#a7adb3", "#e3e8ee"),
    ("#1b2027", "#47505a"), "#525c66",
)  # fmt: skip


def span(values: Sequence[float], centred: bool = False, least: float = 1.0) -> tuple[float, float]:
    """From the smallest to the largest value, `least` apart at least; as far below 0 as above it if `centred`.

    A scale that is widened stays within 0 to 100 where the values do: there are no percentages beyond.
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


@cache
def steps(colours: str) -> list[str]:
    """The nine colours, as `#rrggbb`, between which a scale mixes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    low, high = _PALE[colours]
    return [to_hex(colormaps[colours](low + (high - low) * step / 8)) for step in range(9)]


@cache
def colour_map(colours: str) -> LinearSegmentedColormap:
    """The scale of these colours for matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(colours, steps(colours))


#: The font that comes with matplotlib, and what stands in for it.
FONTS = ["DejaVu Sans", "sans-serif"]
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
#: Points of a figure's title, of a panel's name, and of other text.
TITLE_TYPE, NAME_TYPE, SMALL_TYPE = 9.0, 7.5, 6.5
#: Points: no text of a figure is smaller on paper.
LEAST_TYPE = 5.0
#: Inches of the border around a figure, and of a line of text for each point of its type.
EDGE, LINE = 0.07, 1.35 / 72


class Line(NamedTuple):
    """A line of text above or below the panels."""

    text: str
    size: float
    colour: str
    weight: str = "normal"

    @property
    def high(self) -> float:
        """Its height in inches."""
        return self.size * LINE


@dataclass(frozen=True)
class Look:
    """The options of all figures.

    `columns` are those of a paper that the figure fills, None for a figure as wide as it needs. `labels` are texts by
    the names of models, benchmarks, policies, axes and metrics. `intervals` is True for intervals in the cells of maps,
    False for no intervals at all. Raises KvatlasError if `columns` is neither 1 nor 2.
    """

    columns: int | None = None
    dark: bool = False
    intervals: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    #: The names that a figure shows, which labels may replace.
    _names: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.columns not in (None, *WIDTHS):
            raise KvatlasError(f"--look columns: expected 1 or 2, got {self.columns}.")

    @property
    def colours(self) -> Palette:
        """The colours on this ground."""
        return DARK if self.dark else LIGHT

    @property
    def width(self) -> float | None:
        """Inches, None for as many as the figure needs."""
        return None if self.columns is None else WIDTHS[self.columns]

    @property
    def widest(self) -> float:
        """Inches that the figure may take."""
        return self.width or WIDTHS[2]

    def named(self, name: str) -> str:
        """The text for this name in the figure."""
        self._names[name] = None
        return self.labels.get(name, name)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Figures that are drawn and written inside look like this."""
        import matplotlib as mpl

        ground, ink, *_ = self.colours
        settings: Any = {
            "font.family": FONTS,
            "font.size": 8.0,
            "axes.linewidth": 0.6,
            "svg.fonttype": "none",
            "svg.hashsalt": "kvatlas",
            "pdf.fonttype": 42,
            "text.parse_math": False,
            **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), ground),
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), ink),
            **dict.fromkeys(("xtick.color", "ytick.color"), ink),
        }
        with mpl.rc_context(settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield


def text_width(text: str, size: float = SMALL_TYPE, bold: bool = False) -> float:
    """Inches of a text."""
    return size * _unit_width(visible(text), bold)


@lru_cache(100_000)
def _unit_width(text: str, bold: bool) -> float:
    """Inches of a text in type of one point."""
    renderer, fonts = _renderer()
    # A fiftieth more, since small type is wider than its share of large type.
    return 1.02 * float(renderer.get_text_width_height_descent(text, fonts[bold], False)[0]) / 7200


@cache
def _renderer() -> tuple[Any, list[Any]]:
    """The renderer that measures texts, and the normal and the bold font at 100 points."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    renderer: Any = RendererAgg
    return renderer(1, 1, 72), [FontProperties(family=FONTS, size=100, weight=weight) for weight in ("normal", "bold")]


def wrapped(text: str, inches: float, size: float = SMALL_TYPE, bold: bool = False) -> list[str]:
    """The lines into which a text breaks within a width; a number stays with its ` %`, too long words are broken."""
    lines = [""]
    for word in text.replace(" %", "\u00a0%").split(" "):
        line = f"{lines[-1]} {word}" if lines[-1] else word
        if text_width(line, size, bold) <= inches:
            lines[-1] = line
            continue
        if lines[-1]:
            lines.append("")
        # After a mark if possible, else anywhere.
        for part in [word] if text_width(word, size, bold) <= inches else re.split(r"(?<=[-_/,=(])", word):
            for piece in [part] if text_width(part, size, bold) <= inches else part:
                if lines[-1] and text_width(lines[-1] + piece, size, bold) > inches:
                    lines.append("")
                lines[-1] += piece
    return [line.replace("\u00a0", " ") for line in lines if line]


def lines(text: str, inches: float, size: float, colour: str, weight: str = "normal") -> list[Line]:
    """The lines into which a text breaks within a width."""
    return [Line(part, size, colour, weight) for part in wrapped(text, inches, size, weight == "bold")]


def fitting(inches: float, texts: Iterable[str], largest: float, bold: bool = False) -> float:
    """Points, `largest` at most, at which each of the texts fits into a width."""
    longest = max((text_width(text, 1, bold) for text in texts), default=0)
    return min(largest, (inches - 2 / 72) / longest) if longest else largest


def across(count: int, most: int, fits: Callable[[int], bool] = lambda number: True) -> int:
    """The number of panels in a row: the largest up to `most` that `fits`, in rows of like length; 0 if none fits."""
    fitting = next((number for number in range(min(most, count), 0, -1) if fits(number)), 0)
    return math.ceil(count / math.ceil(count / fitting)) if fitting else 0


class Margins(NamedTuple):
    """Inches around panels: left and right of a row, between two in a row, above and below each."""

    left: float
    right: float
    between: float
    above: float
    below: float

    def inner(self, width: float, across: int) -> float:
        """The width of a panel in a row of a figure."""
        return (width - self.left - self.right - (across - 1) * self.between) / across


def sheet(
    look: Look,
    size: tuple[float, float],
    count: int,
    across: int,
    margins: Margins,
    *,
    title: str = "",
    about: Iterable[str] = (),
    notes: Iterable[Note] = (),
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, `across` in a row, under its title and a line about it, and above its notes.

    `size` is the width of the figure and the height of a panel, in inches.
    """
    from matplotlib.figure import Figure

    (width, high), colours = size, look.colours
    about = "; ".join(filter(None, dict.fromkeys(about)))
    about = about[:1].upper() + about[1:]
    kept = [note for note in dict.fromkeys(notes) if look.intervals is not False or note.kind is not NoteKind.INTERVAL]
    room = width - 2 * EDGE
    urgent, calm = ([note.text for note in kept if note.is_warning == warns] for warns in (True, False))
    head = lines(title, room, TITLE_TYPE, colours.ink, "bold") + lines(about, room, SMALL_TYPE, colours.soft)
    foot = [line for text in urgent for line in lines(text, room, SMALL_TYPE, colours.warning, "bold")]
    foot += lines(" ".join(map(sentence, calm)), room, SMALL_TYPE, colours.soft)
    top, bottom = (EDGE + sum(line.high for line in part) + 0.05 * bool(part) for part in (head, foot))
    down = margins.above + high + margins.below
    height = top + math.ceil(count / across) * down + bottom
    figure = Figure((width, height))
    for part, y in ((head, height - EDGE), (foot, EDGE + sum(line.high for line in foot))):
        for line in part:
            y -= line.high
            place = (EDGE / width, (y + 0.3 * line.size / 72) / height)
            figure.text(*place, line.text, fontsize=line.size, color=line.colour, fontweight=line.weight)
    inner = margins.inner(width, across)
    panels = []
    for number in range(count):
        row, column = divmod(number, across)
        x, y = margins.left + column * (inner + margins.between), height - top - row * down - margins.above - high
        panels.append(figure.add_axes((x / width, y / height, inner / width, high / height)))
    return figure, panels


def write_above(panel: Axes, lines: Sequence[Line]) -> None:
    """Write lines over a panel, the last one nearest to it."""
    y = 4.0
    for line in reversed(lines):
        panel.annotate(
            line.text, (0, 1), (0, y), xycoords="axes fraction", textcoords="offset points", va="baseline",
            fontsize=line.size, color=line.colour, fontweight=line.weight,
        )  # fmt: skip
        y += 72 * line.high


def line_axes(panel: Axes, look: Look, grid: str = "both") -> None:
    """Thin ticks, a pale grid and open sides for a panel of lines."""
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=SMALL_TYPE)
    panel.grid(axis=grid, color=look.colours.soft, alpha=0.3, linewidth=0.5)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def settle(figure: Figure, look: Look) -> None:
    """Make all texts of a figure visible, so that none steers what shows it.

    Raises KvatlasError if a label is for a name that the figure does not show.
    """
    from matplotlib.text import Text

    for name in look.labels:
        if name not in look._names:
            raise KvatlasError(f"The figure does not show the name {name!r}; it shows: {', '.join(look._names)}.")
    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text()))


SUFFIXES = (".png", ".svg", ".pdf")
#: Pixels of a PNG at most: larger figures are written with fewer dots per inch.
_PIXELS = 80_000_000


def check_figure(path: Path) -> None:
    """Raise KvatlasError for a suffix that no figure has and a path that cannot be written to."""
    from kvatlas.results.export import check_target

    if path.suffix.lower() not in SUFFIXES:
        raise KvatlasError(f"A figure cannot be written as {path.name!r}; the name must end in {', '.join(SUFFIXES)}.")
    check_target(path)


def save(figure: Figure, path: Path, maps: Sequence[Map] = (), *, data: str | None = None) -> list[Path]:
    """Write a figure as PNG (300 dpi), SVG (text as text) or PDF (fonts embedded), and return the paths written.

    Its data is written next to it as `NAME.data.csv`: `data` as it is, else `maps` as a CSV map. Equal figures give
    equal bytes. Raises KvatlasError for another suffix and for a path that cannot be written.
    """
    from kvatlas.results.export import csv_text, replacing

    check_figure(path)
    content = rendered(figure, path.suffix.lower())
    with replacing(path) as part:
        part.write_bytes(content)
    if data is None and len({(map_.metric, *(name for name, _ in map_.axes)) for map_ in maps}) == 1:
        data = csv_text(maps)
    if data is None:
        return [path]
    beside = path.with_suffix(".data.csv")
    with replacing(beside) as part:
        part.write_text(data, "utf-8", newline="")
    return [path, beside]


def rows_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the header first, as the text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """A figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`."""
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    dots = min(dots, int((_PIXELS / (figure.get_figwidth() * figure.get_figheight())) ** 0.5))
    file = io.BytesIO()
    with Look().applied():
        figure.savefig(file, format=suffix[1:], dpi=dots, metadata=dates, facecolor=figure.get_facecolor())
    return file.getvalue()

"""What all pictures share: names and numbers as text, colours, the options of figures, canvas, and files."""

from __future__ import annotations

import csv
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


#: Colour maps of ColorBrewer (Brewer 2003) by the names of matplotlib: values, costs, differences (low is red). All are
#: perceptually ordered and safe for the colour-blind.
VALUES, COSTS, DIFFERENCES = "YlGnBu", "YlOrBr", "RdBu"
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
    floor: str
    #: The optimal path of a maze, a model's, and its first error; all can be read as text.
    paths: tuple[str, str, str]


LIGHT = Palette(
    "#ffffff", "#111111", "#444444", "#a11a1a", LINES, ("#eeeeee", "#bbbbbb"), "#c4c4c4", "#e4e7ea",
    ("#0072b2", "#b84f00", "#c1121f"),
)  # fmt: skip
DARK = Palette(
    "#12161b", "#e3e8ee", "#aab4bf", "#ff9b90",
    ("#56b4e9", "#f58b4c", "#2fc79a", "#e3a3c8", "#f0c04a", "#a9c8ff", "#a7adb3", "#e3e8ee"),
    ("#1b2027", "#47505a"), "#525c66", "#2b323a", ("#56b4e9", "#f58b4c", "#ff9b90"),
)  # fmt: skip


def scale(maps: Sequence[Map]) -> tuple[float, float]:
    """The smallest and largest value of the maps' cells in percent, a point apart at least."""
    return span([100 * cell.estimate.value for map_ in maps for cell in map_.cells.values()])


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
    return "#111111" if (luminance + 0.05) ** 2 > 1.05 * 0.056 else "#ffffff"


#: The font that comes with matplotlib.
FONT = "DejaVu Sans"
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
#: Points of the text at the foot, inches from one of its lines to the next.
SMALL_TYPE, LINE_HEIGHT = 6.5, 0.128
#: Points: no text of a figure is smaller on paper.
LEAST_TYPE = 5.0


class Foot(NamedTuple):
    """The lines under a figure as (text, colour, weight), and all of it as the text of a caption."""

    lines: Sequence[tuple[str, str, str]] = ()
    caption: str = ""


#: The options of the command line by the field of `Look` that each of them sets: placeholder and help.
OPTIONS: Mapping[str, tuple[str | None, str]] = {
    "columns": (None, "Fill one or two columns of a paper (3.35 or 7 inches)."),
    "layout": ("ROWSxPANELS", "Rows, and panels in a row, such as 1x4."),
    "dark": (None, "On a dark ground."),
    "font": ("NAME", "An installed font instead of DejaVu Sans."),
    "label": ("NAME=TEXT", "The text for a name in the figure. Repeat it."),
    "intervals": (None, "Without intervals."),
    "notes": (None, "Notes in the caption alone, but for warnings; needs --caption."),
    "caption": ("FILE.tex", "Write the notes as a LaTeX caption, too."),
}


@dataclass(frozen=True)
class Look:
    """The options of all figures.

    `layout` is ROWSxPANELS, both 1 or more; `label` has NAME=TEXT for models, benchmarks, policies, axes and metrics.
    Without `notes` warnings alone stand under a figure, and the rest in its `caption`. Raises KvatlasError if an option
    is not valid.
    """

    columns: int | None = None
    dark: bool = False
    layout: str | None = None
    font: str = FONT
    label: list[str] | None = None
    intervals: bool = True
    notes: bool = True
    caption: Path | None = None
    #: The names that a figure asked for, which labels may replace.
    _names: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from kvatlas.results.export import check_target

        if self.columns not in (None, *WIDTHS):
            raise KvatlasError(f"--columns: expected 1 or 2, got {self.columns}.")
        if self.layout is not None and not re.fullmatch("[1-9][0-9]{0,2}x[1-9][0-9]{0,2}", self.layout):
            raise KvatlasError(f"--layout: expected ROWSxPANELS, such as 1x4, got {self.layout!r}.")
        for text in self.label or ():
            if "=" not in text:
                raise KvatlasError(f"--label: expected NAME=TEXT, got {text!r}.")
        if self.font != FONT:
            from matplotlib import font_manager

            names = sorted({FONT, *font_manager.get_font_names()})
            if self.font not in names:
                raise KvatlasError(f"There is no font {self.font!r} here; there are: {', '.join(names)}.")
        if self.caption is not None:
            check_target(self.caption)
        elif not self.notes:
            raise KvatlasError("--no-notes leaves notes to the caption alone; name its file with --caption FILE.tex.")

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

    def across(self, count: int, usual: int) -> int:
        """How many of so many panels stand in a row: as the layout says, else the usual number."""
        if self.layout is None:
            return max(1, min(count, usual))
        rows, across = map(int, self.layout.split("x"))
        if rows * across < count:
            raise KvatlasError(
                f"The layout {self.layout} has room for {rows * across} panels, and the figure has {count}."
            )
        return across

    def named(self, name: str) -> str:
        """The text for this name in the figure."""
        self._names[name] = None
        return next((text[len(name) + 1 :] for text in self.label or () if text.startswith(f"{name}=")), name)

    def foot(self, notes: Iterable[Note], about: Iterable[str], inches: float) -> Foot:
        """The lines under a figure so wide: notes, warnings in their colour, then sentences about the figure."""
        notes, about, palette = list(notes), [text for text in about if text], self.colours
        lines = []
        for note in notes:
            colour = palette.warning if note.is_warning or note.kind is NoteKind.SCALES else palette.soft
            if self.notes or note.is_warning:
                weight = "bold" if note.is_warning else "normal"
                lines += [(line, colour, weight) for line in wrapped(note.text, inches - 0.2)]
        if self.notes:
            lines += [(line, palette.soft, "normal") for text in about for line in wrapped(text, inches - 0.2)]
        sentences = [note.text for note in notes] + about
        return Foot(lines, " ".join(text if text.endswith(".") else f"{text}." for text in sentences))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Figures that are drawn and written inside look like this."""
        import matplotlib as mpl

        ground, ink, *_ = self.colours
        settings: Any = {
            "font.family": [*dict.fromkeys((self.font, FONT)), "sans-serif"],
            "font.size": 8.0,
            "axes.linewidth": 0.6,
            "figure.constrained_layout.w_pad": 0.06,
            "figure.constrained_layout.h_pad": 0.06,
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


def wrapped(text: str, inches: float, size: float = SMALL_TYPE) -> list[str]:
    """The lines into which a text of so many points breaks within a width; a number stays with its ` %`."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), max(12, int(inches * 72 / (size * 0.53))))
    return [line.replace("\u00a0", " ") for line in lines]


def fitting(inches: float, characters: int, largest: float) -> float:
    """Points, `largest` at most, at which so many characters fit into a width."""
    return min(largest, (inches * 72 - 2) / (0.6 * max(characters, 1)))


def title(text: str, inches: float) -> tuple[str, float]:
    """A title in as many lines as it needs within a width, and its points."""
    size = max(7.0, fitting(inches, len(text), 9.0))
    return "\n".join(wrapped(text, inches, 1.12 * size)), size


def canvas(
    size: tuple[float, float], count: int = 1, across: int = 1, foot: Foot | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, `across` in a row, which make room for their labels, above the lines at its foot.

    `size` is in inches, the foot apart, which adds to the height.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lines, caption = foot or Foot()
    figure = Figure((size[0], size[1] + LINE_HEIGHT * len(lines)), layout="constrained")
    figure.set_label(caption)
    if lines:
        legend = figure.legend(
            [Line2D([], [])] * len(lines), [text for text, _, _ in lines], loc="outside lower left", frameon=False,
            labelcolor=[colour for _, colour, _ in lines], fontsize=SMALL_TYPE, handlelength=0, handletextpad=0,
            borderpad=0.3, labelspacing=0.25,
        )  # fmt: skip
        for text, (_, _, weight) in zip(legend.get_texts(), lines, strict=True):
            text.set_fontweight(weight)
    return figure, [figure.add_subplot(math.ceil(count / across), across, number + 1) for number in range(count)]


def colour_bar(figure: Figure, colours: Any, panels: Sequence[Axes], label: str, size: float, **options: Any) -> None:
    """A colour bar right of the panels, as high as all of them together; its label has `size` points."""
    bar = figure.colorbar(colours, ax=panels, aspect=None, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    bar.ax.minorticks_off()
    bar.set_label(label, fontsize=size, labelpad=3)


def line_axes(panel: Axes, look: Look, grid: str = "both") -> None:
    """Thin ticks, a pale grid and open sides for a panel of lines."""
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=7)
    panel.grid(axis=grid, color=look.colours.soft, alpha=0.3, linewidth=0.5)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def settle(figure: Figure, look: Look) -> None:
    """Lay the panels out now and for good: every format shows the same, and positions can be read.

    Raises KvatlasError if a label is for a name that the figure does not show.
    """
    for name in (text.partition("=")[0] for text in look.label or ()):
        if name not in look._names:
            raise KvatlasError(f"The figure does not show the name {name!r}; it shows: {', '.join(look._names)}.")
    _make_visible(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        # Twice: only then are titles where the panels ended up.
        engine.execute(figure)
        engine.execute(figure)
    # Not "none", for which a figure is drawn once more before it is written.
    figure.set_layout_engine(None)


def _make_visible(figure: Figure) -> None:
    """No text of a figure steers what shows it; an SVG with control characters could not even be opened."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text()))


SUFFIXES = (".png", ".svg", ".pdf")
#: Pixels of a PNG at most: larger figures are written with fewer dots per inch.
_PIXELS = 80_000_000
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"−": "$-$", "–": "--", "⟨": r"\textlangle{}", "⟩": r"\textrangle{}", "∞": r"$\infty$"}
)


def check_figure(path: Path) -> None:
    """Raise KvatlasError for a suffix that no figure has and a path that cannot be written to."""
    from kvatlas.results.export import check_target

    if path.suffix.lower() not in SUFFIXES:
        raise KvatlasError(f"A figure cannot be written as {path.name!r}; the name must end in {', '.join(SUFFIXES)}.")
    check_target(path)


def save(
    figure: Figure, path: Path, maps: Sequence[Map] = (), *, data: str | None = None, look: Look | None = None
) -> list[Path]:
    """Write a figure as PNG (300 dpi), SVG (text as text) or PDF (fonts embedded), and return the paths written.

    Its data is written next to it as `NAME.data.csv`: `data` as it is, else `maps` as a CSV map; the caption that the
    `look` names is written, too. Equal figures give equal bytes. Raises KvatlasError for another suffix and for a path
    that cannot be written.
    """
    from kvatlas.results.csv_maps import VALUE_COLUMNS
    from kvatlas.results.export import csv_text, replacing

    check_figure(path)
    content = rendered(figure, path.suffix.lower())
    with replacing(path) as part:
        part.write_bytes(content)
    if data is None and len({(map_.metric, *(name for name, _ in map_.axes)) for map_ in maps}) == 1:
        data = csv_text(maps) if maps[0].metric in VALUE_COLUMNS else None
    written = {} if data is None else {path.with_suffix(".data.csv"): data}
    if look is not None and look.caption is not None:
        written[look.caption] = f"\\caption{{{visible(str(figure.get_label())).translate(_LATEX)}}}\n"
    for target, text in written.items():
        with replacing(target) as part:
            part.write_text(text, "utf-8", newline="")
    return [path, *written]


def rows_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the header first, as the text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """A figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`."""
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    _make_visible(figure)
    dots = min(dots, int((_PIXELS / (figure.get_figwidth() * figure.get_figheight())) ** 0.5))
    file = io.BytesIO()
    with Look().applied():
        figure.savefig(file, format=suffix[1:], dpi=dots, metadata=dates, facecolor=figure.get_facecolor())
    return file.getvalue()

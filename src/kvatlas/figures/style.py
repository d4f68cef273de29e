"""Parts that all figures share: options, texts with their widths, panels, and files."""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures.colours import DARK, LIGHT, Palette
from kvatlas.figures.marks import KeyEntry, add_mark
from kvatlas.text import axis_label, did_you_mean, in_words, parameter_words, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: The most characters of a value on an axis; of longer ones the beginning is written.
_MOST_TICK = 24


def tick_text(value: Any) -> str:
    """Return a value as it stands on an axis: visible, in one line, and cut to a length that leaves room for panels."""
    text = " ".join(str(visible(str(value))).split())
    return text if len(text) <= _MOST_TICK else f"{text[: _MOST_TICK - 3]}..."


#: The font that comes with matplotlib, and what stands in for it.
FONTS = ["DejaVu Sans", "sans-serif"]
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
#: Inches of a figure at least and at most.
LEAST_WIDTH = 2.0
MOST_WIDTH = 40.0
#: Inches of a figure that a page holds with its caption.
PAGE_HEIGHT = 9.0
#: Points of a figure's title.
TITLE_TYPE = 9.0
#: Points of a panel's name.
NAME_TYPE = 7.5
#: Points of other text.
SMALL_TYPE = 6.5
#: Points: no text of a figure is smaller on paper.
LEAST_TYPE = 5.0
#: Inches of the border around a figure.
EDGE = 0.07
#: Inches of a line of text for each point of its type.
LINE = 1.35 / 72


class Line(NamedTuple):
    """A line of text above or below the panels."""

    text: str
    size: float
    colour: str
    weight: str = "normal"

    @property
    def high(self) -> float:
        """The height of the line in inches."""
        return self.size * LINE

    @property
    def type(self) -> dict[str, Any]:
        """Size, colour and weight as matplotlib names them."""
        return {"fontsize": self.size, "color": self.colour, "fontweight": self.weight}


def height_of(lines: Iterable[Line]) -> float:
    """Return the height of lines of text in inches."""
    return sum(line.high for line in lines)


@dataclass(frozen=True)
class FigureOptions:
    """The options of all figures.

    A figure fills the `columns` of a paper, or is `width` inches wide; by default it is as wide as it needs. `labels`
    are texts by the names of models, benchmarks, policies, parameters, metrics. `intervals` is True for intervals in
    the cells of maps, False for no intervals at all. `title` replaces the finding; an empty one leaves it out. A
    `plain` figure has panels alone, without sentences. Raises KvatlasError for values that no figure can have.
    """

    columns: int | None = None
    dark: bool = False
    intervals: bool | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None
    width: float | None = None
    font: str = ""
    plain: bool = False
    #: The names that a figure shows, which labels may replace.
    _names: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", {in_words(name): text for name, text in self.labels.items()})
        if self.columns not in (None, *WIDTHS):
            raise KvatlasError(f"columns (--look columns): expected 1 or 2, got {self.columns}.")
        if self.width is not None and not LEAST_WIDTH <= self.width <= MOST_WIDTH:
            raise KvatlasError(f"--look width: expected {LEAST_WIDTH:g} to {MOST_WIDTH:g} inches, got {self.width:g}.")
        if self.width is not None and self.columns is not None:
            raise KvatlasError("--look columns and --look width are both given; leave one of them out.")
        if self.font:
            from matplotlib.font_manager import FontProperties, findfont

            try:
                findfont(FontProperties(family=self.font), fallback_to_default=False)
            except ValueError:
                raise KvatlasError(f"--look font: expected the name of an installed font, got {self.font!r}.") from None

    @property
    def colours(self) -> Palette:
        """The colours on this ground."""
        return DARK if self.dark else LIGHT

    @property
    def inches(self) -> float | None:
        """The width of the figure, None for one as wide as it needs."""
        return self.width if self.columns is None else WIDTHS[self.columns]

    @property
    def widest(self) -> float:
        """Inches that the figure may take."""
        return self.inches or WIDTHS[2]

    def named(self, name: str) -> str:
        """Return the text for this name in the figure."""
        return self._label(in_words(name), self.in_words(name))

    def in_words(self, text: str) -> str:
        """Return a text with the settings in it as the figure names them."""
        return in_words(text, lambda name: self._label(axis_label(name), parameter_words(name)))

    def _label(self, name: str, usual: str) -> str:
        self._names[name] = None
        return {axis_label(given): text for given, text in self.labels.items()}.get(axis_label(name), usual)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set up matplotlib for figures that are drawn and written inside."""
        import matplotlib as mpl

        palette = self.colours
        settings: Any = {
            "font.family": [self.font, *FONTS] if self.font else FONTS,
            "font.size": 8.0,
            "axes.linewidth": 0.6,
            "hatch.linewidth": 0.6,
            "svg.fonttype": "none",
            "svg.hashsalt": "kvatlas",
            "pdf.fonttype": 42,
            "text.parse_math": False,
            **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), palette.ground),
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), palette.ink),
            **dict.fromkeys(("xtick.color", "ytick.color"), palette.ink),
        }
        with mpl.rc_context(settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield


def text_width(text: str, size: float = SMALL_TYPE, bold: bool = False) -> float:
    """Return the inches of a text."""
    from matplotlib import rcParams

    return size * _unit_width(visible(text), bold, tuple(rcParams["font.family"]))


@lru_cache(100_000)
def _unit_width(text: str, bold: bool, family: tuple[str, ...]) -> float:
    """Return the inches of a text in type of one point."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=list(family), size=100, weight="bold" if bold else "normal")
    # A fiftieth more, since small type is wider than its share of large type.
    return 1.02 * float(_renderer().get_text_width_height_descent(text, font, False)[0]) / 7200


@cache
def _renderer() -> Any:
    """Return the renderer that measures texts."""
    from matplotlib.backends.backend_agg import RendererAgg

    renderer: Any = RendererAgg
    return renderer(1, 1, 72)


def wrapped(text: str, inches: float, size: float = SMALL_TYPE, bold: bool = False) -> list[str]:
    """Return the lines into which a text breaks within a width.

    A number stays with its ` %`; words that are wider than a line are broken.
    """
    lines = [""]
    for word in text.replace(" %", "\u00a0%").split(" "):
        line = f"{lines[-1]} {word}" if lines[-1] else word
        if text_width(line, size, bold) <= inches:
            lines[-1] = line
            continue

        if lines[-1]:
            lines.append("")
        for piece in _word_pieces(word, inches, size, bold):
            if lines[-1] and text_width(lines[-1] + piece, size, bold) > inches:
                lines.append("")
            lines[-1] += piece
    return [line.replace("\u00a0", " ") for line in lines if line]


def _word_pieces(word: str, inches: float, size: float, bold: bool) -> Iterator[str]:
    """Yield the pieces of a word that fit into a width: after a mark if possible, else single characters."""
    if text_width(word, size, bold) <= inches:
        yield word
        return
    for piece in re.split(r"(?<=[-_/,=(])", word):
        if text_width(piece, size, bold) <= inches:
            yield piece
        else:
            yield from piece


def text_lines(text: str, inches: float, size: float, colour: str, weight: str = "normal") -> list[Line]:
    """Return the lines into which a text breaks within a width."""
    return [Line(line, size, colour, weight) for line in wrapped(text, inches, size, weight == "bold")]


def font_size(inches: float, texts: Iterable[str], largest: float, bold: bool = False) -> float:
    """Return the points, `largest` at most, at which each of the texts fits into a width."""
    longest = max((text_width(text, 1, bold) for text in texts), default=0)
    return min(largest, (inches - 2 / 72) / longest) if longest else largest


def panels_in_row(count: int, most: int, fits: Callable[[int], bool] = lambda panels: True) -> int:
    """Return the number of panels in a row: the largest up to `most` that `fits`, in rows of like length.

    0 if none fits.
    """
    for panels in range(min(most, count), 0, -1):
        if fits(panels):
            rows = math.ceil(count / panels)
            return math.ceil(count / rows)
    return 0


class Margins(NamedTuple):
    """Inches around panels: left and right of a row, between two in a row, above and below each.

    There are so many more above the `first` row and below the `last` one.
    """

    left: float
    right: float
    between: float
    above: float
    below: float
    first: float = 0.0
    last: float = 0.0

    def inner(self, width: float, across: int) -> float:
        """Return the width of a panel in a row of a figure."""
        return (width - self.left - self.right - (across - 1) * self.between) / across


#: Inches between the texts of a figure and its panels.
_TEXT_GAP = 0.05
#: Inches of a line of a key, of its mark before the words, and between two entries.
_KEY_LINE = 0.15
_KEY_MARK = 0.12
_KEY_GAP = 0.16


def make_panels(
    options: FigureOptions,
    size: tuple[float, float],
    count: int,
    across: int,
    margins: Margins,
    *,
    title: str = "",
    about: Iterable[str] = (),
    notes: Iterable[Note] = (),
    key: Iterable[KeyEntry] = (),
) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, `across` in a row, under its title, a line about it and its key, and above its notes.

    `size` is the width of the figure and the height of a panel, in inches.
    """
    from matplotlib.figure import Figure

    width, panel_height = size
    head, foot = _figure_texts(title, about, notes, width - 2 * EDGE, options)
    key_rows = [] if options.plain else _key_rows(key, width - 2 * EDGE)
    key_top = EDGE + height_of(head) + (_TEXT_GAP if key_rows else 0)
    above = key_top + len(key_rows) * _KEY_LINE + (_TEXT_GAP if head or key_rows else 0)
    below = EDGE + height_of(foot) + (_TEXT_GAP if foot else 0)
    row_height = margins.above + panel_height + margins.below
    height = above + margins.first + math.ceil(count / across) * row_height + margins.last + below

    figure = Figure((width, height))
    _write_lines(figure, head, height - EDGE)
    _write_key(figure, key_rows, height - key_top, options)
    _write_lines(figure, foot, EDGE + height_of(foot))

    inner = margins.inner(width, across)
    if inner <= 0 or panel_height <= 0:
        raise KvatlasError(f"The names on this figure leave no room for its panels in {width:g} inches; shorten them.")
    panels = []
    for index in range(count):
        row, column = divmod(index, across)
        x = margins.left + column * (inner + margins.between)
        y = height - above - margins.first - row * row_height - margins.above - panel_height
        panels.append(figure.add_axes((x / width, y / height, inner / width, panel_height / height)))
    return figure, panels


def _figure_texts(
    title: str, about: Iterable[str], notes: Iterable[Note], room: float, options: FigureOptions
) -> tuple[list[Line], list[Line]]:
    """Return the lines over all panels and those under them, for a width in inches.

    Over them: the title, and the clauses about the figure as one sentence. Under them: a paragraph for each warning,
    and one of all other notes.
    """
    if options.title is not None:
        title = options.title
    elif options.plain:
        title = ""
    lines = len(wrapped(title, room, TITLE_TYPE, bold=True))
    # The narrowest of so many lines: none has a single word.
    narrow = next(
        width for share in range(10, 21) if len(wrapped(title, width := room * share / 20, TITLE_TYPE, True)) <= lines
    )
    head = text_lines(title, narrow, TITLE_TYPE, options.colours.ink, "bold")

    # Values that the whole figure holds fixed say what it shows, so they stand above it.
    every_note = list(dict.fromkeys(notes))
    if not options.plain:
        about = list(about)
        said = " ".join([title, *about])
        held = [options.in_words(note.text) for note in every_note if note.kind is NoteKind.FIXED]
        fixed = ", ".join(words for words in held if words not in said)
        clauses = "; ".join(filter(None, dict.fromkeys([*about, fixed])))
        head += text_lines(clauses[:1].upper() + clauses[1:], room, SMALL_TYPE, options.colours.soft)

    foot: list[Line] = []
    sentences: list[str] = []
    for note in every_note:
        is_about_intervals = options.intervals is False and note.kind is NoteKind.INTERVAL
        if note.is_warning:
            foot += text_lines(note.text, room, SMALL_TYPE, options.colours.warning, "bold")
        elif note.kind is not NoteKind.FIXED and not is_about_intervals and not options.plain:
            # The name of a parameter stays as it is.
            is_parameter = "=" in note.text.partition(" ")[0]
            text = options.in_words(note.text) if note.kind is NoteKind.RECOMMENDED else note.text
            text = text if is_parameter else text[:1].upper() + text[1:]
            sentences.append(text if text.endswith(".") else f"{text}.")
    return head, foot + text_lines(" ".join(sentences), room, SMALL_TYPE, options.colours.soft)


def _key_rows(key: Iterable[KeyEntry], room: float) -> list[list[tuple[float, KeyEntry]]]:
    """Return the entries of a key in rows of a width in inches, each after the inches where it begins."""
    rows: list[list[tuple[float, KeyEntry]]] = []
    x = room
    for entry in key:
        inches = _KEY_MARK + text_width(entry.words)
        if x + inches > room:
            rows.append([])
            x = 0.0
        rows[-1].append((x, entry))
        x += inches + _KEY_GAP
    return rows


def _write_key(
    figure: Figure, rows: Iterable[Sequence[tuple[float, KeyEntry]]], top: float, options: FigureOptions
) -> None:
    """Write the rows of a key, each mark before its words, the first one below `top` inches."""
    width, height = figure.get_size_inches()
    soft = options.colours.soft
    for row in rows:
        top -= _KEY_LINE
        for x, entry in row:
            add_mark(figure, (EDGE + x + 0.045, top + 0.075), entry.kind, options.colours)
            figure.text(
                (EDGE + x + _KEY_MARK) / width, (top + 0.04) / height, entry.words, fontsize=SMALL_TYPE, color=soft
            )


def _write_lines(figure: Figure, lines: Iterable[Line], top: float) -> None:
    """Write lines at the left edge of a figure, the first one below `top` inches."""
    width, height = figure.get_size_inches()
    for line in lines:
        top -= line.high
        figure.text(EDGE / width, (top + 0.3 * line.size / 72) / height, line.text, **line.type)


def write_above(
    panel: Axes,
    lines: Sequence[Line],
    place: tuple[float, float] = (0.0, 4.0),
    align: Literal["left", "right"] = "left",
) -> None:
    """Write lines over a panel, the last one nearest to it, at a place in points from its upper left corner."""
    x, y = place
    for line in reversed(lines):
        panel.annotate(
            line.text, (0, 1), (x, y), "axes fraction", "offset points", va="baseline", ha=align, **line.type
        )
        y += 72 * line.high


def move_apart(places: Sequence[float], heights: Sequence[float], top: float) -> list[float]:
    """Return the middles of boxes near their places, from the lowest up: none overlaps, and none is above the top."""
    middles = []
    floor = 0.0
    for place, height in zip(places, heights, strict=True):
        middles.append(max(place, floor + height / 2))
        floor = middles[-1] + height / 2
    ceiling = top
    for index in reversed(range(len(middles))):
        middles[index] = min(middles[index], ceiling - heights[index] / 2)
        ceiling = middles[index] - heights[index] / 2
    return middles


def round_values(low: float, high: float) -> list[float]:
    """Return a few round values from `low` to `high`."""
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(value) for value in values if low <= value <= high]


def finish_texts(figure: Figure, options: FigureOptions) -> None:
    """Make all texts of a figure visible, so that none steers what shows it.

    Raises KvatlasError if a label is for a name that the figure does not show.
    """
    from matplotlib.text import Text

    for name in options.labels:
        if axis_label(name) not in map(axis_label, options._names):
            option_names = [option.name for option in fields(options) if option.init and option.name != "labels"]
            guess = did_you_mean(name, [*option_names, *options._names])
            raise KvatlasError(
                f"The figure does not show the name {name!r}; it shows: {', '.join(options._names)}. Options are "
                f"{', '.join(option_names)}.{guess}"
            )
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
    from kvatlas.results.export import csv_text, replacing, write_text

    check_figure(path)
    content = rendered(figure, path.suffix.lower())
    with replacing(path) as partial_file:
        partial_file.write_bytes(content)
    if data is None and len({(map_.metric, map_.axis_names) for map_ in maps}) == 1:
        data = csv_text(maps)
    if data is None:
        return [path]
    data_path = path.with_suffix(".data.csv")
    write_text(data, data_path)
    return [path, data_path]


def rows_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows, the header first, as the text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """Return a figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`."""
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    dots = min(dots, int((_PIXELS / (figure.get_figwidth() * figure.get_figheight())) ** 0.5))
    file = io.BytesIO()
    with FigureOptions().applied():
        figure.savefig(file, format=suffix[1:], dpi=dots, metadata=dates, facecolor=figure.get_facecolor())
    return file.getvalue()

"""How figures look and are written: light or dark, for a slide or for columns of a paper."""

from __future__ import annotations

import csv
import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.results.csv_maps import VALUE_COLUMNS
from kvatlas.results.export import check_target, csv_text, replacing
from kvatlas.text import guarded, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The font that comes with matplotlib.
FONT = "DejaVu Sans"
SUFFIXES = (".png", ".svg", ".pdf")
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"−": "$-$", "–": "--", "⟨": r"\textlangle{}", "⟩": r"\textrangle{}", "∞": r"$\infty$"}
)
#: Pixels of a PNG at most: larger figures are written with fewer dots per inch.
_PIXELS = 80_000_000


#: Points of the text at the foot, inches from one of its lines to the next.
SMALL_TYPE, LINE_HEIGHT = 6.5, 0.128
#: Points: no text of a figure is smaller on paper.
LEAST_TYPE = 5.0


def _check_font(name: str) -> None:
    from matplotlib import font_manager

    names = sorted({FONT, *font_manager.get_font_names()})
    if name not in names:
        raise KvatlasError(f"There is no font {name!r} here; there are: {', '.join(names)}.")


class FootLine(NamedTuple):
    """A line of text under a figure, its colour, and its weight."""

    text: str
    colour: str
    weight: str = "normal"


class Foot(NamedTuple):
    """The lines under a figure, and all of it as the text of a caption."""

    lines: Sequence[FootLine] = ()
    caption: str = ""


@dataclass(frozen=True)
class Look:
    """How a figure looks: what every command that draws one offers.

    It fills `columns` of a paper (1 or 2; None for as wide as it needs, a page at most), in a `layout` of (rows, panels
    in a row) or one of its own, `dark` or light, in an installed `font`. `labels` are names to be shown for those of
    models, benchmarks, policies, axes and metrics. Without `intervals` none are printed; without `notes` what stands
    under a figure is only in its `caption`, a file for LaTeX, but for warnings. Raises KvatlasError for what is not
    valid.
    """

    columns: int | None = None
    dark: bool = False
    layout: tuple[int, int] | None = None
    font: str = FONT
    labels: Mapping[str, str] = field(default_factory=dict)
    intervals: bool = True
    notes: bool = True
    caption: Path | None = None
    #: The names that a figure asked for, which `labels` may replace.
    _names: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.columns not in (None, *WIDTHS):
            raise KvatlasError(f"A figure fills {self.columns} columns; valid are 1 and 2.")
        if self.layout is not None and min(self.layout) < 1:
            raise KvatlasError("A layout is ROWSxPANELS, both 1 or more, such as 1x4.")
        _check_font(self.font)
        if self.caption is not None:
            check_target(self.caption)
        elif not self.notes:
            raise KvatlasError("Notes are left out of a figure only where they go to its caption; name it a FILE.tex.")

    @property
    def width(self) -> float | None:
        """Inches, None for as many as the figure needs."""
        return None if self.columns is None else WIDTHS[self.columns]

    @property
    def widest(self) -> float:
        """Inches that the figure may take."""
        return self.width or WIDTHS[2]

    def across(self, count: int, wanted: int) -> int:
        """How many of so many panels stand in a row: as the layout says, else as many as wanted."""
        if self.layout is None:
            return max(1, min(count, wanted))
        if math.prod(self.layout) < count:
            rows, across = self.layout
            raise KvatlasError(
                f"The layout {rows}x{across} has room for {rows * across} panels, and the figure has {count}."
            )
        return self.layout[1]

    def named(self, name: str) -> str:
        """The name to be shown for this one."""
        self._names[name] = None
        return self.labels.get(name, name)

    @property
    def ground(self) -> str:
        """The colour behind everything."""
        return "#12161b" if self.dark else "#ffffff"

    @property
    def ink(self) -> str:
        """Text."""
        return "#e3e8ee" if self.dark else "#111111"

    @property
    def soft(self) -> str:
        """Lesser text."""
        return "#aab4bf" if self.dark else "#444444"

    @property
    def lines(self) -> Sequence[str]:
        """The colours of lines, in their order."""
        return style.DARK_LINES if self.dark else style.LINES

    @property
    def warning(self) -> str:
        """Text that must not be missed."""
        return "#ff9b90" if self.dark else "#a11a1a"

    def foot(self, notes: Iterable[Note], about: Iterable[str], inches: float) -> Foot:
        """What stands under a figure so wide: notes, warnings in their colour, then sentences about what is shown."""
        notes, about = list(notes), [text for text in about if text]
        lines = []
        for note in notes:
            colour = self.warning if note.is_warning or note.kind is NoteKind.SCALES else self.soft
            weight = "bold" if note.is_warning else "normal"
            if self.notes or note.is_warning:
                lines += [FootLine(line, colour, weight) for line in wrapped(note.text, inches - 0.2)]
        if self.notes:
            lines += [FootLine(line, self.soft) for text in about for line in wrapped(text, inches - 0.2)]
        sentences = [note.text for note in notes] + about
        return Foot(lines, " ".join(text if text.endswith(".") else f"{text}." for text in sentences))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Figures made and written inside look like this."""
        import matplotlib as mpl

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
            "figure.facecolor": self.ground,
            "savefig.facecolor": self.ground,
            "axes.facecolor": self.ground,
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"),
                self.ink,
            ),
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
            [Line2D([], [])] * len(lines), [line.text for line in lines], loc="outside lower left", frameon=False,
            labelcolor=[line.colour for line in lines], fontsize=SMALL_TYPE, handlelength=0, handletextpad=0,
            borderpad=0.3, labelspacing=0.25,
        )  # fmt: skip
        for text, line in zip(legend.get_texts(), lines, strict=True):
            text.set_fontweight(line.weight)
    return figure, [figure.add_subplot(math.ceil(count / across), across, number + 1) for number in range(count)]


def settle(figure: Figure, look: Look) -> None:
    """Lay the panels out now and for good: every format shows the same, and positions can be read.

    Raises KvatlasError for a label of what the figure does not name.
    """
    for name in look.labels:
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


def check_figure(path: Path) -> None:
    """Raise KvatlasError for a suffix that no figure has and a path that cannot be written to."""
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
    check_figure(path)
    content = rendered(figure, path.suffix.lower())
    with replacing(path) as part:
        part.write_bytes(content)
    if data is None and maps and len({(shown.metric, *(name for name, _ in shown.axes)) for shown in maps}) == 1:
        data = csv_text(maps) if maps[0].metric in VALUE_COLUMNS else None
    texts = {path.with_suffix(".data.csv"): data}
    if look is not None and look.caption is not None:
        texts[look.caption] = f"\\caption{{{latex(str(figure.get_label()))}}}\n"
    written = {target: text for target, text in texts.items() if text is not None}
    for target, text in written.items():
        with replacing(target) as part:
            part.write_text(text, "utf-8", newline="")
    return [path, *written]


def latex(text: str) -> str:
    """A text as LaTeX prints it."""
    return visible(text).translate(_LATEX)  # type: ignore[no-any-return]


def rows_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the header first, as the text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([map(guarded, row) for row in rows])
    return file.getvalue()


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """A figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`."""
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    _make_visible(figure)
    inches = figure.get_figwidth() * figure.get_figheight()
    file = io.BytesIO()
    with Look().applied():
        figure.savefig(
            file,
            format=suffix[1:],
            dpi=min(dots, int((_PIXELS / inches) ** 0.5)),
            metadata=dates,
            facecolor=figure.get_facecolor(),
        )
    return file.getvalue()

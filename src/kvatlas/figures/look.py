"""How figures look and are written: light or dark, for a slide or for columns of a paper, fonts embedded."""

from __future__ import annotations

import base64
import csv
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.results.csv_maps import VALUE_COLUMNS
from kvatlas.results.export import check_target, csv_text, replacing
from kvatlas.visible import guarded, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
_FONT = "DejaVu Sans"
#: Where the first font has no glyph for a character, those of these that the machine has are tried.
_MORE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei",
    "Droid Sans Fallback", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari",
)  # fmt: skip
#: Pixels of a PNG at most: larger figures are written with fewer dots per inch.
_PIXELS = 80_000_000


#: Points of the text at the foot, inches from one of its lines to the next.
SMALL_TYPE, LINE_HEIGHT = 6.5, 0.128


class FootLine(NamedTuple):
    """A line of text under a figure, its colour, and its weight."""

    text: str
    colour: str
    weight: str = "normal"


@dataclass(frozen=True)
class Look:
    """The paper's `columns` that a figure fills (1 or 2; None for as wide as it needs), and whether it is `dark`."""

    columns: int | None = None
    dark: bool = False

    def __post_init__(self) -> None:
        if self.columns not in (None, *WIDTHS):
            raise KvatlasError(f"A figure fills {self.columns} columns; valid are 1 and 2.")

    @property
    def width(self) -> float | None:
        """Inches, None for as many as the figure needs."""
        return None if self.columns is None else WIDTHS[self.columns]

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
    def warning(self) -> str:
        """Text that must not be missed."""
        return "#ff9b90" if self.dark else "#a11a1a"

    def foot(self, notes: Iterable[Note], about: Iterable[str], inches: float) -> list[FootLine]:
        """What stands under a figure so wide: notes, warnings in their colour, then sentences about what is shown."""
        lines = []
        for note in notes:
            colour = self.warning if note.is_warning or note.kind is NoteKind.SCALES else self.soft
            weight = "bold" if note.is_warning else "normal"
            lines += [FootLine(line, colour, weight) for line in wrapped(note.text, inches - 0.2)]
        return lines + [FootLine(line, self.soft) for text in about for line in wrapped(text, inches - 0.2)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Figures made and written inside look like this."""
        import matplotlib as mpl

        settings: Any = {
            "font.family": [_FONT, *_installed()],
            "font.size": 8.0,
            "axes.linewidth": 0.6,
            "figure.constrained_layout.w_pad": 0.09,
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
    size: tuple[float, float], count: int = 1, across: int = 1, foot: Sequence[FootLine] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, `across` in a row, which make room for their labels, above the lines at its foot.

    `size` is in inches, the foot apart, which adds to the height.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure((size[0], size[1] + LINE_HEIGHT * len(foot)), layout="constrained")
    if foot:
        legend = figure.legend(
            [Line2D([], [])] * len(foot), [line.text for line in foot], loc="outside lower left", frameon=False,
            labelcolor=[line.colour for line in foot], fontsize=SMALL_TYPE, handlelength=0, handletextpad=0,
            borderpad=0.3, labelspacing=0.25,
        )  # fmt: skip
        for text, line in zip(legend.get_texts(), foot, strict=True):
            text.set_fontweight(line.weight)
    return figure, [figure.add_subplot(math.ceil(count / across), across, number + 1) for number in range(count)]


def settle(figure: Figure) -> None:
    """Lay the panels out now and for good: every format shows the same, and positions can be read."""
    _make_visible(figure)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")


def _make_visible(figure: Figure) -> None:
    """No text of a figure steers what shows it; an SVG with control characters could not even be opened."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text()))


def _installed() -> list[str]:
    from matplotlib import font_manager

    known = set(font_manager.get_font_names())
    return [name for name in _MORE_FONTS if name in known]


def check_figure(path: Path) -> None:
    """Raise KvatlasError for a suffix that no figure has and a path that cannot be written to."""
    if path.suffix.lower() not in SUFFIXES:
        raise KvatlasError(f"A figure cannot be written as {path.name!r}; the name must end in {', '.join(SUFFIXES)}.")
    check_target(path)


def save(figure: Figure, path: Path, maps: Sequence[Map] = (), *, data: str | None = None) -> list[Path]:
    """Write a figure as PNG (300 dpi), SVG (text as text) or PDF, fonts embedded, and return the paths written.

    Its data is written next to it as `NAME.data.csv`: `data` as it is, else `maps` as a CSV map. Equal figures give
    equal bytes. Raises KvatlasError for another suffix and for a path that cannot be written.
    """
    check_figure(path)
    content = rendered(figure, path.suffix.lower())
    with replacing(path) as part:
        part.write_bytes(content)
    if data is None and maps and len({(shown.metric, *(name for name, _ in shown.axes)) for shown in maps}) == 1:
        data = csv_text(maps) if maps[0].metric in VALUE_COLUMNS else None
    if data is None:
        return [path]
    table = path.with_suffix(".data.csv")
    with replacing(table) as part:
        part.write_text(data, "utf-8", newline="")
    return [path, table]


def rows_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows, the header first, as the text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([map(guarded, row) for row in rows])
    return file.getvalue()


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """A figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`, fonts embedded."""
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
    return _with_font(file.getvalue().decode()).encode() if suffix == ".svg" else file.getvalue()


def _with_font(svg: str) -> str:
    """The SVG with its first font's glyphs that it uses inside, regular and bold, so that it looks alike anywhere."""
    characters = set(re.sub(r"<[^>]*>", "", svg)) | set(" &<>\"'")
    faces = []
    for weight, name in (("normal", "DejaVuSans.ttf"), ("bold", "DejaVuSans-Bold.ttf")):
        if weight == "bold" and not re.search(r"font: (bold|700)|font-weight: (bold|700)", svg):
            continue
        coded = base64.b64encode(_subset(name, characters)).decode()
        faces.append(
            f"@font-face{{font-family:'{_FONT}';font-weight:{weight};"
            f"src:url(data:font/woff;base64,{coded}) format('woff')}}"
        )
    return svg.replace("<defs>", f'<defs><style type="text/css">{"".join(faces)}</style></defs>\n <defs>', 1)


def _subset(name: str, characters: set[str]) -> bytes:
    from fontTools import subset
    from fontTools.ttLib import TTFont
    from matplotlib import get_data_path

    options = subset.Options(flavor="woff", layout_features=[], hinting=False, notdef_outline=True)
    options.drop_tables = [*options.drop_tables, "FFTM"]
    font = TTFont(Path(get_data_path()) / "fonts" / "ttf" / name, recalcTimestamp=False)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=sorted(map(ord, characters)))
    subsetter.subset(font)
    font.flavor = "woff"
    file = io.BytesIO()
    font.save(file)
    return file.getvalue()

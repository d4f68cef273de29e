"""How figures look and are written: light or dark, for a slide or for columns of a paper, fonts embedded."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import KvatlasError, Map
from kvatlas.results.csv_maps import VALUE_COLUMNS
from kvatlas.results.export import csv_text, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
#: Inches of one and of two columns of a paper.
WIDTHS = {1: 3.35, 2: 7.0}
_FONT = "DejaVu Sans"
#: Where the first font has no sign for a letter, those of these that the machine has are tried.
_MORE_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei",
    "Droid Sans Fallback", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari",
)  # fmt: skip
#: Pixels of a PNG at most: larger figures are written with fewer dots per inch.
_PIXELS = 80_000_000


class FootLine(NamedTuple):
    """A line under a figure; the first line of a warning is told in its colour."""

    text: str
    warning: bool = False


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

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Figures made and written inside look like this."""
        import matplotlib as mpl

        settings: Any = {
            "font.family": [_FONT, *_installed()],
            "font.size": 8.0,
            "axes.linewidth": 0.6,
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


def _installed() -> list[str]:
    from matplotlib import font_manager

    known = set(font_manager.get_font_names())
    return [name for name in _MORE_FONTS if name in known]


def save(figure: Figure, path: Path, maps: Sequence[Map] = (), *, data: str | None = None) -> list[Path]:
    """Write a figure as PNG (300 dpi), SVG (text as text) or PDF, fonts embedded, and return the paths written.

    Its data is written beside it as `NAME.data.csv`: `data` as it is, else `maps` as a CSV map. Equal figures give
    equal bytes. Raises KvatlasError for another suffix and for a path that cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise KvatlasError(f"A figure cannot be written as {path.name!r}; the name must end in {', '.join(SUFFIXES)}.")
    content = rendered(figure, suffix)
    with replacing(path) as part:
        part.write_bytes(content)
    if data is None and maps and len({(one.metric, *(name for name, _ in one.axes)) for one in maps}) == 1:
        data = csv_text(maps) if maps[0].metric in VALUE_COLUMNS else None
    if data is None:
        return [path]
    beside = path.with_suffix(".data.csv")
    with replacing(beside) as part:
        part.write_text(data, "utf-8", newline="")
    return [path, beside]


def rendered(figure: Figure, suffix: str, dots: int = 300) -> bytes:
    """A figure's bytes as `.png` (with so many dots per inch), `.svg` or `.pdf`, fonts embedded."""
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
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
    """The SVG with its first font's signs that it uses inside, regular and bold, so that it looks alike anywhere."""
    letters = set(re.sub(r"<[^>]*>", "", svg)) | set(" &<>\"'")
    faces = []
    for weight, name in (("normal", "DejaVuSans.ttf"), ("bold", "DejaVuSans-Bold.ttf")):
        if weight == "bold" and not re.search(r"font: (bold|700)|font-weight: (bold|700)", svg):
            continue
        coded = base64.b64encode(_subset(name, letters)).decode()
        faces.append(
            f"@font-face{{font-family:'{_FONT}';font-weight:{weight};"
            f"src:url(data:font/woff;base64,{coded}) format('woff')}}"
        )
    return svg.replace("<defs>", f'<defs><style type="text/css">{"".join(faces)}</style></defs>\n <defs>', 1)


def _subset(name: str, letters: set[str]) -> bytes:
    from fontTools import subset
    from fontTools.ttLib import TTFont
    from matplotlib import get_data_path

    options = subset.Options(flavor="woff", layout_features=[], hinting=False, notdef_outline=True)
    options.drop_tables = [*options.drop_tables, "FFTM"]
    font = TTFont(Path(get_data_path()) / "fonts" / "ttf" / name, recalcTimestamp=False)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=sorted(map(ord, letters)))
    subsetter.subset(font)
    font.flavor = "woff"
    file = io.BytesIO()
    font.save(file)
    return file.getvalue()

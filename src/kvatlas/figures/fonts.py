"""Fonts of figures: which one is first, which stand in for its missing characters, and their glyphs inside an SVG."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from kvatlas.core import KvatlasError

#: The font that comes with matplotlib.
OWN = "DejaVu Sans"
#: Where the first font has no glyph for a character, those of these that the machine has are tried.
_MORE = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei",
    "Droid Sans Fallback", "Microsoft YaHei", "PingFang SC", "Hiragino Sans", "Arial Unicode MS", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari",
)  # fmt: skip


def check(name: str) -> None:
    """Raise KvatlasError for a font that this machine does not have."""
    if name != OWN and name not in _names():
        raise KvatlasError(f"There is no font {name!r} here; there are: {', '.join(sorted(_names()))}.")


def installed() -> list[str]:
    """The fonts that stand in for missing characters, as far as they are here."""
    return [name for name in _MORE if name in _names()]


def _names() -> set[str]:
    from matplotlib import font_manager

    return set(font_manager.get_font_names())


def embedded(svg: str, family: str) -> str:
    """The SVG with the glyphs of a family that it uses inside, regular and bold, so that it looks alike anywhere."""
    from matplotlib.font_manager import FontProperties, findfont

    characters = set(re.sub(r"<[^>]*>", "", svg)) | set(" &<>\"'")
    faces = []
    for weight in ("normal", "bold"):
        if weight == "bold" and not re.search(r"font: (bold|700)|font-weight: (bold|700)", svg):
            continue
        coded = base64.b64encode(_subset(findfont(FontProperties(family=[family], weight=weight)), characters)).decode()
        faces.append(
            f"@font-face{{font-family:'{family}';font-weight:{weight};"
            f"src:url(data:font/woff;base64,{coded}) format('woff')}}"
        )
    return svg.replace("<defs>", f'<defs><style type="text/css">{"".join(faces)}</style></defs>\n <defs>', 1)


def _subset(path: str | Path, characters: set[str]) -> bytes:
    from fontTools import subset
    from fontTools.ttLib import TTFont

    options = subset.Options(flavor="woff", layout_features=[], hinting=False, notdef_outline=True)
    options.drop_tables = [*options.drop_tables, "FFTM"]
    font = TTFont(path, recalcTimestamp=False, fontNumber=0)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=sorted(map(ord, characters)))
    subsetter.subset(font)
    font.flavor = "woff"
    file = io.BytesIO()
    font.save(file)
    return file.getvalue()

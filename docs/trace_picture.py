"""The picture of a trace that lost a value: its lines beside the full cache's, up to the token where the two part.

`python docs/trace_picture.py runs/demo trace.png` looks for a trace of ledgers in which a line's balance had been
evicted when the answer stated another one. The title says what is seen and no cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvatlas.core import Trace, first_difference
from kvatlas.figures.style import EDGE, FigureOptions, Line, Margins, finish_texts, make_panels, save, write_above
from kvatlas.report.materials import RunMaterials
from kvatlas.results import Store
from kvatlas.text import model_name

#: Lines of the worked-out value, and of the end up to where the traces part.
_FIRST_LINES = 3
_LAST_LINES = 5
#: Tokens that are looked at beyond that.
_LATER = 8
#: Inches of a line, and of a letter of the fixed font at its size in points.
_LINE_HEIGHT = 0.165
_TYPE = 7.0
_LETTER = 0.6023 * _TYPE / 72
_FONT = "DejaVu Sans Mono"
_EVICTED = "#f7e3df"
_KEPT = "#cfe0f7"
_RED = "#a11a1a"
_GREEN = "#1b6b3a"


@dataclass(frozen=True)
class Token:
    """A token's text, if it had left the cache where the traces part, and if it is the first that differs."""

    text: str
    is_evicted: bool = False
    is_first_difference: bool = False
    is_later: bool = False


@dataclass(frozen=True)
class Lost:
    """A pair of traces that part at a value: the ledger's line, its balance, what the answer says, both texts."""

    trace: Trace
    name: str
    value: str
    answered: str
    lines: Sequence[Sequence[Token]]
    full_lines: Sequence[Sequence[Token]]

    @property
    def evicted(self) -> float:
        """The share of the tokens before the last line that had been evicted."""
        tokens = [token for line in self.lines[:-1] for token in line]
        return sum(token.is_evicted for token in tokens) / len(tokens)


def find_lost(folder: Path) -> Lost:
    """Return the pair of a run whose picture has the most evicted tokens; raises ValueError without one."""
    with Store.open(folder) as store:
        materials = RunMaterials.from_manifest(store.manifest())
        traces = [trace for _, trace in store.traces(texts=True)]
    full = {(t.model, t.benchmark, t.problem, t.sample): t for t in traces if t.setting.policy == "full"}
    found = []
    for trace in traces:
        other = full.get((trace.model, trace.benchmark, trace.problem, trace.sample))
        is_lost = other is not None and other.grade.correct and not trace.grade.correct
        if is_lost and other is not None and trace.eviction_trace is not None and trace.setting.policy == "dynts":
            found += list(_pairs(trace, other, materials))
    return max(found, key=lambda lost: lost.evicted)


def _pairs(trace: Trace, full: Trace, materials: RunMaterials) -> Iterator[Lost]:
    """Yield the pair if its traces part at a balance in the answer that had been evicted."""
    at = first_difference(trace.tokens, full.tokens)
    pieces = materials.pieces(trace.model, trace.tokens)
    full_pieces = materials.pieces(full.model, full.tokens)
    if at is None or pieces is None or full_pieces is None:
        return
    if "</think>" not in pieces[:at] or pieces[at - 1] != " = " or not pieces[at].isdigit():
        return
    assert trace.eviction_trace is not None
    evicted_at = trace.eviction_trace.evicted_at[trace.usage.prompt_tokens :]
    tokens = [
        Token(piece, index < at and 0 < evicted_at[index] <= at, index == at, index > at)
        for index, piece in enumerate(pieces[: at + _LATER])
    ]
    full_tokens = [
        Token(piece, False, index == at, index > at) for index, piece in enumerate(full_pieces[: at + _LATER])
    ]
    name = pieces[at - 2].strip()
    lines = _lines_of(tokens)
    last = next(row for row, line in enumerate(lines) if any(token.is_first_difference for token in line))
    lines = lines[: last + 1]
    worked_out = next((n for n, line in enumerate(lines) if _text(line).startswith(f"{name} : ")), None)
    if worked_out is None or worked_out + _FIRST_LINES > len(lines) - _LAST_LINES:
        return
    value = full_pieces[at].strip()
    if _is_gone(tokens[:at], name, value):
        full_lines = _lines_of(full_tokens)[: len(lines)]
        yield Lost(trace, name, value, pieces[at], _excerpt(lines, worked_out), _excerpt(full_lines, worked_out))


def _is_gone(tokens: Sequence[Token], name: str, value: str) -> bool:
    """Return whether every place where the balance of a line stands had been evicted."""
    places = []
    for before, token in pairwise(tokens):
        if (before.text.strip(), token.text.strip()) == (name, value):
            places.append(token)
    return bool(places) and all(token.is_evicted for token in places)


def _text(line: Sequence[Token]) -> str:
    return "".join(token.text for token in line).strip()


def _lines_of(tokens: Sequence[Token]) -> list[list[Token]]:
    """Return the tokens in lines, which end after a full stop or a line feed."""
    lines: list[list[Token]] = [[]]
    for token in tokens:
        lines[-1].append(token)
        if token.text.strip(" ") in (".", "\n", ".\n"):
            lines.append([])
    return [line for line in lines if _text(line)]


def _excerpt(lines: Sequence[Sequence[Token]], start: int) -> list[Sequence[Token]]:
    """Return the lines of the worked-out value, dots, and the last lines."""
    return [*lines[start : start + _FIRST_LINES], [Token("...", is_later=True)], *lines[-_LAST_LINES:]]


def draw(lost: Lost, path: Path) -> None:
    """Draw the pair side by side, line by line."""
    options = FigureOptions(2)
    values = lost.trace.setting.values
    setting = (
        f"at a KV budget of {values['kv_budget']}, {lost.trace.setting.policy} keeps the newest "
        f"{values['local_window']} tokens and {100 * values['ratio']:.0f} % of the older thinking"
    )
    about = [
        f"Two traces of {model_name(lost.trace.model)} on {lost.trace.problem}, same random numbers",
        f"left: {setting}",
        "struck through: evicted",
        "red: the first different token",
    ]
    title = (
        f"It worked out {lost.name} = {lost.value}, the cache dropped it, and it answered {lost.name} = {lost.answered}"
    )
    with options.applied():
        high = max(len(lost.lines), len(lost.full_lines)) * _LINE_HEIGHT + 0.06
        margins = Margins(EDGE, EDGE, 0.14, 0.26, 0.02)
        figure, panels = make_panels(options, (7.0, high), 2, 2, margins, title=title, about=about)
        inner = margins.inner(7.0, 2)
        heads = (
            (f"wrong: {lost.trace.setting.policy}, window {values['local_window']}, ratio {values['ratio']}", _RED),
            ("right: full cache", _GREEN),
        )
        for panel, lines, (head, colour) in zip(panels, (lost.lines, lost.full_lines), heads, strict=True):
            write_above(panel, [Line(head, 8.0, colour, "bold")])
            _draw_lines(panel, lines, inner, high)
        finish_texts(figure, options)
    save(figure, path)


def _draw_lines(panel: Any, lines: Sequence[Sequence[Token]], wide: float, high: float) -> None:
    """Draw lines of tokens in a panel whose units are inches."""
    panel.set(xlim=(0, wide), ylim=(high, 0), xticks=[], yticks=[], facecolor="#f6f8fa")
    panel.spines[:].set_visible(False)
    for row, line in enumerate(lines):
        x = 0.08
        y = 0.03 + (row + 0.5) * _LINE_HEIGHT
        for number, token in enumerate(line):
            text = token.text.replace("\n", "")
            text = text.lstrip(" ") if number == 0 else text
            x = _draw_token(panel, token, text, x, y)


def _draw_token(panel: Any, token: Token, text: str, x: float, y: float) -> float:
    """Draw a token at a place, and return where the next one begins."""
    width = len(text) * _LETTER
    ink = "#111111"
    weight = "normal"
    ground = None if token.is_later else _KEPT
    if token.is_evicted:
        ground = _EVICTED
        ink = "#6b5a57"
    elif token.is_first_difference:
        ground = _RED
        ink = "#ffffff"
        weight = "bold"
    elif token.is_later:
        ink = "#8a8f94"
    if ground:
        low = y - 0.46 * _LINE_HEIGHT
        panel.fill(
            (x, x + width, x + width, x), (low, low, low + 0.92 * _LINE_HEIGHT, low + 0.92 * _LINE_HEIGHT), ground, lw=0
        )
    panel.text(x, y, text, fontsize=_TYPE, family=_FONT, color=ink, fontweight=weight, va="center_baseline")
    if token.is_evicted and text.strip():
        panel.plot((x, x + width), (y, y), color=ink, lw=0.7, solid_capstyle="butt")
    return x + width


if __name__ == "__main__":
    draw(find_lost(Path(sys.argv[1])), Path(sys.argv[2]))

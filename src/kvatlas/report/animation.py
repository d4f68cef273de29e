"""The cache in motion as a GIF: a trace and the full cache's next to it, token by token, fading as they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Trace
from kvatlas.figures import style
from kvatlas.report.sources import Sources
from kvatlas.results.export import check_target, replacing
from kvatlas.results.store import Store
from kvatlas.stats.estimates.grid import short_names
from kvatlas.visible import visible

if TYPE_CHECKING:
    from PIL.Image import Image

#: Columns of text of each trace, lines that are seen at once, pixels of the type, and of the margins.
COLUMNS, LINES, TYPE, MARGIN = 56, 22, 15, 18
#: Frames, the milliseconds of each, and of the last one.
FRAMES, EACH, LAST = 90, 120, 2_000
_GROUND, _INK, _SOFT = "#ffffff", "#1b1f24", "#57606a"
_CACHED, _GONE, _GONE_INK = "#cbdafb", "#ffffff", "#c9c1bb"


@dataclass(frozen=True)
class Column:
    """One trace of an animation: its name, its pieces of text, each with when it leaves (0: never), and its prompt.

    `prompt` has for each cached token of the prompt when it leaves.
    """

    name: str
    pieces: Sequence[str]
    left: Sequence[int]
    prompt: Sequence[int]

    def cached(self, moment: int) -> int:
        """How many tokens are cached after so many new ones."""
        kept = sum(not 0 < step <= moment for step in self.prompt)
        return kept + sum(not 0 < step <= moment for step in self.left[:moment])


def column(name: str, trace: Trace, sources: Sources) -> Column:
    """A trace as an animation shows it; KvatlasError where its tokens cannot be told apart any more."""
    pieces = sources.pieces(trace.model, trace.tokens)
    if pieces is None or trace.eviction_trace is None or trace.usage.prompt_tokens is None:
        raise KvatlasError(
            f"The trace of {trace.problem}, sample {trace.sample} cannot be animated: its model's tokenizer or the "
            "eviction trace of its tokens is not there."
        )
    prompt = trace.usage.prompt_tokens
    # The last token is never cached, so it is never evicted.
    left = [*trace.eviction_trace.left[prompt:], *([0] * len(pieces))][: len(pieces)]
    return Column(name, [visible(piece) for piece in pieces], left, trace.eviction_trace.left[:prompt])


def write_animation(columns: Sequence[Column], title: str, out: Path, frames: int = FRAMES) -> None:
    """Write a GIF of so many frames, whole or not at all; KvatlasError for another kind of file."""
    check_target(out)
    if out.suffix.lower() != ".gif":
        raise KvatlasError(f"An animation is a GIF and cannot be written as {out.name!r}; the name must end in .gif.")
    last = max(len(column.pieces) for column in columns)
    moments = sorted({round(last * number / max(frames - 1, 1)) for number in range(frames)})
    placed = [_placed(column.pieces) for column in columns]
    pictures = [_frame(columns, placed, title, moment, last) for moment in moments]
    with replacing(out) as part:
        times = [EACH] * (len(pictures) - 1) + [LAST]
        pictures[0].save(
            part, format="GIF", save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=True
        )


def _placed(pieces: Sequence[str]) -> list[list[tuple[int, int, str]]]:
    """For each piece where its characters stand, as (line, column, text), wrapped at `COLUMNS`."""
    line = at = 0
    placed = []
    for piece in pieces:
        spans: list[tuple[int, int, str]] = []
        for mark in piece.replace("\t", "    "):
            if mark == "\n" or at >= COLUMNS:
                line, at = line + 1, 0
            if mark == "\n":
                continue
            if spans and spans[-1][0] == line:
                spans[-1] = (line, spans[-1][1], spans[-1][2] + mark)
            else:
                spans.append((line, at, mark))
            at += 1
        placed.append(spans)
    return placed


def _frame(columns: Sequence[Column], placed: Sequence[Any], title: str, moment: int, last: int) -> Image:
    from PIL import Image, ImageDraw

    font, bold = _font("DejaVuSansMono.ttf", TYPE), _font("DejaVuSans-Bold.ttf", TYPE)
    width, height = font.getlength("x"), TYPE + 7
    room = int(width * COLUMNS) + 2 * MARGIN
    picture = Image.new("RGB", (room * len(columns), MARGIN * 3 + height * (LINES + 3)), _GROUND)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN), f"{title}: {moment:,} of {last:,} new tokens", _SOFT, font)
    for number, (column, spans) in enumerate(zip(columns, placed, strict=True)):
        left, now = MARGIN + number * room, min(moment, len(column.pieces))
        draw.text((left, MARGIN + height), _short(column.name), _INK, bold)
        draw.text((left, MARGIN + 2 * height), f"{column.cached(now):,} tokens cached", _SOFT, font)
        newest = max((line for parts in spans[:now] for line, _, _ in parts), default=0)
        for parts, step in zip(spans[:now], column.left[:now], strict=True):
            gone = 0 < step <= moment
            for line, at, text in parts:
                seen = line - max(0, newest - LINES + 1)
                if seen < 0:
                    continue
                x, y = left + at * width, MARGIN * 2 + (seen + 3) * height
                draw.rectangle((x, y - 1, x + len(text) * width, y + height - 4), _GONE if gone else _CACHED)
                draw.text((x, y), text, _GONE_INK if gone else _INK, font)
    return picture.quantize(32)


def _short(name: str) -> str:
    return name if len(name) < COLUMNS else f"{name[: COLUMNS - 2]} …"


@lru_cache(maxsize=4)
def _font(name: str, size: int) -> Any:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


def animate(
    run: Path, out: Path, problem: str, sample: int, policy: str, values: Mapping[str, str], model: str | None
) -> None:
    """Write the first trace of a stored run that fits, with the full cache's of the same sample next to it.

    `values` are parameters of the policy as they are written. KvatlasError where no trace fits.
    """
    with Store.open(run) as store:
        manifest = store.manifest()
        stored = store.keys()
        keys = sorted(key for key in stored if key[3:] == (problem, sample))
        traces = [trace for trace in map(store.trace, keys) if model in (None, trace.model)]
    trace, full = _pair(traces, policy, values)
    sources = Sources.of(manifest)
    short = short_names(cell.setting for cell in manifest.expected)
    shown = [chosen for chosen in (trace, full) if chosen is not None]
    columns = [column(short.get(trace.setting.id, str(trace.setting)), trace, sources) for trace in shown]
    write_animation(columns, visible(f"{style.model(trace.model)}, {trace.problem}"), out)


def _pair(traces: Sequence[Trace], policy: str, values: Mapping[str, str]) -> tuple[Trace, Trace | None]:
    def fits(trace: Trace) -> bool:
        own = trace.setting.values
        return trace.setting.policy == policy and all(
            str(own.get(name)) == str(value) for name, value in values.items()
        )

    matched = next((trace for trace in traces if fits(trace)), None)
    if matched is None:
        raise KvatlasError(
            f"No trace of that problem and sample is one of {policy!r} with these values; its settings are: "
            f"{', '.join(sorted({str(trace.setting) for trace in traces})) or 'none'}."
        )
    same = _same(matched)
    full = next((trace for trace in traces if trace.setting.policy == "full" and _same(trace) == same), None)
    return matched, None if full is matched else full


def _same(trace: Trace) -> tuple[str, str]:
    return trace.model, trace.benchmark

"""The autopsy of one answer as a paragraph: which evicted tokens, of which lines, and what putting them back does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvatlas.autopsy.autopsies import Autopsy
from kvatlas.autopsy.driver import LostCell
from kvatlas.autopsy.lost_answers import LostAnswer
from kvatlas.autopsy.summary import luck_chance
from kvatlas.core import Trace, is_reference
from kvatlas.report.description import say
from kvatlas.results import Manifest, Store
from kvatlas.stats.run_data import short_names

#: The characters of a long line that are shown before and after a token.
_BESIDE = 50


def answer_paragraphs(folder: Path, cell: LostCell, autopsies: Sequence[Autopsy]) -> Iterator[str]:
    """Yield a paragraph for each of the first lost answers of a cell, which have these autopsies."""
    with Store.open(folder) as store:
        manifest = store.manifest()
        for answer, autopsy in zip(cell.lost, autopsies, strict=False):
            trace = answer.trace
            prompt = trace.usage.prompt_tokens or 0
            positions = [token.position for token in autopsy.tokens]
            values = {
                "name": trace.problem if trace.sample == 0 else f"{trace.problem}, sample {trace.sample}",
                "death": " ".join(say("death", answer.death)),
                "places": {},
                "kept_by": [],
                "streams": {arm: sum(outcomes) for arm, outcomes in autopsy.held_out.items()},
                "count": len(autopsy.held_out.get("nothing", ())),
                "chance": luck_chance(autopsy) if autopsy.held_out else 1.0,
            }
            if positions:
                every_token = (*(cell.materials.prompt(trace) or ()), *trace.tokens)
                texts = cell.materials.pieces(trace.model, every_token)
                if texts is not None:
                    values["places"] = _tokens_by_line(texts, positions, prompt)
                # All tokens of a cause were evicted by one compression.
                values["after"] = positions[0] + autopsy.tokens[0].distance - prompt + 1
                values["kept_by"] = _kept_by(store, manifest, answer, positions)
            yield " ".join(say("one_autopsy", autopsy, values))


def _tokens_by_line(texts: Sequence[str], positions: Sequence[int], prompt: int) -> Mapping[str, list[str]]:
    """Return the texts of tokens by the line that they stand in, a long line cut around them."""
    lines: dict[str, list[str]] = {}
    for position in positions:
        text = texts[position]
        before = "".join(texts[:position]).rpartition("\n")[2]
        # A token that ends its line belongs to it.
        rest = "" if text.endswith("\n") else "".join(texts[position + 1 :]).partition("\n")[0]
        start = f"... {before[-_BESIDE:]}" if len(before) > _BESIDE else before
        end = f"{rest[:_BESIDE]} ..." if len(rest) > _BESIDE else rest
        line = f"{start}{text}{end}".strip()
        where = "the question's line" if position < prompt else "the line"
        lines.setdefault(f'{where} "{line}"', []).append(repr(text.strip() or text))
    return lines


def _kept_by(store: Store, manifest: Manifest, answer: LostAnswer, positions: Sequence[int]) -> list[str]:
    """Return the other settings under which the tokens were written alike, and in the cache until the death."""
    trace = answer.trace
    until = len(trace.tokens) if answer.death.token is None else answer.death.token
    prompt = trace.usage.prompt_tokens or 0
    written = max(0, max(positions) - prompt + 1)
    names = short_names(cell.setting for cell in manifest.expected)

    kept = []
    for cell in manifest.expected:
        is_other = cell.setting != trace.setting and not is_reference(cell.setting)
        if not is_other or (cell.model, cell.benchmark) != (trace.model, trace.benchmark):
            continue
        try:
            other: Trace = store.trace((cell.run_key, cell.setting.id, trace.benchmark, trace.problem, trace.sample))
        except KeyError:
            continue
        evictions = other.eviction_trace
        if evictions is None or other.tokens[:written] != trace.tokens[:written]:
            continue
        # 0 is a token that stayed to the end, which a short trace may not have reached.
        steps = [evictions.evicted_at[place] for place in positions if place < len(evictions.evicted_at)]
        if len(steps) == len(positions) and all(step == 0 or step > until for step in steps):
            kept.append(f"{names[cell.setting.id]} ({'right' if other.grade.correct else 'wrong'})")
    return kept

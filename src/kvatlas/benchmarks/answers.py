r"""Finding the answer in what a model wrote: the last `\boxed{}`, else a stated final answer; letters for choices.

Everything here is linear in the length of the text, which is a model's and may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Longer answers than this are cut: no reference answer comes near it.
LONGEST = 1000
#: How far back an unboxed final answer is looked for.
TAIL = 20_000
#: A bare last line that is longer is no answer, in characters.
SHORT = 80
#: Boxes within boxes that are followed outwards.
DEPTH = 8

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_STATED = re.compile(
    r"(?:final\s{1,3}answer|answer|result)[*_]{0,3}\s{0,3}"
    r"(?:(?:to|of|for)\s[^\n.:=]{1,80}?\s)?"
    r"(?:is(?![A-Za-z])|=|:|are(?![A-Za-z])|should\s+be|must\s+be)[\s:=*]{0,8}"
    r"|^(?:#{1,6}\s{1,3}|\*\*)(?:the\s)?final\s{1,3}answer[*_]{0,3}[ \t]{0,3}\n\s{0,8}",
    re.IGNORECASE | re.MULTILINE,
)
#: The beginning of an answer that is a sentence: "the largest $n$ is 34".
_SENTENCE = re.compile(
    r"^(?=[A-Za-z]{2,}\s|\$?[A-Za-z]\$?\s)[^\n]{0,200}\s(?:is|are|equals)(?![A-Za-z])\s*:?(?=\s*[^\s.])"
)
#: Where a stated answer ends: at the line, or at a full stop that ends a sentence (not the point of 3.5).
_END = re.compile(
    r"\n|(?<!\\)[.!;](?=\s|$|\*|\$\s*$)|,\s+(?:so|since|because|which|as|where|and\s+(?:we|this|that))(?![A-Za-z])"
)
#: What a formula alone may stand in, what it holds beside words, and what says that it is a step and no answer.
_DRESS = re.compile(r"^(?:\*\*|\$|\\\(|\\\[|\s)+|(?:\*\*|\$|\\\)|\\\]|\s)+(?=\.?$)")
#: What stands between two boxes of one list.
_MARK = r"\s|\$|\*|\\[()\[\]]"
_JOINT = re.compile(
    rf"(?:{_MARK})*(?:,(?:\s*(?:and|or))?|;|and|or)(?![A-Za-z])(?:{_MARK}|[A-Za-z](?:_\{{?\w\}}?)?\s*=)*"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_RELATION = re.compile(r"[=<>:?≤≥≈]|\\(?:leq?|geq?|approx|neq?|implies|to)(?![A-Za-z])")
_BECAUSE = re.compile(r"\s+(?:because|since|as|by|when|if|which|obtained|after)(?![A-Za-z])")


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` that is not empty holds, boxes inside it unwrapped; None without any.

    An unclosed box holds what follows on its line; `\boxed 7` holds the next word.
    """
    boxes = _boxes(text)
    return boxes[-1] if boxes else None


def _boxes(text: str) -> list[str]:
    r"""The last box, behind those that stand in a list with it: `\boxed{1} and \boxed{-2}`."""
    starts = [match.start() for match in _BOX.finditer(text)]
    boxes: list[str] = []
    first = last = len(text)
    for start in reversed(starts[-4 * DEPTH :]):
        content, end = _content(text, start)
        if not content.strip() and not boxes:
            continue
        if boxes and end >= last:
            # It holds the box that was found: the outer one is the answer.
            boxes.pop(0)
        elif boxes and not _JOINT.fullmatch(text[end + 1 : first][: SHORT + 1]):
            break
        boxes.insert(0, _unwrapped(content).strip()[:LONGEST])
        first, last = start, end
    return boxes


def stated(text: str) -> str | None:
    """The last "the answer is ..." of a text without boxes; None without any."""
    tail = text[-TAIL:]
    for match in reversed(list(_STATED.finditer(tail))):
        rest = tail[match.end() : match.end() + LONGEST]
        end = _END.search(rest)
        part = rest[: end.start()] if end else rest
        because = _BECAUSE.search(part)
        part = part[: because.start()] if because else part
        part = _SENTENCE.sub("", part).strip().strip("*").strip().rstrip(".,;:").strip()
        if re.search(r"[^\W_]", part):
            return part
    return None


def bare(text: str) -> str | None:
    """The last line where it is an answer and no sentence: a number or a formula alone, or what follows `####`.

    Models that nobody told how to end write `7`, `**7**` or, as in GSM8K's solutions, `#### 7`.
    """
    lines = text[-TAIL:].rstrip().rsplit("\n", 1)
    line = lines[-1].strip()[:LONGEST]
    marked = line.startswith("####")
    part = _DRESS.sub("", line.removeprefix("####").strip()).rstrip(".").strip()
    formula = len(part) <= SHORT and not _RELATION.search(part) and not _WORD.search(_COMMAND.sub(" ", part))
    return part if re.search(r"[^\W_]", part) and (marked or (formula and re.search(r"\d|\\", part))) else None


def final(text: str) -> str | None:
    """The answer of a text: what it boxes, each thing once, else what it states."""
    return ", ".join(dict.fromkeys(filter(None, _boxes(text)))) or stated(text)


def letter(text: str, choices: Sequence[str]) -> str | None:
    r"""The letter that a text chooses: `\boxed{C}`, `(C)`, `The answer is C.`; never the A of "Consider A."

    `choices` are the texts behind the letters A, B, ...; a box may hold such a text instead of its letter. May be empty
    where only letters are known (then A to Z are valid).
    """
    last = chr(ord("A") + len(choices) - 1) if choices else "Z"
    box = boxed(text)
    if box is not None:
        return _leading_letter(box, last) or _choice_of(box, choices)
    tail = text[-TAIL:]
    matches = list(_statement(last).finditer(tail))
    if matches:
        return matches[-1]["letter"]
    lines = [line for line in tail.splitlines() if line.strip()]
    return _alone(lines[-1], last) if lines else None


def _statement(last: str) -> re.Pattern[str]:
    wrapped = rf"(?:[*$({{\[]|\\\(|\\text|\\mathrm|\\textbf|\\mathbf){{0,6}}(?P<letter>[A-{last}])"
    # A lone A may be an article and a lone I a pronoun: they count only where a sentence could end.
    after = r"(?=[*$)}\].:,;!]|\\\)|\s*$|\s*\n|\s+(?:because|since|as|is|and|with|which)\b|(?<![AI])\s)"
    return re.compile(
        r"(?i:answer|option|choice|choose|select|pick)(?i:\s{1,3}(?:option|choice|letter|is|are|would\s+be|must\s+be|should"
        rf"\s+be)|\s{{0,3}}[:=]){{0,4}}[\s*:]{{0,6}}{wrapped}(?![A-Za-z'’]){after}"
    )


def _leading_letter(box: str, last: str) -> str | None:
    inner = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mathsf|operatorname|textit)(?![A-Za-z])\s*", "", box)
    match = re.match(rf"[\s{{(\[$*]*(?:(?i:option|choice|answer)[\s:({{\[]*)?([A-{last}])(?![A-Za-z0-9])", inner)
    if match is None:
        return None
    rest = inner[match.end() :].strip(" })]$*.")
    # "C" or "C) 3 eV" or "C: ...", but not the C of "C = 3" or "C + 1".
    opened = re.match(r"[\s})\]$*]*[).:,\-]", inner[match.end() :])
    return match[1] if not rest or opened else None


def _choice_of(box: str, choices: Sequence[str]) -> str | None:
    def plain(text: str) -> str:
        return re.sub(r"[\s$]|\\(?:text|mathrm|left|right|[,;!])", "", text).strip("{}.").casefold()

    chosen = [i for i, choice in enumerate(choices) if plain(choice) == plain(box)]
    return chr(ord("A") + chosen[0]) if len(chosen) == 1 else None


def _alone(line: str, last: str) -> str | None:
    match = re.fullmatch(rf"[\s*$(\[{{]*(?:(?i:answer)[\s:*$(\[{{]*)?([A-{last}])[\s*$)\]}}.]*", line)
    return match[1] if match else None


def _content(text: str, start: int) -> tuple[str, int]:
    """What the box at `start` holds and where it ends."""
    match = _BOX.match(text, start)
    assert match is not None
    at = match.end()
    while at < len(text) and text[at] in " \t":
        at += 1
    if at >= len(text) or text[at] != "{":
        word = re.compile(r"-?\\?\w[\w.,/]*").match(text, at)
        return (word[0].rstrip(".,"), word.end()) if word else ("", at)
    depth, i = 0, at
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[at + 1 : i], i
        i += 1
    line = text[at + 1 :].split("\n", 1)[0][: 4 * LONGEST]
    line = re.split(r"\$|\\\)|\\\]|[.!](?=\s|$)", line, maxsplit=1)[0].strip()
    # Of the braces of an unclosed box only those that close something belong to the answer.
    return (line[:-1] if line.count("}") > line.count("{") else line), len(text)


def _unwrapped(content: str) -> str:
    for _ in range(DEPTH):
        match = _BOX.match(content.strip())
        if match is None:
            break
        content = _content(content.strip(), 0)[0]
    return content

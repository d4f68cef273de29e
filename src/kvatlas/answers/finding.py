r"""The answer in a text: the last `\boxed{}`, else a stated final answer, else a short last line; letters for choices.

What a text states goes before what it mentions. The search is linear in the length of the text, which comes from a
model and may be anything.
"""

import re
from collections.abc import Sequence

from kvatlas.answers.normal import LONGEST

#: Characters at the end of a text that are searched for an unboxed final answer.
TAIL = 20_000
#: The longest bare last line that counts as an answer, in characters.
SHORT = 80
#: The most announcements of a letter that are read, from the end of a text.
MOST_CUES = 200
#: The most boxes within boxes that are followed outwards.
DEPTH = 8
#: The most boxes that are read, from the end of a text.
MOST_BOXES = 4 * DEPTH

_BOX = re.compile(r"\\(?:boxed|f(?:rame)?box)(?![A-Za-z])[ \t]*")
#: A brace; or a sign behind a backslash, which opens and closes nothing.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
#: What a box without braces holds: a number, a command or a capital letter; a word there is prose about boxes.
_UNBRACED = re.compile(r"-?(?:\d[\w.,/]*|\\[A-Za-z][\w.,/]*|[B-Z](?!\w))")
#: Words in place of an answer, in a note on the format of answers.
_BLANK = r"(?:[\s.…?_,:;!{}$*-]|\\(?:[,;:! ]|(?:text|mathrm|quad|qquad|[lc]?dots|square|Box|phantom)(?![A-Za-z])))*"
_PLACEHOLDER = re.compile(rf"{_BLANK}(?:(?:your|the|final|my)\s+)*(?P<word>answer|result)?{_BLANK}", re.IGNORECASE)
#: Words that announce an answer, right before a box without one: "so the answer is \boxed{}".
_ANNOUNCED = re.compile(r"(?:(?<![A-Za-z])(?:is|are|be|equals|get|give)|[:=])[\s$*({\[\\]*$")
#: Signs of other scripts that stand for those of Latin.
_SIGNS = str.maketrans({"：": ":", "＝": "=", "，": ",", "；": ";", "（": "(", "）": ")", "。": ". ", "！": "! "})
_NOUN = (
    r"(?:final\s{1,3}answers?|answers?|result|Antwort|Ergebnis|Lösung|respuesta|resultado|réponse|résultat|resposta|risposta"
    r"|risultato|antwoord|svaret|svar|odpowiedź|ответ|відповідь|cevap|jawaban|đáp\sán|答案|答え|回答|正解|정답|답"
    r"|(?:الإجابة|الاجابة|الجواب)|उत्तर)"
)
_WHICH = r"(?:\s(?:final\w{0,2}|definitiv\w{0,2}|correct\w{0,2}|correta|corretta|النهائية|الصحيحة|النهائي|الصحيح))?"
#: From a noun to an answer: a copula, a colon or an equals sign.
_COPULA = (
    r"(?:(?:is|are|(?:should|must|would|will)\s+be|ist|lautet|beträgt|est|es|é|è|sera|será|är|er|adalah|là)(?![^\W_])"
    r"|[=:]|是|为|為|は|은|는|هي|هو)"
)
_THUS = r"(?:\s(?:therefore|thus|then|hence|indeed|actually|donc|also|daher|somit|entonces|portanto|quindi)\s)?"
#: "Wait, no, it is 8.", before one last word of a line.
_CORRECTION = (
    r"\b(?:no|yes|wait|actually)[,:!]\s(?:(?:it|that)(?:\sis|['’]s)\s)?(?=(?![^\W\d_]{2})\S+[^\S\n]*(?:\n|\Z))"
)
#: Words before and behind an answer that is denied: "8, not 7", "7 is wrong".
_DENIED_BEFORE = re.compile(r"(?<![^\W_])(?:(?:can)?not(?:\sbe)?|rather\sthan|instead\sof)[\s$*(\\\[]*$")
_DENIED_BEHIND = re.compile(r"[\s$*)\\\]]*(?:is|was)\s(?:wrong|incorrect|false|not\s(?:right|correct|the))(?![^\W_])")
_STATED = re.compile(
    rf"{_NOUN}{_WHICH}[*_`]{{0,3}}\s{{0,3}}(?:(?:to|of|for)\s[^\n.:=]{{1,80}}?\s)?{_COPULA}{_THUS}[\s:=*]{{0,8}}"
    rf"|{_CORRECTION}"
    rf"|^(?:#{{1,6}}\s{{1,3}})?(?:the\s)?(?:final\s{{1,3}})?{_NOUN}[ \t]{{0,3}}(?:\n\s{{0,8}}|(?=\$|\\\[|\\\())",
    re.IGNORECASE | re.MULTILINE,
)
#: Words in bold or italics; and a formula on lines of its own.
_EMPHASIS = re.compile(r"</?(?:b|i|em|strong)>|(?<![\w*])(\*\*|__|\*|_)(?=[^\s*_])([^\n]*?[^\s*_])\1(?![\w*])")
_DISPLAY = re.compile(r"\s*(?:\$\$(.+?)\$\$|\\\[(.+?)\\\])", re.DOTALL)
#: Words before a statement that is not the writer's.
_HEDGE = re.compile(
    r"\b(?:(?:thought|whether|initially|at\sfirst|(?:might|may|could|some|people)\s(?:say|think|guess)|if|suppose|assum\w+"
    r"|tempting\sto\s(?:say|think|guess|conclude)|claim(?:s|ed)?|(?<!no\s)(?<!\sa\s)(?<!out\s)doubt"
    r"|not\s(?:true|right|correct|the\scase)\sthat)\s"
    r"[^.,;:!?\n]{0,30}|(?:wrong|incorrect|false|naive)\s)$",
    re.IGNORECASE,
)
#: The beginning of an answer that is a sentence: "the largest $n$ is 34".
_SENTENCE = re.compile(
    r"^(?=[A-Za-z]{2,}\s|\$?[A-Za-z]\$?\s)[^\n]{0,200}\s(?:is|are|equals)(?![A-Za-z])\s*:?(?=\s*[^\s.])"
)
#: Words before a formula that say what it is: "the open interval (0, 1)".
_KIND = re.compile(
    r"^(?:(?:the|an?|open|closed|half-open|ordered|exact|exactly|simply|just|interval|set|point|pair|triple|tuple|value"
    r"|number|integer|fraction|vector|matrix|expression)\s+){1,5}(?=[\d(\[{\\$.-])",
    re.IGNORECASE,
)
#: The end of a stated answer: of the line, a full stop that ends a sentence (not the point of 3.5), a tag, a remark.
_END = re.compile(
    r"\n|(?<!\\)[.!;](?=\s|$|\*|\$\s*$)|</\w|です|입니다|이다"
    r"|,\s+(?:so|since|because|which|as|where|from|by|using|and\s+(?:we|this|that)|weil|denn|da|car|porque|ya\sque)"
    r"(?![^\W_])|,(?=[\u3040-\u9fff])|\s*\((?:from|since|because|as|by|using|see|rounded|after)(?![^\W_])"
)
_REMARK = re.compile(r"\s*\((?:from|since|because|using|rounded)(?![^\W_]).*\)", re.DOTALL)
_BECAUSE = re.compile(
    r",?\s+\(?(?:not|rather\sthan|instead\sof)\s+(?=[-$\\(\d])"
    r"|\s+(?:because|since|as|by|when|if|which|obtained|after|weil|denn|porque)(?![^\W_])"
)
#: Signs around a formula, words in it, and relations: a formula with words or relations is a step and no answer.
_DRESS = re.compile(r"^(?:\*\*|\$|\\\(|\\\[|\s)+|(?:\*\*|\$|\\\)|\\\]|\s)+(?=\.?$)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_RELATION = re.compile(r"[=<>:?≤≥≈]|\\(?:leq?|geq?|approx|neq?|implies|to)(?![A-Za-z])")
#: Signs around an answer that belong to the text: of code, of emphasis, quotation marks, brackets of one thing.
_QUOTES = '`*="“”„«»「」『』 '
_WRAPPED = re.compile(r"\[([^\[\],;]*)\]|(`+|==|[\"“«「『])([^\n]*?)(?:`+|==|[\"”»」』])|'([^']*)'")
_FENCE = re.compile(r"```[a-z]*\n([^\n]*)\n```\s*\Z")
_TAG = re.compile(r"<(answer|final|final[_ -]?answer|result|solution)>", re.IGNORECASE)
#: Signs and spaces between two boxes of one list, and words in a formula.
_MARK = re.compile(r"[$*~]|\\[()\[\],;! ]|\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
#: The name of a part: (b), ii), 2., Part b:
_LABEL = r"(?:(?:for\s+)?[Pp]art\s*)?\(?(?:[a-h]|i{1,3}|iv|v|[1-9])[).:]+\s*"
#: The same before words of its part, on a new line; no number, as steps have them, too.
_PART = r"(?:[Pp]art\s*\(?|\()[a-h]\)?[.:]?\s[^\n]*"
_JOINT = re.compile(
    rf"\s*(?:\(?for\s+(?:part\s*)?\(?\w{{1,3}}\)*\s*)?(?:(?:(?:[,;&]|\\q?quad|and|or)(?![A-Za-z])\s*)+(?:{_LABEL})?"
    rf"|[.,;]?\s*\n\s*(?:{_LABEL}|{_PART}))(?:[A-Za-z](?:_\{{?\w\}}?)?\s*=\s*)?"
)


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` with an answer, boxes inside it unwrapped; None without any.

    An unclosed box holds the rest of its line; `\boxed 7` holds the number.
    """
    boxes = _boxes(text)
    return boxes[-1] if boxes else None


def _boxes(text: str) -> list[str]:
    r"""Return the last box, behind the boxes of the same list: `\boxed{1} and \boxed{-2}`.

    Empty if the answer that the text announces last is an empty box.
    """
    starts = [match.start() for match in _BOX.finditer(text)]
    boxes: list[str] = []
    # Boxes are read backwards: the box that was added last follows the current one in the text.
    following_start = len(text)
    following_end = len(text)
    for start in reversed(starts[-MOST_BOXES:]):
        content, end = _box_content(text, start)
        before = text[max(0, start - SHORT) : start]
        placeholder = _PLACEHOLDER.fullmatch(content[:LONGEST])
        if placeholder and not boxes:
            # A note on the format of answers is skipped; an announced empty box means that there is no answer.
            if not placeholder["word"] and _ANNOUNCED.search(before):
                return []
            continue
        if _DENIED_BEFORE.search(before) or _DENIED_BEHIND.match(text, end + 1):
            continue

        if boxes and end >= following_end:
            # The current box encloses the following one: the outer one is the answer.
            boxes.pop(0)
        elif boxes and not _JOINT.fullmatch(_MARK.sub(r" \1", text[end + 1 : following_start][: SHORT + 1])):
            break

        # Of boxes within boxes the content of the innermost counts; what is behind it is dropped.
        content = content.strip()
        for _ in range(DEPTH):
            if not _BOX.match(content):
                break
            content = _box_content(content, 0)[0].strip()
        boxes.insert(0, content[:LONGEST])
        following_start = start
        following_end = end
    return boxes


def _box_content(text: str, start: int) -> tuple[str, int]:
    """Return the content of the box at `start` and the place where it ends."""
    match = _BOX.match(text, start)
    assert match is not None
    at = match.end()
    if at >= len(text) or text[at] != "{":
        word = _UNBRACED.match(text, at)
        return (word[0].rstrip(".,"), word.end()) if word else ("", at)

    depth = 0
    for brace in _BRACE.finditer(text, at):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[at + 1 : brace.start()], brace.start()

    # The box is not closed: its line counts, up to the end of a formula or a sentence.
    line = text[at + 1 :].split("\n", 1)[0][: 4 * LONGEST]
    line = re.split(r"\$|\\\)|\\\]|[.!](?=\s|$)", line, maxsplit=1)[0].strip()
    # Of the braces of an unclosed box only those that close something belong to the answer.
    return (line[:-1] if line.count("}") > line.count("{") else line), len(text)


def marked_answer(text: str) -> str:
    """Return the content of the last `<answer>` of a text, or of a fence of code around its end; else the text.

    A box behind it goes before it, and any box before a fence.
    """
    fence = _FENCE.search(text[-TAIL:])
    if fence and not _BOX.search(text):
        return fence[1]
    tags = list(_TAG.finditer(text))
    if not tags or _BOX.search(text, tags[-1].end()):
        return text
    return text[tags[-1].end() :].partition("</")[0]


def without_signs(answer: str) -> str:
    """Return an answer without the signs of text around it: `12`, "12", ==12==, [12], **12**."""
    answer = answer.strip().strip(_QUOTES)
    match = _WRAPPED.fullmatch(answer)
    return answer if match is None else (match[1] or match[3] or match[4] or "").strip()


def wrapped_last_line(text: str) -> str | None:
    """Return a last line that is one short answer in code signs, quotation marks or brackets: `12`, [12]."""
    line = text[-TAIL:].rstrip().rpartition("\n")[2].strip()
    match = _WRAPPED.fullmatch(line) if len(line) <= SHORT else None
    return bare_last_line(without_signs(line)) if match else None


def _is_taken_back(tail: str, start: int) -> bool:
    """Return True for the beginning of a statement that a text takes back: "I first thought the answer is A"."""
    return _HEDGE.search(tail[max(0, start - SHORT) : start]) is not None


def stated_answer(text: str) -> str | None:
    """Return the last "the answer is ..." of a text without boxes; None without any."""
    tail = _EMPHASIS.sub(r"\2", text[-TAIL:].translate(_SIGNS))
    for match in reversed(list(_STATED.finditer(tail))):
        answer = tail[match.end() : match.end() + LONGEST]
        if display := _DISPLAY.match(answer):
            answer = " ".join((display[1] or display[2]).split())
        if _BOX.match(answer):
            return None
        if _is_taken_back(tail, match.start()):
            continue

        # Without remarks, the words that lead to the answer, and signs.
        if other := _NOT_BUT.match(answer):
            answer = answer[other.end() :]
        for end in (_END, _BECAUSE):
            answer = end.split(answer, maxsplit=1)[0]
        answer = _KIND.sub("", _SENTENCE.sub("", answer))
        answer = without_signs(answer.strip(_QUOTES).rstrip(".,;:"))
        if re.search(r"[^\W_]", answer):
            return answer
    return None


def bare_last_line(text: str) -> str | None:
    """Return the last line if it is an answer and no sentence: a number or a formula alone, or after `####`."""
    line = text[-TAIL:].rstrip().rpartition("\n")[2].strip()[:LONGEST]
    marked = line.startswith("####")
    answer = _DRESS.sub("", line.removeprefix("####").strip()).rstrip(".").strip()
    if not re.search(r"[^\W_]", answer):
        return None
    if marked:
        return answer
    # A short formula with a digit or a command, without words and relations.
    if len(answer) > SHORT or _RELATION.search(answer) or _WORD.search(_COMMAND.sub(" ", answer)):
        return None
    return answer if re.search(r"\d|\\", answer) else None


_OPTIONS = r"(?:option|choice|opci[oó]n|opção|opzione|alternativ[ae]|вариант|选项)"
_RIGHT = (
    r"(?:correct|right|best|final|my|chosen|selected)\s(?:final\s)?(?:option|choice|letter|one|selection|pick|decision)"
)
_LETTER_CUE = re.compile(
    rf"(?:{_NOUN}{_WHICH}|{_RIGHT}|{_OPTIONS}\s(?:corr|rich)\w+|选项)[*_`]{{0,3}}\s{{0,3}}"
    rf"(?:(?:to|of|for|among)\s[^\n.:=]{{1,80}}?\s)?"
    rf"(?:{_COPULA}{_THUS}|(?=\(|isn['’]t|n['’]est\spas|不是)|(?:[-–—]|->|=>|→|⇒)\s)[\s:=*]{{0,8}}|{_CORRECTION}",
    re.IGNORECASE,
)
_CHOSEN = re.compile(
    r"(?:\b(?:choose|chose|select|pick|go\swith|leaving|leaves|(?:option|choice)\s?(?:is(?![a-z])|:))"
    r"|[选選][择擇]?[项項]?)[\s:是为]{0,4}",
    re.IGNORECASE,
)
#: "C is correct", after a word for an option or at the beginning of a clause.
_CORRECT = re.compile(
    r"(?:(?i:\b(?:option|choice|answer))\s{1,3}|^|[.,]\s{1,3}|(?i:\b(?:so|thus|hence|therefore)),?\s{1,3})[*($\[]{0,3}"
    r"(?P<letter>[A-Z])[*)$\]]{0,3}\s{1,3}(?:is|must\sbe)\s{1,3}(?:the\s{1,3})?"
    r"(?:correct|right|best|answer|true)(?![a-z])",
    re.MULTILINE,
)
#: A last line that concludes with a letter alone.
_CONCLUDED = re.compile(
    r"(?:.*[.!?:;,]\s)?\W{0,4}(?:therefore|thus|hence|so|consequently|accordingly|finally|in\sconclusion|donc|also|somit"
    r"|daher|portanto|quindi|因此|所以|故)[,:]?\s{0,3}(?=\W{0,6}(?:[a-z]{4,6}\s?\{)?[A-Z]\W*$)",
    re.IGNORECASE,
)
_MENTION = re.compile(
    rf"(?:{_NOUN}|{_OPTIONS})\s{{0,3}}(?:\s(?:option|choice|letter)\s{{1,3}}){{0,2}}[\s*:]{{0,6}}", re.IGNORECASE
)
#: The beginning of a statement that no letter is the answer; "not A but B" and "not A, it is B" name one after all.
_NOT = r"(?:(?:not|isn['’]t|nicht|n['’]est\spas|не)(?![^\W_])|不是)"
_DENIAL = re.compile(
    rf"\W{{0,4}}(?:{_NOT}|(?:none|no|neither|unknown|unclear|I\s(?:do|don['’]t|can)|nothing|impossible)(?![^\W_]))"
)
_NOT_BUT = re.compile(
    rf"\W{{0,4}}{_NOT}\s?[^\n.]{{1,12}}?\W{{1,3}}(?:but|it\sis|it['’]s|rather|sondern|mais|而是)\s?(?:rather\s)?"
)
#: Words between "answer:" and the letter; none that deny.
_FILLER = re.compile(
    r"(?:(?!(?:not|nor|never|except|whether|if|unlike|than|wrong|nicht|kein\w*|pas|ni)(?![^\W_]))"
    r"(?:[^\W\d_]{2,},?|I|a)\s{1,3}){1,6}(?=\W{0,4}[A-Z](?![^\W_]))"
)
#: A letter, the signs and words before it, and the rest of its line.
_OPTION = re.compile(
    r"(?:[*_`\"'“=$(\[{<\s]|\\\(|\\[a-z]{4,6}\s?(?=\{)|(?i:option|choice|letter)\s){0,8}"
    r"(?P<letter>[A-Za-z])(?!['’]?[A-Za-z0-9À-ɏ])(?P<rest>[^\n]*)"
)
#: A second letter beside the first: no single choice.
_OTHER = re.compile(
    r"\W{0,4}(?:or|and|oder|und|ou|et|/|&)\W{1,4}(?:(?:possibly|perhaps|maybe)\s)?[A-Z](?![\w'’])|[*)\]]{0,2},\s?[*(\[]{0,2}[A-Z]\W*$"
)
#: After a letter that ends a statement; a capital letter may go on with a reason.
_STOP = re.compile(r"[*_`\"'”=$)}\].:,;!>]|\\\)|\s*$|\s+[-–—(]|です|입니다|项|\s+(?:because|since)(?![a-z])")
_REASON = re.compile(r"\s+(?:as|is|and|with|which)(?![a-z])")


def chosen_letter(text: str, choices: Sequence[str]) -> str | None:
    r"""Return the letter that a text chooses: `\boxed{C}`, `(c)`, `The answer is C.`; never the A of "Consider A."

    A stated answer goes before a mentioned one. The text of one of the `choices` may stand for its letter. Without
    choices all letters count.
    """
    last_letter = chr(ord("A") + len(choices) - 1) if choices else "Z"

    # Boxes that all choose one letter.
    letters = {_letter_of_box(box, last_letter, choices) for box in _boxes(text)}
    if len(letters) == 1 and None not in letters:
        return letters.pop()

    # Statements, the surest first; the last is a last line "Therefore, C.".
    tail = text[-TAIL:].translate(_SIGNS)
    statements = [_announced_letter(tail, last_letter, choices), *_mentioned_letters(tail, last_letter)]
    last_line = tail.rstrip().rpartition("\n")[2][-SHORT:]
    if conclusion := _CONCLUDED.match(last_line):
        statements.append(_letter_at_start(last_line[conclusion.end() :], last_letter, strict=True))
    for statement in statements:
        if statement is not None:
            # "" is a statement that no letter is the answer: it ends the search.
            return statement or None

    if len(letters - {None}) > 1:
        return None
    # Only the last few boxes are searched.
    for match in reversed(list(_BOX.finditer(text))[-DEPTH:]):
        if found := _letter_of_box(_box_content(text, match.start())[0], last_letter, choices):
            return found
    return _letter_on_a_line(tail, last_letter, choices)


def _announced_letter(tail: str, last_letter: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the last statement "the answer is ..."; "" for "the answer is not A", None without any."""
    for rest in reversed(_texts_after(_LETTER_CUE, tail)):
        line = rest.partition("\n")[0]
        if chosen := _letter_of_choice(without_signs(_END.split(line, maxsplit=1)[0]), choices):
            return chosen
        if other := _NOT_BUT.match(line):
            line = line[other.end() :]
        elif _DENIAL.match(line):
            return ""
        if found := _letter_at_start(line, last_letter):
            return found
        if found := _letter_at_start(_FILLER.sub("", line, count=1), last_letter, strict=True):
            return found
    return None


def _texts_after(cue: re.Pattern[str], tail: str) -> list[str]:
    """Return what stands behind the last matches of a pattern."""
    matches = list(cue.finditer(tail))[-MOST_CUES:]
    return [tail[match.end() : match.end() + 2 * SHORT] for match in matches if not _is_taken_back(tail, match.start())]


def _mentioned_letters(tail: str, last_letter: str) -> list[str | None]:
    """Return the letters that a text chooses in other words, the surest first: of "C is correct", "pick C", "option C".

    Of mere mentions there must be one letter alone.
    """
    correct = [match["letter"] for match in _CORRECT.finditer(tail) if match["letter"] <= last_letter]
    chosen = [letter for rest in _texts_after(_CHOSEN, tail) if (letter := _letter_at_start(rest, last_letter))]
    mentions = {_letter_at_start(rest, last_letter) for rest in _texts_after(_MENTION, tail)} - {None}
    return [
        correct[-1] if correct else None,
        chosen[-1] if chosen else None,
        mentions.pop() if len(mentions) == 1 else None,
    ]


def _letter_at_start(text: str, last_letter: str, strict: bool = False) -> str | None:
    """Return the letter at the beginning of a text; None if it is a word of a sentence, or another letter follows.

    A small letter, and with `strict` any, has to end the statement. A lone A may be an article, a lone I a pronoun.
    """
    match = _OPTION.match(text)
    if match is None or match["letter"].upper() > last_letter:
        return None
    found = match["letter"]
    rest = match["rest"]
    if _OTHER.match(rest) or _DENIED_BEHIND.match(rest):
        return None

    if _STOP.match(rest):
        return found.upper()
    if strict or not found.isupper():
        return None
    # A capital letter may be followed by a reason, or by any words unless it can be an article (A) or a pronoun (I).
    is_letter = _REASON.match(rest) or (found not in "AI" and rest[:1].isspace())
    return found if is_letter else None


def _letter_on_a_line(tail: str, last_letter: str, choices: Sequence[str]) -> str | None:
    """Return the letter that is the last line or the first one, alone or before the text of its choice: "b. 4"."""
    lines = [line for line in tail.splitlines() if line.strip()]
    letters: list[str | None] = []
    for line in lines:
        match = _OPTION.match(line.strip())
        if match is None or match["letter"].upper() > last_letter:
            letters.append(None)
            continue
        letter = match["letter"].upper()
        text = match["rest"].strip().lstrip(_QUOTES + ")].:")
        is_alone = not text.strip("$.})\\")
        letters.append(letter if is_alone or _letter_of_choice(text, choices) == letter else None)

    # Several are a list of the options, unless the last is a letter without its text.
    if len(set(letters) - {None}) > 1 and len(lines[-1].strip(_QUOTES + "$().]}")) > 1:
        return None
    return letters[-1] or letters[0] if letters else None


def _letter_of_box(box: str, last_letter: str, choices: Sequence[str]) -> str | None:
    """Return the letter at the beginning of a box's content, or the one of the choice that the content spells out."""
    inner = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mathsf|operatorname|textit)(?![A-Za-z])\s*", "", box)
    letter = rf"([A-{last_letter}a-{last_letter.lower()}])(?![A-Za-z0-9])"
    match = re.match(rf"[\s{{(\[$*]*(?:(?i:option|choice|answer)[\s:({{\[]*)?{letter}", inner)
    chosen = _letter_of_choice(box, choices)
    if match is None or (chosen and match[1].islower()) or _OTHER.match(inner[match.end() :]):
        return chosen

    rest = inner[match.end() :]
    # "C" or "C) 3 eV" or "C: ...", but not the C of "C = 3" or "C + 1", nor a small letter that begins a formula.
    behind = re.match(r"[\s})\]$*]*[).:,\-]", rest) if match[1].isupper() else None
    return match[1].upper() if not rest.strip(" })]$*.") or behind else chosen


def _letter_of_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the only choice with that text."""

    def undecorated(text: str) -> str:
        return re.sub(r"[\s$]|\\(?:text|mathrm|left|right|[,;!])", "", text).strip("{}.").casefold()

    chosen = [i for i, choice in enumerate(choices) if undecorated(choice) == undecorated(text)]
    return chr(ord("A") + chosen[0]) if len(chosen) == 1 else None


def boxed_or_stated(text: str) -> str | None:
    """Return the boxes of a text, else its statement."""
    boxes = (_REMARK.sub("", without_signs(box)) for box in _boxes(text))
    return ", ".join(filter(None, boxes)) or stated_answer(text)

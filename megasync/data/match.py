"""The default reward of rows with a column `answer`: whether a response's answer says the same as the reference.

Numbers are compared by value as people write them, choices by their letter, lists element by element, all else as text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from megasync.data.final_answer import Answer, final_answer, scored
from megasync.data.written_number import LONGEST, plain_math, written_number

# Elements of a list that are compared with each other.
MOST_ELEMENTS = 50

# An option's letter, alone, in brackets, before its text, or before the reason for it.
_CHOICE = re.compile(r"\(?([A-J])\)?[.):]?")
_LED_CHOICE = re.compile(
    r"(?:(?:therefore|thus|hence|so),?\s+)?(?:I(?:'d|\s+would)?\s+(?:choose|pick|select|go\s+with)\s+)?(?:(?:option|choice|letter|statement)\s+)?(?:.{0,4}\u9009\u9879)?(?:"
    r"\(([A-Ja-j])\)(?:\W.*)?|([A-Ja-j])(?:\s*(?:[).:]|\((?=\W*\w{2}))(?:\s.*|(?<=\().*)?"
    r"|,?\s+(?:because|since|as|which|so|for|[-–—]|is\s+(?:the\s+)?(?:correct|right|best|true))(?!\w).*|\u662f?\u6b63\u786e.*|[,;]\s*[^\x00-\x7f].*)?)",
    re.DOTALL | re.IGNORECASE,
)
# Behind a choice, another one: "(B) or (C)", "B. C. D." and "A) 1 B) 2 C) 3".
_OPTION = r"(?:\([A-J]\)|\b[A-J](?=\s*(?:[).:,;/]|$|(?:or|and)\b)))"
_AND_ANOTHER = re.compile(
    rf"[\W_]*(?:(?i:or|and|alternatively|also|maybe|perhaps|possibly|even|then)\b[\W_]*)*{_OPTION}"
    rf"|(?!.*\b(?:because|since|as|so|for|considered)\b).*(?:\([A-J]\)|\b[A-J][).:]).*(?:\([A-J]\)|\b[A-J][).:])",
    re.DOTALL,
)
_CHOICES = re.compile(r"[A-J]{2,}|\(?[A-J]\)?(?:\s*(?:,|;|&|\band\b)\s*\(?[A-J]\)?)+")
_VERDICTS = {"yes": True, "true": True, "correct": True, "no": False, "false": False, "incorrect": False}
# Before a comma, a dash or a clause: "no idea" is no verdict.
_FIRST_WORD = re.compile(
    r"[A-Za-z]+(?=$|[,.;:!]|\s+(?:[-–—(]|(?:it|they|he|she|we|you|i|this|that|there|the|because|since|as)\b))",
    re.IGNORECASE,
)
_BASE_NAMES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
_BASE = re.compile(r"([0-9A-Fa-f]+)\s*_\s*\{?\s*(?:\\text\s*)?(\d{1,2}|" + "|".join(_BASE_NAMES) + r")\s*\}?")
# The name in "x = 5", "f(2) = 5" and "x \in [1, 2]".
_NAMED = re.compile(
    r"(?:[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?|\((?:[A-Za-z]\s*,\s*)+[A-Za-z]\))\s*(?:=|\\in\b|∈)\s*(?=\S)"
)
# The same the other way around: 5 = x.
_NAMED_BEHIND = re.compile(r"([^=]*[^=\s<>])\s*=\s*([A-Za-z](?:_\{?\w+\}?)?)")
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\band\b|\bor\b)\s*")
# A decimal, or a list of two numbers.
_PAIR = re.compile(r"\d+,\d+")
_QUOTES = "\"'`\u201c\u201d\u2018\u2019"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_BOLD = re.compile(r"\*\*(.+?)\*\*|__(.+?)__")
# Where a sentence goes on after it has named the answer.
_CLAUSE = re.compile(
    r",\s+(?=[a-z])|;\s|\s[-–—]\s|\s\((?![A-J]\))|\b(?:because|since|which|so|as|in total|in all|altogether)\b"
)
# Behind which another answer follows.
_GOES_ON = re.compile(r"\W*(?:or|and|alternatively|also|maybe|perhaps|possibly|yes|no|true|false)\b", re.IGNORECASE)
# A sentence with one of these does not say that the number in it is the answer.
_HEDGE = re.compile(
    r"\b(?:not|no\s+(?:es|son)|or|neither|nor|about|approximately|nearly|almost|around|roughly|between|least|most|than|maybe|perhaps"
    r"|either|never|step|case|part|line|question)\b|n't\b|[?~≈<>≤≥]|\\[gl]eq?\b|\\approx"
    # The number is a label.
    r"|\b(?:theorem|lemma|corollary|proposition|definition|equation|eqn?|formula|figure|fig|table|problem|exercise"
    r"|example|method|approach|attempt|option|chapter|section|page|rule|property|item|round|version)s?\.?\s*\(?\d"
    # Other languages.
    r"|\b(?:nicht|kein\w*|oder|etwa|ungefähr|zwischen|pas|ou|environ|entre|o|non|ni|aproximadamente|circa|não|не|или|около)\b"
    r"|[不非或约約]|可能|也许|大概",
    re.IGNORECASE,
)
_RELATION = re.compile(r"[<>≤≥≈≠]|\\[gl]eq?\b|\\ne")
# Of what stands around the only number of a sentence: a word that is no function, no mathematics, a name before it.
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|mod|lim|max|min|pi)\b)[A-Za-z]{2,}"
    r"|[\u0400-\u1eff\u3040-\u9fff\uac00-\ud7af]"
)
_FORMULA = re.compile(r"[+^_{}*/=()]|\\[a-z]")
_NAMED_BEFORE = re.compile(r"\b[A-Za-z]\s*=\s*$")
_SEVERAL = re.compile(r"(?<![{\\]),(?!\d)|(?<!\\);|\b(?:and|or)\b")
# Before a last line's answer.
_LEADING = re.compile(r"(?:(?:∴|⇒|⟹|→|[=-]>|\\(?:therefore|implies|Rightarrow|rightarrow)\b)\s*)+")
_TIME = re.compile(r"(?<=\d)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
_COPULA = re.compile(r"\b(?:is|was|are|were|be)\b")
_QUANTITY = re.compile(
    r"(?:[-−]?\s*\\?[$€£¥₹]\s*)?(?<![A-Za-z0-9.,^_])[-−]?(?:\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
    r"|\d(?:(?:[\d,.'_/]|\{,\}|[ \u00a0\u202f](?=\d))*\d)?|\.\d+)"
    r"(?:\s*(?:\\?%|percent\b|million\b|billion\b|thousand\b))?"
)


def match_answer(
    completions: Sequence[str],
    *,
    answer: Sequence[Any],
    finish_reasons: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """1.0 where the final answer says the same as the column `answer`, as a number or as text, else 0.0.

    None (the response is left out) where `answer` is missing. Raises DataError for an `answer` that is neither text nor
    a number.
    """
    return scored(completions, answer, finish_reasons, _score)


def _score(answer: Answer, right: Sequence[str]) -> float:
    return float(any(agree(text, each) for text in readings(answer) for each in right))


def readings(answer: Answer) -> Iterator[str]:
    """Yields the readings of an answer: its text, and if that is a sentence, the part of it that names the answer."""
    text = answer.text if answer.marked else answer.text.rstrip("!")
    yield text
    nested = None if answer.marked else final_answer(text)
    if nested and nested.marked:
        yield nested.text
    bold = [m[1] or m[2] for m in _BOLD.finditer(text)]
    if len(bold) == 1:
        yield bold[0]
    clause = _CLAUSE.search(text)
    if clause and clause.start() and not _GOES_ON.match(text, clause.end()):
        yield text[: clause.start()]
    if "=" in text and not _RELATION.search(text) and not _SEVERAL.search(text):
        yield text.rpartition("=")[2]
    exact, rounded, value = text.partition(r"\approx" if r"\approx" in text else "≈")
    if rounded and re.search(r"\d", exact):
        yield exact
        if (number := written_number(exact)) and (near := written_number(value)) and number.is_near(near):
            yield value
    if _HEDGE.search(text) or written_number(text):
        return
    text = plain_text(text)
    quantities = list(_QUANTITY.finditer(text))
    if len(quantities) == 1:
        at = quantities[0]
        around = _NAMED_BEFORE.sub(" ", text[: at.start()]) + text[at.end() :]
        if _WORD.search(around) and not _FORMULA.search(around):
            yield at[0]
    if copula := list(_COPULA.finditer(text)):
        yield text[copula[-1].end() :]


def agree(answer: str, reference: str) -> bool | None:
    """Whether two texts say the same; None if neither numbers, letters nor words tell."""
    one, other = plain_text(answer), plain_text(reference)
    if _squeezed(one) == _squeezed(other):
        return bool(one)
    if max(len(one), len(other)) > LONGEST:
        return None
    one, other = (f"{m[2]} = {m[1]}" if (m := _NAMED_BEHIND.fullmatch(text)) else text for text in (one, other))
    for comparison in (_bases, _choices, _numbers, _verdicts, _lists):
        if (result := comparison(one, other)) is not None:
            return result
    stripped = _NAMED.sub("", one, count=1), _NAMED.sub("", other, count=1)
    named = [m[0] for text in (one, other) if (m := _NAMED.match(text))]
    if named and (len(named) == 1 or re.sub(r"\s", "", named[0]) == re.sub(r"\s", "", named[1])):
        return agree(*stripped)
    return True if _words(one) == _words(other) != "" else None


def plain_text(text: str) -> str:
    """A text without the signs around it: mathematics, bold, quotes, backticks, and the full stop."""
    before = None
    text = re.sub(r"\$\$?|\\\[|\\\]|\\\(|\\\)", " ", text) if _balanced_dollars(text) else text
    text = _TIME.sub(r" \1m", plain_math(text))
    text = re.sub(r"\*\*(?=$|[\s.,;:])|(?:^|(?<=\s))\*\*", "", text)
    while before != text:
        before = text
        text = text.strip().strip(_QUOTES + "*_ ").rstrip(".,;: ").lstrip(":")
        text = text[match.end() :] if (match := _LEADING.match(text)) else text
        if text and "So" in (unicodedata.category(text[0]), unicodedata.category(text[-1])):
            words = [at for at, character in enumerate(text) if unicodedata.category(character) != "So"]
            text = text[words[0] : words[-1] + 1] if words else ""
        text = re.sub(r"^\$(?=\(?[A-Za-z])", "", text)
        text = re.sub(r"^[\[<]\s*([A-J])\s*[\]>]$", r"\1", text)
        if text[:1] == "{" and text[-1:] == "}" and text[:2] != "\\{":
            text = text[1:-1] if "," not in text else text
    return text.replace("\\{", "{").replace("\\}", "}")


def _balanced_dollars(text: str) -> bool:
    """Whether dollars enclose mathematics, rather than begin an amount."""
    return text.count("$") % 2 == 0 or bool(re.search(r"\\[\[\]()]", text))


def _squeezed(text: str) -> str:
    """A text without case, and without spaces around signs."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", text.casefold())


def _words(text: str) -> str:
    """A text's words without case, article, and punctuation."""
    text = re.sub(f"[{_QUOTES}*_^{{}}]", "", text.casefold())
    return re.sub(r"\s+", " ", re.sub(r"^(?:the|an?)\s+(?=\w{2})", "", text)).strip()


def _bases(one: str, other: str) -> bool | None:
    """1011_2 is not 1011_3; digits without a base are taken for those of the other's."""
    pairs = [_BASE.fullmatch(text) for text in (one, other)]
    if not any(pairs):
        return None
    digits = [m[1] if m else text for m, text in zip(pairs, (one, other), strict=True)]
    bases = {_BASE_NAMES.get(m[2], m[2]) for m in pairs if m}
    return digits[0].casefold() == digits[1].casefold() and len(bases) == 1


def _choices(one: str, other: str) -> bool | None:
    if right := _CHOICE.fullmatch(other):
        return None if (letter := _led_choice(one)) is None else letter == right[1]
    if (letter := _CHOICE.fullmatch(one)) and (led := _led_choice(other)):
        # The reference has the option's text too.
        return letter[1] == led
    if not (_CHOICES.fullmatch(one) and _CHOICES.fullmatch(other)):
        return None
    letters = [re.findall(r"[A-J]", text) for text in (one, other)]
    # Letters that nothing separates may be a word or an order.
    both_listed = not any(re.fullmatch(r"[A-J]+", text) for text in (one, other))
    return sorted(letters[0]) == sorted(letters[1]) if both_listed else letters[0] == letters[1]


def _led_choice(text: str) -> str | None:
    """The letter of the one option that a text begins with."""
    match = _LED_CHOICE.fullmatch(text)
    if match is None or _AND_ANOTHER.match(text, match.end(match.lastindex or 0) + (match[1] is not None)):
        return None
    return (match[1] or match[2]).upper()


def _numbers(one: str, other: str) -> bool | None:
    number, right = written_number(one), written_number(other)
    if number is None or right is None:
        return None
    equal = right.equals(number)
    if not equal and _PAIR.fullmatch(one) and _PAIR.fullmatch(other):
        return None
    # Who writes 3 + 4 for 7 has not computed it.
    return equal if number.literal or not equal or not right.literal else None


def _verdicts(one: str, other: str) -> bool | None:
    right = _VERDICTS.get(other.casefold())
    first = _FIRST_WORD.match(one)
    verdict = _VERDICTS.get(first[0].casefold()) if first else None
    if right is None or verdict is None:
        return None
    # "Yes, no" is no answer.
    said = {_VERDICTS.get(piece.strip()) for piece in re.split(r"[,.;:!/]|\b(?:and|or)\b", one.casefold())}
    return verdict == right and (not right) not in said


def _lists(one: str, other: str) -> bool | None:
    """Lists in round or square brackets are ordered; without brackets, or in braces, they are sets."""
    (opening, elements, names), (expected, right, right_names) = _elements(one), _elements(other)
    if len(set(names)) == len(names) > 1 and sorted(names) == sorted(right_names):
        # x = 1, y = 2 is not x = 2, y = 1.
        elements = [elements[names.index(name)] for name in right_names]
        opening = expected = "("
        one = other = "()"
    if (len(elements) < 2 and len(right) < 2) or max(len(elements), len(right)) > MOST_ELEMENTS:
        return None
    if len(elements) != len(right):
        comparable = all(written_number(text) for text in (*elements, *right)) or any("dots" in text for text in right)
        return False if comparable and opening == expected else None
    if opening != expected and {opening, expected} != {"", "{"}:
        return None
    if opening in ("(", "["):
        results = [agree(a, b) for a, b in zip(elements, right, strict=True)]
        if one[-1] != other[-1]:
            return False
        return False if False in results else None if None in results else True
    left = list(right)
    undecided = False
    for text in elements:
        results = [agree(text, each) for each in left]
        if True in results:
            left.pop(results.index(True))
        else:
            undecided = undecided or None in results
    return True if not left else None if undecided else False


def _elements(text: str) -> tuple[str, list[str], list[str]]:
    """The opening bracket around a list, empty without one, its elements, and their names, if each has one."""
    opening = ""
    if text[:1] in _BRACKETS and text[-1:] in ")]}" and _encloses(text):
        opening, text = text[0], text[1:-1]
    pieces: list[str] = []
    depth = at = 0
    # Where commas with a space separate, those without one belong to numbers: 1,000, 2,000.
    separator = _SEPARATOR.pattern.replace("[,;]", r"(?:,\s|;)") if re.search(r",\s", text) else _SEPARATOR.pattern
    for match in re.finditer(rf"[(\[{{]|[)\]}}]|{separator}", text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif depth == 0:
            pieces.append(text[at : match.start()])
            at = match.end()
    pieces = [piece.strip() for piece in (*pieces, text[at:])]
    if not all(pieces):
        return opening, [text], []
    names = [re.sub(r"\s", "", match[0]) for piece in pieces if (match := _NAMED.match(piece))]
    return opening, [_NAMED.sub("", piece, count=1) for piece in pieces], names if len(names) == len(pieces) else []


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at == len(text) - 1
    return False

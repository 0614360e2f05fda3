"""The default reward of rows with a column `answer`: whether a response's answer says the same as the reference.

Numbers are compared by value as people write them, choices by their letter, lists element by element, all else as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megasync.data.final_answer import Answer, final_answer, scored
from megasync.data.written_number import LONGEST, plain_math, written_number

# Elements of a list that are compared with each other.
MOST_ELEMENTS = 50

# An option's letter, alone, in brackets, before its text, or before the reason for it.
_CHOICE = re.compile(r"\(?([A-J])\)?[.):]?")
_LED_CHOICE = re.compile(
    r"(?:I(?:'d|\s+would)?\s+(?:choose|pick|select|go\s+with)\s+)?(?:(?:option|choice|letter|statement)\s+)?(?:"
    r"\(([A-Ja-j])\)(?:\W.*)?|([A-Ja-j])(?:[).:](?:\s.*)?|,?\s+(?:because|since|as|which|so|for|[-–—])\s.*)?)",
    re.DOTALL | re.IGNORECASE,
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
_NAMED = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?\s*(?:=|\\in\b|∈)\s*(?=\S)")
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\band\b|\bor\b)\s*")
# A decimal, or a list of two numbers.
_PAIR = re.compile(r"\d+,\d+")
_QUOTES = "\"'`\u201c\u201d\u2018\u2019"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_BOLD = re.compile(r"\*\*(.+?)\*\*|__(.+?)__")
# Where a sentence goes on after it has named the answer.
_CLAUSE = re.compile(r",\s+(?=[a-z])|;\s|\s[-–—]\s|\s\(|\b(?:because|since|which|so|as|in total|in all|altogether)\b")
# A sentence with one of these does not say that the number in it is the answer.
_HEDGE = re.compile(
    r"\b(?:not|or|neither|nor|about|approximately|nearly|almost|around|roughly|between|least|most|more|less|fewer|than"
    r"|maybe|perhaps|either|never|step|case|part|line|question)\b|n't\b|[?~≈<>≤≥]|\\[gl]eq?\b|\\approx",
    re.IGNORECASE,
)
_RELATION = re.compile(r"[<>≤≥≈≠]|\\[gl]eq?\b|\\ne")
# Of what stands around the only number of a sentence: a word that is no function, no mathematics, a name before it.
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|mod|lim|max|min|pi)\b)[A-Za-z]{2,}")
_FORMULA = re.compile(r"[+^_{}*/=()]|\\[a-z]")
_NAMED_BEFORE = re.compile(r"\b[A-Za-z]\s*=\s*$")
_SEVERAL = re.compile(r"(?<!\{),(?!\d)|;|\b(?:and|or)\b")
_COPULA = re.compile(r"\b(?:is|was|are|were|be)\b")
_QUANTITY = re.compile(
    r"(?:[-−]?\s*\\?[$€£¥₹]\s*)?(?<![\w.,^_])[-−]?(?:\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
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
    if clause and clause.start():
        yield text[: clause.start()]
    if "=" in text and not _RELATION.search(text) and not _SEVERAL.search(text):
        yield text.rpartition("=")[2]
    if _HEDGE.search(text) or written_number(text):
        return
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
    text = plain_math(text)
    while before != text:
        before = text
        text = text.strip().strip(_QUOTES + "*_ ").rstrip(".,;:").lstrip(":")
        text = re.sub(r"^\$(?=\(?[A-Za-z])", "", text)
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
        match = _LED_CHOICE.fullmatch(one)
        return (match[1] or match[2]).upper() == right[1] if match else None
    if not (_CHOICES.fullmatch(one) and _CHOICES.fullmatch(other)):
        return None
    letters = [re.findall(r"[A-J]", text) for text in (one, other)]
    # Letters that nothing separates may be a word or an order.
    both_listed = not any(re.fullmatch(r"[A-J]+", text) for text in (one, other))
    return sorted(letters[0]) == sorted(letters[1]) if both_listed else letters[0] == letters[1]


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
    return None if right is None or verdict is None else verdict == right


def _lists(one: str, other: str) -> bool | None:
    """Lists in round or square brackets are ordered; without brackets, or in braces, they are sets."""
    (opening, elements), (expected, right) = _elements(one), _elements(other)
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


def _elements(text: str) -> tuple[str, list[str]]:
    """The opening bracket around a list, empty without one, and its elements."""
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
    named = [_NAMED.sub("", piece, count=1) for piece in pieces]
    return opening, named if all(pieces) else [text]


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at == len(text) - 1
    return False

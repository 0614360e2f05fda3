"""The score that a judge writes, as its position on the scale: "Score: 7", "8/10", "4 out of 5", [[7]], JSON, 80 %."""

from __future__ import annotations

import re

from megasync.data.written_number import plain_math, written_number

_DIGITS = r"(?:\d+(?:[.,]\d+)?(?:e[-+]?\d+)?(?:\s+\d/\d)?|\.\d+)(?![\d\w])"
_WORD = r"zero|one|two|three|four|five|six|seven|eight|nine|ten"
# A number, what it is out of, or a percent sign; or a second number, which makes it a range.
_SCORE = (
    rf"(?P<number>(?<![\w.,])[-+]?(?:{_DIGITS})|\b(?:{_WORD})\b)"
    rf"(?:\s*[*_]*\s*(?:(?:stars?\b|points?\b)?\s*\(?\s*\bout\s+of\b|/|\bof\b(?!\s+the\b))\s*(?P<out_of>{_DIGITS})"
    rf"|\s*(?P<percent>\\?%|percent\b)|\s*(?P<range>(?:-|to|or|and)\s*{_DIGITS}))?"
)
_ANY = re.compile(_SCORE, re.IGNORECASE)
_BETWEEN = re.compile(rf"between\s+{_DIGITS}\s+and\s+{_DIGITS}", re.IGNORECASE)
# Not the bounds of the scale.
_LABEL = (
    r"(?<!max_)(?<!min_)(?<!max )(?<!min )(?<!maximum )(?<!minimum )"
    r"(?:scor(?:es?|ed|ing)|ratings?|rated?|grade[ds]?|rewards?|evaluation|assessment)\b"
)
_OPENING = r"[\s\"'*_`\[({<>$]*(?:\\boxed\{)?"
# "Score: 7", "Score (0-10): 7", "score of 9", "rate it 8", "## Score" above the number, <score>7</score>.
_LABELLED = re.compile(
    rf"(?:(?P<whole>(?<![A-Za-z])(?:(?:overall|final|total)(?![A-Za-z])[^\n:.,]{{0,20}}(?<![A-Za-z\d/]){_LABEL}"
    rf"|overall(?=[\"'*_`\s]*[:=])))|(?<![A-Za-z\d/]){_LABEL})[\"'*_`]*"
    rf"(?:(?:\s*\([^)\n]*\)|[^\n:=\d]{{0,40}}?)?\s*[:=]|\s*\([^)\n]*\)|\s+(?:is|was|of|as|at|it|this|would be|a|an)\b"
    rf"|\s+-(?=\s)|>){{0,3}}"
    rf"{_OPENING}{_SCORE}|\[\[\s*(?P<double>[-+]?{_DIGITS})\s*\]\]",
    re.IGNORECASE,
)
# A label that says that a score follows.
_PROMISED = re.compile(rf"(?<![A-Za-z\d/]){_LABEL}[\"'*_`]*\s*[:=]", re.IGNORECASE)
_VERDICTS = {"yes": 1.0, "correct": 1.0, "right": 1.0, "true": 1.0, "pass": 1.0} | {
    "no": 0.0, "incorrect": 0.0, "wrong": 0.0, "false": 0.0, "fail": 0.0,
}  # fmt: skip
_WORDS = "|".join(_VERDICTS)
_VERDICT = re.compile(
    rf"(?:\b(?:verdict|judge?ment|decision|conclusion|answer)\b\W+(?:is\W+)?|\[\[\s*|\A\W*)(?P<word>{_WORDS})\b"
    rf"(?P<alone>\W*\Z|[,.;:!\n])?",
    re.IGNORECASE,
)


def written_score(text: str, low: float, high: float) -> float | None:
    """The score of a judge's text from 0 (`low`) to 1 (`high`); None without one, for a range, and outside the scale.

    A labelled score counts before an unlabelled one, one of the whole before one of a part, and a later one before an
    earlier one. Without a label, "8/10" counts before a number on a line of its own, and that before the last number.
    A score out of another number than `high`, or in percent, is a share of the scale. On a scale from 0 to 1, a verdict
    such as "yes" or "incorrect" is 1 or 0.
    """
    # In LaTeX, a tilde is a space.
    text = re.sub(r"(?<=\d)\s?~\s?(?=\d)", "-", text)
    lines = [line for each in text.splitlines() if (line := plain_math(each))]
    text = "\n".join(lines)
    if labelled := list(_LABELLED.finditer(text)):
        return _position([m for m in labelled if m["whole"]] or labelled, low, high)
    if _PROMISED.search(text):
        return None
    if (low, high) == (0, 1) and (verdicts := _verdicts(text)):
        return verdicts[-1]
    if _BETWEEN.search(text):
        return None
    matches = list(_ANY.finditer(text))
    alone = [m for line in (lines[:1] + lines[-1:]) if (m := _ANY.fullmatch(line.strip(" *_.`#")))]
    shares = [m for m in matches if m["out_of"] or m["percent"]]
    of_scale = [m for m in shares if m["out_of"] == f"{high:g}"]
    numbers = of_scale or shares or alone[-1:] or matches
    return _position(numbers, low, high) if numbers else None


def _verdicts(text: str) -> list[float]:
    return [_VERDICTS[m["word"].lower()] for m in _VERDICT.finditer(text) if m["alone"] is not None or m.start()]


def _position(matches: list[re.Match[str]], low: float, high: float) -> float | None:
    last = matches[-1].groupdict()
    number = written_number(last.get("double") or last["number"])
    if number is None or last["range"]:
        return None
    value, scale = float(number.value), (low, high)
    if last["percent"] and high != 100:
        scale = (0.0, 100.0)
    elif last["out_of"] and (out_of := written_number(last["out_of"])) and out_of.value != high:
        scale = (0.0, float(out_of.value))
    bottom, top = scale
    return (value - bottom) / (top - bottom) if bottom <= value <= top and top > bottom else None

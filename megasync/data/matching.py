"""Reward for datasets with an answer but no verifier: whether the completion ends with the correct answer."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

BOX = "\\boxed{"


def match_answer(completions: Sequence[str], *, answer: Sequence[object], **columns: object) -> list[float]:
    """1.0 where the final answer equals the column `answer`, as a number or as text, else 0.0.

    The final answer is the content of the last \\boxed{...}, or the last line if there is none.
    """
    return [float(_same(final_answer(c), str(a))) for c, a in zip(completions, answer, strict=True)]


def final_answer(completion: str) -> str:
    """The content of the last \\boxed{...} (braces may nest; empty if unclosed), or the last line of the text."""
    start = completion.rfind(BOX)
    if start < 0:
        return completion.strip().rsplit("\n", 1)[-1].strip()
    depth = 1
    begin = start + len(BOX)
    for place in range(begin, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[place], 0)
        if depth == 0:
            return completion[begin:place].strip()
    return ""


def _same(given: str, right: str) -> bool:
    given, right = (text.strip().strip("$").strip() for text in (given, right))
    if given == right:
        return True
    try:
        return Decimal(given.replace(",", "")) == Decimal(right.replace(",", ""))
    except InvalidOperation:
        return False

"""Joins math-verify: the reward `math`, 1.0 when the final answer equals the reference as mathematics, otherwise 0.0.

Which text is the answer, what is a reference, and numbers, choices and lists as people write them are decided as by
the default reward (`data.final_answer`, `data.match`). The package math-verify (`pip install 'megasync[math]'`)
compares the rest: its equality is symbolic, so that \\sqrt{12} and 2\\sqrt{3} agree.

Some answers keep the symbolic engine busy forever. The package interrupts it with an alarm signal, which works only on
a main thread, so the runner calls `math_reward` in worker processes (`needs_main_thread`).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any

from megasync.base.missing import require_extra
from megasync.data.final_answer import Answer, scored
from megasync.data.match import agree, readings
from megasync.data.written_number import UNIT_NAMES, plain_math
from megasync.errors import DataError

log = logging.getLogger(__name__)
# Outside a main thread timeouts are off, and the package would warn about that on every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Seconds for parsing one text as mathematics, and for comparing two. An answer that takes longer counts as wrong.
TIMEOUT_SECONDS = 5

# LaTeX for the characters that math-verify does not know.
_CHARACTERS = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "\u222a": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", r"\varnothing": r"\emptyset ", "θ": r"\theta ",
    "⩽": r"\le ", "⩾": r"\ge ",
}  # fmt: skip
# Of a sentence, the package finds the mathematics, which must be one formula.
_SENTENCE = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]{2,}\b|[$]|\\[(\[]")
_FORMULA = re.compile(r"\$[^$]+\$|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
# Names as calculators and Python write them.
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(pi|theta|alpha|beta|gamma|lambda|phi|omega|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|infty"
    r"|infinity)(?![A-Za-z])"
)
# A unit, in text or not, at the end of what is no plain number.
_UNIT = re.compile(
    r"(?<=.)\\(?:text|mathrm|mbox|textrm)\s*\{\s*(?:(?:square|cubic|sq\.?|cu\.?)\s+)?"
    rf"(?:{'|'.join(sorted(map(re.escape, UNIT_NAMES), key=len, reverse=True))})s?\.?\s*\}}"
    r"(?:\s*\^\s*\{?[23]\}?)?\s*$"
)
_DEGREES = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*(\d+(?:\.\d+)?)\s*degrees\s*\)?")
# The mathematics of such a sentence is not its answer.
_DENIAL = re.compile(r"\b(?:not|never|neither|at\s+(?:least|most))\b|n't\b", re.IGNORECASE)
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt|\\sqrt(?=\s*\())\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))")


def math_reward(
    completions: Sequence[str],
    *,
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    finish_reasons: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """Scores each completion against its row's `answer` column, or `solution` where rows have no `answer`.

    None (the response is left out) where the reference is missing, or cannot be parsed, which is logged. Raises
    DataError when rows have neither column, or when math-verify is not installed.
    """
    references = answer if answer is not None else solution
    if references is None:
        raise DataError(f"math_reward needs an answer or a solution column; the rows have {sorted(columns)}")
    return scored(completions, references, finish_reasons, _score)


# Read by `RewardRunner`.
setattr(math_reward, "needs_main_thread", True)  # noqa: B010 - functions declare no attributes


def _score(answer: Answer, right: Sequence[str]) -> float | None:
    results = [agree(text, each) for each in right for text in readings(answer)]
    if True in results:
        return 1.0
    if None not in results:
        return 0.0
    if not answer.marked and _DENIAL.search(answer.text):
        return 0.0
    scores = [_verified(answer.text, each) for each in right]
    return 1.0 if 1.0 in scores else 0.0 if 0.0 in scores else None


def _verified(text: str, reference: str) -> float | None:
    require_extra("math", "math_verify", "math_reward", kind=DataError)
    from math_verify import parse, verify

    # The package takes None for no timeout, but declares int.
    timeout: Any = TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    # Only the first match: in a formula that it cannot read, the package would find some number.
    how: dict[str, Any] = {"parsing_timeout": timeout, "extraction_mode": "first_match"}
    gold = parse(f"${_latex(reference)}$", **how)
    if not gold:
        log.warning("Reference answer %r cannot be parsed as mathematics; its responses are not scored", reference)
        return None
    target = _latex(text)
    if not _SENTENCE.search(target):
        target = f"${target}$"
    elif len(_FORMULA.findall(target)) != 1:
        return 0.0
    target = parse(target, **how)
    # An interval may be written as an inequality, on either side.
    return float(verify(gold, target, allow_set_relation_comp=True, timeout_seconds=timeout))


def _latex(text: str) -> str:
    """A text as LaTeX, with roots and signs that were written as characters."""
    text = plain_math(_UNIT.sub("", text)).rstrip(".")
    text = re.sub(r"\{\s+|\s+\}", lambda brace: brace[0].strip(), text).replace("**", "^")
    text = re.sub(r"\+\s*-", "-", text)
    text = _DEGREES.sub(r"\1(\2\\pi/180)", text)
    if not _SENTENCE.search(text):
        text = re.sub(r"(?<![A-Za-z\\])a(?=(?:sin|cos|tan)\s*\()", "arc", text)
        text = _NAMES.sub(lambda name: rf"\{name[1].replace('infinity', 'infty')} ", text)
        if opened := re.fullmatch(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])", text):
            # ]1, 2[ is (1, 2).
            text = f"{'[' if opened[1] == '[' else '('}{opened[2]}{']' if opened[3] == ']' else ')'}"
        if rows := re.fullmatch(r"\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]", text):
            cells = [row.replace(",", " & ") for row in re.findall(r"\[([^\[\]]*)\]", rows[1])]
            text = r"\begin{pmatrix}" + r" \\ ".join(cells) + r"\end{pmatrix}"
    for character, command in _CHARACTERS.items():
        text = text.replace(character, command)
    return _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)

"""How right an answer is: exact match and F1, after SQuAD's normalisation.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 6.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def marked_answer(text: str) -> str | None:
    """The text in the last <answer>...</answer>; None when there is none, or nothing in it."""
    found = _MARKED.findall(text)
    return found[-1].strip() or None if found else None


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """1.0 when the answer is one of `truths`, else 0.0."""
    return float(any(normalise(answer) == normalise(truth) for truth in truths))


def f1(answer: str, truths: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words; the best over `truths`."""
    return max(_f1(normalise(answer).split(), normalise(truth).split()) for truth in truths)


def _f1(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return float(answer == truth)
    common = (Counter(answer) & Counter(truth)).total()
    return 2 * common / (len(answer) + len(truth))

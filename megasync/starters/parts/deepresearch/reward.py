"""The reward: what the model learns to do. `rollout.reward` in run.yaml names this function."""

from __future__ import annotations

import re
from collections import Counter


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Scores the marked answer in each last response by the words that it shares with the right one; 0 without one.

    Searches and their results are not in `completions`. Every column of the rows is a list here, with one entry for
    each response.
    """
    return [overlap(marked(text), right) for text, right in zip(completions, answer, strict=True)]


def marked(text: str) -> str:
    """The text in the last <answer>...</answer>; empty without one."""
    return (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [""])[-1]


def overlap(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall over words: 1.0 for the same words, 0.0 for none in common."""
    one, other = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, right))
    return 2 * (one & other).total() / max(1, one.total() + other.total())

"""The reward: what the model learns to do. `rollout.reward` in run.yaml names this function."""

from __future__ import annotations


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Scores each response by the fraction of its digits that are right, with 1.0 for the exact answer alone.

    Every column of the rows is a list here, with one entry for each response. Partial credit gives a model that is
    never quite right something to learn from.
    """
    return [score(text.strip(), right) for text, right in zip(completions, answer, strict=True)]


def score(text: str, right: str) -> float:
    """The fraction of positions at which both agree; what is too long or too short counts as wrong."""
    matches = sum(one == other for one, other in zip(text, right, strict=False))
    return matches / max(len(text), len(right))

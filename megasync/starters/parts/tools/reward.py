"""The reward: what the model learns to do. `rollout.reward` in run.yaml names this function."""

from __future__ import annotations


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Scores each last answer: 1 for the right number alone.

    Tool calls and their results are not in `completions`. Every column of the rows is a list here, with one entry for
    each response.
    """
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

"""The part of the reward that is for the form of an answer. `rollout.rewards.boxed` in run.yaml names this function."""

from __future__ import annotations


def boxed(completions: list[str], **columns: object) -> list[float]:
    """Scores each response by whether it has exactly one box.

    Every column of the rows arrives as a list with one entry for each response, here in `columns`.
    """
    return [float(text.count("\\boxed{") == 1) for text in completions]

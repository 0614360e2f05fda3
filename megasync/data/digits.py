"""Procedural digit tasks over a 16-token vocabulary: copy, increment each digit, reverse.

Invariant: the hash of a digit string decides whether it belongs to the training or the held-out split, so the splits
never share a row, whatever their seeds and sizes. The reward is the fraction of correct positions, with the end of the
answer counted as one position. It gives partial credit from the first step on, and 1.0 only for an exact match.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from megasync.config.schema import DatasetConfig
from megasync.data.rows import HELD_OUT_SHARE, split_of
from megasync.errors import DataError

# One token per character; its index is the token id. The last id of the vocabulary is the end token.
CHARACTERS = "0123456789=>+<?"
END_TOKEN = "<end>"
MAX_LENGTH = 12
# Up to this many digits, all rows are enumerated. Longer strings are sampled and require `size`.
MAX_LISTED_LENGTH = 4

# By task: the sign that begins its prompts, and the function that computes the answer.
TASKS = {
    "copy": (">", lambda digits: digits),
    "increment": ("+", lambda digits: "".join(str((int(d) + 1) % 10) for d in digits)),
    "reverse": ("<", lambda digits: digits[::-1]),
}


def digit_rows(config: DatasetConfig) -> list[dict[str, str]]:
    """Distinct rows such as {"prompt": "+1290=", "answer": "2301"}. `options.length` is the number of digits.

    Raises DataError for an unknown task, split or option, and when fewer than `size` rows exist.
    """
    if config.source not in TASKS:
        raise DataError(f"unknown digit task {config.source!r}; the tasks are {', '.join(TASKS)}")
    if config.split not in ("train", "test"):
        raise DataError(f"digit tasks have the splits train and test, not {config.split!r}")
    sign, solve = TASKS[config.source]
    return [{"prompt": f"{sign}{digits}=", "answer": solve(digits)} for digits in _draw(config, _length(config))]


def digit_task(config: DatasetConfig) -> tuple[list[dict[str, str]], Callable[..., list[float]]]:
    """`digit_rows`, and the reward function that scores them."""
    return digit_rows(config), digit_reward


def _length(config: DatasetConfig) -> int:
    if unknown := sorted(set(config.options) - {"length"}):
        raise DataError(f"digit tasks have no option {unknown[0]!r}; the only one is length (number of digits)")
    length = config.options.get("length", 4)
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_LENGTH:
        raise DataError(f"digits: options.length must be a whole number from 1 to {MAX_LENGTH}, got {length!r}")
    return length


def _draw(config: DatasetConfig, length: int) -> list[str]:
    generator = random.Random(f"digits {config.split} {config.seed}")
    total = 10**length
    if length <= MAX_LISTED_LENGTH:
        split = [text for number in range(total) if split_of(text := f"{number:0{length}d}") == config.split]
        generator.shuffle(split)
        if config.size is not None and config.size > len(split):
            raise DataError(
                f"there are {len(split)} {config.split} rows of {length} digits, fewer than size={config.size}; "
                f"lower the size or raise options.length"
            )
        return split[: config.size]
    if config.size is None:
        raise DataError(f"{length} digits give {total:,} rows; set size to the number of rows")
    if config.size > total // HELD_OUT_SHARE // 2:
        raise DataError(f"size={config.size} is too large for {length} digits; lower it or raise options.length")
    drawn: dict[str, None] = {}
    while len(drawn) < config.size:
        text = f"{generator.randrange(total):0{length}d}"
        if split_of(text) == config.split:
            drawn[text] = None
    return list(drawn)


def digit_reward(
    completions: Sequence[str], *, answer: Sequence[str], finish_reasons: Sequence[str], **columns: object
) -> list[float]:
    """The fraction of correct positions, including the end of the answer; 1.0 only for an exact match."""
    return [_score(*each) for each in zip(completions, answer, finish_reasons, strict=True)]


def _score(completion: str, answer: str, finish_reason: str) -> float:
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    ended = finish_reason == "stop" and len(completion) == len(answer)
    return (right + ended) / (len(answer) + 1)

"""Trainer and server must compute the same log-probs from the same weights; this is where they are compared.

A wrong layout, a stale cache or a lost bucket shows here as a number far above what rounding explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megasync.errors import ParityError


def compare(
    trainer: Sequence[Sequence[float]],
    server: Sequence[Sequence[float]],
    threshold: float,
    *,
    engine: str = "server",
    version: int | None = None,
) -> float:
    """Mean absolute difference per token, in nats, of the log-probs of the same prompts.

    Args:
        trainer, server: one list per prompt, one log-prob per token but the first; None stands for NaN, as in JSON.
        threshold: largest mean that passes, inclusive.

    Raises:
        ParityError: the mean is above the threshold or not a number, or the shapes differ.
    """
    what = f"{engine}, version {version}" if version is not None else engine
    lengths = [len(tokens) for tokens in trainer], [len(tokens) for tokens in server]
    if lengths[0] != lengths[1]:
        raise ParityError(f"{what}: trainer and server scored different tokens: lengths {lengths[0]} and {lengths[1]}")
    pairs = [
        (math.nan if ours is None else ours, math.nan if theirs is None else theirs, prompt, token)
        for prompt, (row, other) in enumerate(zip(trainer, server, strict=True))
        for token, (ours, theirs) in enumerate(zip(row, other, strict=True), 1)
    ]
    if not pairs:
        raise ParityError(f"{what}: no log-prob to compare; parity needs prompts of at least two tokens")
    gaps = [abs(ours - theirs) for ours, theirs, _, _ in pairs]
    mean = sum(gaps) / len(gaps)
    if math.isfinite(mean) and mean <= threshold:
        return mean
    worst = max(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
    ours, theirs, prompt, token = pairs[worst]
    raise ParityError(
        f"{what}: log-probs of the same weights differ by {mean:.3g} a token on average, over the threshold "
        f"{threshold:g}; worst at prompt {prompt}, token {token}: trainer {ours:.6f}, server {theirs:.6f}"
    )

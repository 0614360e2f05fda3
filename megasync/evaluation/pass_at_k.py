"""pass@k: how likely at least one of k answers is right, estimated from more than k. Pure."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, right: int, k: int) -> float:
    """The unbiased estimate from `n` answers of which `right` are: 1 - C(n - right, k) / C(n, k).

    From "Evaluating Large Language Models Trained on Code" (Chen et al., 2021, arXiv:2107.03374), equation 1. Raises
    ValueError unless 1 <= k <= n and 0 <= right <= n.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"pass@{k} cannot be told from {right} right answers of {n}")
    return 1.0 - comb(n - right, k) / comb(n, k)


def counted(n: int) -> list[int]:
    """The k that are reported for `n` answers: powers of two, and n itself; none for a single answer."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n}) if n > 1 else []

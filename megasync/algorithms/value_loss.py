"""The loss of a critic: squared error of values, clipped as PPO does (Schulman et al. 2017, arXiv 1707.06347)."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error, summed over the tokens of a microbatch. Inputs are [tokens]; arithmetic is float32.

    ``old_values`` are those before the step. With ``clip``, a value that has moved further than that from its old one
    counts with the larger error of itself and of the bound. ``mask`` is non-zero on trained tokens; the values of
    others have no effect, even if they are NaN.

    Returns the loss, to be divided by a global number of tokens, and detached sums: ``tokens``, ``clip_fraction``,
    ``value``, and what `explained_variance` needs.
    """
    keep = mask.bool()
    values, old_values, returns = (torch.where(keep, each.float(), 0.0) for each in (values, old_values, returns))
    error = (values - returns).square()
    clipped = torch.zeros_like(keep)
    if clip is not None:
        bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    missed = torch.where(keep, returns - old_values, 0.0)
    sums = {
        "tokens": keep,
        "clip_fraction": clipped,
        "value": old_values,
        "return": returns,
        "return_square": returns.square(),
        "missed": missed,
        "missed_square": missed.square(),
    }
    return 0.5 * error.sum(), {name: each.detach().double().sum() for name, each in sums.items()}


def explained_variance(sums: dict[str, float]) -> float:
    """The share of the variance of returns that the values before the step explain; 1 is perfect, 0 a constant."""
    tokens = sums["tokens"] or 1.0

    def variance(name: str) -> float:
        return sums[f"{name}_square"] / tokens - (sums[name] / tokens) ** 2

    total = variance("return")
    return 1.0 - variance("missed") / total if total > 0 else 0.0

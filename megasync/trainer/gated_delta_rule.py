"""The gated delta rule in plain torch (Gated Delta Networks, https://arxiv.org/abs/2412.06464).

Each head has a state S, a matrix of key channels by value channels. A token with key k, value v, decay a and rate b
makes it ``a S + k (b (v - k (a S)))``, and its output is ``q S``. Tokens are computed in chunks. Within one, the writes
of all tokens are the solution of a triangular system (section 3.3 of the paper), so only chunks follow each other.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

# Tokens whose writes are solved together.
CHUNK = 64
# Added to the sum of squares of a query or key before it is normalised, as in flash-linear-attention.
NORM_EPSILON = 1e-6


def unit(channels: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last dimension."""
    return channels * torch.rsqrt(channels.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens, and the states after the last.

    A token with a zero key, a zero rate and a zero decay leaves the state as it is: padding.

    Args:
        query, key: float32 [batch, heads, tokens, key channels], normalised; the query also scaled.
        value: float32 [batch, heads, tokens, value channels].
        decay: float32 [batch, heads, tokens], the logarithm of the factor of the state, 0 or less.
        rate: float32 [batch, heads, tokens].
        state: float32 [batch, heads, key channels, value channels] before the first token; None for zeros.

    Returns:
        float32 [batch, heads, tokens, value channels], and states as ``state``.
    """
    tokens = query.shape[2]
    size = min(CHUNK, tokens)
    missing = -tokens % size
    query, key, value = (pad(part, (0, 0, 0, missing)).unflatten(2, (-1, size)) for part in (query, key, value))
    decay, rate = (pad(part, (0, missing)).unflatten(2, (-1, size)) for part in (decay, rate))

    total = decay.cumsum(-1)
    upper = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    # From token j to a later token i of the chunk. The others would overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
    grown = total.exp()[..., None]
    scaled_key = key * rate[..., None]
    # What a token reads of the writes before it in its chunk; the diagonal counts as ones.
    reads = scaled_key @ key.mT * between
    inputs = torch.cat((value * rate[..., None], scaled_key * grown), dim=-1)
    solved = torch.linalg.solve_triangular(reads, inputs, upper=False, unitriangular=True)
    writes, state_reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = query @ key.mT * between
    query, last = query * grown, total[..., -1:]
    key, kept = (key * (last - total).exp()[..., None]).mT, last.exp()[..., None]

    current = value.new_zeros(*value.shape[:2], key.shape[-2], value.shape[-1]) if state is None else state
    outputs: list[torch.Tensor] = []
    for chunk in range(query.shape[2]):
        written = writes[:, :, chunk] - state_reads[:, :, chunk] @ current
        outputs.append(query[:, :, chunk] @ current + within[:, :, chunk] @ written)
        current = current * kept[:, :, chunk] + key[:, :, chunk] @ written
    return torch.cat(outputs, dim=2)[:, :, :tokens], current

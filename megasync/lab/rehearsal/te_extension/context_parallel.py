"""Packed sequences that context parallelism splits: of each, a rank holds two chunks of equal length.

They are the chunks ``rank`` and ``2 * ranks - 1 - rank``. Offsets are those of the tensor beside them: of a rank's
tokens, of which half are in each chunk, or of all ranks' tokens. Log-sum-exps are float32 [heads, tokens], as fused
attention makes Transformer Engine keep them (``packed`` is true).
"""

from __future__ import annotations

import torch

_GRAD_CHANGES = ("add", "copy", "none", "zero")


def thd_get_partitioned_indices(cu_seqlens: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Where the tokens of one rank are among all, int32 [tokens / ranks]."""
    if cu_seqlens.device.type == "meta":
        return torch.empty(tokens // ranks, dtype=torch.int32, device="meta")
    return _rank_order(cu_seqlens, ranks).view(ranks, -1)[rank].int()


def thd_sequence_order_to_cp_rank_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, ranks: int, tokens: int
) -> torch.Tensor:
    """[tokens, ...] in the order of sequences as the tokens of rank 0, those of rank 1 and so on."""
    return torch.empty_like(tensor) if tensor.device.type == "meta" else tensor[_rank_order(cu_seqlens, ranks)]


def thd_cp_rank_order_to_sequence_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, ranks: int, tokens: int
) -> torch.Tensor:
    """The inverse of `thd_sequence_order_to_cp_rank_order`."""
    ordered = torch.empty_like(tensor)
    if tensor.device.type != "meta":
        ordered[_rank_order(cu_seqlens, ranks)] = tensor
    return ordered


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half: int) -> torch.Tensor:
    """The first (0) or second (1) chunk of each sequence of [tokens, heads, dim]: [tokens / 2, heads, dim]."""
    if tensor.device.type == "meta":
        return tensor.new_empty(tensor.shape[0] // 2, *tensor.shape[1:])
    return tensor[_half(cu_seqlens, half)]


def thd_read_second_half_lse(lse: torch.Tensor, cu_seqlens: torch.Tensor, packed: bool, tokens: int) -> torch.Tensor:
    """The log-sum-exps of the second chunks, [heads, tokens]."""
    _check_packed(packed)
    return lse.new_empty(len(lse), tokens) if lse.device.type == "meta" else lse[:, _half(cu_seqlens, 1)]


def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, packed: bool
) -> None:
    """Adds, in place, the keys of a step that only the second chunks attend to; ``lse_per_step`` is of those."""
    _check_packed(packed)
    if lse.device.type != "meta":
        rows = _half(cu_seqlens, 1)
        lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step)


def thd_out_correction(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_lse: torch.Tensor,
    new_lse: torch.Tensor,
    lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    """Adds, in place, the output of a step to that of the steps before, each with its share of the probabilities.

    ``out`` is [tokens, heads, dim] or flatter, ``out_per_step`` the same, or with ``only_second_half`` half of it.
    """
    _check_packed(packed)
    if out.device.type == "meta":
        return
    tokens = old_lse.shape[1]
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(tokens)
    total, step = out.view(tokens, len(old_lse), -1), out_per_step.view(len(rows), len(old_lse), -1)
    old, new = old_lse[:, rows], new_lse[:, rows]
    kept, added = (
        part.float() * (part_lse - new).exp().t()[..., None]
        for part, part_lse in ((total[rows], old), (step, lse_per_step))
    )
    total[rows] = (kept + added).to(out.dtype)


def thd_grad_correction(
    grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str, second_half: str
) -> None:
    """Changes, in place, both chunks of [tokens, heads, dim] by a step's gradients: "add", "copy", "zero" or "none".

    ``grad_per_step`` has the tokens of the chunks that are added or copied.
    """
    changes = (first_half, second_half)
    if any(change not in _GRAD_CHANGES for change in changes):
        raise ValueError(f"a change of gradients is one of {', '.join(_GRAD_CHANGES)}, not {changes}")
    if grad.device.type == "meta":
        return
    both_halves = not {"none", "zero"} & set(changes)
    for half, change in enumerate(changes):
        rows = _half(cu_seqlens, half)
        step = grad_per_step[rows] if both_halves else grad_per_step
        if change == "add":
            grad[rows] += step
        elif change == "copy":
            grad[rows] = step
        elif change == "zero":
            grad[rows] = 0


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    target: torch.Tensor, source: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Copies the tokens of each sequence, without its padding, to the same rows of ``target``."""
    if target.device.type == "meta":
        return
    for start, length in zip(cu_seqlens_padded.tolist(), cu_seqlens.diff().tolist(), strict=False):
        target[start : start + length] = source[start : start + length]


def _rank_order(cu_seqlens: torch.Tensor, ranks: int) -> torch.Tensor:
    """Where the tokens of rank 0, those of rank 1 and so on are among all, [tokens]."""
    chunks = [
        torch.arange(start, stop).view(2 * ranks, -1)
        for start, stop in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)
    ]
    return torch.cat(
        [each[chunk] for rank in range(ranks) for each in chunks for chunk in (rank, 2 * ranks - 1 - rank)]
    )


def _half(cu_seqlens: torch.Tensor, half: int) -> torch.Tensor:
    """The rows of the first or second chunks, [tokens / 2]."""
    bounds = zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)
    return torch.cat([torch.arange(start, stop).view(2, -1)[half] for start, stop in bounds])


def _check_packed(packed: bool) -> None:
    if not packed:
        raise NotImplementedError("the stand-in for context parallelism has packed log-sum-exps only")

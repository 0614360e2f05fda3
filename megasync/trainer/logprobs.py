"""Log-probs and entropy from logits that are sharded over the vocabulary.

No rank ever holds a row of the whole vocabulary. The backward pass keeps nothing of the size of the logits except the
logits. Padded vocabulary columns count as -inf: they have no probability and no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Number of logits converted to float32 at a time; bounds temporary memory to 64 MiB per tensor.
CHUNK_ELEMENTS = 2**24
# On a CPU, 1 MiB stays in a core's cache through all operations on it, which makes them two to three times faster.
CPU_CHUNK_ELEMENTS = 2**18


class _VocabularyParallel(torch.autograd.Function):
    """With z the logits over the temperature, p = softmax(z), H = -sum(p log p), and t the target:

    d log p_t / d z_j = [j = t] - p_j   and   d H / d z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        columns: int,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local = (targets - first).clamp(0, max(columns - 1, 0))
        owned = (targets >= first) & (targets < first + columns)
        rows = len(targets)
        peak = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        if columns and rows:
            peak = logits[:, :columns].amax(dim=-1).float() / temperature
        _reduce(peak, dist.ReduceOp.MAX, group)

        # Sums over the vocabulary: exp(z), exp(z) z and z_t, all with the row's peak subtracted from z.
        sums = torch.zeros(3, rows, dtype=torch.float32, device=logits.device)
        for part in _chunks(logits, columns):
            z = _scaled(logits[part, :columns], temperature, peak[part])
            sums[2, part] = z.gather(1, local[part, None]).squeeze(1).mul_(owned[part])
            weights = z.exp()
            sums[0, part] = weights.sum(dim=-1)
            sums[1, part] = weights.mul_(z).sum(dim=-1)
        _reduce(sums, dist.ReduceOp.SUM, group)

        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(logits, peak + log_total, entropy, local, owned)
        ctx.columns, ctx.temperature = columns, temperature
        ctx.set_materialize_grads(False)
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, of_logprob: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, log_normaliser, entropy, local, owned = ctx.saved_tensors
        columns, grad = ctx.columns, torch.zeros_like(logits)
        for part in _chunks(logits, columns):
            log_p = _scaled(logits[part, :columns], ctx.temperature, log_normaliser[part])
            p = log_p.exp_() if of_entropy is None else log_p.exp()
            if of_entropy is not None:
                slope = log_p.add_(entropy[part, None]).mul_(of_entropy[part, None])
                if of_logprob is not None:
                    slope.add_(of_logprob[part, None])
                total = p.mul_(slope.neg_())
            elif of_logprob is not None:
                total = p.mul_(-of_logprob[part, None])
            else:
                continue
            if of_logprob is not None:
                total.scatter_add_(1, local[part, None], (of_logprob[part] * owned[part])[:, None])
            grad[part, :columns] = total if ctx.temperature == 1.0 else total.div_(ctx.temperature)
        return grad, None, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float, shift: torch.Tensor) -> torch.Tensor:
    """A float32 copy of ``logits / temperature - shift``, with one shift per row."""
    scaled = logits.to(torch.float32, copy=True)
    return (scaled if temperature == 1.0 else scaled.div_(temperature)).sub_(shift[:, None])


def _chunks(logits: torch.Tensor, columns: int) -> list[slice]:
    """Ranges of rows."""
    if not columns:
        return []
    elements = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS
    step = max(1, elements // columns)
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, differentiable and equal on all ranks of ``group``.

    Args:
        logits: [targets, columns of this tensor rank], any floating dtype; ranks hold equal shards in rank order.
        targets: int64 [targets], each below ``vocab_size``.
        vocab_size: number of real columns over all ranks; the columns after them are padding.
        temperature: divides the logits, as the sampler does.

    Returns:
        (log-probs, entropies), float32 [targets].
    """
    rank = group.rank() if group is not None else 0
    first = rank * logits.shape[1]
    columns = min(max(vocab_size - first, 0), logits.shape[1])
    return _VocabularyParallel.apply(logits, targets, first, columns, temperature, group)

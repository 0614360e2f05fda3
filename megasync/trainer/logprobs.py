"""Log-probs and entropies of target tokens from hidden states, without the logits of a whole microbatch.

The output layer is sharded over the vocabulary, and no rank ever holds a row of the whole vocabulary. Rows are
projected a part at a time, so a rank never holds more than `PART_ELEMENTS` logits. A microbatch of a single part keeps
its logits for the backward pass; one of several projects them again there. Padded vocabulary columns count as -inf:
they have no probability and no gradient. So do tokens outside the support of a target (`megasync.trajectory.Support`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from megasync.trajectory import Support

# Logits of a rank that exist at one time: 128 MiB in bfloat16, or 447 rows of 150,000 columns. With much fewer rows the
# product would be slow.
PART_ELEMENTS = 2**26
# Number of logits converted to float32 at a time; bounds temporary memory to 64 MiB per tensor.
CHUNK_ELEMENTS = 2**24
# On a CPU, 1 MiB stays in a core's cache through all operations on it, which makes them two to three times faster.
CPU_CHUNK_ELEMENTS = 2**18


class _Columns(NamedTuple):
    """The vocabulary columns of this tensor rank: the first one's token id, and the number that is not padding."""

    first: int
    number: int


class TargetSupport(NamedTuple):
    """The support of each target, one after another."""

    # Where the ids of each target begin, and the end; [targets + 1].
    starts: list[int]
    # The number of the target, and the token; [ids].
    targets: torch.Tensor
    ids: torch.Tensor
    # True for targets that could be any token, [targets].
    unbounded: torch.Tensor

    @classmethod
    def of(cls, support: Support, device: torch.device) -> TargetSupport:
        targets = np.repeat(np.arange(len(support)), support.sizes)
        arrays = (targets, support.ids.astype(np.int64), support.sizes == 0)
        starts = np.cumsum([0, *support.sizes], dtype=np.int64).tolist()
        return cls(starts, *(torch.from_numpy(array).to(device) for array in arrays))

    def outside(self, rows: slice, columns: _Columns) -> torch.Tensor:
        """Whether each column of this rank is outside the support of each of these targets, [rows, columns]."""
        ids = slice(self.starts[rows.start], self.starts[rows.stop])
        local, targets = self.ids[ids] - columns.first, self.targets[ids] - rows.start
        owned = (local >= 0) & (local < columns.number)
        unbounded = self.unbounded[rows]
        # The last entry takes what other ranks own: the host would have to wait for the number of the others.
        flat = unbounded.new_empty(len(unbounded) * columns.number + 1)
        outside = flat[:-1].view(len(unbounded), columns.number)
        outside.copy_(~unbounded[:, None])
        flat[torch.where(owned, targets * columns.number + local, len(flat) - 1)] = False
        return outside


class _Scores(torch.autograd.Function):
    """With z the logits over the temperature, p = softmax(z), H = -sum(p log p), and t the target:

    d log p_t / d z_j = [j = t] - p_j   and   d H / d z_j = -p_j (log p_j + H)

    Softmax and sum are over the support of the target; outside of it p and both gradients are 0.

    ``narrow`` [targets, rank] and ``up`` [columns, rank], if given, are an adapter of the output layer: their product
    is added to the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        columns: _Columns,
        temperature: float | torch.Tensor,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        support: TargetSupport | None,
        narrow: torch.Tensor | None,
        up: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local = (targets - columns.first).clamp(0, max(columns.number - 1, 0))
        owned = (targets >= columns.first) & (targets < columns.first + columns.number)
        own_weight = weight[: columns.number].to(dtype)
        count = len(targets)
        # The largest z of each row, and sums over the vocabulary: exp(z), exp(z) z and z_t, with it subtracted from z.
        peak = torch.full((count,), -torch.inf, dtype=torch.float32, device=rows.device)
        sums = torch.zeros(3, count, dtype=torch.float32, device=rows.device)
        parts = _ranges(count, columns.number, PART_ELEMENTS)
        logits = None
        for part in parts:
            logits = _logits(rows, own_weight, narrow, up, part)
            for chunk, of in _chunks(logits, part):
                z = _scaled(chunk, temperature, of)
                outside = None if support is None else support.outside(of, columns)
                if outside is not None:
                    z.masked_fill_(outside, -torch.inf)
                peak[of] = z.amax(dim=-1)
                # Without a token of the support among these columns the sums are zero.
                z.sub_(torch.where(peak[of] == -torch.inf, 0.0, peak[of])[:, None])
                sums[2, of] = torch.where(owned[of], z.gather(1, local[of, None]).squeeze(1), 0.0)
                weights = z.exp()
                if outside is not None:
                    z.masked_fill_(outside, 0.0)
                sums[0, of] = weights.sum(dim=-1)
                sums[1, of] = weights.mul_(z).sum(dim=-1)
        if group is not None and group.size() > 1:
            _combine(peak, sums, owned, group)

        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        kept = logits if len(parts) == 1 else None
        ctx.save_for_backward(rows, weight, kept, peak + log_total, entropy, local, owned, narrow, up)
        ctx.columns, ctx.temperature, ctx.dtype, ctx.support = columns, temperature, dtype, support
        ctx.set_materialize_grads(False)
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, of_logprob: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        rows, weight, kept, log_normaliser, entropy, local, owned, narrow, up = ctx.saved_tensors
        count, dtype = ctx.columns.number, ctx.dtype
        own_weight = weight[:count].to(dtype)
        parts = _ranges(len(rows), count, PART_ELEMENTS)
        of_rows = torch.zeros_like(rows)
        of_weight = None
        if ctx.needs_input_grad[1]:
            # Parts are summed in float32, whatever the dtype of the weights.
            of_weight = torch.zeros_like(weight, dtype=dtype if len(parts) == 1 else torch.float32)
        of_adapter: list[torch.Tensor] = []
        if ctx.needs_input_grad[9]:
            of_adapter = [torch.zeros_like(narrow), torch.zeros_like(up, dtype=torch.float32)]
        for part in parts:
            own_rows = rows[part].to(dtype)
            # Becomes its own gradient.
            logits = _logits(rows, own_weight, narrow, up, part) if kept is None else kept
            for chunk, of in _chunks(logits, part):
                log_p = _scaled(chunk, ctx.temperature, of).sub_(log_normaliser[of, None])
                p = log_p.exp_() if of_entropy is None else log_p.exp()
                if of_entropy is not None:
                    slope = log_p.add_(entropy[of, None]).mul_(of_entropy[of, None])
                    if of_logprob is not None:
                        slope.add_(of_logprob[of, None])
                    total = p.mul_(slope.neg_())
                elif of_logprob is not None:
                    total = p.mul_(-of_logprob[of, None])
                else:
                    total = p.zero_()
                if ctx.support is not None:
                    total.masked_fill_(ctx.support.outside(of, ctx.columns), 0.0)
                if of_logprob is not None:
                    total.scatter_add_(1, local[of, None], (of_logprob[of] * owned[of])[:, None])
                chunk.copy_(_divided(total, ctx.temperature, of))
            of_rows[part] = logits @ own_weight
            if of_adapter:
                of_adapter[0][part] = logits @ up[:count].to(dtype)
                of_adapter[1][:count] += logits.T @ narrow[part].to(dtype)
            if of_weight is None:
                continue
            if len(parts) == 1:
                torch.mm(logits.T, own_rows, out=of_weight[:count])
            else:
                of_weight[:count] += logits.T @ own_rows
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        of_narrow, of_up = (of_adapter[0], of_adapter[1].to(up.dtype)) if of_adapter else (None, None)
        return of_rows, of_weight, None, None, None, None, None, None, of_narrow, of_up


def _logits(
    rows: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor | None, up: torch.Tensor | None, part: slice
) -> torch.Tensor:
    """The logits of some rows, in the dtype of ``weight``, whose columns are without padding."""
    logits = linear(rows[part].to(weight.dtype), weight)
    if narrow is not None and up is not None:
        logits.addmm_(narrow[part].to(weight.dtype), up[: len(weight)].to(weight.dtype).T)
    return logits


def _combine(peak: torch.Tensor, sums: torch.Tensor, owned: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Makes peaks and sums of each rank's columns those of the whole vocabulary, in place."""
    local_peak = peak.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    # A rank with only padding has no peak, and its sums stay zero.
    shift = torch.where(local_peak == -torch.inf, 0.0, local_peak - peak)
    sums[1].add_(sums[0] * shift)
    sums[:2].mul_(shift.exp())
    sums[2].add_(shift * owned)
    dist.all_reduce(sums, group=group)


def _scaled(logits: torch.Tensor, temperature: float | torch.Tensor, rows: slice) -> torch.Tensor:
    """A float32 copy of the logits of these rows over the temperature."""
    return _divided(logits.to(torch.float32, copy=True), temperature, rows)


def _divided(values: torch.Tensor, temperature: float | torch.Tensor, rows: slice) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        return values.div_(temperature[rows, None])
    return values if temperature == 1.0 else values.div_(temperature)


def _chunks(logits: torch.Tensor, part: slice) -> list[tuple[torch.Tensor, slice]]:
    """Views of logits, and the ranges of rows that they belong to; ``logits`` are those of ``part``."""
    elements = CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else CHUNK_ELEMENTS
    ranges = _ranges(len(logits), logits.shape[1], elements)
    return [(logits[range_], slice(part.start + range_.start, part.start + range_.stop)) for range_ in ranges]


def _ranges(rows: int, columns: int, elements: int) -> list[slice]:
    """Ranges of rows with at most so many elements, or of one row; none without columns."""
    if not columns:
        return []
    step = max(1, elements // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def token_logprobs(
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    support: TargetSupport | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, differentiable and equal on all ranks of ``group``.

    The gradient of ``rows`` is this rank's part of a sum over ``group``.

    Args:
        rows: hidden states [targets, hidden], any floating dtype, the same on all ranks of ``group``.
        weight: the output layer's [columns of this tensor rank, hidden]; ranks hold equal shards in rank order.
        targets: int64 [targets], each below ``vocab_size``.
        vocab_size: number of real columns over all ranks; the columns after them are padding.
        temperature: divides the logits, as the sampler does; one number, or one of each target.
        dtype: that of the logits; by default that of ``weight``.
        support: the tokens that have a probability, for each target; by default all.
        adapter: narrow vectors [targets, rank], the same on all ranks, and the rows [columns of this rank, rank] of
            whose products with them the logits are changed. Gradients of the former are a part, as those of ``rows``.

    Returns:
        (log-probs, entropies), float32 [targets].
    """
    first = (group.rank() if group is not None else 0) * len(weight)
    columns = _Columns(first, min(max(vocab_size - first, 0), len(weight)))
    options = temperature, group, dtype or weight.dtype, support
    return _Scores.apply(rows, weight, targets, columns, *options, *(adapter or (None, None)))


def squared_norms(logprobs: torch.Tensor, colder: torch.Tensor) -> torch.Tensor:
    """The squared norms of the gradients of log-probs by their logits over the temperature, [targets].

    ``colder`` are log-probs at half the temperature. With z the logits over the temperature, the gradient of log p_t is
    the unit vector of t minus p, of squared norm 1 - 2 p_t + sum(p^2). Since log p_t = z_t - log sum(exp z) and the
    colder one is 2 z_t - log sum(exp 2z), the sum of p^2 is the exponential of twice the first minus the second.
    """
    return 1 - 2 * logprobs.exp() + (2 * logprobs - colder).exp()

"""What Megatron's schedule calls for each microbatch, and once at the end for the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megasync.trainer.batch import Batch
from megasync.trainer.model import PolicyModel

# (batch, this rank's logits [targets, columns], or a critic's values [targets, 1]) -> (loss, report); runs on the last
# pipeline stage.
Evaluate = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Any]]


def forward_step(
    evaluate: Evaluate, balanced: bool, batches: Iterator[Batch], model: PolicyModel
) -> tuple[torch.Tensor, Callable]:
    """Megatron's forward step: this stage's output, and what turns the last stage's logits into a loss.

    ``balanced``: there is a loss on the balance of experts, which needs to know the tokens that count.
    """
    batch = next(batches)
    uncounted = batch.uncounted if balanced else None
    output = model(batch.ids, None, None, packed_seq_params=batch.packed, padding_mask=uncounted)

    def finish(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        loss, report = evaluate(batch, logits)
        # Megatron sums these counts for a division that `finalize_summed_grads` leaves out.
        return loss, torch.ones((), dtype=torch.int, device=logits.device), report

    return output, finish


def finalize_summed_grads(model: list, num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Megatron's reduction of gradients over ranks, without its division by a token count: losses come normalised."""
    finalize_model_grads(model, None, **groups)

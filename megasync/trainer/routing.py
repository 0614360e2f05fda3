"""The router of expert layers: Megatron's, with a load-balancing loss that is normalised like every loss here."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter


class PolicyRouter(TopKRouter):
    """Balances load per layer and microbatch (Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4).

    A step's balancing loss is the mean over microbatches, weighted by their tokens, of the sum over layers. Megatron
    instead counts on a later division of all gradients by the number of tokens, and under sequence parallelism it
    weights by a tensor rank's own tokens only. Padding and masked copies do not count.
    """

    # Tokens of the whole step, on all data-parallel ranks; the engine sets it before each step.
    step_tokens = 0

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """``probs`` unchanged, with the gradient of the balancing loss attached."""
        counts = routing_map.sum(dim=0)
        dist.all_reduce(counts, group=self.tp_cp_group)
        tokens = counts.sum() / self.topk
        if not tokens:
            return probs
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=counts,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=self.get_aux_loss_coeff("aux_loss"),
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens / self.step_tokens)

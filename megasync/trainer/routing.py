"""The router of expert layers: Megatron's, with a load-balancing loss that is normalised like all other losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter

from megasync.layout.layout import Layout


def score_options(layout: Layout) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` that define how logits become chosen experts and their weights."""
    config = {**layout.family.defaults, **layout.hf_config}
    if not layout.family.has_router_bias:
        # A softmax over all experts, renormalised over the chosen ones, is a softmax over the chosen ones.
        return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}
    limited = config["topk_group"] < config["n_group"]
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_router_num_groups": config["n_group"] if limited else None,
        "moe_router_group_topk": config["topk_group"] if limited else None,
    }


class PolicyRouter(TopKRouter):
    """Balances load per layer and microbatch (Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4).

    The balancing loss of a step is the mean over microbatches, weighted by their tokens, of the sum over layers.
    Megatron instead relies on a later division of all gradients by the number of tokens, and under sequence parallelism
    weights only by a tensor rank's own tokens. Padding and masked copies do not count.

    The expert bias (DeepSeek-V3) stays as loaded. Pretraining updates it after each step to balance the load; here that
    would change routing, and so the policy, by something that is not a gradient of the reward.
    """

    # Tokens of the whole step on all data-parallel ranks; set by the engine before each step.
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
            total_num_tokens=tokens,  # pyright: ignore[reportArgumentType] - a tensor avoids a device sync
            topk=self.topk,
            num_experts=counts.shape[0],
            moe_aux_loss_coeff=self.get_aux_loss_coeff("aux_loss"),
        )
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens / self.step_tokens)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Skips Megatron's count of tokens per expert, which serves to update the bias."""

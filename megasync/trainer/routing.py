"""The router of expert layers: Megatron's, with losses of its own that are normalised like all other losses, and with
routes of a server in the place of its own choice (`layout.routes`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megasync.layout.layout import Layout


def score_options(layout: Layout) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` that define how logits become chosen experts and their weights."""
    config = {**layout.family.defaults, **layout.hf_config}
    if layout.family.scales_expert_inputs:
        return {"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True}
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


class RouteReplay(RouterReplay):
    """Megatron's replay of given experts, for passes that mix microbatches and recompute layers.

    Megatron replays with one action for all layers, either those of forward passes or those of recomputation. Here each
    layer tells them apart: what runs in a backward pass is recomputed, in the order of the forward passes. Without
    routes the router chooses itself.
    """

    def __init__(self) -> None:
        # Megatron's own constructor also adds it to a list of all layers that were ever built.
        self.target_topk_idx: torch.Tensor | None = None
        self.replay_backward_list: list[torch.Tensor] = []

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts of each token, both [tokens, topk]."""
        if self.target_topk_idx is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        recomputed = torch._C._current_graph_task_id() >= 0  # -1 outside a backward pass
        experts = self.replay_backward_list.pop(0) if recomputed else self.target_topk_idx
        experts = experts.long()
        return scores.gather(1, experts), experts


class PolicyRouter(TopKRouter):
    """Balances load per layer and microbatch (Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4).

    The balancing loss of a step is the mean over microbatches, weighted by their tokens, of the sum over layers.
    Megatron instead relies on a later division of all gradients by the number of tokens, and under sequence parallelism
    weights only by a tensor rank's own tokens. Padding and masked copies do not count.

    The expert bias (DeepSeek-V3) stays as loaded. Pretraining updates it after each step to balance the load; here that
    would change routing, and so the policy, by something that is not a gradient of the reward.
    """

    # Tokens of the whole step on all data-parallel ranks; set by the learner before each step.
    step_tokens = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay: Any = RouteReplay()

    def replay(self, routes: torch.Tensor | None) -> None:
        """The experts of the next microbatch, [tokens, topk]; None to choose them, which forgets earlier ones."""
        if routes is None:
            self.router_replay.clear_indices()
        else:
            self.router_replay.set_target_indices(routes)

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

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """``logits`` unchanged, with the gradient of the z-loss attached.

        It is equation 5 of ST-MoE (https://arxiv.org/abs/2202.08906). That of a step is the mean over its tokens,
        without those of ``padding_mask``, and the sum over layers.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not torch.is_grad_enabled():
            return logits
        squares = logits.logsumexp(dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask.view_as(squares), 0.0)
        return MoEAuxLossAutoScaler.apply(logits, coefficient * squares.sum() / self.step_tokens)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Skips Megatron's count of tokens per expert, which serves to update the bias."""

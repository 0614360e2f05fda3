"""The loss of a microbatch: a policy loss with off-policy correction, plus optional KL and entropy terms.

Invariant: a masked token contributes nothing to any sum or gradient, even if its value is NaN or infinite. ``_kept``
guarantees this by replacing masked values *before* any arithmetic. Multiplying by a mask afterwards would not, because
``inf * 0`` is NaN and so is its gradient.

The formulas and their sources are in docs/algorithms.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasync.algorithms.choose import loss_of
from megasync.algorithms.importance import ImportanceWeights, importance_weights, rejected
from megasync.algorithms.kl import KL_KINDS, k3, kl_by_age
from megasync.algorithms.losses.tokens import PolicyTokens
from megasync.config.schema import AlgorithmConfig
from megasync.errors import ConfigError


def policy_loss(
    config: AlgorithmConfig,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    segments: Tensor | None = None,
    token_weights: Tensor | None = None,
    ages: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over the trained tokens of one microbatch. Inputs are [tokens]; arithmetic is float32.

    ``logprobs`` carries the gradient, and ``entropy`` may. ``old_logprobs`` are the trainer's before the step: pass
    ``logprobs.detach()`` if there is one optimizer step per batch. ``behaviour_logprobs`` are the server's. ``mask`` is
    non-zero on trained tokens. ``segments`` (int64, the sequence of each token) is required for
    corrections, rejections and losses of sequences, ``reference_logprobs`` for ``kl_coef > 0``, ``entropy`` for
    ``entropy_coef > 0``. ``token_weights`` are what each token counts in the loss, 1 by default. ``ages`` (int64) are
    the versions since each token was sampled; with them the sums include those of `kl_by_age`. ``chosen`` (bool) are
    the tokens that a loss with `chooser_of` has chosen.

    Returns the loss, a scalar to be divided by a *global* number of tokens or sequences, and detached float32 scalars:
    ``tokens``, and sums whose quotients by ``tokens`` are means. ``kl`` and ``entropy`` are present only if their
    inputs are given.

    Raises ConfigError if ratio and correction contradict each other, and ValueError if a required input is missing.
    """
    if config.ratio == "behaviour" and config.correction != "none":
        raise ConfigError(
            f"algorithm.ratio=behaviour already divides by the server's log-probs, so algorithm.correction="
            f"{config.correction} would correct twice; set algorithm.correction=none or algorithm.ratio=trainer"
        )
    keep = mask.bool()
    logprobs = _kept(logprobs, keep)
    old = _kept(old_logprobs, keep).detach()
    behaviour = _kept(behaviour_logprobs, keep).detach()
    advantages = _kept(advantages, keep).detach()

    denominator = behaviour if config.ratio == "behaviour" else old
    found = loss_of(config)(PolicyTokens(logprobs, denominator, advantages, keep, segments, chosen))
    importance = _importance(config, old, behaviour, keep, segments)
    left_out = _rejected(config, old, behaviour, keep, segments)
    weights = torch.where(left_out, 0.0, importance.weights)
    policy = torch.where(keep, weights * found.loss, 0.0)
    total = policy
    none = torch.zeros_like(keep)
    sums = {
        "tokens": keep.sum(),
        "policy_loss": policy.sum(),
        "clip_fraction": (none if found.clipped is None else found.clipped).sum(),
        "dual_clip_fraction": (none if found.dual_clipped is None else found.dual_clipped).sum(),
        "is_weight_mean": weights.sum(),
        "is_weight_square": weights.square().sum(),
        "is_outside_fraction": importance.outside.sum(),
        "is_rejected_fraction": left_out.sum(),
        "logprob_diff": (old - behaviour).abs().sum(),
        # Of what earlier optimizer steps of the batch have changed.
        "approx_kl": k3(old, logprobs.detach()).sum(),
    }
    if ages is not None:
        sums |= kl_by_age(old, behaviour, keep, ages)
    if reference_logprobs is not None:
        kl = KL_KINDS[config.kl_kind](logprobs, _kept(reference_logprobs, keep).detach())
        if config.kl_in == "loss":
            total = total + config.kl_coef * kl
        sums["kl"] = kl.sum()
    elif config.kl_coef:
        raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs reference_logprobs")
    if entropy is not None:
        entropies = _kept(entropy, keep)
        total = total - config.entropy_coef * entropies
        sums["entropy"] = entropies.sum()
    elif config.entropy_coef:
        raise ValueError(f"algorithm.entropy_coef={config.entropy_coef} needs entropy")
    loss = (total if token_weights is None else total * _kept(token_weights, keep)).sum()
    return loss, {name: value.detach().float() for name, value in sums.items()}


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    """The values in float32, with 0 outside ``keep``; [tokens]."""
    return torch.where(keep, values.float(), 0.0)


def _importance(
    config: AlgorithmConfig, old: Tensor, behaviour: Tensor, keep: Tensor, segments: Tensor | None
) -> ImportanceWeights:
    if config.correction == "none":
        return ImportanceWeights(keep.float(), torch.zeros_like(keep))
    return importance_weights(
        old,
        behaviour,
        keep,
        level=config.correction,
        cap=config.correction_cap,
        floor=config.correction_floor,
        masks=config.correction_outside == "mask",
        segments=segments,
    )


def _rejected(config: AlgorithmConfig, old: Tensor, behaviour: Tensor, keep: Tensor, segments: Tensor | None) -> Tensor:
    if config.rejection == "none":
        return torch.zeros_like(keep)
    return rejected(
        old,
        behaviour,
        keep,
        level=config.rejection,
        segments=segments,
        floor=config.rejection_floor,
        cap=config.rejection_cap,
    )

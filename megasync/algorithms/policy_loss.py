"""The policy loss: clipped surrogate, corrected for off-policy samples, plus optional KL and entropy terms.

Invariant: a masked token contributes nothing to any sum or gradient, whatever stands in it (NaN and infinity
included). ``_kept`` guarantees this by replacing masked values *before* any arithmetic; multiplying by a mask
afterwards would not, since ``inf * 0`` is NaN and so is its gradient.

The formulas and their sources are in docs/algorithms.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasync.algorithms.importance import ImportanceWeights, truncated_weights
from megasync.algorithms.kl import KL_KINDS, MAX_LOG_RATIO
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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums over the trained tokens of one microbatch; every input is [tokens], arithmetic is float32.

    ``logprobs`` carries the gradient (so may ``entropy``). ``old_logprobs`` are the trainer's before the step: pass
    ``logprobs.detach()`` when there is one optimizer step per batch. ``behaviour_logprobs`` are the server's.
    ``mask`` is non-zero on trained tokens. ``segments`` (int64, the sequence of each token) is needed for
    ``correction="sequence"``, ``reference_logprobs`` for ``kl_coef > 0``, ``entropy`` for ``entropy_coef > 0``.

    Returns the loss, a scalar to be divided by the *global* number of trained tokens, and detached float32 scalars:
    ``tokens`` and, for each other key, a sum that divided by ``tokens`` is the mean. ``kl`` and ``entropy`` are there
    only when the input they need was given.

    Raises ConfigError when ratio and correction contradict each other, ValueError for an input that is missing.
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
    surrogate, clipped, dual_clipped = _clipped_surrogate(config, logprobs, denominator, advantages)
    importance = _importance(config, old, behaviour, keep, segments)
    policy = -(importance.weights * surrogate).sum()
    loss = policy
    sums = {
        "tokens": keep.sum(),
        "policy_loss": policy,
        "clip_fraction": clipped.sum(),
        "dual_clip_fraction": dual_clipped.sum(),
        "is_weight_mean": importance.weights.sum(),
        "is_capped_fraction": importance.capped.sum(),
        "logprob_diff": (old - behaviour).abs().sum(),
    }
    if reference_logprobs is not None:
        kl = KL_KINDS[config.kl_kind](logprobs, _kept(reference_logprobs, keep).detach()).sum()
        loss = loss + config.kl_coef * kl
        sums["kl"] = kl
    elif config.kl_coef:
        raise ValueError(f"algorithm.kl_coef={config.kl_coef} needs reference_logprobs")
    if entropy is not None:
        total = _kept(entropy, keep).sum()
        loss = loss - config.entropy_coef * total
        sums["entropy"] = total
    elif config.entropy_coef:
        raise ValueError(f"algorithm.entropy_coef={config.entropy_coef} needs entropy")
    return loss, {name: value.detach().float() for name, value in sums.items()}


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, values.float(), 0.0)


def _clipped_surrogate(
    config: AlgorithmConfig, logprobs: Tensor, denominator: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The surrogate [tokens], and bool [tokens] where PPO's clip and where dual clip determined it.

    PPO takes ``min(ratio A, clip(ratio) A)``, with separate bounds on either side. For ``A < 0`` that has no lower
    bound, because the ratio has no upper one. Dual clip takes ``max(., dual_clip A)`` there: such a token keeps a
    constant surrogate and so has no gradient (Ye et al. 2020, arXiv 1912.09729, equation 5).
    """
    ratio = (logprobs - denominator).clamp(max=MAX_LOG_RATIO).exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    surrogate, clipped = torch.minimum(free, bounded), bounded < free
    if config.dual_clip is None:
        return surrogate, clipped, torch.zeros_like(clipped)
    floor = config.dual_clip * advantages
    dual_clipped = (advantages < 0) & (surrogate < floor)
    return torch.where(dual_clipped, floor, surrogate), clipped, dual_clipped


def _importance(
    config: AlgorithmConfig, old: Tensor, behaviour: Tensor, keep: Tensor, segments: Tensor | None
) -> ImportanceWeights:
    if config.correction == "none":
        return ImportanceWeights(keep.float(), torch.zeros_like(keep))
    return truncated_weights(
        old, behaviour, keep, level=config.correction, cap=config.correction_cap, segments=segments
    )

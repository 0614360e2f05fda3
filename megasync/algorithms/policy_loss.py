"""The loss of a microbatch: a policy loss with off-policy correction, plus optional KL and entropy terms.

Invariant: a masked token contributes nothing to any sum or gradient, even if its value is NaN or infinite. ``_kept``
guarantees this by replacing masked values *before* any arithmetic. Multiplying by a mask afterwards would not, because
``inf * 0`` is NaN and so is its gradient.

Invariant of importance weights: they are finite, at most ``cap``, without gradient, and 0 outside the mask. The
log-ratio is clamped before the exponential, so neither an infinite log-prob nor a masked NaN can reach a sum. The
exponent in k3 is at most `MAX_LOG_RATIO`, so the estimate is finite for finite log-probs.

The formulas and their sources are in docs/losses.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megasync.algorithms.choose import Columns, loss_columns, loss_of
from megasync.algorithms.losses import MAX_LOG_RATIO, PolicyTokens, sequence_mean, sequence_sum
from megasync.config.schema import AlgorithmConfig
from megasync.errors import ConfigError


def policy_loss(config: AlgorithmConfig, columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss summed over the trained tokens of one microbatch. Columns are [tokens]; arithmetic is float32.

    Every loss reads what `loss_columns` names:

    - ``logprobs`` carries the gradient, and ``entropy`` may.
    - ``old`` are the trainer's log-probs before the step: ``logprobs.detach()`` if there is one optimizer step per
      batch. ``behaviour`` are the server's.
    - ``mask`` is non-zero on trained tokens.
    - ``chosen`` (bool) are the tokens that a loss with `chooser_of` has chosen.

    Some are read if they are there: ``segments`` (int64, the sequence of each token), which corrections, rejections and
    losses of sequences require; ``weights``, what each token counts in the loss, 1 without; ``ages`` (int64), the
    versions since each token was sampled, for the sums of `kl_by_age`; ``teacher_gap``, the log-prob of a teacher less
    ``old``, NaN where there is none, for the sums ``teacher_kl`` and ``teacher_tokens``.

    Returns the loss, a scalar to be divided by a *global* number of tokens or sequences, and detached float32 scalars:
    ``tokens``, and sums whose quotients by ``tokens`` are means. ``kl`` and ``entropy`` are present only if their
    columns are.

    Raises ConfigError if ratio and correction contradict each other, and ValueError if a required column is missing.
    """
    if config.ratio == "behaviour" and config.correction != "none":
        raise ConfigError(
            f"algorithm.ratio=behaviour already divides by the server's log-probs, so algorithm.correction="
            f"{config.correction} would correct twice; set algorithm.correction=none or algorithm.ratio=trainer"
        )
    if missing := loss_columns(config) - columns.keys():
        raise ValueError(f"algorithm.loss={config.loss} and its terms need the columns {sorted(missing)}")
    keep = columns["mask"].bool()
    logprobs = _kept(columns["logprobs"], keep)
    old, behaviour, advantages = (_kept(columns[name], keep).detach() for name in ("old", "behaviour", "advantages"))
    segments = columns.get("segments")

    denominator = behaviour if config.ratio == "behaviour" else old
    token_loss = loss_of(config)(PolicyTokens(logprobs, denominator, advantages, keep, segments, columns.get("chosen")))
    importance = importance_weights(
        old,
        behaviour,
        keep,
        level=config.correction,
        cap=config.correction_cap,
        floor=config.correction_floor,
        masks=config.correction_outside == "mask",
        segments=segments,
    )
    left_out = rejected(
        old,
        behaviour,
        keep,
        level=config.rejection,
        segments=segments,
        floor=config.rejection_floor,
        cap=config.rejection_cap,
    )
    weights = torch.where(left_out, 0.0, importance.weights)
    policy = torch.where(keep, weights * token_loss.loss, 0.0)
    total = policy
    none = torch.zeros_like(keep)
    sums = {
        "tokens": keep.sum(),
        "policy_loss": policy.sum(),
        "clip_fraction": (none if token_loss.clipped is None else token_loss.clipped).sum(),
        "dual_clip_fraction": (none if token_loss.dual_clipped is None else token_loss.dual_clipped).sum(),
        "is_weight_mean": weights.sum(),
        "is_weight_square": weights.square().sum(),
        "is_outside_fraction": importance.outside.sum(),
        "is_rejected_fraction": left_out.sum(),
        "logprob_diff": (old - behaviour).abs().sum(),
        # Of what earlier optimizer steps of the batch have changed.
        "approx_kl": k3(old, logprobs.detach()).sum(),
    }
    if "ages" in columns:
        sums |= kl_by_age(old, behaviour, keep, columns["ages"])
    if "reference" in columns:
        kl = KL_KINDS[config.kl_kind](logprobs, _kept(columns["reference"], keep).detach())
        if config.kl_in == "loss":
            total = total + config.kl_coef * kl
        sums["kl"] = kl.sum()
    if "entropy" in columns:
        entropies = _kept(columns["entropy"], keep)
        total = total - config.entropy_coef * entropies
        sums["entropy"] = entropies.sum()
    if "teacher_gap" in columns:
        gap = torch.where(keep, columns["teacher_gap"], torch.nan)
        sums |= {"teacher_kl": -gap.nansum(), "teacher_tokens": (~gap.isnan()).sum()}
    loss = (total * _kept(columns["weights"], keep) if "weights" in columns else total).sum()
    return loss, {name: value.detach().float() for name, value in sums.items()}


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    """The values in float32, with 0 outside ``keep``; [tokens]."""
    return torch.where(keep, values.float(), 0.0)


# Importance weights


class ImportanceWeights(NamedTuple):
    """``weights`` [tokens] float32, and ``outside`` [tokens] bool, true where the ratio is outside of its bounds."""

    weights: Tensor
    outside: Tensor


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    cap: float,
    floor: float = 0.0,
    masks: bool = False,
    segments: Tensor | None = None,
) -> ImportanceWeights:
    """``pi_trainer / pi_behaviour`` per token (``level="token"``) or per sequence, in [floor, cap]; 1 for ``"none"``.

    A ratio outside of the bounds is replaced by the bound, or, with ``masks``, its weight is 0. All tensors are
    [tokens]. ``mask`` is non-zero on trained tokens. ``segments`` (int64, the index of each token's sequence) is
    required for sequences, and every sequence must be complete. The ratio of a sequence is the geometric mean over its
    trained tokens (``"sequence"``), which does not grow with the length, or their product (``"product"``), which is the
    exact ratio of the two probabilities of the sequence. All its tokens share the weight.

    Token level: truncated importance sampling (Ionides 2008) for the behaviour/proximal part of AReaL's decoupled
    objective (Fu et al. 2025, arXiv 2505.24298, section 5.2); with ``masks`` masked importance sampling, and with a
    ``floor`` too what Ling's authors call IcePop (arXiv 2510.18855). Sequence level: the same with the
    length-normalised ratio of GSPO (Zheng et al. 2025, arXiv 2507.18071, equation 7).

    Raises ValueError for an unknown level, and for sequences without ``segments``.
    """
    keep = mask.bool()
    if level == "none":
        return ImportanceWeights(keep.float(), torch.zeros_like(keep))
    log_ratio = _log_ratio(trainer_logprobs, behaviour_logprobs, keep, level, segments)
    low, high = _bounds(floor, cap)
    outside = keep & ((log_ratio > high) | (log_ratio < low))
    counted = keep & ~outside if masks else keep
    return ImportanceWeights(torch.where(counted, log_ratio.clamp(low, high).exp(), 0.0), outside)


@torch.no_grad()
def rejected(
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    segments: Tensor | None,
    floor: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """The trained tokens of sequences that the trainer's policy would hardly have sampled, bool [tokens].

    Arguments are those of `importance_weights`. A sequence is rejected if its ratio, the geometric mean or the product,
    is outside of [floor, cap]; with ``level="token"`` if that of any of its trained tokens is; with ``"none"`` never.
    """
    keep = mask.bool()
    if level == "none":
        return torch.zeros_like(keep)
    log_ratio = _log_ratio(trainer_logprobs, behaviour_logprobs, keep, level, segments)
    low, high = _bounds(floor, cap)
    outside = keep & ((log_ratio > high) | (log_ratio < low))
    if level != "token":
        return outside
    if segments is None:
        raise ValueError("rejection of sequences needs `segments`, the sequence index of each token")
    return keep & (sequence_sum(outside.float(), keep, segments) > 0)


def _bounds(floor: float, cap: float | None) -> tuple[float, float]:
    return math.log(floor) if floor else -math.inf, math.inf if cap is None else math.log(cap)


def _log_ratio(trainer: Tensor, behaviour: Tensor, keep: Tensor, level: str, segments: Tensor | None) -> Tensor:
    """The log-ratio of each token or of its sequence, float32 [tokens]; 0 outside ``keep`` for tokens."""
    each = torch.where(keep, trainer.float() - behaviour.float(), 0.0)
    if level == "token":
        return each
    if level not in ("sequence", "product"):
        raise ValueError(f"importance ratios are per 'token', or of a 'sequence' or its 'product', not {level!r}")
    if segments is None:
        raise ValueError("sequence-level importance ratios need `segments`, the sequence index of each token")
    return (sequence_mean if level == "sequence" else sequence_sum)(each, keep, segments)


# Per-token estimators of KL(policy || reference) from a sampled token (Schulman 2020, "Approximating KL Divergence")


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``log pi - log ref``: unbiased, of either sign. As a loss its expected gradient on on-policy samples is zero."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``(log pi - log ref)^2 / 2``: biased, never negative. As a loss it has the gradient of the reverse KL."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """``ref/pi - 1 - log(ref/pi)``: unbiased, never negative, low variance."""
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) - log_ratio


KL_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

# Ages in versions that `kl_by_age` tells apart; the last one includes all older tokens.
AGES = 8


@torch.no_grad()
def kl_by_age(logprobs: Tensor, behaviour_logprobs: Tensor, keep: Tensor, ages: Tensor) -> dict[str, Tensor]:
    """KL(server || trainer), estimated by k3 and summed over kept tokens of each age, with their numbers.

    All are [tokens]; ``ages`` (int64) counts the versions since a token was sampled. Returns scalars ``server_kl@AGE``
    and ``tokens@AGE`` for every age below `AGES`.
    """
    each = k3(behaviour_logprobs, logprobs)
    bounded = ages.clamp(0, AGES - 1)
    sums: dict[str, Tensor] = {}
    for age in range(AGES):
        of_age = keep & (bounded == age)
        sums |= {f"server_kl@{age}": torch.where(of_age, each, 0.0).sum(), f"tokens@{age}": of_age.sum()}
    return sums

"""The loss of a microbatch: a policy loss with off-policy correction, plus optional KL and entropy terms.

The policy losses are pure functions of `PolicyTokens`. Their options are in `config.builtin.LOSSES`, under the names of
the functions; docs/adding_an_algorithm.md shows how to add one. The formulas and their sources are in docs/losses.md.

Invariant: a masked token contributes nothing to any sum or gradient, even if its value is NaN or infinite. ``_kept``
guarantees this by replacing masked values *before* any arithmetic. Multiplying by a mask afterwards would not, because
``inf * 0`` is NaN and so is its gradient.

Invariant of importance weights: they are finite, at most ``cap``, without gradient, and 0 outside the mask. The
log-ratio is clamped before the exponential, so neither an infinite log-prob nor a masked NaN can reach a sum. The
exponent in k3 is at most `MAX_LOG_RATIO`, so the estimate is finite for finite log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasync.algorithms.choose import Columns, loss_columns, loss_of
from megasync.config.schema import AlgorithmConfig
from megasync.errors import ConfigError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# e^20 is half a billion: far above any ratio of a healthy run, and far below the float32 limit, even after a sum.
MAX_LOG_RATIO = 20.0


def sequence_sum(values: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
    """The sum of the kept values of each token's sequence, [tokens].

    ``segments`` (int64) is the sequence of each token; outside of ``keep`` (bool) it may be anything.
    """
    if not values.numel():
        return values
    segments = torch.where(keep, segments, 0)
    total = values.new_zeros(int(segments.max()) + 1).index_add(0, segments, torch.where(keep, values, 0.0))
    return total[segments]


def sequence_mean(values: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
    """The mean of the kept values of each token's sequence, [tokens]; as `sequence_sum`."""
    count = sequence_sum(keep.to(values.dtype), keep, segments)
    return sequence_sum(values, keep, segments) / count.clamp(min=1)


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of one microbatch, float32 [tokens]; outside of ``keep`` all values are 0.

    A mean over these tokens would depend on the packing of a step. That of a sequence does not.
    """

    # Carries the gradient.
    logprobs: Tensor
    # The denominator of the ratio: the trainer's log-probs before the step, or the server's.
    old: Tensor
    advantages: Tensor
    # The trained tokens, bool.
    keep: Tensor
    # The sequence of each token, int64; every sequence is complete.
    segments: Tensor | None = None
    # The tokens that the loss treats apart, bool, if it chooses any: see `StepTokens`.
    chosen: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """``log pi - log pi_old``."""
        return self.logprobs - self.old

    @cached_property
    def ratio(self) -> Tensor:
        """``pi / pi_old``, finite."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    @property
    def chosen_tokens(self) -> Tensor:
        """The tokens of ``chosen`` that are kept. Raises ValueError if none were chosen before the step."""
        if self.chosen is None:
            raise ValueError("this loss needs `chosen`, the tokens of the whole minibatch that it treats apart")
        return self.chosen & self.keep

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over the kept tokens of each token's sequence, [tokens]. Raises ValueError without segments."""
        if self.segments is None:
            raise ValueError("a loss of whole sequences needs `segments`, the sequence index of each token")
        return sequence_mean(values, self.keep, self.segments)


@dataclass(frozen=True)
class StepTokens:
    """A rank's trained tokens of one optimizer step, float64 [tokens], for a loss that chooses among all ranks'."""

    # Of the policy just before the step.
    logprobs: Floats
    # The denominators of the ratio.
    old: Floats
    advantages: Floats
    # As good as random, below 2^32; those of a token are the same whichever rank has it.
    random_keys: NDArray[np.uint64]
    # Returns the sums of its argument over all ranks: each rank must call it the same number of times, with arrays of
    # the same shape.
    summed: Callable[[Floats], Floats]


def random_keys(step: int, trajectories: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The random keys of tokens, from their trajectories in a step and their places in these; see `StepTokens`."""
    mixed = np.full(len(places), step, dtype=np.uint64)
    for part in (trajectories, places):
        # The finalizer of SplitMix64 (Steele et al. 2014, OOPSLA), in which numpy's overflows are intended.
        mixed = (mixed ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed >> np.uint64(32)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and where a bound took its gradient or replaced its value: bool [tokens].

    ``dual_clipped`` is where the lower bound for negative advantages applied.
    """

    loss: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None


def vanilla(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLoss:
    """``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``, and at most ``-dual_clip A`` where A < 0.

    PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7; bounds of their own on either side: DAPO, Yu et al. 2025,
    arXiv 2503.14476, section 3.1. For A < 0 this is unbounded above, because the ratio is. Dual clip (Ye et al. 2020,
    arXiv 1912.09729, equation 5) makes it a constant there, which has no gradient.
    """
    advantages = tokens.advantages
    free = tokens.ratio * advantages
    bounded = tokens.ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate, clipped = torch.minimum(free, bounded), bounded < free
    if dual_clip is None:
        return TokenLoss(-surrogate, clipped)
    floor = dual_clip * advantages
    dual_clipped = (advantages < 0) & (surrogate < floor)
    return TokenLoss(-torch.where(dual_clipped, floor, surrogate), clipped, dual_clipped)


def gpg(tokens: PolicyTokens) -> TokenLoss:
    """``-A log pi``, without a ratio. Chu et al. 2025, arXiv 2504.02546."""
    return TokenLoss(-tokens.advantages * tokens.logprobs)


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log pi``: every token keeps a gradient.

    The importance weight is clipped, instead of the surrogate. MiniMax 2025, arXiv 2506.13585. The paper has no lower
    bound: ``clip_low=1``.
    """
    weight = tokens.ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, (weight != tokens.ratio) & tokens.keep)


def sapo(tokens: PolicyTokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (ratio - 1)) A``, with a temperature for either sign of A.

    arXiv 2511.20347. The paper takes the mean of sequences
    (``algorithm.aggregation=sequence``).
    """
    tau = torch.full_like(tokens.advantages, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    return TokenLoss(-torch.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau) * tokens.advantages)


def dro(tokens: PolicyTokens, *, beta: float = 0.1) -> TokenLoss:
    """``-(A log pi - beta / 2 (log pi - log pi_old)^2)``, as verl 0.9.1's ``dro``.

    It is a variant of Richemond et al. 2024, arXiv 2405.19107, which penalises the log ratio of a whole
    response to the reference policy, and learns a value of the prompt in place of an advantage. Tokens without an
    advantage are penalised too. In the first optimizer step of a batch the ratio is 1, and nothing is penalised.
    """
    return TokenLoss(0.5 * beta * tokens.log_ratio.square() - tokens.advantages * tokens.logprobs)


# DPPO (arXiv 2602.04879): tokens whose policy has moved too far, by a divergence of two outcomes, have no gradient. The
# outcomes are this token and any other. The ratio is truncated at ``max_ratio`` and has no gradient; ``clip_low`` and
# ``clip_high`` are thresholds of the divergence.


def dppo_tv(tokens: PolicyTokens, *, clip_low: float, clip_high: float, max_ratio: float = 20.0) -> TokenLoss:
    """DPPO with the total variation ``|pi - pi_old|``."""
    moved = tokens.logprobs.exp() - tokens.old.exp()
    return _near(tokens, moved <= clip_high, moved >= -clip_low, max_ratio)


def dppo_kl(tokens: PolicyTokens, *, clip_low: float, clip_high: float, max_ratio: float = 20.0) -> TokenLoss:
    """DPPO with the divergence ``KL(pi_old || pi)``."""
    new, old = tokens.logprobs.exp(), tokens.old.exp()
    # The small number keeps the logarithm of the other outcome finite.
    divergence = old * (tokens.old - tokens.logprobs) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    return _near(tokens, (divergence <= clip_high) | (new <= old), (divergence <= clip_low) | (new >= old), max_ratio)


def _near(tokens: PolicyTokens, if_positive: Tensor, if_negative: Tensor, max_ratio: float) -> TokenLoss:
    """``-ratio A log pi`` where the condition for the sign of A holds."""
    near = torch.where(tokens.advantages > 0, if_positive, if_negative).detach()
    weight = tokens.ratio.clamp(max=max_ratio).detach() * near
    truncated = near & (tokens.ratio > max_ratio) & tokens.keep
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ~near & tokens.keep, truncated)


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss with the geometric mean of a sequence's ratios in place of each token's ratio.

    Its token form, GSPO-token: ``s = sg[exp(mean of log ratios)] * pi / sg[pi]``, so that each token gets the gradient
    of its own log-prob. Zheng et al. 2025, arXiv 2507.18071. The paper clips at 3e-4 and 4e-4, and
    takes the mean of sequences (``algorithm.aggregation=sequence``).
    """
    of_sequence = tokens.sequence_mean(tokens.log_ratio).detach()
    ratio = (of_sequence + tokens.logprobs - tokens.logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    free, bounded = ratio * tokens.advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages
    return TokenLoss(-torch.minimum(free, bounded), bounded < free)


def geo_mean(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-A exp(mean over the sequence of clipped log ratios)``, the same for each of its tokens.

    A token's log ratio is clipped to [-clip_low, clip_high] where that makes the objective smaller, and the mean is at
    most `MAX_LOG_RATIO`. Zhao et al. 2025, arXiv 2507.20673; the paper clips at 0.4 on both sides and takes
    the mean of sequences (``algorithm.aggregation=sequence``). All tokens of a sequence must have the same advantage:
    the gradient of a token's loss goes to all of them alike.
    """
    sign = tokens.advantages.sign()
    bounded = tokens.log_ratio.clamp(-clip_low, clip_high)
    least = sign * torch.minimum(sign * tokens.log_ratio, sign * bounded)
    ratio = tokens.sequence_mean(least).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(-tokens.advantages * ratio, (bounded != tokens.log_ratio) & (sign != 0) & tokens.keep)


# The loss of a microbatch


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

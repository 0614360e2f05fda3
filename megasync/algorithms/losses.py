"""Policy losses: pure functions of the tokens of a microbatch, what each of them gets, and what it returns.

Their options are in `config.builtin.LOSSES`, under the names of the functions; docs/adding_an_algorithm.md shows how to
add one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


# Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617) restrain the few tokens whose log-prob and advantage rise
# together most, which lower the entropy of a policy fastest.
#
# Invariant: which tokens they are depends neither on the packing of a minibatch nor on its ranks. `clip_cov_tokens` and
# `kl_cov_tokens` guarantee this: they choose once before an optimizer step, among all of its trained tokens, those
# without an advantage included, by sums over all ranks. The published code chooses within each microbatch.

# Bits of a key, and of each of its digits by which `_largest` narrows the threshold down.
_KEY, _DIGIT = 64, 8


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss, without a gradient at the tokens that `clip_cov_tokens` has chosen."""
    free = tokens.ratio * tokens.advantages
    bounded = tokens.ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages
    chosen = tokens.chosen_tokens
    return TokenLoss(torch.where(chosen, 0.0, -torch.minimum(free, bounded)), (bounded < free) | chosen)


def clip_cov_tokens(
    step: StepTokens, *, clip_low: float, clip_high: float, share: float = 0.0002, least: float = 1.0, most: float = 5.0
) -> Bools:
    """Chooses tokens with a covariance between ``least`` and ``most``: at most a ``share`` of all tokens, or one.

    They are drawn at random, without those that PPO clips.
    """
    covariance = _covariances(step)
    ratio = np.exp(np.minimum(step.logprobs - step.old, MAX_LOG_RATIO))
    clipped = np.where(step.advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low) & (step.advantages != 0)
    eligible = (covariance > least) & (covariance < most) & ~clipped
    # Every eligible token is above all others, and among them chance decides.
    return eligible & _largest(eligible.astype(np.float64), share, step)


def kl_cov(tokens: PolicyTokens, *, coef: float = 1.0) -> TokenLoss:
    """``-ratio A``, and ``coef |log ratio|`` more at the tokens that `kl_cov_tokens` has chosen."""
    chosen = tokens.chosen_tokens
    penalty = coef * torch.where(chosen, tokens.log_ratio.abs(), 0.0)
    return TokenLoss(penalty - tokens.ratio * tokens.advantages, chosen)


def kl_cov_tokens(step: StepTokens, *, share: float = 0.0002) -> Bools:
    """The ``share`` of all tokens with the largest covariance, at least one."""
    return _largest(_covariances(step), share, step)


def _covariances(step: StepTokens) -> Floats:
    """``(A - mean A)(log pi - mean log pi)`` of each token, with means over all ranks; [tokens]."""
    local_sums = np.array([step.advantages.sum(), step.logprobs.sum(), len(step.logprobs)], dtype=np.float64)
    advantage, logprob, count = step.summed(local_sums)
    return (step.advantages - advantage / max(1.0, count)) * (step.logprobs - logprob / max(1.0, count))


def _largest(values: Floats, share: float, step: StepTokens) -> Bools:
    """Whether each value is among the ``share`` of the largest on all ranks, at least one.

    Random keys decide between equals. Ranks exchange counts of the digits of a key, from the highest one down, which
    narrows the threshold's key down.
    """
    keys = _ordered(values) << np.uint64(32) | step.random_keys
    missing, threshold = 0, np.uint64(0)
    for shift in range(_KEY - _DIGIT, -1, -_DIGIT):
        # In numpy, a shift by the whole width is undefined.
        near = np.ones(len(keys), bool) if shift + _DIGIT == _KEY else keys >> np.uint64(shift + _DIGIT) == threshold
        digits = (keys[near] >> np.uint64(shift) & np.uint64(2**_DIGIT - 1)).astype(np.int64)
        counts = step.summed(np.bincount(digits, minlength=2**_DIGIT).astype(np.float64))
        if shift + _DIGIT == _KEY:
            missing = max(1, int(share * counts.sum()))
        # Tokens whose digit is this one or a higher one.
        reached = np.cumsum(counts[::-1])[::-1]
        digit = int(np.flatnonzero(reached >= min(missing, reached[0]))[-1])
        missing -= int(reached[digit] - counts[digit])
        threshold = threshold << np.uint64(_DIGIT) | np.uint64(digit)
    return keys >= threshold


def _ordered(values: Floats) -> NDArray[np.uint64]:
    """Unsigned numbers of 32 bits in the order of the values in float32."""
    # Minus zero becomes zero.
    bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(2**31)).astype(np.uint64)

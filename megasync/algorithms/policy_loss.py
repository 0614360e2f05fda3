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
from megasync.algorithms.columns import Columns, loss_columns
from megasync.algorithms.importance import importance_weights, rejected
from megasync.algorithms.kl import KL_KINDS, k3, kl_by_age
from megasync.algorithms.losses.tokens import PolicyTokens
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

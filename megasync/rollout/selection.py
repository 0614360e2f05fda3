"""Selects which of a prompt's scored responses become a group, or drops the group. Pure.

Invariant: the result is either trajectories that can all be trained (a reward, at least one token in the loss, enough
of them to compare) or a `Dropped` with a reason. The rollouter hands exactly one of the two to the buffer, so a
rejected group frees its slot.

The steps, in order: penalise over-long responses (`overlong: punish`); remove responses without a reward or a trained
token; remove those that reached the length limit (`overlong: mask`); of more samples than needed, keep those with the
largest spread of rewards (`keep: spread`); drop a group with nothing to compare.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megasync.config.schema import GroupConfig
from megasync.rollout.drops import ALL_FAILED, ALL_SOLVED, OVERLONG, UNIFORM, Dropped
from megasync.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Selection:
    """Applies the rules of `GroupConfig`. A group needs `samples` samples; `max_new_tokens` is the length limit.

    With `relative`, each reward is compared with the mean of its group, so a group needs at least two responses.
    """

    config: GroupConfig
    samples: int
    max_new_tokens: int
    relative: bool = True

    @property
    def samples_started(self) -> int:
        return self.samples + self.config.extra_samples

    @property
    def samples_awaited(self) -> int:
        """Number of started samples that must finish; the rest are aborted."""
        return self.samples if self.config.keep == "first" else self.samples_started

    def select(self, scored: Sequence[Sequence[Trajectory]], counts: Counter[str]) -> list[Trajectory] | Dropped:
        """Select the trajectories of the group, or return why the group is dropped.

        `scored` holds the trajectories of each sample. `counts` is incremented for removed and penalised ones.
        """
        if self.config.overlong == "punish":
            scored = [[self._penalised(t, counts) for t in sample] for sample in scored]
        usable = _filtered(scored, lambda t: t.reward is not None and t.oldest_version is not None)
        if self.config.overlong == "mask":
            whole = _filtered(usable, lambda t: t.finish_reason != "length")
            counts["responses_overlong"] += _count(usable) - _count(whole)
            if _count(whole) < self._minimum <= _count(usable):
                return Dropped(OVERLONG)
            usable = whole
        if self.config.keep == "spread" and len(usable) > self.samples:
            means = [statistics.fmean(t.reward for t in sample if t.reward is not None) for sample in usable]
            chosen = widest_spread(means, self.samples)
            counts["samples_unused"] += len(usable) - len(chosen)
            usable = [usable[index] for index in chosen]
        kept = [t for sample in usable for t in sample]
        if not kept:
            return Dropped("unscored", "no response has both a reward and a token to train on")
        if len(kept) < self._minimum:
            return Dropped("lone_survivor", "only one response of the group was scored")
        rewards = {t.reward for t in kept if t.reward is not None}
        if self.config.drop_uniform and len(rewards) == 1:
            (reward,) = rewards
            return Dropped(ALL_SOLVED if reward >= 1 else ALL_FAILED if reward <= 0 else UNIFORM)
        return kept

    @property
    def _minimum(self) -> int:
        return 2 if self.relative else 1

    def _penalised(self, trajectory: Trajectory, counts: Counter[str]) -> Trajectory:
        penalty = self.config.overlong_penalty * overlong_share(
            trajectory.trained().total(), self.max_new_tokens, self.config.overlong_tokens
        )
        if trajectory.reward is None or not penalty:
            return trajectory
        counts["responses_overlong"] += 1
        return replace(trajectory, reward=trajectory.reward - penalty)


def _filtered(samples: Sequence[Sequence[Trajectory]], keep: Callable[[Trajectory], bool]) -> list[list[Trajectory]]:
    """Return each sample's trajectories for which `keep` is true. Samples without any are omitted."""
    return [kept for sample in samples if (kept := [t for t in sample if keep(t)])]


def _count(samples: Sequence[Sequence[Trajectory]]) -> int:
    return sum(map(len, samples))


def overlong_share(length: int, longest: int, margin: int) -> float:
    """Return 0.0 up to a length of `longest - margin` tokens, then a linear ramp to 1.0 at `longest`.

    This is the soft over-long penalty of DAPO (Yu et al. 2025, equation 13), without its sign.
    """
    return min(1.0, max(0, length - (longest - margin)) / margin)


def widest_spread(rewards: Sequence[float], count: int) -> list[int]:
    """Return the sorted indices of the `count` rewards with the largest variance among all choices of that size.

    The best choice always consists of the highest and the lowest rewards (max-variance down-sampling, Xu et al. 2025,
    "Not All Rollouts are Useful"), so only `count + 1` choices are compared. Ties are broken by the order of `rewards`.
    """
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    choices = [order[:low] + order[len(order) - (count - low) :] for low in range(count, -1, -1)]
    return sorted(max(choices, key=lambda choice: statistics.pvariance([rewards[index] for index in choice])))

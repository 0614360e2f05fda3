"""Which of a prompt's scored responses become a group, and which prompts become none. Pure.

Invariant: what comes out is either trajectories that can all be trained (a reward, at least one token in the loss, enough
of them to compare) or a `Dropped` with a reason; the rollouter hands exactly one of the two to the buffer, so that a
rejected group gives its slot back.

The steps, in this order: long responses are punished (`overlong: punish`); what has no reward or no trained token is left
out; so is what the length limit cut (`overlong: mask`); of more samples than needed those with the largest spread are kept
(`keep: spread`); a group with nothing to compare is dropped.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megasync.config.schema import GroupConfig
from megasync.trajectory import Trajectory

# Reasons of drops that are no failures: the rewards are all equal, so there is nothing to learn. Solved is a reward of at
# least 1, failed one of at most 0; anything between is just uniform.
ALL_SOLVED, ALL_FAILED, UNIFORM = "all_solved", "all_failed", "uniform"
# Too few responses were left after those that the length limit cut.
OVERLONG = "overlong"
HARMLESS = frozenset({ALL_SOLVED, ALL_FAILED, UNIFORM, OVERLONG})


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that will not be trained: the reason under which it is counted, and the error behind it if there is one."""

    reason: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rules of `GroupConfig`. `samples` is what a group needs, `max_new_tokens` the length limit.

    With `relative` a reward counts against its group's mean, so a group needs two responses.
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
        """So many of them are enough; the rest is aborted."""
        return self.samples if self.config.keep == "first" else self.samples_started

    def select(self, scored: Sequence[Sequence[Trajectory]], counts: Counter[str]) -> list[Trajectory] | Dropped:
        """The group of `scored`, the trajectories of each sample. `counts` gets what was left out or punished."""
        if self.config.overlong == "punish":
            scored = [[self._punished(t, counts) for t in sample] for sample in scored]
        usable = _each(scored, lambda t: t.reward is not None and any(t.loss_mask))
        if self.config.overlong == "mask":
            whole = _each(usable, lambda t: t.finish_reason != "length")
            counts["responses_overlong"] += _count(usable) - _count(whole)
            if _count(whole) < self._least <= _count(usable):
                return Dropped(OVERLONG)
            usable = whole
        if self.config.keep == "spread" and len(usable) > self.samples:
            chosen = widest_spread([statistics.fmean(t.reward for t in sample) for sample in usable], self.samples)
            counts["samples_unused"] += len(usable) - len(chosen)
            usable = [usable[index] for index in chosen]
        kept = [t for sample in usable for t in sample]
        if not kept:
            return Dropped("unscored", "no response has both a reward and a token to train on")
        if len(kept) < self._least:
            return Dropped("lone_survivor", "only one response of the group was scored")
        if self.config.drop_uniform and len({t.reward for t in kept}) == 1:
            reward = kept[0].reward
            return Dropped(ALL_SOLVED if reward >= 1 else ALL_FAILED if reward <= 0 else UNIFORM)
        return kept

    @property
    def _least(self) -> int:
        return 2 if self.relative else 1

    def _punished(self, trajectory: Trajectory, counts: Counter[str]) -> Trajectory:
        penalty = self.config.overlong_penalty * overlong_share(
            sum(trajectory.loss_mask), self.max_new_tokens, self.config.overlong_tokens
        )
        if trajectory.reward is None or not penalty:
            return trajectory
        counts["responses_overlong"] += 1
        return replace(trajectory, reward=trajectory.reward - penalty)


def _each(samples: Sequence[Sequence[Trajectory]], keep: Callable[[Trajectory], bool]) -> list[list[Trajectory]]:
    """Every sample's trajectories that `keep` is true of; samples without any are gone."""
    return [kept for sample in samples if (kept := [t for t in sample if keep(t)])]


def _count(samples: Sequence[Sequence[Trajectory]]) -> int:
    return sum(map(len, samples))


def overlong_share(length: int, longest: int, margin: int) -> float:
    """0.0 up to `longest - margin` tokens, then growing in proportion to 1.0 at `longest`.

    The soft punishment of over-long responses of DAPO (Yu et al. 2025, equation 13), without its sign.
    """
    return min(1.0, max(0, length - (longest - margin)) / margin)


def widest_spread(rewards: Sequence[float], count: int) -> list[int]:
    """The indices, in order, of the `count` rewards with the largest variance among all choices of so many.

    They are always some of the highest and the rest of the lowest (max-variance down-sampling, Xu et al. 2025, "Not All
    Rollouts are Useful"), so only `count + 1` choices are compared. Among equal rewards their order decides.
    """
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    choices = [order[:low] + order[len(order) - (count - low) :] for low in range(count, -1, -1)]
    return sorted(max(choices, key=lambda choice: statistics.pvariance([rewards[index] for index in choice])))

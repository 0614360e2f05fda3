"""The policy training step: groups of trajectories in, one or more optimizer steps, metrics out.

Every rank receives the headers of all groups: lengths, token counts and rewards. From these it computes advantages,
the divisor of the loss, and the packing, the same on all ranks without communication. It then loads only the
trajectories that its own microbatches contain. Scores by current and reference weights stay on the rank that computes
them, because training uses the same packing.

The loss of an optimizer step is a sum over tokens divided by the number of trained tokens of all its trajectories, or
by what `algorithm.aggregation` says, over all microbatches and data-parallel ranks. The number is never zero, because a
step without trained tokens is skipped.

Advantages are estimated of samples, whose trajectories all get that of their sample (`algorithms.advantages.rewards`).
With a critic, rewards of tokens or a KL penalty in the rewards, they need more than headers. They are then known
only where their trajectories are computed, or only after the ranks have exchanged a few numbers for each trajectory.

Without a KL or entropy term, and in most losses, a trajectory with advantage zero has no gradient. It is then not
computed, but its tokens stay in the divisor, so the gradient is exactly the same. If no trajectory has a gradient, the
optimizer step is not taken. Per-token metrics are means over the computed tokens of the steps that were applied.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megasync.algorithms.advantages.rewards import WHITEN_EPS, Floats, Forks, StepRewards, TokenRewards
from megasync.algorithms.choose import (
    chooser_of,
    compares_with_reference,
    estimator_of,
    needs_all_tokens,
    needs_norms,
    needs_reference,
    takes_tokens,
)
from megasync.algorithms.kl import AGES, KL_KINDS
from megasync.algorithms.losses import StepTokens
from megasync.algorithms.losses.tokens import lots_of
from megasync.algorithms.policy_loss import policy_loss
from megasync.base.files import atomic_write
from megasync.buffer.payload import LeasedGroup
from megasync.config.schema import AlgorithmConfig
from megasync.errors import MegasyncError
from megasync.layout.model_files import read_hf_config
from megasync.observe import trace
from megasync.observe.metrics import percentiles
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.critic import Critic, Returns
from megasync.trainer.engine import MegatronEngine, Share
from megasync.trainer.flops import ADAPTER_PASSES, TRAINING_PASSES, ModelFlops, Work
from megasync.trainer.layer_norms import named_norms
from megasync.trainer.members import Members, advantages_of, check_advantages, divisor_of, members_of, split
from megasync.trainer.nonfinite import SkipBudget
from megasync.trainer.offload import Offload
from megasync.trainer.recording import Loader, Recorder
from megasync.trajectory import ROUTES, TEACHER, TOKEN_REWARDS, Trajectory, sample_rewards

log = logging.getLogger(__name__)

# Cosine of the change that adapters make and of what merged weights have of it, below which a run warns: a fifth of the
# latter is then noise.
KEPT_COSINE = 0.98

# Sums over computed tokens that the loss reports; the metrics of the same names are their means.
PER_TOKEN = (
    "entropy",
    "kl",
    "approx_kl",
    "clip_fraction",
    "dual_clip_fraction",
    "is_weight_mean",
    "is_outside_fraction",
    "is_rejected_fraction",
    "logprob_diff",
)


@dataclass
class Minibatch:
    """One optimizer step: the trajectories with a gradient, and what this rank computes of them.

    ``divisor`` is that of the loss, for all trajectories; see `divisor_of`. ``behaviour`` are the log-probs of each own
    sample's scored tokens, float32, ``versions`` those that sampled them. The others are of each own microbatch,
    float32 [targets] on the last pipeline stage, or None if they are not needed: ``proximal`` and ``reference`` scores,
    squared ``norms`` of the gradients of log-probs, the ``penalties`` that are subtracted from the rewards, and
    ``advantages`` of tokens. ``rewards`` are those given to each own sample's scored tokens, and whether each has one;
    empty if the estimator takes none. ``teacher`` are a teacher's log-probs of each own sample's scored tokens, NaN
    where there are none; empty without teachers.

    ``work`` is what a pass computes on all ranks.

    ``chosen`` are the tokens of each own microbatch that the loss treats apart, bool [targets]; None if it has none.
    ``rescored``: they took a scoring pass of their own.

    ``kept`` are the own samples that are recorded, ``scored`` the log-probs before the update of each own microbatch
    that has any of them, and its advantages if they are of tokens.
    """

    members: Members
    divisor: float
    share: Share
    work: Work
    behaviour: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    versions: dict[int, NDArray[Any]] = field(default_factory=dict[int, NDArray[Any]])
    proximal: list[torch.Tensor] | None = None
    reference: list[torch.Tensor] | None = None
    norms: list[torch.Tensor] | None = None
    penalties: list[torch.Tensor] | None = None
    advantages: list[torch.Tensor] | None = None
    chosen: list[torch.Tensor] | None = None
    rescored: bool = False
    teacher: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])
    rewards: dict[int, tuple[Floats, NDArray[np.bool_]]] = field(
        default_factory=dict[int, tuple[Floats, NDArray[np.bool_]]]
    )
    kept: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    scored: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict[int, tuple[torch.Tensor, torch.Tensor | None]]
    )

    def counted(self, index: int) -> bool:
        return self.share.microbatches[index].counted

    def counts(self, own: Sequence[int]) -> list[int]:
        """The numbers of scored tokens of own samples."""
        return [len(self.behaviour[index]) for index in own]


class PolicyTrainer:
    """Turns groups into optimizer steps of an initialised engine.

    If the algorithm needs a reference, it is the engine's weights at construction, and those of later steps as
    `algorithm.reference_every` says. Batches with a non-finite loss or gradient are written to ``dump_dir``.
    ``temperature`` is the sampling temperature of the trajectories, at which they are also scored. ``longest`` is the
    number of tokens that a response may have. ``critic`` learns in the same steps, on the same process groups.
    ``taught``: teachers have scored the trajectories. ``recorder`` records responses of each step.
    ``peak_tflops`` is the peak of a device, None if it is unknown. Every ``norms_every`` steps, norms are measured by
    groups of layers; 0 for never.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        algorithm: AlgorithmConfig,
        dump_dir: str | Path,
        temperature: float = 1.0,
        longest: int = 1,
        critic: Critic | None = None,
        taught: bool = False,
        recorder: Recorder | None = None,
        peak_tflops: float | None = None,
        norms_every: int = 0,
    ) -> None:
        self._norms_every = norms_every
        self._peak_tflops = peak_tflops
        self._flops = _flops_of(engine)
        self._critic_flops = None if critic is None else _flops_of(critic.engine)
        self._recorder = recorder
        self._taught = taught
        self._takes_tokens = takes_tokens(algorithm, critic is not None)
        self._critic = critic
        self._offload = Offload(engine.memory, engine.device)
        self._longest = longest
        self._engine = engine
        self._algorithm = algorithm
        self._dump_dir = Path(dump_dir)
        self._temperature = temperature
        self._warned = False
        # Current step and weight version, for the dump of a skipped batch.
        self._current: dict[str, int] = {}
        self._minibatches = engine.trainer_config.minibatches
        self._budget = SkipBudget(engine.trainer_config.max_skipped_steps)
        if needs_reference(algorithm):
            engine.keep_reference()

    def step(self, groups: Sequence[LeasedGroup], load: Loader, step: int, version: int) -> dict[str, float]:
        """Trains on the groups. A collective; returns the same metrics on every rank.

        ``load`` is called for the trajectories that this rank computes. ``step`` counts from 1 and determines the
        learning rate. Staleness is counted from the weight version ``version``. Raises NonFiniteError if more optimizer
        steps in a row than allowed had a non-finite loss or gradient, and TrainingError if a group has too few samples
        with a reward.
        """
        start = time.monotonic()
        self._current = {"step": step, "version": version}
        members, rewards = members_of(groups, self._algorithm, self._takes_tokens)
        metrics = _batch_metrics(groups, version)
        if self._recorder is not None:
            self._recorder.begin(groups)
        with trace.span("rank", "load", groups=len(groups)):
            parts = [self._minibatch(groups, part, load) for part in split(members, len(groups), self._minibatches)]
        metrics |= self._train(groups, members, rewards, parts, load, step)
        minibatches = [part for part in parts if part is not None]
        if self._recorder is not None:
            self._recorder.record(groups, members, minibatches, load, step, version)
        if (every := self._algorithm.reference_every) and step % every == 0:
            self._engine.keep_reference()
        metrics["train/seconds"] = seconds = time.monotonic() - start
        return metrics | self._speed(minibatches, step, seconds)

    def _speed(self, minibatches: Sequence[Minibatch], step: int, seconds: float) -> dict[str, float]:
        """Tokens and operations by second and device, over all passes of a step that took ``seconds``."""
        if not minibatches:
            return {}
        warms_up = self._critic is not None and step <= self._critic.warmup_steps
        training = TRAINING_PASSES if self._engine.trained_layout is self._engine.layout else ADAPTER_PASSES
        operations = 0.0
        for part in minibatches:
            scores = (part.proximal is not None) + (part.reference is not None) + part.rescored
            operations += (scores + (0 if warms_up else training)) * self._flops.forward(part.work)
            if self._critic_flops is not None:
                operations += (1 + TRAINING_PASSES) * self._critic_flops.forward(part.work)
        device_seconds = seconds * self._engine.topology.world
        teraflops = operations / device_seconds / 1e12
        found = {
            "train/tokens_per_second_per_device": sum(part.work.tokens for part in minibatches) / device_seconds,
            "train/tflops_per_device": teraflops,
        }
        return found if self._peak_tflops is None else {**found, "train/mfu": teraflops / self._peak_tflops}

    # Optimizer steps

    def _train(
        self,
        groups: Sequence[LeasedGroup],
        members: Members,
        rewards: StepRewards,
        parts: Sequence[Minibatch | None],
        load: Loader,
        step: int,
    ) -> dict[str, float]:
        minibatches = [part for part in parts if part is not None]
        # Scores are computed before any minibatch is trained. With a single minibatch the proximal log-probs are the
        # current ones, which the loss computes anyway.
        penalised = bool(self._algorithm.kl_coef) and self._algorithm.kl_in == "reward"
        compared = compares_with_reference(self._algorithm)
        if needs_norms(self._algorithm):
            for minibatch in minibatches:
                found = self._engine.score_with_norms(minibatch.share, temperature=self._temperature)
                minibatch.proximal, minibatch.norms = found
        elif self._minibatches > 1 or penalised or compared:
            for minibatch in minibatches:
                minibatch.proximal = self._engine.score(minibatch.share, temperature=self._temperature)
        if needs_reference(self._algorithm):
            for minibatch in minibatches:
                minibatch.reference = self._engine.score(minibatch.share, temperature=self._temperature, reference=True)
        metrics: dict[str, float] = {}
        if penalised:
            metrics |= self._penalise(minibatches, rewards)
        if compared:
            ratios = [
                [old - reference for old, reference in zip(part.proximal or [], part.reference or [], strict=True)]
                for part in minibatches
            ]
            found = self._of_samples(minibatches, ratios, len(rewards.rewards))
            self._readvantage(minibatches, replace(rewards, log_ratios=found))
        if self._takes_tokens and self._critic is None:
            self._of_tokens(minibatches, None, members, rewards)
        if self._critic is not None and minibatches:
            metrics |= self._estimate(self._critic, minibatches, members, rewards, step)
            if step <= self._critic.warmup_steps:
                return {**metrics, "train/skipped": 0.0}
        reports = []
        for index, minibatch in enumerate(parts):
            if minibatch is not None:
                self._choose(minibatch, step, moved=bool(reports))
                report = self._optimizer_step(minibatch, step)
                if not report["applied"]:
                    self._skip(groups, minibatch, load, f"step-{step:08d}-{index}", report)
                reports.append(report)
        # For the weight sync, which reads them where they are.
        if (kept := self._engine.gather_weights()) is not None:
            metrics["train/merged_cosine"] = kept
            self._warn_of_rounding(kept)
        return {**metrics, **_summary(reports), "train/without_gradient": float(len(parts) - len(reports))}

    def _warn_of_rounding(self, kept: float) -> None:
        """Warns once, on the first rank, if servers get little of what the adapters have learned."""
        if kept >= KEPT_COSINE or self._warned or self._engine.rank:
            return
        self._warned = True
        log.warning(
            "Merged weights in %s differ from what the adapters have learned (cosine of the changes %.2f, "
            "train/merged_cosine): a change this small is lost in rounding, so servers sample another policy. It grows "
            "with training; set sync.transport=adapters, which merges nothing, or model.dtype=float32",
            self._engine.model_config.dtype,
            kept,
        )

    def _choose(self, minibatch: Minibatch, step: int, moved: bool) -> None:
        """Chooses the tokens that the loss treats apart, among those of all ranks. A collective.

        ``moved``: the weights have changed since the proximal scores, so the minibatch is scored again.
        """
        chooser = chooser_of(self._algorithm)
        if chooser is None:
            return
        if minibatch.proximal is not None and not moved:
            scores = minibatch.proximal
        else:
            scores = self._engine.score(minibatch.share, temperature=self._temperature)
            minibatch.rescored = True
        logprobs, denominators, advantages, numbers, places = ([cast("Any", np.zeros(0))] for _ in range(5))
        for index, scored in enumerate(scores):
            if not minibatch.counted(index):
                continue
            own = list(minibatch.share.microbatches[index].sequences)
            old = scored if minibatch.proximal is None else minibatch.proximal[index]
            behaviour = np.concatenate([minibatch.behaviour[each] for each in own])
            counts = minibatch.counts(own)
            logprobs.append(_numbers(scored))
            denominators.append(_numbers(old) if self._algorithm.ratio == "trainer" else behaviour)
            advantages.append(_numbers(self._token_advantages(minibatch, index, old)[0]))
            numbers.append(np.repeat(minibatch.members.numbers[own], counts))
            places += [np.arange(count) for count in counts]
        lots = lots_of(step, np.concatenate(numbers).astype(np.int64), np.concatenate(places).astype(np.int64))
        joined = [np.concatenate(each).astype(np.float64) for each in (logprobs, denominators, advantages)]
        tokens = StepTokens(joined[0], joined[1], joined[2], lots, self._summed)
        rest = torch.from_numpy(chooser(tokens)).to(self._engine.device.torch_device)
        minibatch.chosen = []
        for index, scored in enumerate(scores):
            taken = len(scored) if minibatch.counted(index) else 0
            minibatch.chosen.append(rest[:taken] if taken else torch.zeros_like(scored, dtype=torch.bool))
            rest = rest[taken:]

    def _token_advantages(
        self, minibatch: Minibatch, index: int, old: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The advantages of the targets of a microbatch, and their gaps to a teacher, NaN where they have none.

        ``old`` are the log-probs before the step. Without teachers there are no gaps.
        """
        device = self._engine.device.torch_device
        own = list(minibatch.share.microbatches[index].sequences)
        if minibatch.advantages is None:
            each = np.repeat(minibatch.members.advantages[own].astype(np.float32), minibatch.counts(own))
            advantages = torch.from_numpy(each).to(device)
        else:
            advantages = minibatch.advantages[index]
        if not self._taught:
            return advantages, None
        gap = torch.from_numpy(np.concatenate([minibatch.teacher[each] for each in own])).to(device) - old
        taught = torch.where(gap.isnan(), 0.0, gap)
        return self._algorithm.reward_coef * advantages + self._algorithm.teacher_coef * taught, gap

    def _penalise(self, minibatches: Sequence[Minibatch], rewards: StepRewards) -> dict[str, float]:
        """Subtracts the KL penalty from the rewards: from those of tokens, or the sum from that of a sample."""
        algorithm = self._algorithm
        for minibatch in minibatches:
            pairs = zip(minibatch.proximal or [], minibatch.reference or [], strict=True)
            minibatch.penalties = [algorithm.kl_coef * KL_KINDS[algorithm.kl_kind](*pair) for pair in pairs]
        found = [minibatch.penalties or [] for minibatch in minibatches]
        penalties = self._of_samples(minibatches, found, len(rewards.rewards))
        if not self._takes_tokens:
            self._readvantage(minibatches, replace(rewards, rewards=rewards.rewards - penalties))
        return {"train/reward_penalty": float(penalties.mean())}

    def _of_samples(
        self, minibatches: Sequence[Minibatch], values: Sequence[Sequence[torch.Tensor]], count: int
    ) -> NDArray[np.float64]:
        """Sums over the tokens of each sample of the step, the same on all ranks. A collective.

        ``values`` are of each own microbatch of a minibatch, [targets]; none before the last pipeline stage.
        """
        sums = torch.zeros(count, dtype=torch.float64, device=self._engine.device.torch_device)
        for minibatch, parts in zip(minibatches, values, strict=True):
            for index, part in enumerate(parts):
                if minibatch.counted(index):
                    sequences = list(minibatch.share.microbatches[index].sequences)
                    samples = np.repeat(minibatch.members.samples[sequences], minibatch.counts(sequences))
                    sums.index_add_(0, torch.from_numpy(samples).to(sums.device), part.double())
        return self._summed(sums.cpu().numpy())

    def _summed(self, values: Floats) -> Floats:
        """The sums over all ranks of what each knows of its own responses. A collective."""
        coords = self._engine.coords
        # Tensor and context peers have the same.
        own = values if not (coords.tp or coords.cp) else np.zeros_like(values)
        sums = torch.from_numpy(own).to(self._engine.device.torch_device)
        dist.all_reduce(sums)
        return sums.cpu().numpy()

    def _readvantage(self, minibatches: Sequence[Minibatch], rewards: StepRewards) -> None:
        """Estimates the advantages again, from what is known of the step now."""
        advantages = advantages_of(rewards, self._algorithm)
        for minibatch in minibatches:
            members = minibatch.members
            minibatch.members = replace(members, advantages=advantages[members.samples])

    def _estimate(
        self, critic: Critic, minibatches: Sequence[Minibatch], members: Members, rewards: StepRewards, step: int
    ) -> dict[str, float]:
        """Estimates the advantages of tokens from the values of the critic, and lets it learn from their returns."""
        with critic.turn(self._offload):
            values = [critic.values(minibatch.share) for minibatch in minibatches]
            self._of_tokens(minibatches, values, members, rewards)
            lessons = []
            for minibatch, old in zip(minibatches, values, strict=True):
                returns = [each + value for each, value in zip(minibatch.advantages or [], old, strict=True)]
                lessons.append(Returns(minibatch.share, int(minibatch.members.trained.sum()), old, returns))
            if self._algorithm.normalize_std:
                self._whiten(minibatches)
            return critic.learn(lessons, step)

    def _of_tokens(
        self,
        minibatches: Sequence[Minibatch],
        values: Sequence[Sequence[torch.Tensor]] | None,
        members: Members,
        rewards: StepRewards,
    ) -> None:
        """Estimates the advantages of the targets of all minibatches. A collective.

        ``values`` are a critic's of each microbatch, none before the last pipeline stage. ``members`` and ``rewards``
        are the step's.
        """
        device, last = self._engine.device.torch_device, self._engine.is_last_stage
        given, penalties, estimates, norms = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
        rewarded = [np.zeros(0, bool)]
        counts: list[int] = []
        numbers: list[int] = []
        for number, minibatch in enumerate(minibatches):
            for index in range(len(minibatch.share.microbatches)) if last else ():
                if not minibatch.counted(index):
                    continue
                own = list(minibatch.share.microbatches[index].sequences)
                counts += minibatch.counts(own)
                numbers += minibatch.members.numbers[own].tolist()
                given += [minibatch.rewards[each][0] for each in own]
                rewarded += [minibatch.rewards[each][1] for each in own]
                zeros = np.zeros(sum(minibatch.counts(own)))
                penalties.append(zeros if minibatch.penalties is None else _numbers(minibatch.penalties[index]))
                estimates.append(zeros if values is None else _numbers(values[number][index]))
                if minibatch.norms is not None:
                    norms.append(_numbers(minibatch.norms[index]))
        penalised = any(minibatch.penalties is not None for minibatch in minibatches)
        computed = np.flatnonzero(members.trained)
        step = TokenRewards.of(
            rewards,
            Forks(
                members.samples[computed],
                members.groups[computed],
                members.trained[computed],
                np.searchsorted(computed, numbers),
            ),
            int(members.groups[-1]) + 1,
            self._summed,
            starts=np.cumsum([0, *counts]),
            given=np.concatenate(given),
            rewarded=np.concatenate(rewarded),
            values=np.concatenate(estimates),
            penalties=np.concatenate(penalties) if penalised else None,
            squared_norms=np.concatenate(norms) if needs_norms(self._algorithm) else None,
        )
        found = np.asarray(estimator_of(self._algorithm)(step), dtype=np.float64)
        # Values that are not finite make the losses so, and every rank then skips the step.
        check_advantages(self._algorithm, found, len(step.rewards), "token")
        rest = torch.from_numpy(found.astype(np.float32)).to(device)
        for minibatch in minibatches:
            minibatch.advantages = []
            for index, microbatch in enumerate(minibatch.share.microbatches if last else ()):
                count = sum(minibatch.counts(list(microbatch.sequences)))
                taken = count if minibatch.counted(index) else 0
                minibatch.advantages.append(rest[:taken] if taken else torch.zeros(count, device=device))
                rest = rest[taken:]

    def _whiten(self, minibatches: Sequence[Minibatch]) -> None:
        """Shifts and scales advantages to mean 0 and variance 1 over the trained tokens of the step, on all ranks."""
        parts = [(part.advantages or [], part) for part in minibatches]
        own = [each for advantages, part in parts for index, each in enumerate(advantages) if part.counted(index)]
        if not any(advantages for advantages, _ in parts):
            return  # Only the last stage has any.
        whole = torch.cat([torch.zeros(0, device=self._engine.device.torch_device), *own]).double()
        first = torch.stack([torch.full_like(whole.sum(), len(whole)), whole.sum()])
        dist.all_reduce(first, group=self._engine.data_group)
        count, mean = first[0], first[1] / first[0]
        squares = (whole - mean).square().sum()
        dist.all_reduce(squares, group=self._engine.data_group)
        scale = (squares / (count - 1).clamp(min=1) + WHITEN_EPS).rsqrt()
        for advantages, part in parts:
            part.advantages = [((each - mean) * scale).float() for each in advantages]

    def _minibatch(self, groups: Sequence[LeasedGroup], part: Members, load: Loader) -> Minibatch | None:
        """Plans a minibatch and loads this rank's share of it; None if no trajectory has a gradient.

        A trajectory without a trained token never has one, so the loss is never divided by zero.
        """
        algorithm = self._algorithm
        terms = algorithm.kl_coef or algorithm.entropy_coef or self._takes_tokens or self._taught
        always = bool(terms) or needs_all_tokens(algorithm)
        active = part[np.flatnonzero((part.trained > 0) & (always | (part.advantages != 0.0)))]
        if not len(active):
            return None
        packing = self._engine.plan(active.lengths)
        microbatches = self._engine.own_microbatches(packing)
        needed = sorted({index for microbatch in microbatches for index in microbatch.sequences})
        trajectories = _load(groups, active, needed, load)
        samples = {index: _sample(trajectories[index], int(active.lengths.fed[index])) for index in needed}
        recorder = self._recorder
        kept = [index for index in needed if recorder is not None and recorder.takes(int(active.groups[index]))]
        return Minibatch(
            active,
            divisor_of(part, algorithm, self._longest),
            Share(microbatches, samples, packing.counted_tokens),
            Work.of(packing, active.lengths, int(active.trained.sum())),
            {index: trajectories[index].logprobs[sample.scored] for index, sample in samples.items()},
            {index: trajectories[index].versions.expand()[sample.scored] for index, sample in samples.items()},
            teacher={
                index: _teacher(trajectories[index])[sample.scored]
                for index, sample in (samples.items() if self._taught else ())
            },
            rewards={
                index: _given_rewards(trajectories[index], sample.scored)
                for index, sample in (samples.items() if self._takes_tokens else ())
            },
            kept={index: trajectories[index] for index in kept},
        )

    def _optimizer_step(self, minibatch: Minibatch, step: int) -> dict[str, float]:
        """One optimizer step; reports sums over computed tokens, and the optimizer's update."""
        device = self._engine.device.torch_device

        def loss(
            batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            own = list(minibatch.share.microbatches[batch.index].sequences)
            behaviour = np.concatenate([minibatch.behaviour[index] for index in own])
            ages = self._current["version"] - np.concatenate([minibatch.versions[index] for index in own])
            members = minibatch.members
            weights = None
            if self._algorithm.aggregation == "sequence":
                each = np.repeat((1.0 / members.sequences[own]).astype(np.float32), batch.counts)
                weights = torch.from_numpy(each).to(device)
            proximal, reference = minibatch.proximal, minibatch.reference
            old = proximal[batch.index] if proximal else logprobs.detach()
            advantages, gap = self._token_advantages(minibatch, batch.index, old)
            if not minibatch.kept.keys().isdisjoint(own):
                of_tokens = minibatch.advantages is not None or gap is not None
                minibatch.scored[batch.index] = old, advantages if of_tokens else None
            total, sums = policy_loss(
                self._algorithm,
                logprobs=logprobs,
                old_logprobs=old,
                behaviour_logprobs=torch.from_numpy(behaviour).to(device),
                advantages=advantages,
                mask=torch.full_like(logprobs, float(batch.counted)),
                entropy=entropy if self._algorithm.entropy_coef else entropy.detach(),
                reference_logprobs=reference[batch.index] if reference else None,
                segments=batch.segments,
                token_weights=weights,
                ages=torch.from_numpy(ages).to(device),
                chosen=None if minibatch.chosen is None else minibatch.chosen[batch.index],
            )
            if gap is not None:
                sums["teacher_kl"] = -gap.nansum() * float(batch.counted)
                sums["taught"] = (~gap.isnan()).sum() * float(batch.counted)
            return total / minibatch.divisor, sums

        sums = self._engine.forward_backward(minibatch.share, loss, self._temperature)
        measured = bool(self._norms_every) and step % self._norms_every == 0
        # Its learning rate begins its course when it begins to learn.
        own_step = step if self._critic is None else step - self._critic.warmup_steps
        update = self._engine.update(own_step, math.isfinite(sums["loss"]), measured)
        norms = {} if update.squares is None else named_norms(update.squares, self._engine.layout.sizes.layers)
        if update.applied:
            self._budget.applied()
        return {**sums, **norms, "applied": float(update.applied), "grad_norm": update.grad_norm, "lr": update.lr}

    # Non-finite steps

    def _skip(
        self, groups: Sequence[LeasedGroup], minibatch: Minibatch, load: Loader, name: str, report: dict[str, float]
    ) -> None:
        values = f"loss {report['loss']} and gradient norm {report['grad_norm']}"
        if self._engine.rank == 0:
            log.error("Skipped %s because of %s; writing its batch to %s", name, values, self._dump_dir)
            try:
                self._dump(groups, minibatch.members, load, name, report)
            except (OSError, MegasyncError) as error:
                # Raising here would leave the other ranks waiting.
                log.error("Could not write the batch of %s: %s", name, error)
        self._budget.skipped(f"{name} with {values}; the batches are in {self._dump_dir}")

    def _dump(
        self, groups: Sequence[LeasedGroup], members: Members, load: Loader, name: str, report: dict[str, float]
    ) -> None:
        """Writes all trajectories of a minibatch, also those of other ranks."""
        trajectories = _load(groups, members, range(len(members)), load)
        batch = [
            {"uid": groups[group].uid, "advantage": advantage, "trajectory": trajectories[index].plain()}
            for index, (group, advantage) in enumerate(
                zip(members.groups.tolist(), members.advantages.tolist(), strict=True)
            )
        ]
        reported = {key: report[key] for key in ("loss", "grad_norm")}
        record = {"name": name, **self._current, **reported, "batch": batch}
        # JSON has no non-finite numbers; they become strings such as "nan".
        record = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        atomic_write(self._dump_dir / f"{name}.json", json.dumps(record, allow_nan=False))


def _flops_of(engine: MegatronEngine) -> ModelFlops:
    return ModelFlops.of(engine.layout, read_hf_config(engine.model_config.path))


def _batch_metrics(groups: Sequence[LeasedGroup], version: int) -> dict[str, float]:
    """Counts and staleness over all trajectories with a reward, and the mean reward of their samples.

    Staleness is the number of versions between the current weights and the oldest that sampled a trained token; that
    of tokens is of each trained token by itself.
    """
    members = [t for group in groups for t in group.header.trajectories if t.reward is not None]
    rewards = [reward for group in groups for reward in sample_rewards(group.header.trajectories)]
    ages = [version - oldest for t in members if (oldest := t.oldest_version) is not None]
    metrics = {
        "train/sequences": float(len(members)),
        "train/tokens": float(sum(t.trained_tokens for t in members)),
        "train/reward": sum(rewards) / max(1, len(rewards)),
    }
    metrics |= _spread(groups) | _lengths([t.response_tokens for t in members])
    by_age = Counter[int]()
    for t in members:
        for sampled, tokens in t.trained:
            by_age[version - sampled] += tokens
    if tokens := by_age.total():
        metrics["train/token_staleness"] = sum(age * count for age, count in by_age.items()) / tokens
        for age in range(AGES):
            # The last one includes all older tokens, as that of `train/server_kl` does.
            count = by_age[age] if age < AGES - 1 else sum(n for other, n in by_age.items() if other >= age)
            if count:
                metrics[f"train/token_staleness@{age}"] = count / tokens
    if ages:
        metrics |= {"train/staleness_mean": sum(ages) / len(ages), "train/staleness_max": float(max(ages))}
    return metrics


def _spread(groups: Sequence[LeasedGroup]) -> dict[str, float]:
    """The deviation of all rewards of a step (divided by n - 1), and the share of groups whose rewards are equal."""
    each = [sample_rewards(group.header.trajectories) for group in groups]
    rewards = [reward for own in each for reward in own]
    uniform = sum(len(set(own)) < 2 for own in each) / max(1, len(each))
    deviation = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
    return {"train/reward_std": deviation, "train/uniform_groups": uniform}


def _lengths(lengths: Sequence[int]) -> dict[str, float]:
    """Of the responses in tokens, to be compared with those of all generated ones."""
    name = "train/response_length"
    return {name: sum(lengths) / len(lengths), **percentiles(name, lengths)} if lengths else {}


def _load(
    groups: Sequence[LeasedGroup], members: Members, indices: Sequence[int], load: Loader
) -> dict[int, Trajectory]:
    """The trajectories of members by index; one call of ``load`` per group. ``indices`` are ascending."""
    loaded: dict[int, Trajectory] = {}
    for group, own in groupby(indices, key=lambda index: int(members.groups[index])):
        own = list(own)
        loaded |= zip(own, load(groups[group], members.places[own].tolist()), strict=True)
    return loaded


def _sample(trajectory: Trajectory, fed: int) -> Sample:
    scored = np.flatnonzero(trajectory.loss_mask.expand())
    support = trajectory.support
    return Sample(
        trajectory.prompt_ids,
        trajectory.response_ids,
        scored,
        fed,
        trajectory.arrays.get(ROUTES),
        None if support is None else support.at(scored),
    )


def _given_rewards(trajectory: Trajectory, scored: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
    """The rewards given to single scored tokens, and whether each has one."""
    rewards, rewarded = np.zeros(len(scored)), np.zeros(len(scored), dtype=bool)
    given = trajectory.arrays.get(TOKEN_REWARDS, np.zeros(0, np.float32))
    at = np.flatnonzero(~np.isnan(given))
    # Those of tokens that were not sampled are for the last one before them that was.
    places = np.searchsorted(scored, at, side="right") - 1
    at, places = at[places >= 0], places[places >= 0]
    np.add.at(rewards, places, given[at].astype(np.float64))
    rewarded[places] = True
    return rewards, rewarded


def _numbers(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()


def _teacher(trajectory: Trajectory) -> NDArray[np.float32]:
    """The teacher's log-probs of the response tokens; NaN if it has none."""
    missing = np.full(len(trajectory.response_ids), np.nan, dtype=np.float32)
    return trajectory.arrays.get(TEACHER, missing)


def _summary(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all minibatches: means over the optimizer steps that were applied, and over their computed tokens."""
    applied = [report for report in reports if report["applied"]]
    found = {"train/skipped": float(len(reports) - len(applied))}
    if not applied:
        return found

    def total(name: str) -> float:
        return sum(report[name] for report in applied)

    tokens = total("tokens")
    found |= {f"train/{name}": total(name) / len(applied) for name in ("loss", "grad_norm")}
    found |= {f"train/{name}": total(name) / tokens for name in PER_TOKEN if name in applied[0]}
    if "taught" in applied[0] and (taught := total("taught")):
        found["train/teacher_kl"] = total("teacher_kl") / taught
    for age in range(AGES):
        if of_age := total(f"tokens@{age}"):
            found[f"train/server_kl@{age}"] = total(f"server_kl@{age}") / of_age
    # How many tokens of equal weight would have the same variance, as a share (Kish 1965).
    squares = total("is_weight_square")
    found["train/is_effective_share"] = total("is_weight_mean") ** 2 / (tokens * squares) if squares else 0.0
    # Of the last optimizer step.
    found |= {name: value for name, value in applied[-1].items() if name.startswith("norms/")}
    return {**found, "train/computed_tokens": tokens, "train/lr": applied[-1]["lr"]}

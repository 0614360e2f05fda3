"""The policy training step: groups of trajectories in, one or more optimizer steps, metrics out.

The loss of an optimizer step is a sum over tokens divided by the number of trained tokens of all its trajectories, over
all microbatches and data-parallel ranks. Every rank receives all groups, so it knows that number before it computes
anything. The number is never zero, because a step without trained tokens is skipped.

Without a KL or entropy term, a trajectory with advantage zero has no gradient. It is then not computed, but its tokens
stay in the divisor, so the gradient is exactly the same. If no trajectory has a gradient, the optimizer step counts as
skipped. Per-token metrics are means over the computed tokens.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from megasync.algorithms.advantages import group_advantages
from megasync.algorithms.policy_loss import policy_loss
from megasync.config.schema import AlgorithmConfig
from megasync.errors import NonFiniteError, TrainingError
from megasync.files import atomic_write
from megasync.trainer.batch import Batch
from megasync.trainer.engine import MegatronEngine
from megasync.trainer.packing import Sample
from megasync.trajectory import Group, Trajectory

log = logging.getLogger(__name__)

# Sums over computed tokens that the loss reports; the metrics of the same names are their means.
PER_TOKEN = (
    "entropy",
    "kl",
    "clip_fraction",
    "dual_clip_fraction",
    "is_weight_mean",
    "is_capped_fraction",
    "logprob_diff",
)


@dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory with its reward and advantage; ``scored`` are the response offsets that are trained."""

    uid: str
    trajectory: Trajectory
    reward: float
    advantage: float
    scored: tuple[int, ...]


@dataclass
class Targets:
    """The inputs of the loss for one sample, except the model's output; tensors are float32 [scored tokens]."""

    advantage: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


class PolicyTrainer:
    """Turns groups into optimizer steps of an initialised engine.

    With a KL term, the engine's weights at construction become the reference. Batches with a non-finite loss or
    gradient are written to ``dump_dir``. ``temperature`` is the sampling temperature of the trajectories, at which they
    are also scored.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        algorithm: AlgorithmConfig,
        dump_dir: str | Path,
        temperature: float = 1.0,
    ) -> None:
        self._engine = engine
        self._algorithm = algorithm
        self._dump_dir = Path(dump_dir)
        self._temperature = temperature
        # Current step and weight version, for the dump of a skipped batch.
        self._current: dict[str, int] = {}
        self._minibatches = engine.trainer_config.minibatches
        self._skips_left = self._skips_allowed = engine.trainer_config.max_skipped_steps
        if algorithm.kl_coef:
            engine.keep_reference()

    def step(self, groups: Sequence[Group], step: int, version: int) -> dict[str, float]:
        """Trains on the groups. A collective; returns the same metrics on every rank.

        ``step`` counts from 1 and determines the learning rate. Staleness is counted from the weight version
        ``version``. Raises NonFiniteError if more optimizer steps in a row than allowed had a non-finite loss or
        gradient, and TrainingError if a group has fewer than two rewards.
        """
        start = time.monotonic()
        self._current = {"step": step, "version": version}
        scored = [self._with_advantages(group) for group in groups]
        everyone = [member for group in scored for member in group]
        metrics = {
            "train/sequences": float(len(everyone)),
            "train/tokens": float(sum(len(member.scored) for member in everyone)),
            "train/reward": sum(member.reward for member in everyone) / max(1, len(everyone)),
            **_staleness(everyone, version),
        }
        metrics |= self._train(scored, step)
        metrics["train/seconds"] = time.monotonic() - start
        return metrics

    def _with_advantages(self, group: Group) -> list[ScoredTrajectory]:
        scored = [(trajectory, trajectory.reward) for trajectory in group.trajectories if trajectory.reward is not None]
        try:
            advantages = group_advantages([reward for _, reward in scored], self._algorithm.normalize_std)
        except ValueError as error:
            raise TrainingError(f"group {group.uid} cannot be trained: {error}") from error
        return [
            ScoredTrajectory(
                group.uid,
                trajectory,
                reward,
                advantage,
                tuple(np.flatnonzero(trajectory.loss_mask.expand()).tolist()),
            )
            for (trajectory, reward), advantage in zip(scored, advantages, strict=True)
        ]

    # Optimizer steps

    def _train(self, groups: list[list[ScoredTrajectory]], step: int) -> dict[str, float]:
        parts = _split(groups, self._minibatches)
        active = [self._active(part) for part in parts]
        targets = self._targets(active)
        reports = []
        for index, (part, members, own_targets) in enumerate(zip(parts, active, targets, strict=True)):
            tokens = sum(len(member.scored) for member in part)
            # Without tokens there is no active member, so the loss is never divided by zero.
            if members:
                reports.append(self._minibatch(members, own_targets, tokens, step, index))
        skipped = len(parts) - sum(report["applied"] for report in reports)
        if not reports:
            return {"train/skipped": skipped}
        return {**_summary(reports), "train/skipped": skipped}

    def _active(self, part: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
        """The trajectories that have a gradient."""
        always = self._algorithm.kl_coef or self._algorithm.entropy_coef
        return [member for member in part if member.scored and (always or member.advantage != 0.0)]

    def _targets(self, active: list[list[ScoredTrajectory]]) -> list[list[Targets]]:
        """The targets of each minibatch; proximal and reference log-probs are computed before any minibatch is trained.

        With a single minibatch the proximal log-probs are the current ones, which the loss computes anyway.
        """
        device = self._engine.device.torch_device
        targets = [[_target(member, device) for member in members] for members in active]
        flat = [target for part in targets for target in part]
        samples = [_sample(member) for members in active for member in members]
        if not samples:
            return targets
        if self._minibatches > 1:
            for target, values in zip(flat, self._score(samples), strict=True):
                target.proximal = values
        if self._algorithm.kl_coef:
            for target, values in zip(flat, self._score(samples, reference=True), strict=True):
                target.reference = values
        return targets

    def _score(self, samples: list[Sample], reference: bool = False) -> list[torch.Tensor]:
        return self._engine.score(samples, temperature=self._temperature, reference=reference)

    def _minibatch(
        self, members: list[ScoredTrajectory], targets: list[Targets], tokens: int, step: int, index: int
    ) -> dict[str, float]:
        """One optimizer step; reports sums over computed tokens, and the optimizer's update."""

        def loss(
            batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            selected = [targets[index] for index in batch.samples]
            proximal = [t.proximal for t in selected if t.proximal is not None]
            reference = [t.reference for t in selected if t.reference is not None]
            total, sums = policy_loss(
                self._algorithm,
                logprobs=logprobs,
                old_logprobs=torch.cat(proximal) if proximal else logprobs.detach(),
                behaviour_logprobs=torch.cat([t.behaviour for t in selected]),
                advantages=torch.cat([t.advantage for t in selected]),
                mask=torch.full_like(logprobs, float(batch.counted)),
                entropy=entropy if self._algorithm.entropy_coef else entropy.detach(),
                reference_logprobs=torch.cat(reference) if reference else None,
                segments=batch.segments,
            )
            return total / tokens, sums

        samples = [_sample(member) for member in members]
        sums = self._engine.forward_backward(samples, loss, self._temperature)
        update = self._engine.update(step, math.isfinite(sums["loss"]))
        if not update.applied:
            self._skip(members, f"step-{step:08d}-{index}", sums["loss"], update.grad_norm)
        else:
            self._skips_left = self._skips_allowed
        return {**sums, "applied": float(update.applied), "grad_norm": update.grad_norm, "lr": update.lr}

    # Non-finite steps

    def _skip(self, members: list[ScoredTrajectory], name: str, loss: float, grad_norm: float) -> None:
        values = f"loss {loss} and gradient norm {grad_norm}"
        if self._engine.rank == 0:
            log.error("Skipped %s because of %s; writing its batch to %s", name, values, self._dump_dir)
            self._dump(members, name, loss, grad_norm)
        self._skips_left -= 1
        if self._skips_left < 0:
            raise NonFiniteError(
                f"{self._skips_allowed + 1} optimizer steps in a row had a non-finite loss or gradient "
                f"(trainer.max_skipped_steps={self._skips_allowed}); the last was {name} with {values}; the batches "
                f"are in {self._dump_dir}"
            )

    def _dump(self, members: list[ScoredTrajectory], name: str, loss: float, grad_norm: float) -> None:
        batch = [
            {"uid": member.uid, "advantage": member.advantage, "trajectory": member.trajectory.plain()}
            for member in members
        ]
        record = {"name": name, **self._current, "loss": loss, "grad_norm": grad_norm, "batch": batch}
        # JSON has no non-finite numbers; they become strings such as "nan".
        record = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
        try:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            atomic_write(self._dump_dir / f"{name}.json", json.dumps(record, allow_nan=False))
        except OSError as error:
            # Raising here would leave the other ranks waiting.
            log.error("Could not write the batch of %s: %s", name, error)


def _split(groups: list[list[ScoredTrajectory]], parts: int) -> list[list[ScoredTrajectory]]:
    """Splits groups, in order, into ``parts`` non-empty minibatches of nearly equal numbers of groups."""
    parts = max(1, min(parts, len(groups)))
    bounds = [len(groups) * part // parts for part in range(parts + 1)]
    return [[member for group in groups[low:high] for member in group] for low, high in pairwise(bounds)]


def _sample(member: ScoredTrajectory) -> Sample:
    return Sample(member.trajectory.prompt_ids.tolist(), member.trajectory.response_ids.tolist(), member.scored)


def _target(member: ScoredTrajectory, device: torch.device) -> Targets:
    logprobs = member.trajectory.logprobs
    behaviour = torch.tensor(logprobs[list(member.scored)], dtype=torch.float32, device=device)
    return Targets(torch.full_like(behaviour, member.advantage), behaviour)


def _staleness(members: list[ScoredTrajectory], version: int) -> dict[str, float]:
    """Staleness over trajectories: versions between the current weights and the oldest that sampled a trained token."""
    ages = [version - oldest for member in members if (oldest := member.trajectory.oldest_version) is not None]
    if not ages:
        return {}
    return {"train/staleness_mean": sum(ages) / len(ages), "train/staleness_max": float(max(ages))}


def _summary(reports: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of all minibatches: means over optimizer steps, and over computed tokens."""
    computed = sum(report["tokens"] for report in reports)
    means = {f"train/{name}": sum(r[name] for r in reports) / len(reports) for name in ("loss", "grad_norm")}
    per_token = {
        f"train/{name}": sum(report[name] for report in reports) / computed for name in PER_TOKEN if name in reports[0]
    }
    return {**means, "train/lr": reports[-1]["lr"], **per_token}

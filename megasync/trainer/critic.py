"""The critic of a rank: a second learner with a value head, on the same process groups, with an optimizer of its own.

It computes the microbatches that the policy has planned, and learns before the policy does. Values and returns stay on
the rank that computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megasync.algorithms.value_loss import explained_variance, value_loss
from megasync.config.schema import CriticConfig, LoraConfig, ModelConfig, TrainerConfig
from megasync.device import Device
from megasync.trainer.batch import Batch
from megasync.trainer.checkpoint import CRITIC, Shard
from megasync.trainer.learner import LossFunction, MegatronLearner
from megasync.trainer.offload import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, Offload
from megasync.trainer.optimizer import SkipBudget
from megasync.trainer.tables import Minibatch


class Critic:
    """Every method is a collective of all ranks. ``learner`` is initialised, and has a value head."""

    def __init__(self, learner: MegatronLearner, config: CriticConfig) -> None:
        self.learner = learner
        self.warmup_steps = config.warmup_steps
        self._clip = config.clip
        self._budget = SkipBudget(learner.trainer_config.max_skipped_steps)
        self._shares_device = config.offload
        self._offload = Offload(learner.memory, learner.device)
        if self._shares_device:
            self._offload.offload(GRADIENTS, OPTIMIZER)

    def leave_device(self) -> None:
        """Moves everything to the host; `return_to_device` undoes it."""
        self._offload.offload(*KINDS)

    def return_to_device(self) -> None:
        self._offload.restore(WEIGHTS)
        if not self._shares_device:
            self._offload.restore(*KINDS)

    @contextmanager
    def on_device(self, policy: Offload) -> Iterator[None]:
        """Within the context the critic may learn. With `critic.offload` the policy then may not: it has no gradients
        and no optimizer state on the device.
        """
        if not self._shares_device:
            yield
            return
        policy.offload(GRADIENTS, OPTIMIZER)
        try:
            with self._offload.present(GRADIENTS, OPTIMIZER):
                yield
        finally:
            policy.restore(GRADIENTS, OPTIMIZER)

    def learn(self, minibatches: Sequence[Minibatch], step: int) -> dict[str, float]:
        """Takes an optimizer step on the columns `values` and `returns` of each minibatch.

        Returns the same metrics on every rank. ``step`` counts from 1 and determines the learning rate. Raises
        NonFiniteError if more optimizer steps in a row than allowed had a non-finite loss or gradient.
        """
        totals: dict[str, float] = {}
        norms: list[float] = []
        lr = 0.0
        for index, minibatch in enumerate(minibatches):
            sums = self.learner.forward_backward(minibatch.batch, self._loss(minibatch))
            update = self.learner.update(step, math.isfinite(sums["loss"]))
            lr = update.lr
            if update.applied:
                norms.append(update.grad_norm)
                totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
            what = f"step {step} of the critic, minibatch {index}"
            values = f"loss {sums['loss']} and gradient norm {update.grad_norm}"
            self._budget.count(update.applied, f"{what}, with {values}")
        self.learner.gather_weights()
        metrics = {"critic/lr": lr, "critic/skipped": float(len(minibatches) - len(norms))}
        if not norms:
            return metrics
        tokens = totals["tokens"]
        return metrics | {
            "critic/loss": totals["loss"] / len(norms),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/clip_fraction": totals["clip_fraction"] / tokens,
            "critic/value_mean": totals["value"] / tokens,
            "critic/return_mean": totals["return"] / tokens,
            "critic/explained_variance": explained_variance(totals),
        }

    @contextmanager
    def saved(self) -> Iterator[dict[str, Shard]]:
        """The critic's part of the policy's checkpoint, by its folder there, to be copied within the context."""
        with self._offload.present(OPTIMIZER):
            yield {CRITIC: self.learner.shard()}

    def load(self, path: Path) -> None:
        """Restores the critic of the policy's checkpoint at ``path``. Raises CheckpointError if there is none."""
        with self._offload.present(OPTIMIZER):
            self.learner.load(path / CRITIC)

    def _loss(self, minibatch: Minibatch) -> LossFunction:
        tokens = int(minibatch.trajectories.trained.sum())

        def loss(batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            columns = minibatch.tables[batch.index].columns
            total, sums = value_loss(
                values,
                old_values=columns["values"],
                returns=columns["returns"],
                mask=torch.full_like(values, float(batch.counted)),
                clip=self._clip,
            )
            return total / tokens, sums

        return loss


def critic_learner(
    config: CriticConfig, model: ModelConfig, trainer: TrainerConfig, device: Device, rank: int, **options: object
) -> MegatronLearner:
    """The learner of a critic beside a policy of ``model`` and ``trainer``; see `MegatronLearner` for ``options``."""
    return MegatronLearner(
        replace(model, path=config.path or model.path),
        replace(trainer, optimizer=config.optimizer, lora=LoraConfig()),
        device,
        rank,
        value_head=True,
        **options,  # pyright: ignore[reportArgumentType]
    )

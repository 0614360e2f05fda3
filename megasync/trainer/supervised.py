"""Supervised steps of an initialised engine: rows of tokens in, optimizer steps and losses out.

The loss is the negative log-prob of the trained tokens, summed and divided by their number in the whole step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from megasync.data.supervised import TokenRow
from megasync.errors import NonFiniteError
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.engine import MegatronEngine, Share

log = logging.getLogger(__name__)


class SupervisedTrainer:
    """Every method is a collective and returns the same on every rank."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._skips_left = self._skips_allowed = engine.trainer_config.max_skipped_steps

    def step(self, rows: Sequence[TokenRow], step: int) -> dict[str, float]:
        """Takes an optimizer step; ``step`` counts from 1 and determines the learning rate.

        Raises NonFiniteError if more steps in a row than allowed had a non-finite loss or gradient.
        """
        start = time.monotonic()
        share, tokens = self._share(rows), _trained(rows)

        def loss(batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict]:
            return _negative_sum(batch, logprobs) / tokens, {}

        sums = self._engine.forward_backward(share, loss)
        update = self._engine.update(step, math.isfinite(sums["loss"]))
        if update.applied:
            self._skips_left = self._skips_allowed
        else:
            self._skip(step, sums["loss"], update.grad_norm)
        return {
            "sft/loss": sums["loss"],
            "train/grad_norm": update.grad_norm,
            "train/lr": update.lr,
            "train/tokens": float(tokens),
            "train/sequences": float(len(rows)),
            "train/skipped": float(not update.applied),
            "train/seconds": time.monotonic() - start,
        }

    def loss(self, rows: Sequence[TokenRow]) -> float:
        """The mean negative log-prob of all trained tokens, without a step."""

        def total(batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict]:
            return _negative_sum(batch, logprobs), {}

        return self._engine.total(self._share(rows), total)["loss"] / _trained(rows)

    def _share(self, rows: Sequence[TokenRow]) -> Share:
        return self._engine.share([_sample(row) for row in rows])

    def _skip(self, step: int, loss: float, grad_norm: float) -> None:
        log.error("Skipped step %d because of loss %s and gradient norm %s", step, loss, grad_norm)
        self._skips_left -= 1
        if self._skips_left < 0:
            raise NonFiniteError(
                f"{self._skips_allowed + 1} steps in a row had a non-finite loss or gradient "
                f"(trainer.max_skipped_steps={self._skips_allowed}); the last was step {step} with loss {loss} and "
                f"gradient norm {grad_norm}"
            )


def _negative_sum(batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
    # A masked copy only keeps a rank in step with others.
    return -logprobs.sum() * float(batch.counted)


def _trained(rows: Sequence[TokenRow]) -> int:
    return sum(int(row.trained.sum()) for row in rows)


def _sample(row: TokenRow) -> Sample:
    first = int(np.flatnonzero(row.trained)[0])
    return Sample.of(row.ids[:first], row.ids[first:], np.flatnonzero(row.trained[first:]))

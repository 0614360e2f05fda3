"""Supervised steps of an initialised learner: numbers of rows in, optimizer steps and losses out.

The loss is the negative log-prob of the trained tokens, summed and divided by their number in the whole step.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from megasync.observe import trace
from megasync.supervised.row_file import RowFile
from megasync.supervised.rows import TokenRow
from megasync.trainer.batch import Batch, Sample
from megasync.trainer.learner import LocalBatch, MegatronLearner
from megasync.trainer.optimizer import SkipBudget
from megasync.trainer.packing import Ints, Lengths


class SupervisedTrainer:
    """Every method is a collective and returns the same on every rank. A rank reads only the rows that it computes."""

    def __init__(self, learner: MegatronLearner) -> None:
        self._learner = learner
        self._budget = SkipBudget(learner.trainer_config.max_skipped_steps)

    def step(self, file: RowFile, rows: Ints, step: int) -> dict[str, float]:
        """Takes an optimizer step on rows of a file; ``step`` counts from 1 and determines the learning rate.

        Raises NonFiniteError if more steps in a row than allowed had a non-finite loss or gradient.
        """
        start = time.monotonic()
        with trace.span("rank", "load", rows=len(rows)):
            batch, tokens = self._local_batch(file, rows), int(file.trained_tokens[rows].sum())

        def loss(batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict]:
            total, sums = _negative_sum(batch, logprobs, entropy)
            return total / tokens, sums

        sums = self._learner.forward_backward(batch, loss)
        update = self._learner.update(step, math.isfinite(sums["loss"]))
        step_name = f"step {step} with loss {sums['loss']} and gradient norm {update.grad_norm}"
        self._budget.count(update.applied, step_name)
        return {
            "sft/loss": sums["loss"],
            "train/grad_norm": update.grad_norm,
            "train/lr": update.lr,
            "train/tokens": float(tokens),
            "train/sequences": float(len(rows)),
            "train/skipped": float(not update.applied),
            "train/seconds": time.monotonic() - start,
        }

    def loss(self, file: RowFile) -> float:
        """The mean negative log-prob of all trained tokens of a file, without a step."""
        batch = self._local_batch(file, np.arange(len(file)))
        return self._learner.total(batch, _negative_sum)["loss"] / int(file.trained_tokens.sum())

    def _local_batch(self, file: RowFile, rows: Ints) -> LocalBatch:
        packing = self._learner.plan(Lengths(file.prompts[rows], file.prompt_tokens[rows], file.response_inputs[rows]))
        microbatches = self._learner.own_microbatches(packing)
        local_rows = {index for part in microbatches for index in part.sequences}
        samples = {index: _sample(file.row(int(rows[index]))) for index in local_rows}
        return LocalBatch(microbatches, samples, packing.counted_tokens)


def _negative_sum(batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict]:
    # A masked copy only keeps a rank in step with others.
    return -logprobs.sum() * float(batch.counted), {}


def _sample(row: TokenRow) -> Sample:
    first = int(np.flatnonzero(row.trained)[0])
    return Sample.of(row.ids[:first], row.ids[first:], np.flatnonzero(row.trained[first:]))

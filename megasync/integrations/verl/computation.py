"""Runs verl's batches and losses on a `MegatronLearner`.

verl assigns sequences to data-parallel ranks and microbatches, and provides the loss; the engine computes. verl's
losses are means over data-parallel ranks and megasync's are sums, hence the division in `_evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from megasync.errors import TrainingError
from megasync.integrations.verl.batches import VerlBatch, check_batch, temperatures, tensor_at
from megasync.integrations.verl.checkpoints import Checkpoints
from megasync.layout.routes import RouteFormat
from megasync.sync.stream import Shards
from megasync.trainer.batch import Batch
from megasync.trainer.learner import LocalBatch, MegatronLearner
from megasync.trainer.offload import GRADIENTS, WEIGHTS, Offload
from megasync.trainer.optimizer import learning_rate
from megasync.trainer.packing import Microbatch


class Computation:
    """The computation of one rank; every method except `learning_rate` is a collective. Initialises its engine.

    Exports and checkpoints restore offloaded memory (`offload`) themselves. Before any other call the caller must
    restore it.
    """

    def __init__(self, engine: MegatronLearner, exports: bool) -> None:
        engine.initialize()
        self._engine = engine
        self._ranks = engine.topology.data
        self._losses_are_finite = True
        # Whether gradients of an earlier call exist.
        self._has_gradients = False
        self._routes = RouteFormat.of(engine.layout.hf_config)
        self._outputs = self._values if engine.layout.value_head else self._scores
        self.data_group = engine.data_group
        self.offload = Offload(engine.memory, engine.device)
        self.checkpoints = Checkpoints(engine, self.offload, exports)

    def forward_backward(self, data: TensorDict, loss: Callable | None, forward_only: bool) -> dict[str, Any]:
        """Computes a batch as `MegasyncEngine.forward_backward_batch` documents."""
        if loss is None and not forward_only:
            raise TrainingError("training needs a loss function; call set_loss_fn first")
        check_batch(data)
        device, topology = self._engine.device.torch_device, self._engine.topology
        mask = tensor_at(data, "loss_mask")
        counted = (mask.values() if mask.is_nested else mask).sum().to(device)
        dist.all_reduce(counted, group=self.data_group)
        tu.assign_non_tensor(data, batch_num_tokens=counted.item(), dp_size=self._ranks, sp_size=1)
        parts, order = prepare_micro_batches(
            data,
            dp_group=self.data_group,
            num_batches_divided_by=topology.pipeline if topology.virtual > 1 else None,
        )
        batch = VerlBatch([part.to(device) for part in parts], self._routes)
        microbatches, tokens = self._align(batch.microbatches)
        evaluate = partial(self._evaluate, batch, loss, forward_only)
        with nullcontext() if forward_only else self._accumulating():
            local = LocalBatch(microbatches, batch.samples, tokens)
            reports = self._engine.run(local, evaluate, forward_only=forward_only)
        finite = all(math.isfinite(report["loss"]) for report in reports)
        if not forward_only:
            self._losses_are_finite = self._losses_are_finite and finite
        if self._engine.coords.pp < topology.pipeline - 1:
            return {}
        return postprocess_batch_func(reports, order, data)

    def _align(self, microbatches: list[Microbatch]) -> tuple[list[Microbatch], int]:
        """The microbatches, padded alike on all ranks if the expert dispatcher needs it, and all ranks' token count."""
        sizes = torch.tensor([item.tokens for item in microbatches], device=self._engine.device.torch_device)
        tokens = sizes.sum()
        if self._engine.layout.sizes.experts:
            dist.all_reduce(tokens, group=self.data_group)
            if self._engine.device.expert_dispatcher == "allgather":
                dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.data_group)
                microbatches = [
                    replace(item, room=room) for item, room in zip(microbatches, sizes.tolist(), strict=True)
                ]
        return microbatches, int(tokens)

    def _evaluate(
        self, batch: VerlBatch, loss: Callable | None, forward_only: bool, packed: Batch, result: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Computes the loss and verl's report of a microbatch from its hidden states or values."""
        part = batch.part(packed)
        output = {name: batch.jagged(tokens, packed) for name, tokens in self._outputs(part, packed, result).items()}
        value, metrics = torch.ones((), device=result.device), {}
        if loss is not None:
            value, metrics = loss(model_output=output, data=part, dp_group=self.data_group)
        report = {"loss": value.detach().item(), "metrics": detach_tree(metrics)}
        if forward_only or tu.get_non_tensor_data(part, key="return_model_output", default=False):
            report["model_output"] = detach_tree(output)
        return value / self._ranks, report

    def _scores(self, part: TensorDict, packed: Batch, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        temperature = temperatures(part)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[packed.segments]
        logprobs, entropy = self._engine.score_rows(rows, packed, temperature)
        if tu.get_non_tensor_data(part, key="calculate_entropy", default=False):
            return {"log_probs": logprobs, "entropy": entropy}
        return {"log_probs": logprobs}

    def _values(self, part: TensorDict, packed: Batch, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"values": self._engine.value_rows(values, packed)}

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Sets earlier gradients aside and adds them again, so that Megatron reduces each gradient over ranks once."""
        if self._has_gradients:
            gradients = self._engine.memory()[GRADIENTS]
            earlier = [tensor.clone() for tensor in gradients]
            self._engine.zero_grad()
            yield
            for tensor, before in zip(gradients, earlier, strict=True):
                tensor += before
        else:
            yield
        self._has_gradients = True

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self._engine.zero_grad()
        self._has_gradients, self._losses_are_finite = False, True

    def update(self, step: int) -> float:
        """Clips and updates, or skips the update if a loss or the norm is not finite on any rank.

        Returns the norm of the gradients before clipping.
        """
        return self._engine.update(step, self._losses_are_finite).grad_norm

    def learning_rate(self, step: int) -> float:
        """The learning rate of an optimizer step (from 1)."""
        return learning_rate(self._engine.trainer_config.optimizer, step, self._engine.total_steps)

    @contextmanager
    def shards(self) -> Iterator[Shards]:
        """This rank's weights, which are on their device within the context."""
        engine = self._engine
        with self.offload.present(WEIGHTS):
            yield Shards(engine.layout, engine.model_config.dtype, engine.rank, engine.params())

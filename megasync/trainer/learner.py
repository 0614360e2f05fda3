"""One Megatron rank of the policy: load weights, score tokens, accumulate gradients, update, save.

Every public method is a collective: all ranks call it in the same order. What a rank computes is its `LocalBatch` of
a packing, which every rank plans from the same lengths, so ranks agree on it without communication. Tensor, context
and pipeline peers have the same one. Nothing that a rank holds or sends grows with the number of ranks.

A bfloat16 model holds bfloat16 weights, also on a CPU, with float32 gradients and main weights in the optimizer.
Float32 weights under autocast would be cast again in every microbatch, and Megatron's linear layers leave autocast in
their backward pass. On a CPU with bfloat16 instructions a matrix product takes less than a quarter of the float32 time.
The trained weights are bitwise those that are served.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megasync.config.megatron_options import check_megatron, converted
from megasync.config.schema import ModelConfig, TrainerConfig
from megasync.device import Device, check_deep_ep, side_stream, synchronize
from megasync.errors import CheckpointError, ConfigError, TrainingError
from megasync.layout.adapter import AdapterLayout, adapter_layout
from megasync.layout.adapter_files import read_adapter
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.shards import load_shards
from megasync.layout.topology import Topology
from megasync.observe import trace
from megasync.trainer import checkpoint
from megasync.trainer.adam import Adam
from megasync.trainer.adapters import Adapters, ReferenceAdapters, attach, fresh_adapters
from megasync.trainer.architecture import check_architecture, check_trainer, full_microbatch, token_multiple
from megasync.trainer.batch import Batch, Sample, Samples, lengths_of, make_batch
from megasync.trainer.collectives import broadcast_json
from megasync.trainer.context import FromAllRanks
from megasync.trainer.layer_graphs import LayerGraphs, most_sequences
from megasync.trainer.loading import load_once
from megasync.trainer.logprobs import squared_norms
from megasync.trainer.model import PolicyModel, build_chunks, fresh_value_head, named_weights
from megasync.trainer.offload import Memory, buffers_of, memory_of
from megasync.trainer.optimizer import Optimizer, Update, group_names, groups_of
from megasync.trainer.packing import Lengths, Microbatch, Packing, plan_packing
from megasync.trainer.param_attributes import sum_partial_experts
from megasync.trainer.reference import ReferenceWeights
from megasync.trainer.routing import PolicyRouter
from megasync.trainer.user_buffers import close_buffers, open_buffers

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# (batch, log-probs [targets], entropies [targets]) -> (loss, sums to report); called on the last pipeline stage. With a
# value head (batch, values [targets]).
LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
# (batch, hidden states [own targets, hidden], or a critic's values [own targets, 1]) -> (loss, report); called on the
# last pipeline stage.
Evaluate = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Any]]


@dataclass(frozen=True)
class LocalBatch:
    """The microbatches that a rank computes in a pass, the same on its tensor and pipeline peers."""

    # As many as on every other rank, with an interleaved pipeline a multiple of its stages.
    microbatches: Sequence[Microbatch]
    # The microbatches refer to them by index.
    samples: Samples
    # Counted tokens of all microbatches on all data-parallel ranks; only expert layers use them.
    tokens: int


class MegatronLearner:
    """One rank of a model. The constructor only validates the configuration; `initialize` needs torch.distributed.

    Raises ConfigError if the architecture or an option is not supported.

    Args:
        total_steps: training step at which the learning rate decay ends.
        seed: for Megatron's random states, and for a value head that the model folder does not contain.
        trains: false for a learner that only scores; it has no gradients and no optimizer.
        collective_seconds: deadline of one collective in Megatron's process groups.
        value_head: builds a critic. `run` passes values instead of hidden states to ``evaluate``; log-probs are
            unavailable.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        device: Device,
        rank: int,
        total_steps: int = 0,
        seed: int = 0,
        trains: bool = True,
        value_head: bool = False,
        collective_seconds: float = 1800.0,
    ) -> None:
        self.model_config = model
        self.trainer_config = trainer
        self.device = device
        self.topology = Topology.from_config(trainer)
        if model.dtype not in DTYPES:
            raise ConfigError(f"model.dtype is {model.dtype!r}; it must be {' or '.join(DTYPES)}")
        self.rank = rank
        self.coords = self.topology.coords(rank)
        self.dtype = DTYPES[model.dtype]
        hf_config = read_hf_config(model.path)
        self.layout = Layout(hf_config, self.topology, device.spec, value_head)
        self._sparse_layers = sorted(self.layout.sizes.sparse_layers)
        check_architecture(hf_config)
        check_trainer(self.layout, trainer, model)
        check_megatron(vars(trainer.megatron))
        self._adapter_layout = None if value_head else adapter_layout(self.layout, trainer)
        # What is trained and saved: the adapters, if there are any.
        self.trained_layout = self._adapter_layout or self.layout
        self._adapters: Adapters | None = None
        if trainer.moe_deepep:
            check_deep_ep()
        self.total_steps = total_steps
        self._seed = seed
        self._collective_seconds = collective_seconds
        self._trains = trains
        self._reference: ReferenceWeights | ReferenceAdapters | None = None
        self._saving: checkpoint.Saving | None = None
        self._host_memory = checkpoint.HostMemory()
        self._gathers_awaited = False
        self._graphs: list[LayerGraphs] = []

    def initialize(self, load: Callable[[Layout, int, torch.dtype], dict[str, torch.Tensor]] | None = None) -> None:
        """Builds process groups, model and optimizer, and loads this rank's shard of the model folder.

        A rehearsal without weights passes its own ``load``. Raises ConfigError if the world size
        does not match the topology, and CheckpointError if the weights in the folder do not match its config.json.
        """
        config = self.trainer_config
        open_process_groups(self.topology, self._collective_seconds)
        model_parallel_cuda_manual_seed(self._seed)
        # Megatron does not annotate these.
        self._tensor_group = cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        self._context_group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
        self.data_group = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())
        if config.tp_comm_overlap:
            tokens = full_microbatch(self.trainer_config) // self.topology.context
            sizes = tokens, self.layout.sizes.hidden, self.topology.tensor
            open_buffers(*sizes, self.dtype, config.fp8 is not None, self.device.backend)
        self.chunks = build_chunks(self.layout, config, self.device, self.dtype)
        self.weights = self.trained = named_weights(self.chunks)
        weights = (load or self._load_folder)(self.layout, self.rank, torch.float32)
        self.write(weights)
        if (layout := self._adapter_layout) is not None:
            split_tokens = self.trainer_config.sequence_parallel
            self._adapters = attach(self.chunks, self.weights, layout, self.rank, split_tokens)
            self.trained = self._adapters.params
            weights = (load or self._load_adapters)(layout, self.rank, torch.float32)
            self.write(weights)
        # The chunks wrapped for training; empty in a learner that only scores.
        self.wrapped: list[DistributedDataParallel] = []
        if self._trains:
            self._prepare_training(weights)
        counts = [sum(param.numel() for param in params.values()) for params in (self.weights, self.trained)]
        log.info("Rank %d holds %d parameters and trains %d", self.rank, *counts)

    def _load_folder(self, layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        path = self.model_config.path
        defaults = fresh_value_head(layout, self._seed) if layout.value_head else {}
        read = partial(load_shards, path, layout, rank, dtype, defaults)
        return load_once(read, Path(path), layout, rank, dtype, self.device.torch_device)

    def _load_adapters(self, layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        path = self.trainer_config.lora.path
        assert isinstance(layout, AdapterLayout)
        if path is None:
            return fresh_adapters(layout, rank, self._seed)
        adapters: dict[str, torch.Tensor] = {}
        checkpoint.run_collectively(
            lambda: adapters.update(read_adapter(path, layout, rank)), "read", Path(path), self.device.torch_device
        )
        return adapters

    def _prepare_training(self, weights: Mapping[str, torch.Tensor]) -> None:
        config = self.trainer_config
        copies = self.topology.data * self.topology.context
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            # Megatron keeps other dtypes of optimizer states, or a share of them on the host, in this one only.
            use_distributed_optimizer=config.distributed_optimizer
            and (copies > 1 or config.optimizer.precision_aware or config.optimizer.offload > 0),
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather and config.distributed_optimizer and copies > 1,
            **converted("ddp", config.megatron.ddp),
        )
        # Gradients are added on the stream that is current here; a CUDA graph cannot capture work of the default one.
        device = self.device.torch_device
        synchronize(device)
        with side_stream(device) if config.cuda_graphs else nullcontext():
            self.wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in self.chunks]
            synchronize(device)
        schedule = self.chunks[0].config
        schedule.finalize_model_grads_func = finalize_summed_grads
        if config.overlap_grad_reduce:
            # All microbatches but the last only accumulate; without these functions each would be reduced.
            waits = [model.no_sync for model in self.wrapped]
            # Megatron declares one function and takes one for each chunk.
            schedule.no_sync_func = waits if len(waits) > 1 else waits[0]  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer = Optimizer(self.wrapped, config, self.total_steps, self.dtype, self.device.torch_device)
        self.optimizer.start_from(self.trained, weights)
        self._await_gathers(False)
        if config.cuda_graphs:
            self._graphs = [LayerGraphs(chunk, full_microbatch(config)) for chunk in self.chunks]
            self.zero_grad()

    # With `trainer.overlap_param_gather` an update leaves each rank with only its own part of the new weights. The next
    # forward pass gathers each bucket before its first use; whoever else reads weights calls `gather_weights`.

    def _await_gathers(self, awaited: bool) -> None:
        """Sets whether weights have yet to be gathered, and whether Megatron gathers them in the next forward pass."""
        self._gathers_awaited = awaited
        for group in self._bucket_groups():
            group.param_gather_dispatched = not awaited

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is of the pipeline stage that computes log-probs and losses."""
        return self.coords.pp == self.topology.pipeline - 1

    def _bucket_groups(self) -> list[Any]:
        """Megatron's buckets of parameters that are gathered in forward passes; none without that option."""
        overlapped = [model for model in self.wrapped if model.ddp_config.overlap_param_gather]
        return [group for model in overlapped for group in model.bucket_groups + model.expert_parallel_bucket_groups]

    def gather_weights(self) -> float | None:
        """Completes the weights of the last update on this rank, and merges adapters for `params`. A collective.

        Returns how much of the adapters' change the merged weights of all ranks have, as the cosine of both changes;
        None without adapters, while nothing was merged or changed, and where nothing is rounded.
        """
        self._gather()
        if self._adapters is None:
            return None
        self._adapters.merge()
        kept = self._adapters.kept.to(self.device.torch_device)
        dist.all_reduce(kept)
        made, served, both = kept.tolist()
        if not made:
            return None
        return both / math.sqrt(made * served) if served else 0.0

    def _gather(self) -> None:
        if not self._gathers_awaited:
            return
        for group in self._bucket_groups():
            # Those that the last forward pass gathered have no more to wait for.
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)
        self._await_gathers(False)

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [*(self.wrapped or self.chunks)]

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters under the names of `Layout.params`.

        Adapters are merged into them as of the last `gather_weights`.
        """
        if self._adapters is not None:
            return self._adapters.served()
        return {name: param.data for name, param in self.weights.items()}

    def memory(self) -> Memory:
        """The memory of this rank on its device except activations; see `offload.Offload`."""
        weights = [*self.weights.values(), *(self._adapters.tensors if self._adapters is not None else ())]
        return memory_of(self.wrapped, weights, self.optimizer if self._trains else None)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrites what is trained. The optimizer gets to know by `Optimizer.reload_weights`."""
        with torch.no_grad():
            for name, param in self.trained.items():
                param.copy_(weights[name])

    @property
    def adapters(self) -> Adapters:
        """The adapters of a learner that has some."""
        assert self._adapters is not None
        return self._adapters

    def reduce_gradients(self) -> None:
        """Adds up what is in the gradient buffers over ranks, as `run` does with what it has computed."""
        finalize_summed_grads(self._models, None)

    def gradient_buffers(self) -> list[torch.Tensor]:
        """The memory of this rank's gradients, which `run` adds to and `update` reads."""
        return [buffer.grad_data for buffer in buffers_of(self.wrapped)]

    # Computation

    def plan(self, lengths: Lengths) -> Packing:
        """Packs sequences for all ranks; not a collective. See `local_batch` for what this rank computes of it."""
        sizes, context = self.layout.sizes, self.topology.context
        budget = full_microbatch(self.trainer_config)
        linear = sizes.hidden * (2 * sizes.q_rows + 2 * sizes.kv_rows + 3 * sizes.active_width)
        return plan_packing(
            lengths,
            ranks=self.topology.data,
            budget=budget,
            most_trees=most_sequences(budget) if self.trainer_config.cuda_graphs else None,
            attention_cost=2 * sizes.q_rows / linear,
            share_prompts=self.device.spec == "local" and context == 1,
            multiple=self.topology.pipeline if self.topology.virtual > 1 else 1,
            chunks=2 * context if context > 1 else 1,
        )

    def own_microbatches(self, packing: Packing) -> list[Microbatch]:
        """The microbatches of this rank, padded to its expert-parallel peers' lengths if the dispatcher requires it.

        With `trainer.pad_microbatches` they are padded to a full one; raises TrainingError for a longer one.
        """
        dp = self.coords.dp
        lockstep = self.layout.sizes.experts and self.device.expert_dispatcher == "allgather"
        room = full_microbatch(self.trainer_config) if self.trainer_config.pad_microbatches else 0
        if room and (longest := int(packing.tokens.max())) > room:
            raise TrainingError(
                f"a sequence has {longest} tokens, but trainer.pad_microbatches=true pads microbatches to {room} "
                f"(trainer.tokens_per_microbatch x context_parallel); raise trainer.tokens_per_microbatch"
            )
        return packing.microbatches(dp, self.topology.expert_peers(dp) if lockstep else None, room)

    def local_batch(self, samples: Sequence[Sample]) -> LocalBatch:
        """This rank's part of samples that every rank has; not a collective."""
        packing = self.plan(lengths_of(samples))
        return LocalBatch(self.own_microbatches(packing), samples, packing.counted_tokens)

    def forward_backward(self, batch: LocalBatch, loss: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """Computes the gradients of the summed loss of all ranks' batches, replacing earlier gradients; see `update`.

        ``loss`` must already be normalised by a count over all samples: gradients are summed over microbatches and
        data-parallel ranks, never averaged. Returns "loss" and every sum that ``loss`` reports, summed over all
        microbatches and data-parallel ranks; the same on every rank.
        """
        with trace.span("rank", "forward_backward", microbatches=len(batch.microbatches)):
            self.zero_grad()
            return self._sum_reports(self.run(batch, self._reporting(loss, temperature), forward_only=False))

    def total(self, batch: LocalBatch, loss: LossFunction, temperature: float = 1.0) -> dict[str, float]:
        """The result of `forward_backward`, without gradients."""
        with torch.no_grad():
            return self._sum_reports(self.run(batch, self._reporting(loss, temperature), forward_only=True))

    def _reporting(self, loss: LossFunction, temperature: float) -> Evaluate:
        def evaluate(batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            if self.layout.value_head:
                outputs = (self.value_rows(rows, batch),)
            else:
                outputs = self.score_rows(rows, batch, temperature)
            value, sums = loss(batch, *outputs)
            return value, {"loss": value.detach(), **sums}

        return evaluate

    def zero_grad(self) -> None:
        """Zeroes the gradients."""
        for model in self.wrapped:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron would now gather in any case.
        self._await_gathers(self._gathers_awaited)

    def update(self, step: int | Adam, loss_is_finite: bool = True, norms: bool = False) -> Update:
        """Takes an optimizer step with the gradients of `forward_backward`, or skips it if any rank saw a non-finite
        value. With `trainer.overlap_param_gather`, call `gather_weights` before `params` are read.

        ``step`` is that of `Optimizer.step`. With ``norms``, the update has what `optimizer.named_norms` names.
        """
        with trace.span("rank", "optimizer"):
            update = self.optimizer.step(step, loss_is_finite, self._squares if norms else None)
        self._await_gathers(update.applied and bool(self._bucket_groups()))
        return update

    def _squares(self) -> torch.Tensor:
        layers = self.layout.sizes.layers
        groups = groups_of(self.trained, layers, self.topology, self.coords.pp)
        return self.optimizer.squares(self.trained, groups, len(group_names(layers)))

    def score(self, batch: LocalBatch, *, temperature: float = 1.0, reference: bool = False) -> list[torch.Tensor]:
        """Log-probs of each microbatch's targets, float32 [targets] on the device; empty before the last stage.

        ``reference`` scores with the weights of `keep_reference` instead of the current ones; see `reference`. Raises
        TrainingError for ``reference`` without `keep_reference`.
        """
        if not reference:
            weights = nullcontext()
        elif self._reference is not None:
            weights = self._reference.applied()
        else:
            raise TrainingError("there are no reference weights to score with; call keep_reference first")
        with weights, trace.span("rank", "score", reference=reference):
            # The routes were chosen by the current weights, or by those of a few steps ago.
            return self._collect(
                batch, lambda part, rows: self.score_rows(rows, part, temperature)[0], replays=not reference
            )

    def score_with_norms(
        self, batch: LocalBatch, *, temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probs as `score`, and the squared norms of their gradients; see `logprobs.squared_norms`."""

        def both(part: Batch, rows: torch.Tensor) -> torch.Tensor:
            logprobs, _ = self.score_rows(rows, part, temperature)
            colder, _ = self.score_rows(rows, part, temperature / 2)
            return torch.stack([logprobs, squared_norms(logprobs, colder)])

        with trace.span("rank", "score"):
            pairs = self._collect(batch, both)
        return [each[0] for each in pairs], [each[1] for each in pairs]

    def values(self, batch: LocalBatch) -> list[torch.Tensor]:
        """A critic's values of each microbatch's targets, float32 [targets] on the device; empty before the last stage.

        The value of a target is that of the text before it.
        """
        return self._collect(batch, lambda part, rows: self.value_rows(rows, part))

    def _collect(
        self, batch: LocalBatch, compute: Callable[[Batch, torch.Tensor], torch.Tensor], replays: bool = True
    ) -> list[torch.Tensor]:
        """Applies ``compute`` to each microbatch's hidden states, without gradients; empty before the last stage."""

        def evaluate(part: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = compute(part, rows)
            return values.sum(), values

        with torch.no_grad():
            return self.run(batch, evaluate, forward_only=True, replays=replays)

    def score_everywhere(self, samples: Sequence[Sample], *, reference: bool = False) -> list[torch.Tensor]:
        """Log-probs of each sample's scored tokens at temperature 1, float32 [scored] on the device, on every rank.

        For a few samples that every rank has. `score` keeps its results where they are computed.
        """
        batch = self.local_batch(samples)
        parts = [torch.zeros(len(sample.scored), device=self.device.torch_device) for sample in samples]
        scores = self.score(batch, reference=reference)
        for microbatch, logprobs in zip(batch.microbatches, scores, strict=False):
            if microbatch.counted and self.coords.tp == self.coords.cp == 0:
                targets = [parts[index] for index in microbatch.sequences]
                for part, values in zip(targets, logprobs.split(list(map(len, targets))), strict=True):
                    part.copy_(values)
        # One rank has written each token; all others hold zero there.
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        return list(flat.split([len(part) for part in parts]))

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of all tokens of each sequence except the first, at temperature 1."""
        samples = [Sample.of(ids[:1], ids[1:]) for ids in sequences if len(ids) > 1]
        scored = iter(self.score_everywhere(samples) if samples else [])
        return [next(scored).tolist() if len(ids) > 1 else [] for ids in sequences]

    def run(self, batch: LocalBatch, evaluate: Evaluate, *, forward_only: bool, replays: bool = True) -> list[Any]:
        """Runs Megatron's schedule over a batch; the last stage returns the reports of ``evaluate``, others none.

        Gradients are added to existing ones before the reduction over ranks, so call `zero_grad` first. With
        ``replays``, samples with routes go to those experts; a critic has experts of its own.
        """
        for chunk in self.chunks:
            for router in _routers(chunk):
                router.step_tokens = batch.tokens
        balanced = self.trainer_config.moe_aux_loss > 0 or "moe_z_loss_coeff" in self.trainer_config.megatron.model
        interleaved = self.topology.virtual > 1
        replays = replays and not self.layout.value_head and _have_routes(batch)
        batches = [self._batches(batch, replays) for _ in self._models]
        reports = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, evaluate, balanced),
            data_iterator=batches if interleaved else batches[0],
            model=self._models if interleaved else self._models[0],
            num_microbatches=len(batch.microbatches),
            # Ignored if microbatches differ in length: stages then send shapes along with tensors.
            seq_length=full_microbatch(self.trainer_config),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        for chunk in self._models:
            self._replay(chunk, None)
        # Weights that this pass did not use.
        self._gather()
        return reports

    def _forward_step(
        self, evaluate: Evaluate, balanced: bool, batches: Iterator[Batch], model: PolicyModel
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Any]]]:
        """Megatron's forward step: this stage's output, and the function that turns the last stage's into a loss.

        ``balanced``: routers have a loss of their own, and need to know which tokens count.
        """
        batch = next(batches)
        if batch.routes is not None:
            self._replay(model, batch.routes)
        uncounted = batch.uncounted if balanced else None
        output = model(batch.ids, None, None, packed_seq_params=batch.packed, padding_mask=uncounted)

        def finish(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, report = evaluate(batch, rows)
            # Megatron sums these counts for a division that `finalize_summed_grads` skips.
            return loss, torch.ones((), dtype=torch.int, device=rows.device), report

        return output, finish

    def _replay(self, chunk: torch.nn.Module, routes: torch.Tensor | None) -> None:
        """Sets the experts of the next microbatch on every router of a chunk; None lets them choose.

        ``routes`` are [tokens, expert layers, experts per token].
        """
        if routes is not None and self.trainer_config.sequence_parallel:
            routes = routes.chunk(self.topology.tensor)[self.coords.tp]
        for router in _routers(chunk):
            assert router.layer_number is not None
            layer = self._sparse_layers.index(router.layer_number - 1)
            router.replay(None if routes is None else routes[:, layer])

    def _batches(self, batch: LocalBatch, replays: bool) -> Iterator[Batch]:
        for index, microbatch in enumerate(batch.microbatches):
            yield make_batch(
                microbatch,
                batch.samples,
                index=index,
                multiple=token_multiple(self.trainer_config),
                device=self.device.torch_device,
                flavour=self.device.spec,
                context=(self.topology.context, self.coords.cp),
                replays=replays,
            )

    def score_rows(
        self, rows: torch.Tensor, batch: Batch, temperature: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of each target, float32 [targets], from what `run` passes to ``evaluate``.

        Both are those of the distribution over the target's support, where sampling was truncated.
        ``temperature`` is one number, or one of each target. Context-parallel ranks return the same, and must compute
        the same loss of it: each has the rows of its own targets, and gets their gradients. Raises TrainingError if the
        learner has a value head.
        """
        if self.layout.value_head:
            raise TrainingError("a learner with a value head has no log-probs; create one without value_head")
        if isinstance(temperature, torch.Tensor) and batch.kept is not None:
            temperature = temperature[batch.kept]
        scores = self.chunks[-1].score(
            rows,
            batch.own_targets,
            vocab_size=self.layout.sizes.vocab,
            temperature=temperature,
            group=self._tensor_group,
            dtype=torch.float32 if self.trainer_config.float32_head else None,
            support=batch.support,
        )
        if batch.kept is None:
            return scores
        count, group = len(batch.targets), self._context_group
        logprobs, entropies = (FromAllRanks.apply(values, batch.kept, count, group) for values in scores)
        return logprobs, entropies

    def value_rows(self, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The values of all targets, float32 [targets], from what `run` passes to ``evaluate``; see `score_rows`."""
        values = rows.squeeze(1).float()
        if batch.kept is None:
            return values
        return FromAllRanks.apply(values, batch.kept, len(batch.targets), self._context_group)

    def _sum_reports(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over microbatches and data-parallel ranks, broadcast from the last stage to every rank."""
        last = self.topology.pipeline - 1
        totals: dict[str, float] = {}
        if self.is_last_stage:
            names = sorted(reports[0])
            first, *others = reports
            sums = [sum((report[name].double() for report in others), first[name].double()) for name in names]
            values = torch.stack(sums)
            dist.all_reduce(values, group=self.data_group)
            totals = dict(zip(names, values.tolist(), strict=True))
        if last == 0:
            return totals
        return broadcast_json(totals, self.topology.rank(tp=0, dp=0, pp=last), self.device.torch_device)

    # Reference weights

    def keep_reference(self) -> None:
        """Copies the current weights to host memory, for `score` with ``reference``; replaces earlier ones."""
        self._gather()
        self._reference = None
        if self._adapters is not None:
            self._reference = ReferenceAdapters(self._adapters)
        else:
            self._reference = ReferenceWeights(self.chunks, self.device)

    def load_reference(self, path: Path) -> None:
        """Keeps the weights of a checkpoint as `keep_reference` does. They are also the current ones until `load`.

        Raises CheckpointError as `load` does.
        """
        self._read_weights(path)
        self.keep_reference()

    # Checkpoints

    def save(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint that includes ``state`` (JSON). Raises CheckpointError; then nothing is at ``path``."""
        self.begin_save(path, state or {})
        self.finish_save(wait=True)

    def begin_save(
        self, path: Path, state: Mapping[str, Any], inner: Mapping[str, checkpoint.Shard] | None = None
    ) -> None:
        """Copies everything to host memory and begins to write a checkpoint; see `finish_save`.

        ``inner`` are those of other learners within it, by folder. Raises CheckpointError if there is something at
        ``path``.
        """
        device, memory = self.device.torch_device, self._host_memory
        self._saving = checkpoint.begin(Path(path), self.shard(), dict(state), device, memory, inner or {})

    def shard(self) -> checkpoint.Shard:
        """This rank's part of a checkpoint, not copied."""
        self._gather()
        return checkpoint.Shard(
            layout=self.trained_layout,
            dtype=self.model_config.dtype,
            rank=self.rank,
            params={name: param.data for name, param in self.trained.items()},
            optimizer=self.optimizer.slices(self.trained),
            sharded=self.optimizer.sharded,
            updates=self.optimizer.updates,
            moments=self.optimizer.moment_dtypes,
        )

    def finish_save(self, wait: bool) -> bool:
        """Whether the checkpoint of `begin_save` is complete; with ``wait`` it then is.

        Raises CheckpointError if it could not be written; then nothing is at its path.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            raise CheckpointError("no checkpoint is being written; call begin_save first")
        if not saving.finish(wait):
            self._saving = saving
            return False
        return True

    def load(self, path: Path) -> dict[str, Any]:
        """Restores weights, optimizer and random state of a checkpoint, and returns its ``state``.

        It may be of another topology. Raises CheckpointError if it is incomplete, or of another model or dtype.
        """
        self._gather()
        saved = checkpoint.load(
            Path(path),
            self.trained_layout,
            self.model_config.dtype,
            self.rank,
            self.optimizer.ranges(self.trained),
            self.device.torch_device,
        )
        self._read_weights(Path(path))
        self.optimizer.reload_weights()
        self.optimizer.restore(self.trained, saved.optimizer, saved.updates)
        self.gather_weights()
        for kind, dtype in self.optimizer.moment_dtypes.items():
            if saved.updates and saved.moments[kind] != dtype:
                log.info("Converted %s of %s from %s to %s", kind, path, saved.moments[kind], dtype)
        return saved.state

    def _read_weights(self, path: Path) -> None:
        layout = self.trained_layout
        read = partial(checkpoint.read_weights, path, layout, self.dtype, self.rank)
        self.write(load_once(read, path, layout, self.rank, self.dtype, self.device.torch_device))

    def close(self) -> None:
        """Drops Megatron's process groups; torch.distributed.destroy_process_group closes them.

        With `trainer.tp_comm_overlap`, the buffers of all learners of the process end with the first that closes.
        """
        close_buffers()
        self._host_memory.close()
        for graphs in self._graphs:
            graphs.close()
        # A token dispatcher keeps tensors of the last forward pass. Their graph refers to the model through gradient
        # hooks, which the garbage collector cannot see: model and process groups would never be freed.
        for module in (module for chunk in self.chunks for module in chunk.modules()):
            dispatcher = vars(module).get("token_dispatcher")
            # That of DeepEP has them in a part of its own.
            for holder in filter(None, (dispatcher, getattr(dispatcher, "_comm_manager", None))):
                for name, value in vars(holder).items():
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        setattr(holder, name, None)
        parallel_state.destroy_model_parallel()


def open_process_groups(topology: Topology, seconds: float = 1800.0) -> None:
    """Opens Megatron's process groups, which several learners of one process share. A collective.

    ``seconds`` is the deadline of a collective in them; by default Megatron's own.

    Raises ConfigError if the world has another size, or groups of other sizes are already open in this process.
    """
    world = dist.get_world_size()
    if world != topology.world:
        raise ConfigError(
            f"the trainer has {world} ranks, but trainer.tensor_parallel x context_parallel x pipeline_parallel x "
            f"data_parallel is "
            f"{topology.world}"
        )
    virtual = topology.virtual if topology.virtual > 1 else None
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            topology.tensor,
            topology.pipeline,
            virtual,
            context_parallel_size=topology.context,
            expert_model_parallel_size=topology.expert,
            expert_tensor_parallel_size=topology.expert_tensor_size,
            create_gloo_process_groups=False,
            # Megatron makes a timedelta of it, for which fractions of a minute are fine.
            distributed_timeout_minutes=seconds / 60,  # pyright: ignore[reportArgumentType]
        )
        return
    needed = (topology.tensor, topology.context, topology.pipeline, virtual)
    needed += (topology.expert, topology.expert_tensor_size)
    current = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if current != needed:
        raise ConfigError(
            f"Megatron's process groups are already open in this process with sizes {current} (tensor, context, "
            f"pipeline, virtual, expert, expert tensor), but this learner needs {needed}; use the same sizes for all "
            f"learners of a process"
        )


def _routers(chunk: torch.nn.Module) -> Iterator[PolicyRouter]:
    return (module for module in chunk.modules() if isinstance(module, PolicyRouter))


def _have_routes(batch: LocalBatch) -> bool:
    """Whether the samples of a batch have routes. Raises TrainingError if only some of them have."""
    routed = {batch.samples[index].routes is not None for part in batch.microbatches for index in part.sequences}
    if len(routed) > 1:
        raise TrainingError(
            "some responses of this step have routes and others have none; set rollout.routing_replay as it was when "
            "the run began"
        )
    return True in routed


def finalize_summed_grads(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **groups: Any) -> None:
    """Megatron's gradient reduction over ranks without its division by a token count: the loss is normalised.

    Megatron does not sum the gradients of parameters that several ranks of one expert hold whole; this does.
    """
    finalize_model_grads(model, None, **groups)
    sum_partial_experts(param for chunk in model for param in chunk.parameters())

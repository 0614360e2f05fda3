"""One rank of the policy under Megatron: load, score tokens, accumulate gradients, update, save. Free of Ray.

Every public method is a collective: all ranks call it with the same arguments in the same order. Token counts and
packing are computed from those arguments, so ranks agree on them without communication; results are the same on every
rank.

A bfloat16 model holds bfloat16 weights, on a CPU too, with float32 gradients and main weights in the optimizer. The
alternative, float32 weights under autocast, would cast every weight in every microbatch, and Megatron's own linear
layers leave autocast in their backward pass. On a CPU with bfloat16 instructions a matrix product takes less than a
quarter of the float32 time; and the weights that train are bit for bit those that are served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megasync.config.schema import ModelConfig, TrainerConfig
from megasync.device import Device
from megasync.errors import ConfigError, TrainingError
from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.shards import load_shards
from megasync.layout.topology import Topology
from megasync.trainer import checkpoint
from megasync.trainer.architecture import check_architecture, check_experts
from megasync.trainer.batch import Batch, make_batch
from megasync.trainer.collectives import broadcast_json
from megasync.trainer.forward_step import Evaluate, finalize_summed_grads, forward_step
from megasync.trainer.logprobs import token_logprobs
from megasync.trainer.model import build_chunks, named_weights, set_step_tokens
from megasync.trainer.offload import Memory, memory_of
from megasync.trainer.optimizer import Optimizer, Update
from megasync.trainer.packing import Microbatch, Sample, level, pack
from megasync.trainer.process_groups import open_groups
from megasync.trainer.reference import ReferenceWeights
from megasync.trainer.value_head import fresh_value_head

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# (batch, log-probs [targets], entropies [targets]) -> (loss, sums to report); runs on the last pipeline stage.
LossFunction = Callable[[Batch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class MegatronEngine:
    """The constructor only reads and checks the configuration; torch.distributed must be up at `initialize`.

    Args:
        total_steps: training step at which the learning rate's decay ends.
        seed: of Megatron's random states, and of a value head that the model folder does not have.
        trains: false for an engine that only scores; it has no gradients and no optimizer.
        value_head: a critic; `run` hands values to ``evaluate`` where a policy has logits, and log-probs there are none.

    Raises:
        ConfigError: a world of another size than the layout's, or an architecture that is not supported.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        device: Device,
        rank: int,
        world: int,
        total_steps: int = 0,
        seed: int = 0,
        trains: bool = True,
        value_head: bool = False,
    ) -> None:
        self.model_config = model
        self.trainer_config = trainer
        self.device = device
        self.topology = Topology.from_config(trainer)
        if world != self.topology.world:
            raise ConfigError(
                f"the trainer has {world} ranks, but trainer.tensor_parallel x pipeline_parallel x data_parallel is "
                f"{self.topology.world}"
            )
        if model.dtype not in DTYPES:
            raise ConfigError(f"model.dtype is {model.dtype!r}; it must be {' or '.join(DTYPES)}")
        self.rank = rank
        self.coords = self.topology.coords(rank)
        self.dtype = DTYPES[model.dtype]
        hf_config = read_hf_config(model.path)
        self.layout = Layout(hf_config, self.topology, device.spec, value_head)
        check_architecture(hf_config)
        check_experts(self.layout, trainer)
        self.total_steps = total_steps
        self._seed = seed
        self._trains = trains
        self._reference: ReferenceWeights | None = None

    def initialize(self) -> None:
        """Builds process groups, model and optimizer, and loads this rank's slices of the model folder.

        Raises:
            CheckpointError: the folder's weights do not fit its config.
        """
        config = self.trainer_config
        open_groups(self.topology)
        model_parallel_cuda_manual_seed(self._seed)
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self._chunks = build_chunks(self.layout, config, self.device, self.dtype)
        self._params = named_weights(self._chunks)
        absent = fresh_value_head(self.layout, self._seed) if self.layout.value_head else {}
        weights = load_shards(self.model_config.path, self.layout, self.rank, torch.float32, absent)
        self._write(weights)
        self._models: list = self._chunks
        if self._trains:
            self._prepare_training(weights)
        log.info("rank %d holds %d parameters", self.rank, sum(p.numel() for p in self._params.values()))

    def _prepare_training(self, weights: Mapping[str, torch.Tensor]) -> None:
        config = self.trainer_config
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.distributed_optimizer and config.data_parallel > 1,
        )
        self._models = [DistributedDataParallel(chunk.config, options, chunk) for chunk in self._chunks]
        self._chunks[0].config.finalize_model_grads_func = finalize_summed_grads
        self._optimizer = Optimizer(
            self._models, config.optimizer, self.total_steps, self.dtype, self.device.torch_device
        )
        self._optimizer.start_from(self._params, weights)

    def params(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters under the names of `Layout.params`."""
        return {name: param.data for name, param in self._params.items()}

    def memory(self) -> Memory:
        """What this rank holds on its device besides activations; see `offload.Offload`."""
        return memory_of(self._models, self._params.values(), self._optimizer if self._trains else None)

    def _write(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(weights[name])

    # Computation

    def microbatches(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """This data-parallel rank's share of the samples; as many microbatches as every other rank has."""
        return self._share(self._pack(samples))

    def _pack(self, samples: Sequence[Sample]) -> list[list[Microbatch]]:
        """Every data-parallel rank's microbatches."""
        sizes = self.layout.sizes
        linear = sizes.hidden * (2 * sizes.q_rows + 2 * sizes.kv_rows + 3 * sizes.active_width)
        return pack(
            samples,
            ranks=self.topology.data,
            budget=self.trainer_config.tokens_per_microbatch,
            attention_cost=2 * sizes.q_rows / linear,
            share_prompts=self.device.spec == "local",
            rounds=self.topology.pipeline if self.topology.virtual > 1 else 1,
        )

    def _share(self, dealt: list[list[Microbatch]]) -> list[Microbatch]:
        """This rank's own; level with those it exchanges tokens with, where the dispatcher cannot do without."""
        dp = self.coords.dp
        if not self.layout.sizes.experts or self.device.expert_dispatcher != "allgather":
            return dealt[dp]
        peers = self.topology.expert_peers(dp)
        return level(dealt, peers)[dp - peers.start]

    def forward_backward(
        self, samples: Sequence[Sample], loss: LossFunction, temperature: float = 1.0
    ) -> dict[str, float]:
        """Gradients of the summed loss of all samples, replacing those before; see `update`.

        ``loss`` must be normalised by a count over all samples already: gradients are summed over microbatches and
        data-parallel ranks, never averaged.

        Returns:
            Each sum that ``loss`` reports, over all microbatches and data-parallel ranks, with "loss" among them.
        """
        self.zero_grad()

        def evaluate(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value, sums = loss(batch, *self.score_logits(logits, batch, temperature))
            return value, {"loss": value.detach(), **sums}

        return self._total(self._run(samples, evaluate, forward_only=False))

    def zero_grad(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def update(self, step: int, loss_is_finite: bool) -> Update:
        """One optimizer step with the gradients of `forward_backward`, or none at all if any rank objects."""
        return self._optimizer.step(step, loss_is_finite)

    def score(
        self, samples: Sequence[Sample], *, temperature: float = 1.0, reference: bool = False
    ) -> list[torch.Tensor]:
        """Log-probs of each sample's scored tokens, float32 on the device, on every rank.

        ``reference`` scores with the weights of `keep_reference` instead of the present ones, a block of the model at a
        time; see `reference`.

        Raises:
            TrainingError: ``reference`` without `keep_reference`.
        """
        starts = [0]
        for sample in samples:
            starts.append(starts[-1] + len(sample.scored))
        found = torch.zeros(starts[-1], dtype=torch.float32, device=self.device.torch_device)

        def collect(batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
            logprobs, _ = self.score_logits(logits, batch, temperature)
            if batch.counted and self.coords.tp == 0:
                for index, part in zip(batch.samples, logprobs.split(batch.counts), strict=True):
                    found[starts[index] : starts[index + 1]] = part
            return logprobs.sum(), None

        if reference and self._reference is None:
            raise TrainingError("there are no reference weights to score with; call keep_reference first")
        with torch.no_grad(), self._reference.applied() if reference else nullcontext():
            self._run(samples, collect, forward_only=True)
        # Every token was written by one rank, all others hold zero.
        dist.all_reduce(found)
        return [found[start:end] for start, end in pairwise(starts)]

    def logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence, at temperature 1."""
        samples = [Sample(ids[:1], ids[1:], range(len(ids) - 1)) for ids in sequences if len(ids) > 1]
        scored = iter(self.score(samples) if samples else [])
        return [next(scored).tolist() if len(ids) > 1 else [] for ids in sequences]

    def _run(self, samples: Sequence[Sample], evaluate: Evaluate, *, forward_only: bool) -> list[Any]:
        dealt = self._pack(samples)
        counted = sum(item.tokens for mine in dealt for item in mine if item.counted)
        return self.run(self._share(dealt), samples, counted, evaluate, forward_only=forward_only)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        samples: Sequence[Sample],
        tokens: int,
        evaluate: Evaluate,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's schedule over this rank's microbatches; what ``evaluate`` reports, on the last stage only.

        Gradients add up to those there are, and the sum is reduced over ranks; so call `zero_grad` before.

        Args:
            microbatches: as many on every rank, a multiple of the stages with an interleaved pipeline.
            samples: those that the microbatches' trees name by index.
            tokens: counted tokens of all microbatches on all data-parallel ranks; only experts need them.
        """
        set_step_tokens(self._chunks, tokens)
        balanced = self.trainer_config.moe_aux_loss > 0
        interleaved = self.topology.virtual > 1
        batches = [self._batches(microbatches, samples) for _ in self._models]
        return get_forward_backward_func()(
            forward_step_func=partial(forward_step, evaluate, balanced),
            data_iterator=batches if interleaved else batches[0],
            model=self._models if interleaved else self._models[0],
            num_microbatches=len(microbatches),
            # Shapes travel with the tensors between stages, as microbatches differ in length.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _batches(self, microbatches: Iterable[Microbatch], samples: Sequence[Sample]) -> Iterator[Batch]:
        parallel = self.trainer_config.sequence_parallel
        for microbatch in microbatches:
            yield make_batch(
                microbatch,
                samples,
                multiple=self.topology.tensor if parallel else 1,
                device=self.device.torch_device,
                flavour=self.device.spec,
            )

    def score_logits(self, logits: torch.Tensor, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of each target of a batch, float32 [targets], from what `run` hands to ``evaluate``.

        Raises:
            TrainingError: the engine has a value head.
        """
        if self.layout.value_head:
            raise TrainingError("this engine has a value head, which gives no log-probs; make one without value_head")
        return token_logprobs(
            logits,
            batch.targets,
            vocab_size=self.layout.sizes.vocab,
            temperature=temperature,
            group=self._tensor_group,
        )

    def _total(self, reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over microbatches and data-parallel ranks, from the last stage to every rank."""
        last = self.topology.pipeline - 1
        totals: dict[str, float] = {}
        if self.coords.pp == last:
            names = sorted(reports[0])
            values = torch.stack([sum(report[name].double() for report in reports) for name in names])
            dist.all_reduce(values, group=self.data_group)
            totals = dict(zip(names, values.tolist(), strict=True))
        if last == 0:
            return totals
        return broadcast_json(totals, self.topology.rank(tp=0, dp=0, pp=last), self.device.torch_device)

    # Reference weights

    def keep_reference(self) -> None:
        """Keeps a copy of the present weights in host memory, for `score` with ``reference``."""
        self._reference = ReferenceWeights(self._chunks, self.device)

    # Checkpoints

    def save(self, path: Path, state: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint with ``state`` (JSON) inside; see `checkpoint.save`. Raises CheckpointError."""
        checkpoint.save(
            Path(path),
            checkpoint.Shard(
                layout=self.layout,
                dtype=self.model_config.dtype,
                rank=self.rank,
                params=self.params(),
                optimizer=self._optimizer.state(),
            ),
            dict(state or {}),
            self.device.torch_device,
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Restores weights, optimizer and random state of a checkpoint, and returns its ``state``.

        Raises:
            CheckpointError: it is incomplete, or was written by another layout.
        """
        params, optimizer, state = checkpoint.load(
            Path(path), self.layout, self.model_config.dtype, self.rank, self.device.torch_device
        )
        self._write(params)
        self._optimizer.reload_weights()
        self._optimizer.load_state(optimizer)
        return state

    def close(self) -> None:
        """Forgets Megatron's process groups; they end with torch.distributed.destroy_process_group."""
        parallel_state.destroy_model_parallel()

"""Megatron's Adam: learning rate schedule, gradient clipping, the guard against non-finite steps, and saved state.

An update happens on every rank or on none: before any weight changes, `Optimizer.step` checks on all ranks that loss
and gradient norm are finite.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megasync.config.megatron_options import converted
from megasync.config.schema import OptimizerConfig, TrainerConfig
from megasync.errors import ConfigError, NonFiniteError
from megasync.layout.topology import Topology
from megasync.trainer.adam import Adam
from megasync.trainer.checkpoint import MAIN_WEIGHT, MOMENTS, Slice
from megasync.trainer.collectives import all_agree

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step ``step`` (from 1): linear warm-up, then the configured decay.

    Warm-up reaches ``lr`` at step ``warmup_steps``. Decay has ``lr`` at the step after that, and would reach ``min_lr``
    one step after ``total_steps``: as in PyTorch's schedulers, every step that is taken moves the weights, the last one
    too. Raises ConfigError if the decay is unknown.
    """
    if config.decay not in ("constant", "linear", "cosine"):
        raise ConfigError(f"trainer.optimizer.decay is {config.decay!r}; it must be constant, linear or cosine")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (step - 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    factor = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * factor


class Update(NamedTuple):
    """The result of one optimizer step; ``applied`` is false if it was skipped because a value was not finite.

    ``squares`` are those of the norms of gradients, before clipping, and of weights [2, groups], if they were measured.
    """

    applied: bool
    grad_norm: float
    lr: float
    squares: torch.Tensor | None = None


class Optimizer:
    """The optimizer of one rank's shard.

    In float32 it updates the model's weights directly. In bfloat16 it updates float32 main weights and rounds the
    model's weights from them, so that small updates are not lost. Megatron holds these main weights, or Transformer
    Engine's Adam among its states, if it is precision-aware: then the inner parameters are the model's weights, and
    of a main weight there may be only the bits that the model's weight lacks (`joined`).

    With `trainer.optimizer.offload` a `HybridDeviceOptimizer` holds the main weights, and inside it there is one torch
    optimizer for the device and one for each parameter whose main weight is in host memory.
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        trainer: TrainerConfig,
        total_steps: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config = trainer.optimizer
        self._total_steps = total_steps
        self._device = device
        self._keeps_main_weights = dtype != torch.float32
        self._precision_aware = config.precision_aware
        # Where Megatron puts gradients for these two.
        self._decoupled = config.precision_aware or config.offload > 0
        self.moment_dtypes: dict[str, str] = dict(
            zip(MOMENTS, (config.exp_avg_dtype, config.exp_avg_sq_dtype), strict=True)
        )
        # Updates so far, which Adam's bias correction needs.
        self.updates = 0
        # Annotated as the base class, but Megatron always returns a chain: dense parameters and experts.
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=models[0].ddp_config.use_distributed_optimizer,
                overlap_param_gather=models[0].ddp_config.overlap_param_gather,
                use_precision_aware_optimizer=self._decoupled,
                store_param_remainders=config.store_param_remainders,
                exp_avg_dtype=getattr(torch, config.exp_avg_dtype),
                exp_avg_sq_dtype=getattr(torch, config.exp_avg_sq_dtype),
                **converted("optimizer", trainer.megatron.optimizer),
            ),
            list(models),
            use_gloo_process_groups=False,
        )
        self._optimizer = cast("ChainedOptimizer", optimizer)
        for part in self._optimizer.chained_optimizers if config.offload else ():
            if part.optimizer is not None:
                part.optimizer = with_offload(part.optimizer, config)
        for inner in self._inner():
            if isinstance(inner, torch.optim.AdamW):
                for group in inner.param_groups:
                    # One pass over the weights instead of eight; torch reads the flag from the group at each step.
                    group["fused"] = True
            if self._precision_aware:
                # Otherwise it makes the main weights at the first step, from the model's weights.
                adam: Any = inner
                for param in self._parameters_of(inner):
                    adam.initialize_state(param, adam.store_param_remainders and param.dtype == torch.bfloat16)

    def _inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside; none on a rank with an empty shard."""
        inner: list[torch.optim.Optimizer] = []
        for part in self._optimizer.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                inner += part.optimizer.sub_optimizers
            elif part.optimizer is not None:
                inner.append(part.optimizer)
        return inner

    def _hybrids(self) -> list[HybridDeviceOptimizer]:
        chained = (part.optimizer for part in self._optimizer.chained_optimizers)
        return [optimizer for optimizer in chained if isinstance(optimizer, HybridDeviceOptimizer)]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, step: int | Adam, loss_is_finite: bool, measure: Callable[[], torch.Tensor] | None = None) -> Update:
        """Clips by the global norm and updates, unless any rank saw a non-finite value. A collective.

        ``step`` is the number of the training step, or parameters in place of the configured ones. ``measure`` returns
        `Update.squares`; it is called when the gradients are ready.
        """
        adam = step if isinstance(step, Adam) else self._configured(step)
        lr = adam.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = lr, (adam.beta1, adam.beta2), adam.eps
            # Megatron sets wd_mult to 0 for vectors (norms, biases), but only its own scheduler applies it.
            group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not all_agree(loss_is_finite and math.isfinite(norm), self._device):
            return Update(False, norm, lr)
        squares = None if measure is None else measure()
        if adam.clip_grad > 0:
            for part in self._optimizer.chained_optimizers:
                params: list[torch.Tensor] = [*part.get_parameters()]
                clip_grad_by_total_norm_fp32(params, adam.clip_grad, norm, self._decoupled)
        self._apply()
        self.updates += 1
        return Update(True, norm, lr, squares)

    def _configured(self, step: int) -> Adam:
        config = self._config
        lr, (beta1, beta2) = learning_rate(config, step, self._total_steps), config.betas
        return Adam(lr, beta1, beta2, config.eps, config.weight_decay, config.clip_grad)

    def squares(self, params: Mapping[str, torch.Tensor], groups: Mapping[str, int], count: int) -> torch.Tensor:
        """Squared norms of the gradients and of the weights of each of ``count`` groups, float64 [2, count].

        ``groups`` are those of ``params`` by name. Over all ranks, each element counts once, as in Megatron's norm of
        all gradients. A collective, between `prepare_grads` and the update.
        """
        names = {id(held): name for name, (held, _) in self._held(params).items()}
        outer = {id(param): id(inner) for each in self._hybrids() for param, inner in each.param_to_inner_param.items()}
        total = torch.zeros(2, count, dtype=torch.float64, device=self._device)
        for part in self._optimizer.chained_optimizers:
            local_squares = torch.zeros_like(total)
            # Without those that other tensor or pipeline ranks hold too.
            counted = {id(grad): grad for grad in part.get_main_grads_for_grad_norm()}
            for param in part.get_parameters():
                grad = getattr(param, "decoupled_grad" if self._decoupled else "grad", None)
                name = names.get(outer.get(id(param), id(param)))
                if id(grad) not in counted or name is None:
                    continue
                for row, tensor in enumerate((counted[id(grad)], param.detach())):
                    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
                    local_squares[row, groups[name]] += norm.double().square()
            dist.all_reduce(local_squares, group=part.get_grad_stats_parallel_group())
            total += local_squares
        return total

    def update_without_values(self) -> None:
        """Does what `step` does to tensors that have no values: creates the moments and writes the weights."""
        for group in self._optimizer.param_groups:
            if "fused" in group:
                group["fused"] = False  # torch has no kernel for the meta device
        self._optimizer.prepare_grads()
        self._apply()

    def _apply(self) -> None:
        for hybrid in self._hybrids():
            for param, inner in hybrid.param_to_inner_param.items():
                # Megatron hands over the gradients of all but these: float32 weights that it updates in place.
                if param is inner:
                    param.grad = param.decoupled_grad
        self._optimizer.step_with_ready_grads()

    def reload_weights(self) -> None:
        """Copies the model's weights to the main weights, after the model was written from outside."""
        self._optimizer.reload_model_params()
        for hybrid in self._hybrids():
            # Megatron leaves out those of float32 weights.
            for param, copy in hybrid.gpu_params_map_cpu_copy.items():
                copy.data.copy_(param.data)

    def start_from(self, params: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        """Initialises the main weights with the full precision of the model folder.

        A main weight that starts exactly on a bfloat16 value must move half the distance to the next value before the
        served model changes; at the small learning rates of RL that takes many steps. With full-precision main weights,
        the served model changes in proportion from the first step on.
        """
        if not self._keeps_main_weights:
            return
        for name, (main, start) in self._held(params).items():
            exact = weights[name].to(main.device).view(-1)[start : start + main.numel()]
            self._write_main_weight(main, exact.view(main.shape))

    def _held(self, params: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        """For each parameter, the inner optimizers' tensor of it, and the element at which that begins.

        Without those that only other data-parallel ranks hold, and without buffers.
        """
        inner = {id(tensor) for tensor in self._parameters()}
        shards = (self._shard(param) for param in params.values())
        return {name: shard for name, shard in zip(params, shards, strict=True) if id(shard[0]) in inner}

    def _shard(self, param: torch.Tensor) -> tuple[torch.Tensor, int]:
        for part in self._optimizer.chained_optimizers:
            if not isinstance(part, DistributedOptimizer) or not isinstance(param, torch.nn.Parameter):
                continue
            # Experts have an optimizer of their own.
            if param in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[param]
                elements: Any = part._get_model_param_range_map(param)["param"]
                held = part.optimizer.param_groups[group]["params"][place]
                if isinstance(part.optimizer, HybridDeviceOptimizer):
                    held = part.optimizer.param_to_inner_param[held]
                return held, elements.start
        main: torch.Tensor | None = getattr(param, "main_param", None)
        return param if main is None else main, 0

    def tensors(self) -> list[torch.Tensor]:
        """Main weights and moments, and the gradients in host memory; in float32 the main weights on the device are the
        model's weights.
        """
        moments = (value for inner in self._inner() for state in inner.state.values() for value in state.values())
        gradients = (grad for hybrid in self._hybrids() for grad in hybrid.cpu_copy_map_grad.values())
        return [*self._parameters(), *(value for value in moments if isinstance(value, torch.Tensor)), *gradients]

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks hold different parts of main weights and moments."""
        return any(isinstance(part, DistributedOptimizer) for part in self._optimizer.chained_optimizers)

    def ranges(self, params: Mapping[str, torch.Tensor]) -> dict[str, range]:
        """The elements of each parameter of which this rank holds main weights and moments."""
        return {name: range(start, start + held.numel()) for name, (held, start) in self._held(params).items()}

    def slices(self, params: Mapping[str, torch.Tensor]) -> dict[str, Slice]:
        """Main weights and moments of this rank, by parameter; on its device, not copied."""
        states = {id(param): state for inner in self._inner() for param, state in inner.state.items()}
        slices: dict[str, Slice] = {}
        for name, (held, start) in self._held(params).items():
            tensors = {kind: states[id(held)][kind].view(-1) for kind in MOMENTS if self.updates}
            made: dict[str, Callable[[], torch.Tensor]] = {}
            if self._keeps_main_weights:
                main = self._main_weight(held)
                if main.dtype == torch.int16:
                    made[MAIN_WEIGHT] = partial(joined, held.data.view(-1), main.view(-1))
                else:
                    tensors[MAIN_WEIGHT] = main.view(-1)
            slices[name] = Slice(start, tensors, made)
        return slices

    def _main_weight(self, held: torch.Tensor) -> torch.Tensor:
        """The float32 main weight of an inner parameter, or the int16 bits that a bfloat16 weight lacks of it."""
        if not self._precision_aware or held.dtype == torch.float32:
            return held.data
        (state,) = (inner.state[held] for inner in self._inner() if held in inner.state)
        return state["master_param"]

    def _write_main_weight(self, held: torch.Tensor, values: torch.Tensor) -> None:
        """``values`` are float32, of the shape of ``held``, which is these values if rounded."""
        main = self._main_weight(held)
        main.copy_(remainders(values.to(held.device), held.data) if main.dtype == torch.int16 else values)

    def restore(self, params: Mapping[str, torch.Tensor], slices: Mapping[str, Slice], updates: int) -> None:
        """Restores what `slices` returned, after as many updates. Hyperparameters stay those of the configuration."""
        self.updates = updates
        saved = {id(held): (held, slices[name].tensors) for name, (held, _) in self._held(params).items()}
        for hybrid in self._hybrids():
            # The same moments once more; it sets them again at its next step.
            hybrid.state.clear()
        for inner in self._inner():
            if self._precision_aware:
                for param in self._parameters_of(inner):
                    for kind in MOMENTS:
                        moment, tensors = inner.state[param][kind], saved[id(param)][1]
                        if updates:
                            moment.copy_(tensors[kind].view(param.shape))
                        else:
                            moment.zero_()
                for group in inner.param_groups:
                    group["step"] = updates
                continue
            # Frees the moments first: torch would otherwise hold old and new ones at the same time.
            inner.state.clear()
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for index, param in enumerate(self._parameters_of(inner) if updates else ()):
                held, tensors = saved[id(param)]
                moments[index] = {kind: tensors[kind].view(held.shape) for kind in MOMENTS}
                if isinstance(inner, torch.optim.AdamW):
                    moments[index]["step"] = torch.tensor(float(updates))
            inner.load_state_dict({"state": moments, "param_groups": inner.state_dict()["param_groups"]})
            for group in inner.param_groups if not isinstance(inner, torch.optim.AdamW) else ():
                # Transformer Engine's Adam counts steps per group, torch's among the moments.
                group["step"] = updates
        if self._keeps_main_weights:
            for held, tensors in saved.values():
                self._write_main_weight(held, tensors[MAIN_WEIGHT].view(held.shape))

    def _parameters(self) -> list[torch.Tensor]:
        return [param for inner in self._inner() for param in self._parameters_of(inner)]

    @staticmethod
    def _parameters_of(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [param for group in inner.param_groups for param in group["params"]]


def with_offload(adam: torch.optim.Optimizer, config: OptimizerConfig) -> HybridDeviceOptimizer:
    """Megatron's optimizer for the parameters of ``adam``, with a share of the state in host memory and updated there.

    Megatron's own option would build it twice: first with all weights of the rank, in pinned memory that torch keeps,
    and then with the part of them whose state the distributed optimizer has.
    """
    for group in adam.param_groups:
        # As for torch's Adam above.
        group["fused"] = True
        for param in group["params"]:
            if not param.is_leaf:
                # A part of a float32 weight. Torch's optimizers refuse a view unless it keeps its gradient.
                param.retain_grad()
    return HybridDeviceOptimizer(
        adam.param_groups,
        offload_fraction=config.offload,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=type(adam),
        param_update_in_fp32=True,
        # A parameter is updated while gradients of the next ones and weights of the former ones are copied.
        overlap_cpu_optimizer_d2h_h2d=True,
    )


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 values of bfloat16 weights and the int16 bits that these lack, as Transformer Engine's Adam splits
    them: a value is rounded up if the highest of these bits is set.
    """
    high = weight.view(torch.int16).int() - (remainder < 0).int()
    return (high << 16 | remainder.int() & 0xFFFF).view(torch.float32)


def remainders(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The int16 bits of float32 ``values`` that bfloat16 weights lack; see `joined`.

    A value halfway between two weights that torch rounded down to an even one becomes the next smaller float32 number,
    because such a bit would round it up.
    """
    bits = values.view(torch.int32)
    halfway = (bits & 0xFFFF == 0x8000) & (bits >> 16 == weight.view(torch.int16).int())
    return torch.where(halfway, 0x7FFF, bits).to(torch.int16)


log = logging.getLogger(__name__)


class SkipBudget:
    """The number of steps in a row that may be skipped because their loss or gradient was not finite.

    ``allowed`` is `trainer.max_skipped_steps`.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed

    def count(self, applied: bool, step: str) -> None:
        """Counts a step that was applied or skipped, and logs a skipped one as ``step`` describes it.

        Raises NonFiniteError if it was one too many in a row.
        """
        if applied:
            self._left = self._allowed
            return
        log.error("Skipped %s", step)
        self._left -= 1
        if self._left < 0:
            raise NonFiniteError(
                f"{self._allowed + 1} steps in a row had a non-finite loss or gradient "
                f"(trainer.max_skipped_steps={self._allowed}); the last was {step}"
            )


# Norms by groups of layers: where in the model an update is large
#
# A group is the embedding, a span of layers, or what follows the layers. The squares of all groups' norms of gradients
# add up to that of `train/grad_norm`: both take the same elements, each once over all ranks.


# The most spans of layers.
SPANS = 8
EMBEDDING, OUTPUT = "embedding", "output"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Of an interleaved pipeline: the number of the chunk.
_CHUNK = re.compile(r"(\d+)\.")


def group_names(layers: int) -> list[str]:
    """The groups of a model with that many layers, from the input on."""
    bounds = [layers * span // min(SPANS, layers) for span in range(min(SPANS, layers) + 1)]
    spans = [
        f"layers_{first}" if last == first else f"layers_{first}-{last}"
        for first, last in ((low, high - 1) for low, high in pairwise(bounds))
    ]
    return [EMBEDDING, *spans, OUTPUT]


def groups_of(names: Iterable[str], layers: int, topology: Topology, stage: int) -> dict[str, int]:
    """The group of each of a rank's parameters, as a position in `group_names`; names are those of `Layout.params`."""
    chunks = topology.stage_layers(layers)[stage]
    spans = min(SPANS, layers)
    groups: dict[str, int] = {}
    for name in names:
        layer = _LAYER.search(name)
        if layer is None:
            groups[name] = 0 if "embedding" in name else spans + 1
            continue
        chunk = _CHUNK.match(name)
        number = chunks[int(chunk[1]) if chunk else 0][int(layer[1])]
        # The last span that begins at or before the layer.
        groups[name] = 1 + max(span for span in range(spans) if layers * span // spans <= number)
    return groups


def named_norms(squares: torch.Tensor, layers: int) -> Mapping[str, float]:
    """Metrics from the squared norms [2, groups] of gradients and weights; without groups that have no weights."""
    norms = squares.sqrt().tolist()
    return {
        f"norms/{kind}/{name}": norm
        for kind, of_groups in zip(("grad", "weight"), norms, strict=True)
        for name, norm, weight in zip(group_names(layers), of_groups, norms[1], strict=True)
        if weight
    }

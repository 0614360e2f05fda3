"""`MegatronLearner` behind verl's engine interface. Importing this module registers the engines.

It does not import Megatron, so that verl can load it in any process; `computation` does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from megasync.device import resolve_device
from megasync.errors import ConfigError
from megasync.integrations.verl.config import (
    STRATEGY,
    check_contents,
    to_model,
    to_optimizer,
    to_trainer,
    verl_setting_names,
)
from megasync.integrations.verl.weights import LiveWeights, Weights
from megasync.layout.topology import Topology

DEVICES = ["cuda", "cpu"]


class TrainMode(BaseEngineCtx):
    """verl's training context. Zeroes the gradients at its end, unless they are to be accumulated."""

    def __init__(self, engine: MegasyncEngine, **kwargs: Any) -> None:
        super().__init__(engine, mode="train", **kwargs)
        if engine.is_param_offload_enabled and not (self.zero_grad_on_exit or self.disable_auto_offload):
            raise ConfigError(
                "param_offload=True drops gradients when it frees the GPU, but they must be kept between calls "
                "(zero_grad_on_exit=False); set param_offload=false"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.zero_grad_on_exit or error is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, traceback)


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=DEVICES)
class MegasyncEngine(BaseEngine):
    """One rank of a language model. Methods are collectives, except properties and getters of ranks and sizes.

    The constructor converts and validates the configuration. As verl requires, the rank's position is known before
    `initialize` builds anything. Raises ConfigError if a setting, the architecture or the world size is not supported.
    """

    value_head = False

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **_: Any
    ) -> None:
        self.engine_config = engine_config
        # Set by verl's contexts: "train", "eval" or None.
        self.mode: str | None = None
        self._trains = not engine_config.forward_only
        # verl omits it if nothing is saved.
        checkpoint_config = checkpoint_config or CheckpointConfig()
        if self._trains:
            check_contents(checkpoint_config)
        self._saves_hf = self._trains and "hf_model" in checkpoint_config.save_contents
        self._model = to_model(model_config, engine_config)
        self._trainer = to_trainer(engine_config, optimizer_config if self._trains else None, dist.get_world_size())
        self._total_steps = to_optimizer(optimizer_config)[1] if self._trains else 0
        with verl_setting_names():
            self._topology = Topology.from_config(self._trainer)
        self._coords = self._topology.coords(dist.get_rank())
        # The current optimizer step, from 1; determines the learning rate.
        self._step = 1

    def initialize(self) -> None:
        """Builds the model, loads its weights and, unless the engine only scores, creates an optimizer."""
        device = resolve_device(get_device_name())
        device.prepare_process(local_rank=0 if device.kind == "cpu" else torch.cuda.current_device())
        # Imported after `prepare_process`, which may patch Megatron.
        from megasync.integrations.verl.computation import Computation
        from megasync.trainer.learner import MegatronLearner

        with verl_setting_names():
            engine = MegatronLearner(
                self._model,
                self._trainer,
                device,
                dist.get_rank(),
                total_steps=self._total_steps,
                seed=self.engine_config.seed,
                trains=self._trains,
                value_head=self.value_head,
            )
        self._computation = Computation(engine, exports=self._saves_hf)
        self._step = 1
        weights, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=weights, optimizer=optimizer, grad=weights)

    # Position of this rank

    def get_data_parallel_rank(self) -> int:
        return self._coords.dp

    def get_data_parallel_size(self) -> int:
        return self._topology.data

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._computation.data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self._coords.tp == 0 and self._coords.pp == self._topology.pipeline - 1

    # Modes and memory

    @property
    def is_param_offload_enabled(self) -> bool:
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self.engine_config.optimizer_offload

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return TrainMode(self, **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves this rank's memory to the host ("cpu") or back to its device. Does nothing on a CPU.

        Gradients are restored as zeros. Raises ConfigError for another kind of device.
        """
        device_name = get_device_name()
        if device not in ("cpu", device_name):
            raise ConfigError(f"megasync's engine moves between {device_name!r} and 'cpu', not to {device!r}")
        if device_name == "cpu":
            return
        selected = {"weights": model, "gradients": grad, "optimizer": optimizer}
        kinds = [kind for kind, moves in selected.items() if moves]
        offload = self._computation.offload
        (offload.offload if device == "cpu" else offload.restore)(*kinds)

    # Computation

    @property
    def optimizer(self) -> MegasyncEngine:
        """verl's workers of split steps look for parameter groups here, to change them for one step.

        There are none; verl's error names the returned object.
        """
        return self

    def optimizer_zero_grad(self) -> None:
        self._computation.zero_grad()

    def optimizer_step(self) -> float:
        """Clips and updates, or skips the update if the norm is not finite on any rank.

        Returns the norm of the gradients before clipping.
        """
        return self._computation.update(self._step)

    def lr_scheduler_step(self) -> float:
        """Advances the schedule and returns the new learning rate."""
        self._step += 1
        return self._computation.learning_rate(self._step)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Implements verl's interface. Gradients are added to those of earlier calls.

        ``data`` holds the sequences of this data-parallel rank, with jagged ``input_ids``. Returns ``model_output``
        (jagged ``log_probs``, and ``entropy`` if requested; in training only with ``return_model_output``),
        ``loss`` and ``metrics`` of each microbatch; {} before the last stage. Raises TrainingError if the batch is not
        supported, or there is no loss to train with.
        """
        return self._computation.forward_backward(data, loss_function, forward_only)

    # Weights

    # verl declares a generator where it needs an iterator.
    def get_per_tensor_param(self, **_: Any) -> tuple[Weights, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An iterator over the whole tensors of the model (see `Weights`), and None, because there is no adapter."""
        return Weights(self._computation.shards), None

    @property
    def module(self) -> list[LiveWeights]:
        """The weights that verl's `DetachActorWorker` copies, to restore those with which a batch began."""
        return [LiveWeights(self._computation.shards)]

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Saves a checkpoint; see `Checkpoints.save`. Raises CheckpointError, or ConfigError for a remote path."""
        self._check_stored(hdfs_path)
        state = {"global_step": global_step, "step": self._step}
        self._computation.checkpoints.save(local_path, state, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Restores weights, optimizer, schedule and random state. Like verl's own engines, does nothing without a path.

        ``del_local_after_load`` applies to copies of remote checkpoints, which do not exist here. Raises like
        `save_checkpoint`.
        """
        if local_path is None:
            return
        self._check_stored(hdfs_path)
        self._step = self._computation.checkpoints.load(local_path)["step"]

    def _check_stored(self, hdfs_path: str | None) -> None:
        if hdfs_path is not None:
            raise ConfigError(
                f"hdfs_path is {hdfs_path!r}, but checkpoints must be on a file system that all ranks share"
            )
        if not self._trains:
            raise ConfigError("an engine that only scores (forward_only) has no checkpoint; load its model folder")


@EngineRegistry.register(model_type="value_model", backend=STRATEGY, device=DEVICES)
class MegasyncValueEngine(MegasyncEngine):
    """One rank of a critic: `forward_backward_batch` returns jagged ``values`` instead of log-probs and entropy.

    The model folder contains a language model, which gets a new head, or a token classifier with one label.
    """

    value_head = True

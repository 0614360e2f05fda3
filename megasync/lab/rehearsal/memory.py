"""Bytes that a rehearsed rank holds, and those that `megasync plan` predicts for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megasync.config.schema import Config
from megasync.lab.rehearsal.cuda import PinnedTensor
from megasync.layout.adapter import adapter_layout
from megasync.planning.memory import host_state, saved_activations, stage_memory
from megasync.preflight.check import model_layout
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.offload import KINDS, OPTIMIZER, WEIGHTS

ACTIVATIONS, CRITIC, HOST = "activations", "critic", "host"
# Largest accepted difference between held and planned bytes, relative to the plan, by kind of memory.
TOLERANCE = {"weights": 0.02, "gradients": 0.02, "optimizer": 0.02, ACTIVATIONS: 0.05, CRITIC: 0.02, HOST: 0.02}


def held_bytes(learner: MegatronLearner) -> dict[str, int]:
    """Bytes of the storages of a built rank by kind, gradient buffers with their padding included.

    Takes an optimizer step on tensors without memory, because Adam creates its moments at the first one. What the
    optimizer has in host memory is a kind of its own.
    """
    with torch.device("cpu"):  # torch's Adam reads its count of steps
        learner.optimizer.update_without_values()
    taken: set[int] = set()
    held: dict[str, int] = {}
    memory = dict(learner.memory())
    # Without counts of steps, a few bytes on the host or the device.
    memory[OPTIMIZER] = [tensor for tensor in memory[OPTIMIZER] if tensor.dim()]
    on_host = [tensor for tensor in memory[OPTIMIZER] if isinstance(tensor, PinnedTensor)]
    parts = ({HOST: on_host} if on_host else {}) | memory
    for kind, tensors in parts.items():
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        held[kind] = sum(storage.nbytes() for key, storage in storages.items() if key not in taken)
        taken |= storages.keys()
    return held


def added_by_critic(critic: Mapping[str, int], policy: Mapping[str, int], takes_turns: bool) -> int:
    """Bytes that a critic adds to its rank, of what both hold by `KINDS`.

    With ``takes_turns`` (`critic.offload`) gradients and optimizer of only one of the two are on the device.
    """
    critic_bytes, others = (sum(held[kind] for kind in KINDS if kind != WEIGHTS) for held in (critic, policy))
    return critic[WEIGHTS] + critic_bytes - (min(critic_bytes, others) if takes_turns else 0)


def planned_bytes(config: Config, rank: int) -> dict[str, int]:
    """The bytes that `megasync plan` predicts for the stage of a rank, by the kinds of `KINDS`."""
    layout, _ = model_layout(config, planning=True)
    stage = layout.topology.coords(rank).pp
    memory = stage_memory(config, layout, 0, stage)
    kinds = (*KINDS, CRITIC) if config.critic.enabled else KINDS
    planned = {kind: getattr(memory, kind) for kind in kinds}
    if config.trainer.optimizer.offload:
        trained = adapter_layout(layout, config.trainer) or layout
        planned[HOST] = host_state(config, trained, rank, pinned=1)
    # Of Megatron's own layers the plan has a lower bound only, of layers with some adapters an upper one.
    bounded = layout.spec == "local" or config.trainer.lora.targets
    return planned if bounded else planned | {ACTIVATIONS: saved_activations(config, layout, stage)}


def memory_differences(held: Mapping[str, int], planned: Mapping[str, int], *, fp8: bool = False) -> list[str]:
    """The kinds of memory that differ from the plan by more than `TOLERANCE`, in words.

    If the optimizer's state is partly in host memory, the plan is an upper bound for each of the two places. So it is
    for activations with `trainer.fp8`: it counts the inputs of linear layers in 16 bits.
    """
    bounded = {OPTIMIZER, HOST} if planned.get(HOST) and planned[OPTIMIZER] else set[str]()
    bounded |= {ACTIVATIONS} if fp8 else set()
    return [
        f"{kind}: {held[kind] / 1e9:.3f} GB are held, but `megasync plan` predicts {planned[kind] / 1e9:.3f} GB"
        for kind, share in TOLERANCE.items()
        if kind in held
        and abs(held[kind] - planned[kind]) > share * planned[kind]
        and (kind not in bounded or held[kind] > planned[kind])
    ]

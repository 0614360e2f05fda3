"""One trainer rank of a configuration, built at full size without weights and without a GPU.

The rank is the real learner: Megatron's process groups on torch's fake backend, the layers of the device's flavour,
gradient buffers and optimizer, with every tensor on the meta device. What it built is compared with what the topology
and the layout say. `differences` decides from shapes how a parameter is split, and not from the table of splits that
`set_param_attributes` reads, so that an error in either is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode

from megasync.config.schema import Config
from megasync.device import Device
from megasync.lab.rehearsal.activations import saved_bytes
from megasync.lab.rehearsal.groups import fake_world
from megasync.lab.rehearsal.memory import (
    ACTIVATIONS,
    CRITIC,
    added_by_critic,
    held_bytes,
    memory_differences,
    planned_bytes,
)
from megasync.lab.rehearsal.report import RankReport
from megasync.layout.layout import Layout, Placed
from megasync.layout.model_files import find_hf_config
from megasync.layout.topology import Topology
from megasync.trainer.critic import critic_learner
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.user_buffers import close_buffers

META = torch.device("meta")
# Ends of the names of parameters with a row for each token of the vocabulary.
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


class MetaDevice(Device):
    """A kind of device whose tensors have shapes but no memory."""

    @cached_property
    def torch_device(self) -> torch.device:
        return META


def rehearse_rank(config: Config, rank: int, device: MetaDevice, saved: dict[int, int]) -> RankReport:
    """Builds one rank of ``config``. Of the model it needs the config.json (`find_hf_config`).

    An error of Megatron, Transformer Engine or the learner is a difference. No process group stays open, so another
    rank can follow in the same process. ``saved`` keeps the activations of each stage, the same on all its ranks, for
    later calls. The process must be prepared for ``device`` (`rehearsal.child`).
    """
    begun = time.monotonic()
    problems: list[str] = []
    held: dict[str, int] = {}
    plan: dict[str, int] = {}
    parameters = 0
    try:
        with built_rank(config, rank, device) as learner:
            problems += differences(learner)
            parameters = sum(weight.numel() for weight in learner.weights.values())
            if config.sync.transport != "adapters":
                learner.params()  # merges adapters into weights for servers
            held, plan = held_bytes(learner), planned_bytes(config, rank)
            if ACTIVATIONS in plan:
                if (stage := learner.coords.pp) not in saved:
                    saved[stage] = saved_bytes(learner, config)
                held[ACTIVATIONS] = saved[stage]
            if config.critic.enabled:
                critic = built_critic(config, rank, device)
                problems += (f"critic: {text}" for text in differences(critic))
                held[CRITIC] = added_by_critic(held_bytes(critic), held, config.critic.offload)
            problems += memory_differences(held, plan, fp8=config.trainer.fp8 is not None)
    except Exception as error:  # noqa: BLE001 - what stops this rank stops it on a GPU too
        problems.append(f"{type(error).__name__}: {error}")
    return RankReport(rank, parameters, held, plan, time.monotonic() - begun, tuple(problems))


@contextmanager
def built_rank(config: Config, rank: int, device: MetaDevice) -> Iterator[MegatronLearner]:
    """An initialised learner with uninitialised weights, in fake process groups that are closed afterwards."""
    with fake_world(rank, Topology.from_config(config.trainer).world), META, _OnMeta(device.kind):
        model = replace(config.model, path=str(find_hf_config(config.model, planning=True)))
        learner = MegatronLearner(model, config.trainer, device, rank, config.schedule.total_steps)
        try:
            learner.initialize(load=_absent_weights)
            yield learner
        finally:
            close_buffers()
            parallel_state.destroy_model_parallel()


def built_critic(config: Config, rank: int, device: MetaDevice) -> MegatronLearner:
    """The learner of the critic, on the process groups of `built_rank`, in whose context it must be called."""
    # A folder of its own has the policy's sizes, and need not be on this machine.
    critic = replace(config.critic, path=None)
    model = replace(config.model, path=str(find_hf_config(config.model, planning=True)))
    learner = critic_learner(critic, model, config.trainer, device, rank, total_steps=config.schedule.total_steps)
    learner.initialize(load=_absent_weights)
    return learner


def _absent_weights(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights that have a shape only, in place of those of a folder."""
    return {name: torch.empty(shape, dtype=dtype, device=META) for name, shape in layout.params(rank).items()}


class _OnMeta(TorchFunctionMode):
    """Creates on the meta device what asks for "cuda", and lets tensors report the types of tensors of ``kind``.

    Megatron and Transformer Engine name the device in some calls, and Megatron's optimizers compare names of types.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._types = "torch.cuda" if kind == "cuda" else "torch"

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = META
        if func is torch.Tensor.cpu:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(META if _is_cuda(argument) else argument for argument in args)
        if func == _SET_DATA and args[0].is_meta:
            # Transformer Engine frees tensors by an empty one that it made on the CPU.
            args = (args[0], args[1].to(META))
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return f"{self._types}.{answer.rpartition('.')[2]}"
        return answer


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


# What was built, against the topology and the layout


def differences(learner: MegatronLearner) -> Iterator[str]:
    """How a built rank differs from its topology and layout, in words. The learner itself compares names and shapes."""
    yield from _layer_differences(learner)
    yield from _group_differences(learner)
    yield from _weight_differences(learner)


def _layer_differences(learner: MegatronLearner) -> Iterator[str]:
    """Which layers of the model each chunk has, as Megatron counts them (from 1)."""
    stage = learner.layout.stages[learner.coords.pp]
    for number, (chunk, layers) in enumerate(zip(learner.chunks, stage, strict=True)):
        blocks: Any = chunk.decoder.layers
        numbers = [layer.layer_number - 1 for layer in blocks]
        if numbers != [*layers]:
            yield f"chunk {number} of the stage has layers {numbers}; the layout says {[*layers]}"


def expected_groups(topology: Topology, rank: int) -> dict[str, list[int]]:
    """The global ranks of each of Megatron's groups that ``rank`` is in, by the words of its getter."""
    coords, own_expert = topology.coords(rank), topology.expert_coords(rank)
    members: dict[str, list[int]] = {}
    for other in range(topology.world):
        dense, expert = topology.coords(other), topology.expert_coords(other)
        tp, dp, pp, cp = (a == b for a, b in zip(dense, coords, strict=True))
        etp, ep, edp = (a == b for a, b in zip(expert, own_expert, strict=True))
        joined = {
            "tensor_model_parallel": dp and pp and cp,
            "data_parallel": tp and pp and cp,
            "pipeline_model_parallel": tp and dp and cp,
            "model_parallel": dp and cp,
            "tensor_and_data_parallel": pp and cp,
            "context_parallel": tp and dp and pp,
            "expert_tensor_parallel": ep and edp and pp,
            "expert_model_parallel": etp and edp and pp,
            "expert_data_parallel": etp and ep and pp,
            "expert_tensor_and_model_parallel": edp and pp,
        }
        for name, inside in joined.items():
            if inside:
                members.setdefault(name, []).append(other)
    stages = members["pipeline_model_parallel"]
    if rank in (stages[0], stages[-1]):
        members["embedding"] = sorted({stages[0], stages[-1]})
    return members


# Attributes of Megatron's modules that hold a group; experts and their dispatcher have tensor groups of their own.
_ATTRIBUTES = {
    "tp_group": "tensor_model_parallel",
    "pp_group": "pipeline_model_parallel",
    "cp_group": "context_parallel",
    "ep_group": "expert_model_parallel",
    "tp_ep_group": "expert_tensor_and_model_parallel",
}


def _group_differences(learner: MegatronLearner) -> Iterator[str]:
    expected = expected_groups(learner.topology, learner.rank)
    for name, ranks in expected.items():
        yield from _compare_group(f"the {name} group", getattr(parallel_state, f"get_{name}_group")(), ranks)
    seen: set[tuple[str, int]] = set()
    for name, holder, experts in _holders(learner):
        for attribute, kind in _ATTRIBUTES.items():
            group = vars(holder).get(attribute)
            if experts and attribute == "tp_group":
                kind = "expert_tensor_parallel"
            if isinstance(group, dist.ProcessGroup) and (kind, id(group)) not in seen:
                seen.add((kind, id(group)))
                yield from _compare_group(f"{name}.{attribute}", group, expected[kind])
    tensor, stage = learner.coords.tp, learner.topology.stage_ranks(learner.coords.pp)
    dense = [rank for rank in stage if learner.topology.coords(rank).tp == tensor]
    for model in learner.wrapped:
        # Megatron replaces `Module.buffers`, a method, by its list of buffers.
        lists: tuple[Any, ...] = (model.buffers, model.expert_parallel_buffers)
        for buffers, ranks in zip(lists, (dense, expected["expert_data_parallel"]), strict=True):
            for buffer in buffers:
                yield from _compare_group("the gradients' group", buffer.data_parallel_group, ranks)


def _holders(learner: MegatronLearner) -> Iterator[tuple[str, Any, bool]]:
    """Modules and token dispatchers with their names, and whether they work on experts."""
    for chunk in learner.chunks:
        for name, module in chunk.named_modules():
            yield name, module, ".mlp.experts" in name
            if (dispatcher := vars(module).get("token_dispatcher")) is not None:
                yield f"{name}.token_dispatcher", dispatcher, True


def _compare_group(name: str, group: dist.ProcessGroup, expected: list[int]) -> Iterator[str]:
    ranks = dist.get_process_group_ranks(group)
    if ranks != expected:
        yield f"{name} has {_ranks(ranks)}; the topology says {_ranks(expected)}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"{len(ranks)} rank(s) ({shown})"


def _weight_differences(learner: MegatronLearner) -> Iterator[str]:
    """Dtypes, marks, and the gradient buffer of each parameter."""
    layout, full_shapes = learner.layout, _whole_shapes(learner)
    in_expert_buffer = {
        param for model in learner.wrapped for buffer in model.expert_parallel_buffers for param in buffer.params
    }
    for item in layout.of_rank(learner.rank):
        weight = learner.weights[item.param]
        dtype = getattr(torch, item.dtype) if item.dtype else learner.dtype
        if weight.dtype != dtype:
            yield f"{item.param} is {weight.dtype}; the layout says {dtype}"
        for mark, value in _expected_marks(learner, item, tuple(weight.shape), full_shapes[item.param]).items():
            if (actual := getattr(weight, mark, None)) != value:
                yield f"{item.param} has {mark}={actual}; with its shape {tuple(weight.shape)} it must be {value}"
        # Weights below adapters have no gradients, a router's bias neither.
        trained = isinstance(weight, torch.nn.Parameter) and weight.requires_grad
        if trained and (weight in in_expert_buffer) != (item.ep is not None):
            yield f"the gradient of {item.param} is not in the buffer of its kind of layer"


def _whole_shapes(learner: MegatronLearner) -> dict[str, tuple[int, ...]]:
    """The shapes of a rank's parameters if tensor ranks shared nothing."""
    layout, topology = learner.layout, learner.topology
    undivided = replace(topology, tensor=1, expert_tensor=1, data=topology.tensor * topology.data)
    full_layout = Layout(layout.hf_config, undivided, layout.spec, layout.value_head)
    shapes = {
        name: shape
        for ep in range(topology.expert)
        for name, shape in full_layout.params(topology.rank(0, 0, learner.coords.pp) + ep).items()
    }
    # Tensor ranks pad the vocabulary to a multiple of their own. A value head has one row.
    vocabulary = VOCABULARY[:1] if layout.value_head else VOCABULARY
    return {
        name: (layout.padded_vocab, *shape[1:]) if name.endswith(vocabulary) else shape
        for name, shape in shapes.items()
    }


def _expected_marks(
    learner: MegatronLearner, item: Placed, shape: tuple[int, ...], full_shape: tuple[int, ...]
) -> dict[str, Any]:
    """The attributes that Megatron must find on a parameter; see `set_param_attributes`.

    Without a second tensor rank a shape does not tell how a parameter would be split, and nothing depends on it.
    """
    expert = item.ep is not None
    marks: dict[str, Any] = {"allreduce": not expert, "shared": item.copy}
    if (learner.topology.expert_tensor_size if expert else learner.topology.tensor) == 1:
        return marks
    split = [dim for dim, (part, size) in enumerate(zip(shape, full_shape, strict=True)) if part != size]
    parallel = learner.trainer_config.sequence_parallel
    return marks | {
        "tensor_model_parallel": bool(split) or expert,
        "partition_dim": split[0] if split else -1,
        "sequence_parallel": parallel and not split and not expert and not item.all_tokens,
    }

"""Megatron's pipeline schedules and process groups over NCCL, as programs for a `fake_nccl.Machine`.

Each rank in turn runs Megatron's own schedule in this process, on a stage of one multiplication, in fake process groups
that megasync's own code opened. Which groups it made, in which order, and what it did with `torch.distributed`'s
point-to-point functions is recorded. Every wait blocks the host, which is stricter than a GPU, where only the stream
waits: what does not deadlock here does not deadlock there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from fake_nccl import Action, Machine, Process
from fake_nccl_group import FakeNCCL, FakeStore, nccl, recording
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from torch.overrides import TorchFunctionMode

from megasync.config.schema import TrainerConfig
from megasync.device import Device
from megasync.lab.rehearsal.groups import fake_world
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.trainer.engine import open_process_groups
from megasync.trainer.model import transformer_config

MODEL = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
}
SHAPE = (2, 1, 4)


class _Stage(nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: Any, chunk: int) -> None:
        super().__init__()
        self.config, self.vp_stage = config, chunk
        self.weight = nn.Parameter(torch.ones(()))
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self) -> torch.Tensor:
        return self.weight * (torch.ones(SHAPE) if self.given is None else self.given)


class _OnCpu(TorchFunctionMode):
    """Tensors for a GPU are on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **{**kwargs, "device": "cpu"} if kwargs.get("device") == "cuda" else kwargs)


class _Operation(NamedTuple):
    op: Any
    tensor: torch.Tensor
    peer: int
    group: Any


class _Groups:
    """In the place of torch.distributed's point-to-point functions; groups communicate over `FakeNCCL`."""

    def __init__(self) -> None:
        self._made: dict[str, FakeNCCL] = {}

    def _of(self, group: Any) -> tuple[FakeNCCL, list[int]]:
        group = group or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        name = group.group_name
        if name not in self._made:
            self._made[name] = FakeNCCL(FakeStore(name), group.rank(), len(ranks), FakeNCCL.Options())
        return self._made[name], ranks

    def isend(self, tensor: torch.Tensor, dst: int, group: Any = None) -> Any:
        found, ranks = self._of(group)
        return found.send([tensor], ranks.index(dst), 0)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any = None) -> Any:
        found, ranks = self._of(group)
        if tensor.dtype == torch.int64:
            # A message of shapes, which the schedule reads.
            tensor.copy_(torch.tensor(SHAPE))
        return found.recv([tensor], ranks.index(src), 0)

    def batch(self, operations: Sequence[Any]) -> list[Any]:
        found, _ = self._of(operations[0].group)
        found._start_coalescing()
        for each in operations:
            each.op(each.tensor, each.peer, each.group)
        return [found._end_coalescing()]


@contextmanager
def _patched(groups: _Groups, made: list[tuple[int, ...]]) -> Iterator[None]:
    new_group = dist.new_group

    def noted(ranks: Any = None, *args: Any, **options: Any) -> Any:
        made.append(tuple(ranks or range(dist.get_world_size())))
        return new_group(ranks, *args, **options)

    with ExitStack() as stack:
        for where, name, what in (
            (dist, "new_group", noted),
            (dist, "isend", groups.isend),
            (dist, "irecv", groups.irecv),
            (dist, "batch_isend_irecv", groups.batch),
            (dist, "P2POp", _Operation),
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda: None),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        yield


def created_groups(topology: Topology, rank: int) -> list[tuple[int, ...]]:
    """The members of the groups that a rank creates, in the order of its calls; a collective each."""
    made: list[tuple[int, ...]] = []
    with fake_world(rank, topology.world), _patched(_Groups(), made):
        open_process_groups(topology)
        parallel_state.destroy_model_parallel()
    return made


def create_eagerly(made: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Action]]:
    """Programs in which each rank makes the communicators of its groups at once, given what each rank creates."""
    programs: list[list[Action]] = []
    for rank, groups in enumerate(made):
        program: list[Action] = []
        for number, ranks in enumerate(groups):
            if rank in ranks:
                member, name = ranks.index(rank), f"group {number} of {list(ranks)}"
                program.append(("join", name, member, len(ranks)))
                program.append(("init", name, member, name, tuple(range(len(ranks))), None, None, None))
        programs.append([*program, ("mark", "end")])
    return programs


def record_step(topology: Topology, microbatches: int, **options: Any) -> list[list[Action]]:
    """What each rank does with its pipeline's groups in one step of forward and backward passes.

    ``options`` change Megatron's configuration.
    """
    programs: list[list[Action]] = []
    for rank in range(topology.world):
        with (
            nccl(),
            fake_world(rank, topology.world),
            _patched(_Groups(), []),
            recording() as program,
            _OnCpu(),
        ):
            open_process_groups(topology)
            try:
                _run_schedule(topology, microbatches, options)
            finally:
                parallel_state.destroy_model_parallel()
        programs.append(program)
    return programs


def _run_schedule(topology: Topology, microbatches: int, options: dict[str, Any]) -> None:
    interleaved = topology.virtual > 1
    layout = Layout({**MODEL, "num_hidden_layers": topology.pipeline * topology.virtual}, topology)
    trainer = TrainerConfig(
        tensor_parallel=topology.tensor,
        pipeline_parallel=topology.pipeline,
        data_parallel=topology.data,
        virtual_pipeline=topology.virtual,
    )
    config = transformer_config(layout, trainer, Device("cpu"), torch.float32)
    vars(config).update(options)
    chunks = [_Stage(config, chunk) for chunk in range(topology.virtual)]

    def step(batches: Any, model: Any) -> Any:
        return model(), lambda output: (output.sum(), torch.tensor(1), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(()) for _ in chunks] if interleaved else iter(()),
        model=chunks if interleaved else chunks[0],
        num_microbatches=microbatches,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
        forward_only=False,
    )


def run_programs(programs: Sequence[Sequence[Action]], queues: int = 1) -> Machine:
    """A machine that has run the programs of trainer ranks."""
    machine = Machine()
    for rank, program in enumerate(programs):
        machine.add(Process(f"trainer rank {rank}", rank // 8, queues), program)
    machine.run()
    return machine

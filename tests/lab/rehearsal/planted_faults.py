"""Rehearses a rank once for each fault, with that fault planted: CONFIG, and ranks by fault as JSON."""

import json
import sys
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from megasync.config import load_config
from megasync.lab.rehearsal.child import prepare

config = load_config(sys.argv[1])
device = prepare(config, "0.16.1")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megasync.lab.rehearsal.rank import rehearse_rank  # noqa: E402
from megasync.layout.families import experts  # noqa: E402
from megasync.layout.topology import Topology  # noqa: E402
from megasync.trainer import learner, model  # noqa: E402

set_marks, options = model.set_param_attributes, model.transformer_config


def marks(part: str, **values):
    """Marks that are as they should be, except on parameters with this part in their name."""

    def set_wrong(weights, *arguments):
        set_marks(weights, *arguments)
        for name, weight in weights.items():
            if part in name:
                for mark, value in values.items():
                    setattr(weight, mark, value)

    return patch.object(model, "set_param_attributes", set_wrong)


def option(**values):
    def with_option(*arguments):
        made = options(*arguments)
        for name, value in values.items():
            setattr(made, name, value)
        return made

    return patch.object(model, "transformer_config", with_option)


@contextmanager
def renamed_norm():
    rule = experts.QKV_WEIGHT
    first = next(r for r in experts.SPARSE["qwen3_moe"].layer if r.te and r.te.endswith("layer_norm_weight"))
    wrong = first.te.replace("layer_norm_weight", "layernorm_weight")
    object.__setattr__(first, "te", wrong)
    try:
        yield rule
    finally:
        object.__setattr__(first, "te", wrong.replace("layernorm_weight", "layer_norm_weight"))


def expert_ranks_in_order_of(topology, rank):
    """Expert coordinates as if experts were spread over ranks before their copies."""
    within, etp = rank % (topology.tensor * topology.data), topology.expert_tensor_size
    copies = topology.expert_data
    return type(coords(topology, rank))(within % etp, within // etp // copies, within // etp % copies)


coords = Topology.expert_coords
layers = Topology.stage_layers


def late_layers(topology, count):
    """Chunks that begin one layer late."""
    return [[range(part.start + 1, part.stop + 1) for part in stage] for stage in layers(topology, count)]


def narrow(**values):
    values["grad_reduce_in_fp32"] = False
    return engine_options(**values)


engine_options = learner.DistributedDataParallelConfig
build = learner.build_chunks


def float_chunks(layout, trainer, device, dtype):
    return build(layout, trainer, device, torch.float32)


FAULTS = {
    "none": lambda: ExitStack(),
    "a spec name": renamed_norm,
    "a missing mark": lambda: marks("q_layernorm", sequence_parallel=False),
    "a mark too many": lambda: marks("router.weight", tensor_model_parallel=True),
    "experts reduced over all data ranks": lambda: patch.object(
        parallel_state, "get_expert_data_parallel_group", lambda *_, **__: parallel_state.get_data_parallel_group()
    ),
    "experts in the wrong buffer": lambda: marks(".experts.", allreduce=True),
    "an order of expert ranks": lambda: patch.object(Topology, "expert_coords", expert_ranks_in_order_of),
    "an option that Transformer Engine refuses": lambda: option(normalization="BatchNorm"),
    "an interleaved stage that is off by one": lambda: patch.object(Topology, "stage_layers", late_layers),
    "a gradient buffer of 16 bits": lambda: patch.object(learner, "DistributedDataParallelConfig", narrow),
    "recomputation that is not switched on": lambda: option(recompute_granularity=None),
    "weights in another dtype": lambda: patch.object(learner, "build_chunks", float_chunks),
}

found: dict = {}
# Activations of each stage without a fault; only one fault changes them.
saved: dict[int, int] = {}
for fault, rank in json.loads(sys.argv[2]).items():
    with FAULTS[fault]():
        stages = {} if "recomputation" in fault else saved
        found[fault] = rehearse_rank(config, rank, device, stages).differences
print(json.dumps(found))

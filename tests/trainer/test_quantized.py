"""Ranks quantize their shards to what quantizing the whole matrices gives, bit for bit, wherever blocks are cut."""

import pytest
import torch
import torch.distributed as dist
from family_layouts import layout_of
from fp8_folders import quantize

from megasync.layout.block_fp8 import SCALES, Block
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.quantized import QuantizedLayout
from megasync.layout.shards import HfFolder, assemble
from megasync.layout.topology import Topology

pytestmark = pytest.mark.processes

# It divides none of the ranks' shares.
BLOCK = (20, 28)
LAYOUTS = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-ep2-etp1": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": 2,
        "expert_tensor_parallel": 1,
    },
    "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1},
}
CASES = {"qwen2": ("tp2", "pp2"), "qwen3_moe": ("tp2", "tp2-ep2-etp1"), "deepseek_v3": ("tp2-ep2-etp1",)}


def box_of(shape):
    return Box(0, shape[0], 0, shape[1])


@pytest.mark.parametrize("family", CASES)
def test_shards_quantize_like_whole_matrices(models, run_ranks, family):
    config = read_hf_config(models[family])
    shapes = Layout(config, Topology()).hf_tensors
    names = sorted(name for name, shape in shapes.items() if "_proj" in name and len(shape) == 2)
    trainers = {label: LAYOUTS[label] for label in CASES[family]}
    ranks = run_ranks(quantized, 2, model=models[family], names=names, block=BLOCK, trainers=trainers)
    with HfFolder(models[family]) as folder:
        whole = {name: folder.reader(name, shapes[name])(box_of(shapes[name])).bfloat16() for name in names}
    for label, trainer in trainers.items():
        layout = QuantizedLayout(layout_of(models[family], trainer), Block(*BLOCK), names)
        for state, change in enumerate((1.0, 1.5)):
            held = [rank[label][state] for rank in ranks]
            for name in names:
                values, scales = quantize(whole[name] * change, BLOCK)
                actual = assemble(name, layout, lambda rank, param, held=held: held[rank][param])
                assert torch.equal(actual.view(torch.uint8), values.view(torch.uint8)), (label, name)
                for rank in held:
                    assert name + SCALES not in rank or torch.equal(rank[name + SCALES], scales)


def quantized(model, names, block, trainers):
    """What a rank has for servers in block FP8, before and after its weights have changed, for each layout."""
    from rank_engines import close, make_engine

    from megasync.trainer.quantized import QuantizedWeights

    results = {}
    for label, trainer in trainers.items():
        engine = make_engine(model, trainer, dtype="bfloat16")
        weights = QuantizedWeights(
            QuantizedLayout(engine.layout, Block(*block), names), dist.get_rank(), engine.params()
        )
        params, states = weights.params(), []
        for change in (1.0, 1.5):
            with torch.no_grad():
                for param in engine.params().values():
                    param.mul_(change)
            weights.refresh()
            states.append({name: param.clone() for name, param in params.items()})
        results[label] = states
        close(engine)
    return results

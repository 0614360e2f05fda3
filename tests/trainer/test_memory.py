"""What `megasync plan` says of a rank's memory is what the engine holds."""

import json
from pathlib import Path

import pytest

from megasync.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from megasync.preflight.memory import stage_memory
from megasync.sync.layout import Layout
from megasync.sync.topology import Topology

RUNS = {
    "tp2-float32": ("float32", {"tensor_parallel": 2}),
    "tp2-bfloat16": ("bfloat16", {"tensor_parallel": 2}),
    "pp2-uneven": ("bfloat16", {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "dp2-replicated": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": False}),
    "dp2-distributed": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": True}),
}
# A distributed optimizer begins each parameter at a multiple of 64 elements, and cuts at one of 128 a rank.
PADDING = 1.15


@pytest.fixture(scope="module")
def held(run_ranks, models):
    return run_ranks("held_bytes", 2, model=models["qwen3"], runs=RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_weights_gradients_and_optimizer(held, models, name):
    dtype, parallel = RUNS[name]
    config = Config(
        model=ModelConfig(path=models["qwen3"], dtype=dtype),
        data=DataConfig(prompt=PromptConfig(max_tokens=8)),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=16)),
        trainer=TrainerConfig(**parallel, tokens_per_microbatch=24),
    )
    values = json.loads((Path(config.model.path) / "config.json").read_text())
    layout = Layout(values, Topology.from_config(config.trainer))
    for rank, real in enumerate(held):
        planned = stage_memory(config, layout, 0, layout.topology.coords(rank).pp)
        print(name, rank, real[name], planned)
        assert real[name]["weights"] == planned.weights
        for kind in ("gradients", "optimizer"):
            share = real[name][kind] / getattr(planned, kind)
            assert share == 1 or (name == "dp2-distributed" and 1 <= share <= PADDING), kind

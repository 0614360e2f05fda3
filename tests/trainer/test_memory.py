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
from megasync.preflight.memory import checkpoint_bytes, stage_memory
from megasync.sync.layout import Layout
from megasync.sync.topology import Topology

RUNS = {
    "tp2-float32": ("float32", {"tensor_parallel": 2}),
    "tp2-bfloat16": ("bfloat16", {"tensor_parallel": 2}),
    "pp2-uneven": ("bfloat16", {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "dp2-replicated": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": False}),
    "dp2-distributed": ("bfloat16", {"data_parallel": 2, "distributed_optimizer": True}),
}
# A distributed optimizer begins each parameter at a round number of elements, and cuts where a rank's share ends.
PADDING = 0.01
TOKENS = {"prompt": 8, "response": 16}


@pytest.fixture(scope="module")
def held(run_ranks, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks("held_bytes", 2, model=models["qwen3"], runs=RUNS, **TOKENS, folder=str(folder))


def configured(model, name):
    """A configuration of that run, and its layout."""
    dtype, parallel = RUNS[name]
    config = Config(
        model=ModelConfig(path=model, dtype=dtype),
        data=DataConfig(prompt=PromptConfig(max_tokens=TOKENS["prompt"])),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=TOKENS["response"])),
        trainer=TrainerConfig(**parallel, tokens_per_microbatch=sum(TOKENS.values())),
    )
    values = json.loads((Path(model) / "config.json").read_text())
    return config, Layout(values, Topology.from_config(config.trainer))


def planned(model, name, rank):
    config, layout = configured(model, name)
    return stage_memory(config, layout, 0, layout.topology.coords(rank).pp)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_weights_gradients_and_optimizer_are_exact(held, models, name, rank):
    real, plan = held[rank][name], planned(models["qwen3"], name, rank)
    assert real["weights"] == plan.weights
    padding = PADDING if name == "dp2-distributed" else 0
    for kind in ("gradients", "optimizer"):
        assert real[kind] == pytest.approx(getattr(plan, kind), rel=padding, abs=0)


@pytest.mark.parametrize("name", ["tp2-float32", "tp2-bfloat16", "dp2-replicated"])
def test_activations_are_of_the_size_that_is_estimated(held, models, name):
    """Without fused layers more is saved, such as float32 copies in norms; never several times as much."""
    plan = planned(models["qwen3"], name, 0)
    assert 1 <= held[0][name]["activations"] / (plan.activations + plan.logits) <= 2.5


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_as_large_as_is_expected(held, models, name):
    """But for headers of files and tensors and the ranks' random states, which matter in a model as small as this one."""
    planned_bytes = checkpoint_bytes(*configured(models["qwen3"], name))
    assert 0 <= held[0][name]["checkpoint"] - planned_bytes <= 128 * 1024

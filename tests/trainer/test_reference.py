"""Reference weights streamed through the device score exactly as if they were the model's own."""

import json
from pathlib import Path

import pytest
import torch

from megasync.config.schema import AlgorithmConfig, Config, ModelConfig, TrainerConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.planning.memory import reference_bytes

RUNS = {
    1: {"latent-tied": ("deepseek_v3_plain", {})},
    2: {
        "tp2": ("llama", {"tensor_parallel": 2}),
        "tp2-sp": ("deepseek_v3", {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"}),
        "pp2-tied": ("qwen2_moe", {"pipeline_parallel": 2, "first_stage_layers": 1}),
        "pp2-vpp2": ("mistral", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        "dp2-distributed": ("qwen3", {"data_parallel": 2, "distributed_optimizer": True}),
    },
}
NAMES = [name for runs in RUNS.values() for name in runs]


@pytest.fixture(scope="module")
def results(run_ranks, models):
    results = {}
    for world, runs in RUNS.items():
        ranks = run_ranks("streamed_reference", world, runs={n: (models[m], t) for n, (m, t) in runs.items()})
        results |= {name: [rank[name] for rank in ranks] for name in runs}
    return results


@pytest.mark.parametrize("name", NAMES)
def test_streamed_scores_are_the_references_bit_for_bit_and_weights_stay_where_they_are(results, name):
    """After a pass, and after one that failed while a block pointed elsewhere."""
    for rank in results[name]:
        assert rank["in_place"]
        scores = rank["scores"]
        assert rank["microbatches"] > 1
        assert (scores["others"] - scores["reference"]).abs().max() > 1e-3
        assert torch.equal(scores["streamed"], scores["reference"])
        assert torch.equal(scores["again"], scores["others"])


@pytest.mark.parametrize("name", NAMES)
def test_the_slots_have_the_planned_size(results, models, name):
    model, trainer = next(runs[name] for runs in RUNS.values() if name in runs)
    config = Config(
        model=ModelConfig(path=models[model], dtype="float32"),
        trainer=TrainerConfig(**trainer),
        algorithm=AlgorithmConfig(kl_coef=0.1),
    )
    values = json.loads((Path(models[model]) / "config.json").read_text())
    layout = Layout(values, Topology.from_config(config.trainer))
    planned = [reference_bytes(config, layout, rank) for rank in range(layout.topology.world)]
    assert planned == [rank["device_bytes"] for rank in results[name]]
    config.algorithm.kl_coef = 0.0
    assert reference_bytes(config, layout, 0) == 0

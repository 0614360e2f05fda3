"""Reference weights streamed through the device score exactly as if they were the model's own."""

import pytest
import torch

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
    found = {}
    for world, runs in RUNS.items():
        ranks = run_ranks("streamed_reference", world, runs={n: (models[m], t) for n, (m, t) in runs.items()})
        found |= {name: [rank[name] for rank in ranks] for name in runs}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_streamed_scores_are_the_references_bit_for_bit(results, name):
    for rank in results[name]:
        scores = rank["scores"]
        assert rank["microbatches"] > 1
        assert (scores["others"] - scores["reference"]).abs().max() > 1e-3
        assert torch.equal(scores["streamed"], scores["reference"])
        assert torch.equal(scores["again"], scores["others"])


@pytest.mark.parametrize("name", NAMES)
def test_the_policys_weights_stay_where_they_are(results, name):
    """After a pass, and after one that failed while a block pointed elsewhere."""
    assert all(rank["in_place"] for rank in results[name])

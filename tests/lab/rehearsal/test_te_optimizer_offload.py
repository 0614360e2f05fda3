"""A share of the optimizer's state in host memory: Megatron's own optimizer for it, on the CPU with a stand-in GPU."""

from itertools import product

import pytest
import torch
from trainer_ranks import TIMED

# Which weights are offloaded depends on their order, so half of them are others in each run.
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}
SCHEDULE = {"decay": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "clip_grad": 0.5}
DATA = {"data_parallel": 2, "minibatches": 2}
EXPERTS = {"data_parallel": 2, "expert_parallel": 2}
# Adapters of experts that two ranks share: some of their gradients are parts, which are added up before the copies.
CUT_ADAPTERS = {"data_parallel": 2, "expert_tensor_parallel": 2, "lora": {"rank": 4, "alpha": 8.0}}


def optimizers(**options) -> dict[str, dict]:
    return {name: {**options, "offload": share} for name, share in SHARES.items()}


def assert_same_training(found: dict, expected: dict) -> None:
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - TIMED:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], weight, atol=1e-6, rtol=0, msg=key)


@pytest.mark.parametrize(
    ("family", "trainer", "megatron"),
    [
        ("qwen2", DATA, ""),
        ("qwen3_moe", EXPERTS, ""),
        ("qwen3_moe", CUT_ADAPTERS, ""),
        pytest.param("qwen2", DATA, " 0.19.2", marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", EXPERTS, " 0.19.2", marks=pytest.mark.matrix),
        pytest.param("qwen3_moe", CUT_ADAPTERS, " 0.19.2", marks=pytest.mark.matrix),
    ],
)
def test_training_is_the_same_with_any_share(run_ranks, models, family, trainer, megatron):
    """In float32, over steps with a schedule, weight decay and clipping."""
    runs = {name: {"steps": 3, "trainer": trainer, "optimizer": each} for name, each in optimizers(**SCHEDULE).items()}
    for rank in run_ranks("policies", 2, flavour=f"te{megatron}", model=models[family], runs=runs):
        assert max(step["train/grad_norm"] for step in rank["none"]["metrics"]) > 0.5  # clipped
        for name in ("half", "all"):
            assert_same_training(rank[name], rank["none"])


@pytest.mark.parametrize("megatron", ["", pytest.param(" 0.19.2", marks=pytest.mark.matrix)])
def test_a_checkpoint_of_any_share_loads_into_any_other(run_ranks, models, tmp_path, megatron):
    """Bitwise, main weights and moments. They start with the precision of the model folder."""
    arguments = {"model": models["qwen2"], "ways": optimizers(), "folder": str(tmp_path)}
    ranks = run_ranks("states", 2, flavour=f"te{megatron}", **arguments)
    for rank, (name, other) in product(ranks, product(SHARES, SHARES)):
        assert rank[name]["norm"] == pytest.approx(rank["none"]["norm"], rel=1e-6)
        assert all(torch.equal(rank[name]["start"][key], start) for key, start in rank["none"]["start"].items())
        loaded, saved = rank[name, other], rank[other]
        assert loaded["after"].keys() == saved["after"].keys()
        assert {kind for _, kind in saved["after"]} == {"main_weight", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(loaded["after"][key], values) for key, values in saved["after"].items())
        assert all(torch.equal(loaded["weights"][key], weight) for key, weight in saved["weights"].items())
        for key, values in rank["none"]["after"].items():
            torch.testing.assert_close(rank[name]["after"][key], values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(run_ranks, models, tmp_path, dtype):
    optimizer = {"offload": 0.5, "clip_grad": 0.5}
    dense = {"model": models["qwen2"], "dtype": dtype, "trainer": {"data_parallel": 2}, "optimizer": optimizer}
    runs = {"dense": dense, "adapters": {**dense, "model": models["qwen3_moe"], "trainer": CUT_ADAPTERS}}
    for rank, name in product(run_ranks("resume", 2, flavour="te", runs=runs, folder=str(tmp_path)), runs):
        metrics, weights = rank[name]["straight"]
        resumed_metrics, resumed_weights = rank[name]["resumed"]
        assert metrics == resumed_metrics
        assert all(torch.equal(weights[key], resumed_weights[key]) for key in weights)


def test_an_update_is_skipped_on_all_ranks_if_one_is_not_finite(run_ranks, models, tmp_path):
    arguments = {"model": models["qwen2"], "folder": str(tmp_path), "optimizer": {"offload": 0.5}}
    for rank in run_ranks("guard", 2, flavour="te", **arguments):
        assert rank["skipped"]["train/skipped"] == 1
        assert rank["unchanged"] and rank["changed"]


def test_norms_by_layers_are_those_without_offload(run_ranks, models):
    runs = {
        name: {"model": models["qwen2"], "trainer": {"data_parallel": 2}, "optimizer": each}
        for name, each in optimizers().items()
    }
    for rank in run_ranks("layer_norms", 2, flavour="te", runs=runs):
        expected = {key: value for key, value in rank["none"][1].items() if key.startswith("norms/")}
        assert len(expected) > 4
        for name in ("half", "all"):
            for key, value in expected.items():
                assert rank[name][1][key] == pytest.approx(value, rel=1e-4), (name, key)


def test_a_critic_offloads_its_own_share(run_ranks, models, tmp_path):
    """In turns with the policy, which offloads another share; a checkpoint after the second step is loaded."""
    algorithm = {"advantage": "gae"}
    shares = {"none": (0.0, 0.0), "both": (0.5, 1.0)}
    runs = {
        name: {
            "steps": 3,
            "trainer": {"data_parallel": 2},
            "algorithm": algorithm,
            "optimizer": {"offload": policy},
            "critic": {"offload": True, "optimizer": {"lr": 1e-3, "offload": critic}},
        }
        for name, (policy, critic) in shares.items()
    }
    found = {}
    for name, run in runs.items():
        folder = str(tmp_path / name)
        found[name] = run_ranks("critics", 2, flavour="te", model=models["qwen2"], runs={name: run}, folder=folder)
    for both, none in zip(found["both"], found["none"], strict=True):
        assert_same_training(both["both"], none["none"])
        for key, weight in none["none"]["critic"].items():
            torch.testing.assert_close(both["both"]["critic"][key], weight, atol=1e-6, rtol=0, msg=key)

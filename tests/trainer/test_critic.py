"""A critic beside the policy: values, advantages and steps on every layout, taking turns, warm-up, and checkpoints."""

import math

import pytest
from trainer_ranks import TWO_RANKS, assert_same_metrics

STEPS = {"steps": 3}
# Two of four trajectories of a group are one sample, each of which may be on another rank.
FORKED = {**STEPS, "samples": 4, "forked": True, "algorithm": {"advantage_options": {"lam": 0.9, "gamma": 0.95}}}
PENALTY = {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}


@pytest.fixture(scope="module")
def model(models):
    return models["qwen3"]


@pytest.fixture(scope="module")
def alone(run_ranks, model):
    settings = {
        "plain": STEPS,
        "plain bfloat16": {**STEPS, "dtype": "bfloat16"},
        "turns": {**STEPS, "critic": {"offload": True}},
        "warmup": {**STEPS, "critic": {"warmup_steps": 2}, "optimizer": {"lr": 0.01, "warmup_steps": 2}},
        "minibatches": {**STEPS, "trainer": {"minibatches": 2}, "algorithm": PENALTY},
        "forked": FORKED,
        "lam": {**STEPS, "algorithm": {"advantage_options": {"lam": 0.9}, "normalize_std": False}},
    }
    return run_ranks("critics", 1, model=model, runs=settings)[0]


@pytest.fixture(scope="module")
def spread(run_ranks, model):
    settings = {layout: {**STEPS, "trainer": trainer} for layout, trainer in TWO_RANKS.items()}
    settings["tp2"]["trainer"] = {**TWO_RANKS["tp2"], "sequence_parallel": True}
    settings["forked"] = {**FORKED, "trainer": TWO_RANKS["dp2"]}
    settings["minibatches"] = {**STEPS, "trainer": {**TWO_RANKS["dp2"], "minibatches": 2}, "algorithm": PENALTY}
    return run_ranks("critics", 2, model=model, runs=settings)


def same_weights(left, right):
    return all((left[name] == right[name]).all() for name in left)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "cp2", "minibatches", "forked"])
def test_a_critic_learns_the_same_on_every_layout(alone, spread, layout):
    expected = alone[layout if layout in ("minibatches", "forked") else "plain"]["metrics"]
    first, second = (rank[layout]["metrics"] for rank in spread)
    for step in range(3):
        assert_same_metrics(first[step], second[step], rel=0, abs=0)
        assert_same_metrics(first[step], expected[step], rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("run", ["plain", "plain bfloat16", "minibatches", "lam"])
def test_values_approach_the_returns(alone, run):
    metrics = alone[run]["metrics"]
    assert all(math.isfinite(value) for each in metrics for value in each.values())
    # A response's reward is 0, 1 or 2, and values begin near 0.
    assert abs(metrics[0]["critic/value_mean"]) < 0.5 < metrics[0]["critic/return_mean"]
    assert metrics[2]["critic/value_mean"] > metrics[0]["critic/value_mean"]
    assert metrics[2]["critic/loss"] < metrics[0]["critic/loss"]


def test_taking_turns_on_the_device_changes_nothing(alone):
    """On a CPU nothing is on another device, so nothing moves; rehearsals move it."""
    for kind in ("weights", "critic"):
        assert same_weights(alone["turns"][kind], alone["plain"][kind])


def test_the_policy_stands_still_in_the_first_steps(alone):
    first, second, third = alone["warmup"]["metrics"]
    assert "train/loss" not in first and "train/loss" not in second and "train/loss" in third
    assert first["critic/loss"] == alone["plain"]["metrics"][0]["critic/loss"]
    # The third step is the first of two in which its learning rate rises.
    assert third["train/lr"] == pytest.approx(0.005)


def test_a_kl_penalty_in_the_rewards_starts_at_zero(alone):
    """Before the first step the policy is the reference."""
    metrics = alone["minibatches"]["metrics"]
    assert metrics[0]["train/reward_penalty"] == pytest.approx(0, abs=1e-9)
    assert abs(metrics[2]["train/reward_penalty"]) > 1e-4


def test_policy_and_critic_resume_bitwise(alone, run_ranks, model, tmp_path):
    resumed = run_ranks("critics", 1, model=model, runs={"plain": STEPS}, folder=str(tmp_path))[0]["plain"]
    for kind in ("weights", "critic"):
        assert same_weights(resumed[kind], alone["plain"][kind])
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert (saved / "critic" / "COMPLETE").is_file()

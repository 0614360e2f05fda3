"""Estimators and losses against verl's functions of the same names, on random batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chosen_tokens import chosen_of
from token_rewards import step_of as token_step_of
from token_rewards import with_values

from megasync.algorithms import estimator_of
from megasync.algorithms.advantages import StepRewards, gae, optimal_token_baseline
from megasync.algorithms.losses import policy_loss
from megasync.algorithms.value_loss import value_loss
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig

pytest.importorskip("verl.version", reason="verl is not installed; run `megasync install verl`")
pytestmark = pytest.mark.extra
GROUPS, SIZE, LONGEST = 6, 4, 9
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
# What verl calls the aggregations; its constant is the width of the batch.
AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


@pytest.fixture(scope="module")
def core_algos():
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture
def batch():
    """Rewards, lengths and log-probs of a step, padded to [responses, longest] for verl."""
    drawn = np.random.default_rng(5)
    count = GROUPS * SIZE
    lengths = drawn.integers(1, LONGEST + 1, count)
    lengths[0] = LONGEST
    mask = torch.from_numpy((np.arange(LONGEST) < lengths[:, None]).astype(np.float32))
    rewards = drawn.choice([0.0, 0.5, 1.0], count)
    old = torch.from_numpy(drawn.uniform(-3, -0.1, (count, LONGEST)).astype(np.float32))
    new = (old + torch.from_numpy(drawn.normal(0, 0.4, (count, LONGEST)).astype(np.float32))).clamp(max=-1e-3)
    return SimpleNamespace(
        rewards=rewards, lengths=lengths, mask=mask, old=old, new=new, groups=np.repeat(np.arange(GROUPS), SIZE)
    )


# verl's gpg counts rewards other than 0, where the paper counts groups whose rewards differ.
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize(
    "name", [name for name, item in ADVANTAGES.items() if not (item.tokens or item.reference or name == "gpg")]
)
def test_advantages_are_verls(core_algos, batch, name, normalize_std):
    scores = torch.zeros_like(batch.mask)
    # verl finds the reward of a response in any of its tokens.
    scores[torch.arange(len(batch.rewards)), torch.from_numpy(batch.lengths) - 1] = torch.from_numpy(
        batch.rewards
    ).float()
    read = {"norm_adv_by_std_in_grpo": normalize_std}
    options = {"config": SimpleNamespace(gamma=1.0, get=read.get)}
    if name in ("grpo", "gdpo"):
        options["norm_adv_by_std_in_grpo"] = normalize_std
    if name != "reinforce_plus_plus":
        options["index"] = batch.groups
    baselines = np.linspace(0, 1, GROUPS)[batch.groups]
    if name == "remax":
        options = {"reward_baselines": torch.from_numpy(baselines).float()}
    expected, _ = core_algos.get_adv_estimator_fn(name)(token_level_rewards=scores, response_mask=batch.mask, **options)
    step = StepRewards(batch.rewards, batch.groups, batch.lengths, baselines=baselines)
    actual = estimator_of(AlgorithmConfig(advantage=name, normalize_std=normalize_std))(step)
    assert actual.tolist() == pytest.approx(expected[:, 0].tolist(), rel=1e-4, abs=1e-4)


def test_gpg_is_verls_but_for_its_scale(core_algos, batch):
    scores = torch.from_numpy(batch.rewards).float()[:, None] * batch.mask / batch.mask.sum(dim=1, keepdim=True)
    theirs, _ = core_algos.get_adv_estimator_fn("gpg")(
        token_level_rewards=scores, response_mask=batch.mask, index=batch.groups
    )
    actual = estimator_of(AlgorithmConfig(advantage="gpg"))(StepRewards(batch.rewards, batch.groups, batch.lengths))
    spread = sum(len(set(batch.rewards[batch.groups == group])) > 1 for group in range(GROUPS)) * SIZE
    scale = np.count_nonzero(batch.rewards) / spread
    assert actual.tolist() == pytest.approx((scale * theirs[:, 0]).tolist(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_of_two_reward_functions_are_verls(core_algos, batch, normalize_std):
    parts = {"math": batch.rewards, "style": np.random.default_rng(6).normal(0, 100, len(batch.rewards))}
    # verl puts a score behind the prompt, at the last token of the response.
    prompts = torch.zeros(len(batch.rewards), 2)
    attended = torch.cat((torch.ones_like(prompts), batch.mask), dim=1).long()
    expected, _ = core_algos.get_adv_estimator_fn("gdpo")(
        token_level_rewards=torch.zeros_like(batch.mask),
        response_mask=batch.mask,
        index=batch.groups,
        norm_adv_by_std_in_grpo=normalize_std,
        config={"gdpo_reward_keys": list(parts), "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch=parts,
        batch={"prompts": prompts, "attention_mask": attended},
    )
    step = StepRewards(batch.rewards, batch.groups, batch.lengths, parts, {"math": 1.0, "style": 0.5})
    actual = estimator_of(AlgorithmConfig(advantage="gdpo", normalize_std=normalize_std))(step)
    assert actual.tolist() == pytest.approx(expected[:, 0].tolist(), rel=1e-4, abs=1e-4)


def config_of(name: str):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=20.0 if name.startswith("dppo") else 3.0,
        policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1, kl_cov_ratio=0.05, ppo_kl_coef=1.0),
        tau_pos=1.0,
        tau_neg=1.05,
    )


# clip_cov draws its tokens at random.
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clip_cov"])
def test_a_loss_and_its_gradient_are_verls(core_algos, batch, name, aggregation):
    if (name, aggregation) in (
        ("sapo", "token"),
        ("sapo", "constant"),
        ("geo_mean", "token"),
        ("geo_mean", "constant"),
    ):
        pytest.skip("verl takes the mean of sequences whatever the mode")
    advantages = torch.linspace(-2, 2, len(batch.lengths))
    theirs = batch.new.clone().requires_grad_()
    expected, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=theirs,
        advantages=advantages[:, None].expand_as(batch.new) * batch.mask,
        response_mask=batch.mask,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config_of(name),
    )
    expected.backward()

    keep = batch.mask.bool()
    lengths = torch.from_numpy(batch.lengths)
    ours = batch.new[keep].clone().requires_grad_()
    options = {"share": 0.05} if name == "kl_cov" else {}
    config = AlgorithmConfig(loss=name, loss_options=options, correction="none", **CLIP)
    each = advantages.repeat_interleave(lengths)
    columns = {
        "logprobs": ours,
        "old": batch.old[keep],
        "behaviour": batch.old[keep],
        "advantages": each,
        "mask": torch.ones(int(lengths.sum())),
        "segments": torch.arange(len(lengths)).repeat_interleave(lengths),
    }
    if name == "kl_cov":
        columns["chosen"] = chosen_of(config, *(values.tolist() for values in (batch.new[keep], batch.old[keep], each)))
    if aggregation == "sequence":
        columns["weights"] = (1 / lengths).repeat_interleave(lengths)
    actual, _ = policy_loss(config, columns)
    divisor = {"token": lengths.sum(), "sequence": len(lengths), "constant": len(lengths) * LONGEST}[aggregation]
    loss = actual / divisor
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert ours.grad.tolist() == pytest.approx(theirs.grad[keep].tolist(), rel=1e-3, abs=1e-6)


@pytest.fixture
def critic_batch():
    """Responses with tokens that are not trained, padded to [responses, longest]."""
    drawn = np.random.default_rng(3)
    mask = np.zeros((6, 9))
    for row, length in enumerate(drawn.integers(2, 10, 6)):
        mask[row, :length] = drawn.integers(0, 2, length)
        mask[row, length - 1] = 1
    tensors = {name: torch.from_numpy(drawn.normal(0, 1, (6, 9))).float() for name in ("values", "old", "returns")}
    return {"mask": torch.from_numpy(mask).float(), **tensors}


def test_advantages_and_returns_of_a_critic_are_verls(core_algos, critic_batch):
    trained = critic_batch["mask"].bool()
    rewards = torch.zeros_like(critic_batch["mask"])
    # The last token of each is trained.
    ends = (trained * torch.arange(9)).argmax(dim=1)
    rewards[torch.arange(6), ends] = torch.arange(6.0)
    advantages, returns = core_algos.compute_gae_advantage_return(
        token_level_rewards=rewards, values=critic_batch["old"], response_mask=critic_batch["mask"], gamma=0.9, lam=0.8
    )
    starts = np.cumsum([0, *trained.sum(dim=1).tolist()])
    step = with_values(rewards[trained].double().numpy(), critic_batch["old"][trained].double().numpy(), starts)
    actual = gae(step, gamma=0.9, lam=0.8)
    assert (actual + step.values).tolist() == pytest.approx(returns[trained].tolist(), abs=1e-5)
    # verl always normalises.
    whitened = (actual - actual.mean()) / np.sqrt(actual.var(ddof=1) + 1e-8)
    assert whitened.tolist() == pytest.approx(advantages[trained].tolist(), abs=1e-4)


@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_the_loss_of_a_critic_is_verls(core_algos, critic_batch, clip):
    trained = critic_batch["mask"].bool()
    expected, clipped = core_algos.compute_value_loss(
        vpreds=critic_batch["values"],
        values=critic_batch["old"],
        returns=critic_batch["returns"],
        response_mask=critic_batch["mask"],
        cliprange_value=clip,
    )
    flat = {name: critic_batch[name][trained] for name in ("values", "returns")}
    loss, sums = value_loss(
        **flat,
        old_values=critic_batch["old"][trained],
        mask=torch.ones(int(trained.sum())),
        clip=None if clip > 1 else clip,
    )
    assert loss.item() / sums["tokens"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums["clip_fraction"].item() / sums["tokens"].item() == pytest.approx(clipped.item())


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_advantages_of_the_optimal_baseline_are_verls(core_algos, name):
    drawn = np.random.default_rng(2)
    count, longest = 8, 7
    lengths = drawn.integers(2, longest + 1, count)
    mask = (np.arange(longest) < lengths[:, None]).astype(np.float64)
    if name.startswith("tir"):
        # Tools wrote some of the tokens; the last one is the model's.
        mask *= drawn.integers(0, 2, mask.shape)
        mask[np.arange(count), lengths - 1] = 1
    rewards = np.zeros((count, longest))
    rewards[np.arange(count), lengths - 1] = drawn.choice([0.0, 1.0], count)
    logprobs, squares = drawn.uniform(-3, -0.1, mask.shape), drawn.uniform(0, 1, mask.shape)
    groups = np.repeat(np.arange(2), 4)
    expected, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=torch.from_numpy(rewards),
        response_mask=torch.from_numpy(mask),
        index=groups,
        old_log_probs=torch.from_numpy(logprobs),
        sum_pi_squared=torch.from_numpy(squares),
    )
    norms = 1 - 2 * np.exp(logprobs) + squares
    trained = mask.astype(bool)
    rows = [(int(group), rewards[at][trained[at]].tolist()) for at, group in enumerate(groups)]
    most = np.array([trained[groups == group].sum(axis=1).max() for group in range(2)])
    actual = optimal_token_baseline(token_step_of(rows, most, squared_norms=norms[trained]))
    assert actual.tolist() == pytest.approx(expected[torch.from_numpy(trained)].tolist(), abs=1e-6)

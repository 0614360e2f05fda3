"""Estimators and losses against verl's functions of the same names, on random batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chosen_tokens import chosen_of

from megasync.algorithms import estimator_of, policy_loss
from megasync.algorithms.advantages import StepRewards
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig

pytest.importorskip("verl.version", reason="verl is not installed; run `bash launch/setup_extra.sh verl`")
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
    found = estimator_of(AlgorithmConfig(advantage=name, normalize_std=normalize_std))(step)
    assert found.tolist() == pytest.approx(expected[:, 0].tolist(), rel=1e-4, abs=1e-4)


def test_gpg_is_verls_but_for_its_scale(core_algos, batch):
    scores = torch.from_numpy(batch.rewards).float()[:, None] * batch.mask / batch.mask.sum(dim=1, keepdim=True)
    theirs, _ = core_algos.get_adv_estimator_fn("gpg")(
        token_level_rewards=scores, response_mask=batch.mask, index=batch.groups
    )
    found = estimator_of(AlgorithmConfig(advantage="gpg"))(StepRewards(batch.rewards, batch.groups, batch.lengths))
    spread = sum(len(set(batch.rewards[batch.groups == group])) > 1 for group in range(GROUPS)) * SIZE
    scale = np.count_nonzero(batch.rewards) / spread
    assert found.tolist() == pytest.approx((scale * theirs[:, 0]).tolist(), rel=1e-4, abs=1e-4)


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
    found = estimator_of(AlgorithmConfig(advantage="gdpo", normalize_std=normalize_std))(step)
    assert found.tolist() == pytest.approx(expected[:, 0].tolist(), rel=1e-4, abs=1e-4)


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
    found, _ = policy_loss(config, columns)
    divisor = {"token": lengths.sum(), "sequence": len(lengths), "constant": len(lengths) * LONGEST}[aggregation]
    loss = found / divisor
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert ours.grad.tolist() == pytest.approx(theirs.grad[keep].tolist(), rel=1e-3, abs=1e-6)

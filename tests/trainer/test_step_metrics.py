"""What the metrics of a step are means of: with an optimizer step that was skipped, and tokens without a teacher."""

import math

import pytest
import torch

from megasync.algorithms.losses import policy_loss
from megasync.config.schema import AlgorithmConfig
from megasync.trainer.policy import PER_TOKEN, _summary

CONFIG = AlgorithmConfig(correction_cap=1.5, kl_coef=0.1, kl_kind="k2")
# Of each token: log-prob, before the step, the server's, of the reference; entropy, advantage, age.
FIRST = [
    (-1.0, -1.5, -1.0, -1.2, 0.5, 1.0, 0),
    (-2.0, -1.0, -2.5, -2.0, 1.5, -1.0, 0),
    (-0.5, -0.5, -0.4, -1.0, 0.1, 0.0, 1),
]
SECOND = [(-3.0, -2.0, -2.2, -2.5, 2.0, 2.0, 0), (-0.1, -2.0, -0.2, -0.3, 1.0, -2.0, 9)]
BROKEN = [(math.nan, -1.0, -1.0, -1.0, math.nan, 1.0, 0)]


def report(tokens, applied=1.0, grad_norm=2.0, gaps=()):
    """What the ranks report of an optimizer step; ``gaps`` are those to a teacher, NaN for tokens without one."""
    names = ("logprobs", "old", "behaviour", "reference", "entropy", "advantages", "ages")
    columns = {name: torch.tensor(column) for name, column in zip(names, zip(*tokens, strict=True), strict=True)}
    columns |= {"mask": torch.ones(len(tokens)), "teacher_gap": torch.tensor([*gaps] or [math.nan] * len(tokens))}
    loss, sums = policy_loss(CONFIG, columns)
    update = {"loss": loss.item(), "applied": applied, "grad_norm": grad_norm, "lr": 0.5}
    return {name: value.item() for name, value in sums.items()} | update


@pytest.fixture(scope="module")
def metrics():
    return _summary(
        [
            report(FIRST, grad_norm=2.0, gaps=[0.5, math.nan, -2.0]),
            report(BROKEN, applied=0.0, grad_norm=math.nan, gaps=[math.inf]),
            report(SECOND, grad_norm=4.0, gaps=[0.0, math.nan]),
        ]
    )


def test_a_skipped_optimizer_step_counts_as_skipped_and_in_nothing_else(metrics):
    assert metrics["train/skipped"] == 1 and metrics["train/computed_tokens"] == 5
    assert metrics["train/grad_norm"] == 3.0
    first, second = (report(tokens)["loss"] for tokens in (FIRST, SECOND))
    assert metrics["train/loss"] == pytest.approx((first + second) / 2)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_whose_optimizer_steps_were_all_skipped_has_no_means():
    assert _summary([report(BROKEN, applied=0.0), report(BROKEN, applied=0.0)]) == {"train/skipped": 2.0}
    assert _summary([]) == {"train/skipped": 0.0}


MEANS = {
    "entropy": lambda new, old, server, ref, entropy, advantage: entropy,
    "kl": lambda new, old, server, ref, entropy, advantage: (new - ref) ** 2 / 2,
    "approx_kl": lambda new, old, server, ref, entropy, advantage: math.exp(new - old) - 1 - (new - old),
    "logprob_diff": lambda new, old, server, ref, entropy, advantage: abs(old - server),
    "is_weight_mean": lambda new, old, server, ref, entropy, advantage: min(1.5, math.exp(old - server)),
    "is_outside_fraction": lambda new, old, server, ref, entropy, advantage: math.exp(old - server) > 1.5,
    "is_rejected_fraction": lambda new, old, server, ref, entropy, advantage: 0.0,
    "clip_fraction": lambda new, old, server, ref, entropy, advantage: (
        math.exp(new - old) > 1.28 if advantage > 0 else advantage < 0 and math.exp(new - old) < 0.8
    ),
    "dual_clip_fraction": lambda new, old, server, ref, entropy, advantage: advantage < 0 and math.exp(new - old) > 3,
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_mean_is_over_the_computed_tokens_of_the_applied_steps(metrics, name):
    expected = sum(MEANS[name](*token[:6]) for token in FIRST + SECOND) / 5
    assert expected or name == "is_rejected_fraction", "the tokens above show it"
    assert metrics[f"train/{name}"] == pytest.approx(expected, rel=1e-5)


def test_other_means_are_over_the_tokens_that_their_names_say(metrics):
    assert metrics["train/teacher_kl"] == pytest.approx((-0.5 + 2.0 - 0.0) / 3)
    ages = {0: [FIRST[0], FIRST[1], SECOND[0]], 1: [FIRST[2]], 7: [SECOND[1]]}
    for age, tokens in ages.items():
        gaps = [old - server for _, old, server, *_ in tokens]
        expected = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(tokens)
        assert metrics[f"train/server_kl@{age}"] == pytest.approx(expected, rel=1e-4)
    assert sum(name.startswith("train/server_kl@") for name in metrics) == len(ages)
    weights = [min(1.5, math.exp(old - server)) for _, old, server, *_ in FIRST + SECOND]
    share = sum(weights) ** 2 / (5 * sum(weight**2 for weight in weights))
    assert metrics["train/is_effective_share"] == pytest.approx(share, rel=1e-5)

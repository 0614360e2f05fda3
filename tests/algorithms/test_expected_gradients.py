"""What every estimator climbs: its expected gradient, over all outcomes of a small policy, some of which fork.

The policy writes a first token, one of three, and then a second one, one of two. Its gradients are sums over all groups
that it can sample, each weighed by its probability. So nothing here is estimated, and a bias is seen whatever its size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from toy_samples import Sample, advantages

from megasync.config.builtin import ADVANTAGES
from megasync.config.schema import AlgorithmConfig

# Logits of the first token, and of the second after each of them.
FIRST = np.array([0.3, -0.2, 0.5])
SECOND = np.array([[0.1, -0.4], [0.7, 0.2], [-0.3, 0.6]])
PARAMETERS = FIRST.size + SECOND.size
SAMPLES = 3
# Samples that begin so are two trajectories.
FORKED = (1, 2)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@dataclass(frozen=True)
class Outcome:
    """What a sample may be: its tokens, their probability, and their log-probs' gradients, [tokens, parameters]."""

    tokens: tuple[int, int]
    probability: float
    scores: np.ndarray

    @property
    def score(self):
        return self.scores.sum(axis=0)


def outcomes() -> list[Outcome]:
    results = []
    for a, b in itertools.product(range(3), range(2)):
        first, second = softmax(FIRST), softmax(SECOND[a])
        scores = np.zeros((2, PARAMETERS))
        scores[0, :3] = np.eye(3)[a] - first
        scores[1, 3 + 2 * a : 5 + 2 * a] = np.eye(2)[b] - second
        results.append(Outcome((a, b), float(first[a] * second[b]), scores))
    return results


OUTCOMES = outcomes()
# Rewards by outcome: of many values, binary, and rare.
MANY = dict(zip((o.tokens for o in OUTCOMES), [0.3, -1.0, 2.0, 0.5, 0.0, 1.2], strict=True))
BINARY = {o.tokens: float(o.tokens in ((1, 0), (2, 1))) for o in OUTCOMES}
RARE = {o.tokens: float(o.tokens == (1, 1)) for o in OUTCOMES}


def sample_of(outcome: Outcome, reward: float, forks: bool = True, **more) -> Sample:
    return Sample(reward, (1, 1) if forks and outcome.tokens[0] in FORKED else (2,), **more)


def true_gradient(value: Callable[[Outcome], float]):
    """Of the expectation of a value of the sample."""
    return sum(o.probability * value(o) * o.score for o in OUTCOMES)


def expected(
    name: str, make: Callable[[Outcome], Sample], *, groups: int = 1, weights: dict | None = None, **changes
) -> np.ndarray:
    """The expectation of sum(advantage * gradient of the log-prob) over the tokens of a group, or of a step by groups.

    Groups that do not depend on each other are all of one step.
    """
    config = AlgorithmConfig(advantage=name, **changes)
    drawn = list(itertools.product(OUTCOMES, repeat=SAMPLES if groups == 1 else 2 * groups))
    samples = [[make(o) for o in each] for each in drawn]
    if groups == 1:
        actual = advantages(samples, config, weights)
    else:
        steps = ([each[at : at + 2] for at in range(0, 2 * groups, 2)] for each in samples)
        actual = [[*itertools.chain(*advantages(step, config, weights))] for step in steps]
    total = np.zeros(PARAMETERS)
    for each, parts in zip(drawn, actual, strict=True):
        probability = np.prod([o.probability for o in each])
        total += probability * sum(part @ o.scores for o, part in zip(each, parts, strict=True))
    return total / groups


def close(actual, expected):
    assert actual.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


# What a group of n finds of the gradient of the mean reward: all of it, or without what the baseline has of the sample.
UNBIASED = {
    "rloo": SAMPLES,
    "remax": SAMPLES,
    "gae": SAMPLES,
    "grpo": SAMPLES - 1,
    # With as many tokens in each sample.
    "opo": SAMPLES - 1,
    # With equal norms.
    "optimal_token_baseline": SAMPLES - 1,
    "grpo_process": SAMPLES - 1,
}


def critic(outcome: Outcome) -> tuple[float, float]:
    """Any function of the text so far."""
    return 0.4, 0.7 * outcome.tokens[0] - 0.2


@pytest.mark.parametrize("constant", [0.0, 5.0])
@pytest.mark.parametrize("rewards", [MANY, BINARY, RARE], ids=["many", "binary", "rare"])
@pytest.mark.parametrize("name", UNBIASED)
def test_the_expected_gradient_is_that_of_the_mean_reward(name, rewards, constant):
    def make(o):
        return sample_of(o, rewards[o.tokens] + constant, values=critic(o), baseline=0.6)

    actual = expected(name, make, normalize_std=False)
    close(actual, UNBIASED[name] * true_gradient(lambda o: rewards[o.tokens]))


@pytest.mark.parametrize("name", UNBIASED)
def test_a_penalty_of_tokens_is_part_of_the_reward(name):
    """As with `algorithm.kl_in: reward`."""
    penalties = {o.tokens: (0.2 * o.tokens[0] - 0.1, 0.3 * o.tokens[1] + 0.05) for o in OUTCOMES}

    def make(o):
        return sample_of(o, MANY[o.tokens], values=critic(o), baseline=0.6, penalties=penalties[o.tokens])

    actual = expected(name, make, normalize_std=False)
    close(actual, UNBIASED[name] * true_gradient(lambda o: MANY[o.tokens] - sum(penalties[o.tokens])))


OF_TOKENS = {o.tokens: (0.5 * o.tokens[0] - 0.3, 1.0 - 0.8 * o.tokens[1] * o.tokens[0]) for o in OUTCOMES}


@pytest.mark.parametrize("rest", [0.0, 0.7])
@pytest.mark.parametrize("name", ["gae", "optimal_token_baseline", "grpo_process"])
def test_rewards_of_tokens_are_part_of_the_reward(name, rest):
    """A group finds of a token's gradient what its baseline has not of the sample itself.

    The mean of grpo_process is over two steps of each sample; a first token is compared with it twice.
    """

    def make(o):
        given = OF_TOKENS[o.tokens]
        return sample_of(o, sum(given) + rest, token_rewards=given, values=critic(o))

    actual = expected(name, make, normalize_std=False)
    whole = true_gradient(lambda o: sum(OF_TOKENS[o.tokens]) + rest)
    share = np.full(PARAMETERS, UNBIASED[name], float)
    if name == "grpo_process":
        share[:3], share[3:] = SAMPLES - 1, SAMPLES - 0.5
        # For the second token only what it gets itself: earlier rewards do not depend on it.
        whole = np.concatenate([whole[:3], true_gradient(lambda o: OF_TOKENS[o.tokens][1] + rest)[3:]])
    close(actual, share * whole)


@pytest.mark.parametrize("constant", [0.0, 5.0])
@pytest.mark.parametrize("rewards", [MANY, BINARY, RARE], ids=["many", "binary", "rare"])
def test_grpo_passk_climbs_the_expected_best_of_a_group(rewards, constant):
    best = np.zeros(PARAMETERS)
    for each in itertools.product(OUTCOMES, repeat=SAMPLES):
        probability = np.prod([o.probability for o in each])
        best += probability * max(rewards[o.tokens] for o in each) * sum(o.score for o in each)
    actual = expected("grpo_passk", lambda o: sample_of(o, rewards[o.tokens] + constant), normalize_std=False)
    close(actual, best)


@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_dpo_climbs_the_preference_loss_of_best_and_worst(constant):
    beta, ratios = 0.7, {o.tokens: 0.3 * o.tokens[0] - 0.5 * o.tokens[1] for o in OUTCOMES}
    expected_gradient = np.zeros(PARAMETERS)
    for each in itertools.product(OUTCOMES, repeat=SAMPLES):
        probability = np.prod([o.probability for o in each])
        rewards = [MANY[o.tokens] for o in each]
        if max(rewards) == min(rewards):
            continue
        better, worse = each[int(np.argmax(rewards))], each[int(np.argmin(rewards))]
        scale = beta / (1 + np.exp(beta * (ratios[better.tokens] - ratios[worse.tokens])))
        expected_gradient += probability * scale * (better.score - worse.score)

    def make(o):
        return sample_of(o, MANY[o.tokens] + constant, log_ratio=ratios[o.tokens])

    close(expected("dpo", make, advantage_options={"beta": beta}), expected_gradient)


@pytest.mark.parametrize("constant", [0.0, -1.0, 5.0])
@pytest.mark.parametrize("rewards", [BINARY, RARE], ids=["binary", "rare"])
def test_gpg_is_the_mean_over_the_groups_that_have_a_gradient(rewards, constant):
    """Two groups of two: half of the gradient is lost to the own share in the mean."""
    p = sum(o.probability * rewards[o.tokens] for o in OUTCOMES)
    spread = 2 * p * (1 - p)
    scale = (1 - (1 - spread) ** 2) / spread
    actual = expected("gpg", lambda o: sample_of(o, rewards[o.tokens] + constant), groups=2)
    close(actual, scale * true_gradient(lambda o: rewards[o.tokens]))


# Scaled by deviations, which depend on the samples: of rewards 0 and 1 the direction is that of the mean reward.
SCALED = ("grpo", "grpo_passk", "grpo_process", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


@cache
def _scaled(name: str, forks: bool, constant: float) -> np.ndarray:
    weights = {"exact": 1.0, "brief": 0.5} if name == "gdpo" else None

    def make(o):
        reward = BINARY[o.tokens] + constant
        return sample_of(o, reward, forks, scores=(("exact", reward), ("brief", 3.0)))

    return expected(name, make, groups=1 if name.startswith("grpo") else 2, weights=weights)


@pytest.mark.parametrize("constant", [0.0, 5.0])
@pytest.mark.parametrize(
    "name", ["grpo", "grpo_process", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_a_scaled_gradient_has_the_direction_of_that_of_the_mean_reward(name, constant):
    actual, whole = _scaled(name, True, constant), true_gradient(lambda o: BINARY[o.tokens])
    close(actual, _scaled(name, False, 0.0))
    scale = (actual @ whole) / (whole @ whole)
    assert scale > 0
    close(actual, scale * whole)


def test_every_estimator_is_here():
    assert {*UNBIASED, *SCALED, "dpo", "gpg"} == set(ADVANTAGES)

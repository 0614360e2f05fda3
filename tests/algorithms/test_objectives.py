"""What each accepted pair of estimator, loss, KL term and aggregation minimises, by enumeration on a toy policy.

The gradient that megasync's functions give, in expectation over every group of responses, is compared with the gradient
of the objective that docs/losses.md names, a function of the policy's logits alone. New estimators and losses are
covered by their lines in the registries: an estimator needs an objective here, and a pair must be proven or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from toy_policy import LONGEST, Toy, expected_gradient, groups_of, toy_of

from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.rules import check_rules
from megasync.config.schema import AlgorithmConfig, Config, CriticConfig, TrainerConfig
from megasync.errors import ConfigError

KL_COEF, BETA = 0.2, 0.7


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mean_reward(toy: Toy, logits: Tensor, rewards: Tensor, size: int) -> Tensor:
    return (toy.log_probs(logits).exp() * rewards).sum()


def best_of(toy: Toy, logits: Tensor, rewards: Tensor, size: int) -> Tensor:
    """The mean over groups of the best reward; each of their responses has a share of the gradient."""
    probabilities = toy.log_probs(logits).exp()
    groups = torch.tensor(groups_of(toy, size))
    return (probabilities[groups].prod(1) * rewards[groups].max(1).values).sum() / size


def preference(toy: Toy, logits: Tensor, rewards: Tensor, size: int) -> Tensor:
    """Minus the preference loss of the best and the worst of each group, which is sampled from the policy as it is."""
    log_probs, total = toy.log_probs(logits), torch.zeros((), dtype=torch.float64)
    probabilities = log_probs.exp().detach()
    margins = BETA * (log_probs - toy.log_probs(toy.reference))
    for group in groups_of(toy, size):
        own = rewards[list(group)].tolist()
        if max(own) > min(own):
            better, worse = (group[own.index(pick(own))] for pick in (max, min))
            total = total + probabilities[list(group)].prod() * logsigmoid(margins[better] - margins[worse])
    return total / size


def above_average(toy: Toy, logits: Tensor, rewards: Tensor, size: int) -> Tensor:
    """The mean reward, less for each token the mean reward of a token of the policy as it is."""
    probabilities = toy.log_probs(logits).exp()
    average = (probabilities @ rewards / (probabilities @ toy.lengths)).detach()
    return (probabilities * (rewards - average * toy.lengths)).sum()


def mine(size: int) -> float:
    """A response's own share of its group's mean is not in its advantage."""
    return (size - 1) / size


@dataclass(frozen=True, eq=False)
class Claim:
    """What an estimator maximises, and how near the expected gradient is to that of it.

    It is ``scale`` times the gradient (EXACT), some positive multiple of it if all responses are equally long
    (MULTIPLE), or a response is in its own baseline, and the gradient (LIMIT) or its direction (DIRECTION) approaches
    that of the objective as groups grow. With ``binary`` rewards are 0 or 1. ``linear``: they may be anything, so a
    penalty in them is one in the objective, and samples may be of another policy that a correction accounts for.
    """

    objective: Callable[[Toy, Tensor, Tensor, int], Tensor]
    kind: str
    binary: bool = False
    linear: bool = False
    scale: Callable[[int], float] = lambda size: 1.0
    options: Mapping[str, float] = field(default_factory=dict)


EXACT, MULTIPLE, LIMIT, DIRECTION = "exact", "multiple", "limit", "direction"
# By estimator and `normalize_std`, which others do not read.
CLAIMS = {
    ("rloo", True): Claim(mean_reward, EXACT, linear=True),
    ("remax", True): Claim(mean_reward, EXACT, linear=True),
    ("gae", True): Claim(mean_reward, EXACT, linear=True),
    ("grpo", False): Claim(mean_reward, EXACT, linear=True, scale=mine),
    ("grpo_passk", False): Claim(best_of, EXACT),
    ("dpo", True): Claim(preference, EXACT, options={"beta": BETA}),
    ("grpo", True): Claim(mean_reward, MULTIPLE, binary=True),
    ("grpo_passk", True): Claim(best_of, MULTIPLE, binary=True),
    ("gdpo", True): Claim(mean_reward, MULTIPLE, binary=True),
    ("gdpo", False): Claim(mean_reward, MULTIPLE, binary=True),
    ("gpg", True): Claim(mean_reward, MULTIPLE, binary=True),
    ("reinforce_plus_plus", True): Claim(mean_reward, MULTIPLE, binary=True),
    ("reinforce_plus_plus_baseline", True): Claim(mean_reward, MULTIPLE, binary=True),
    ("opo", True): Claim(mean_reward, LIMIT),
    ("optimal_token_baseline", True): Claim(mean_reward, LIMIT),
    ("grpo_process", False): Claim(above_average, LIMIT),
    ("grpo_process", True): Claim(above_average, DIRECTION, binary=True),
}
# Where the KL term is, and its estimate.
KL_TERMS = [None, ("loss", "k1"), ("loss", "k2"), ("loss", "k3"), ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]
AGGREGATIONS = ("token", "sequence", "constant")


def configured(advantage: str, normalize_std: bool, loss: str, minibatches: int | None = None, **more) -> Config:
    """With as many minibatches as losses that penalise a change need; what is computed is the first of them."""
    # Clip-Cov restrains none here: what it leaves out is no objective.
    options = {"clip_cov": {"least": 50.0, "most": 60.0}, "kl_cov": {"share": 0.2}}.get(loss, {})
    algorithm = AlgorithmConfig(
        advantage=advantage,
        advantage_options=dict(CLAIMS[advantage, normalize_std].options),
        normalize_std=normalize_std,
        loss=loss,
        loss_options=options,
        **{"correction": "none", **more},
    )
    if minibatches is None:
        minibatches = 2 if LOSSES[loss].penalty else 1
    return Config(
        algorithm=algorithm,
        critic=CriticConfig(enabled=ADVANTAGES[advantage].critic),
        trainer=TrainerConfig(minibatches=minibatches),
    )


def refusal(config: Config) -> str | None:
    try:
        check_rules(config, within=("algorithm", "critic"))
    except ConfigError as error:
        return str(error)
    return None


def terms(kl) -> dict:
    return {} if kl is None else {"kl_coef": KL_COEF, "kl_in": kl[0], "kl_kind": kl[1]}


def objective(toy: Toy, claim: Claim, kl, size: int, logits: Tensor) -> Tensor:
    """What is maximised, for a loss that is divided by the longest response."""
    rewards = toy.rewards
    if kl is not None and kl[0] == "reward":
        rewards = rewards - KL_COEF * (toy.log_probs(logits) - toy.log_probs(toy.reference))
    value = claim.scale(size) * claim.objective(toy, logits, rewards, size)
    if kl is not None and kl[0] == "loss":
        # Of the next token, at the texts that the policy as it is writes.
        own, reference = logits.log_softmax(1), toy.reference.log_softmax(1)
        first, second = (own, reference) if kl[1] == "k2" else (reference, own)
        value = value - KL_COEF * (toy.visits(toy.policy) * (first.exp() * (first - second)).sum(1)).sum()
    return value / LONGEST


@cache
def gradient_of(toy: Toy, claim: Claim, kl, size: int) -> Tensor:
    logits = toy.policy.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-objective(toy, claim, kl, size, logits), logits)
    return gradient


def error(actual: Tensor, expected: Tensor, kind: str = EXACT) -> float:
    """The relative difference, or that of directions."""
    if kind in (MULTIPLE, DIRECTION):
        actual, expected = (each / each.norm() for each in (actual, expected))
    return ((actual - expected).norm() / expected.norm()).item()


def test_every_estimator_has_an_objective():
    assert {name for name, _ in CLAIMS} == set(ADVANTAGES)
    by_std = {name for name, item in ADVANTAGES.items() if "normalize_std" in item.keys and not item.critic}
    assert {name for name, normalize_std in CLAIMS if not normalize_std} == by_std


@pytest.mark.every(7)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("advantage", "normalize_std"), CLAIMS)
def test_an_accepted_pair_follows_the_gradient_of_its_objective(advantage, normalize_std, loss):
    """With all KL terms and aggregations. A KL term has the estimator's scale only where that is known."""
    claim, proven = CLAIMS[advantage, normalize_std], 0
    toy = toy_of("equal", binary=claim.binary)
    for kl, aggregation in product(KL_TERMS, AGGREGATIONS):
        config = configured(advantage, normalize_std, loss, aggregation=aggregation, **terms(kl))
        if refusal(config) is None and (kl is None or claim.kind == EXACT):
            proven += 1
            actual, expected = expected_gradient(toy, config.algorithm, 2), gradient_of(toy, claim, kl, 2)
            if claim.kind in (EXACT, MULTIPLE):
                assert error(actual, expected, claim.kind) < 1e-4, (kl, aggregation)
            else:
                larger = expected_gradient(toy, config.algorithm, 3)
                assert error(larger, expected, claim.kind) < 0.85 * error(actual, expected, claim.kind), aggregation
    refused = (LOSSES[loss].responses and ADVANTAGES[advantage].tokens) or (advantage, loss) == ("dpo", "clip_cov")
    assert bool(proven) != refused


@pytest.mark.every(3)
@pytest.mark.parametrize(("advantage", "normalize_std"), CLAIMS)
def test_responses_of_different_lengths_change_no_objective_if_all_tokens_weigh_the_same(advantage, normalize_std):
    """Advantages that are shifted by a mean over tokens then have the right direction in the limit."""
    claim = CLAIMS[advantage, normalize_std]
    toy, config = (
        toy_of("unequal", binary=claim.binary),
        configured(advantage, normalize_std, "gpg", aggregation="constant"),
    )
    errors = [
        error(expected_gradient(toy, config.algorithm, size), gradient_of(toy, claim, None, size), claim.kind)
        for size in (2, 4)
    ]
    assert errors[1] < 1e-4 or (claim.kind != EXACT and errors[1] < 0.75 * errors[0])


@pytest.mark.parametrize(("advantage", "normalize_std"), [key for key, claim in CLAIMS.items() if claim.linear])
def test_means_of_sequences_are_a_mean_of_rewards_by_length(advantage, normalize_std):
    """That of `(r - b) / T`, with the baseline as it is: it prefers short right answers and long wrong ones."""
    if ADVANTAGES[advantage].tokens:
        pytest.skip("its baseline is of each token")
    claim, toy = CLAIMS[advantage, normalize_std], toy_of("unequal")
    config = configured(advantage, normalize_std, "gpg", aggregation="sequence")
    logits = toy.policy.clone().requires_grad_()
    probabilities = toy.log_probs(logits).exp()
    baseline = toy.greedy if ADVANTAGES[advantage].baseline else (probabilities @ toy.rewards).detach()
    value = claim.scale(2) * (probabilities * (toy.rewards - baseline) / toy.lengths).sum()
    (expected,) = torch.autograd.grad(-value, logits)
    assert error(expected_gradient(toy, config.algorithm, 2), expected) < 1e-4


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("advantage", "normalize_std"), [key for key, claim in CLAIMS.items() if claim.linear])
def test_the_exact_ratio_corrects_for_another_policy_that_sampled(advantage, normalize_std, loss):
    claim, toy = CLAIMS[advantage, normalize_std], toy_of("unequal")
    more = {"aggregation": "constant", "correction": "product", "correction_cap": 1e6}
    config = configured(advantage, normalize_std, loss, **more)
    if refusal(config) is None:
        actual = expected_gradient(toy, config.algorithm, 2, stale=True)
        assert error(actual, gradient_of(toy, claim, None, 2)) < 1e-4
        plain = configured(advantage, normalize_std, loss, **more | {"correction": "none", "correction_cap": 2.0})
        uncorrected = expected_gradient(toy, plain.algorithm, 2, stale=True)
        assert error(uncorrected, gradient_of(toy, claim, None, 2)) > 0.02
    else:
        assert LOSSES[loss].responses and ADVANTAGES[advantage].tokens


BEHAVIOUR = {"ratio": "behaviour", "clip_low": 1.0, "clip_high": 1e6}


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        *((loss, {"correction": "token", "correction_cap": 1e6}) for loss in LOSSES),
        *((loss, BEHAVIOUR) for loss in ("vanilla", "cispo")),
    ],
)
def test_ratios_of_tokens_correct_for_the_next_token_alone(loss, more):
    """The objective is of responses of which one token is of the policy, and all others are of the one that sampled."""
    toy, config = toy_of("unequal"), configured("rloo", True, loss, aggregation="constant", **more)
    if refusal(config) is not None:
        assert LOSSES[loss].responses
        return
    logits, server = toy.policy.clone().requires_grad_(), toy.behaviour.log_softmax(1)
    own, total = logits.log_softmax(1), torch.zeros((), dtype=torch.float64)
    for response, reward in zip(toy.responses, toy.rewards, strict=True):
        others = sum(server[pair] for pair in response)
        total = total + reward * sum((others - server[pair] + own[pair]).exp() for pair in response)
    (expected,) = torch.autograd.grad(-total / LONGEST, logits)
    assert error(expected_gradient(toy, config.algorithm, 2, stale=True), expected) < 1e-4


def test_an_entropy_bonus_is_that_of_the_next_token():
    """At the texts that the policy as it is writes."""
    toy = toy_of("unequal")
    config = configured("rloo", True, "gpg", aggregation="constant", entropy_coef=0.3)
    logits = toy.policy.clone().requires_grad_()
    log_probs = logits.log_softmax(1)
    entropies = -(log_probs.exp() * log_probs).sum(1)
    bonus = 0.3 * (toy.visits(toy.policy) * entropies).sum() / LONGEST
    value = objective(toy, CLAIMS["rloo", True], None, 2, logits) + bonus
    (expected,) = torch.autograd.grad(-value, logits)
    assert error(expected_gradient(toy, config.algorithm, 2), expected) < 1e-4


# Overrides that are refused, what the message names of both keys, and the KL term that they seem to have.
REFUSED = [
    ("dpo", {"aggregation": "sequence"}, ("advantage=dpo", "aggregation=sequence"), None),
    ("gae", {"loss": "geo_mean"}, ("advantage=gae", "loss=geo_mean"), None),
    ("rloo", terms(("loss", "k1")), ("kl_kind=k1", "kl_in=loss"), ("loss", "k2")),
    ("rloo", terms(("reward", "k2")), ("kl_kind=k2", "kl_in=reward"), ("reward", "k1")),
    ("rloo", terms(("reward", "k3")), ("kl_kind=k3", "kl_in=reward"), ("reward", "k1")),
    ("grpo_passk", terms(("reward", "k1")), ("advantage=grpo_passk", "kl_in=reward"), ("reward", "k1")),
]


@pytest.mark.parametrize(("advantage", "more", "words", "kl"), REFUSED)
def test_what_is_refused_follows_another_gradient(advantage, more, words, kl):
    """By a tenth at least: of the whole gradient, or of the part of it that the KL term has."""
    normalize_std, toy = advantage != "grpo_passk", toy_of("unequal")
    claim = CLAIMS[advantage, normalize_std]
    config = configured(advantage, normalize_std, **{"loss": "gpg", "aggregation": "constant"} | more)
    why = refusal(config)
    assert why is not None and all(word in why for word in words)
    actual, expected = expected_gradient(toy, config.algorithm, 2), gradient_of(toy, claim, kl, 2)
    if kl is not None:
        without = gradient_of(toy, claim, None, 2)
        actual, expected = actual - without, expected - without
    elif config.algorithm.aggregation == "sequence":
        actual = actual / LONGEST
    assert error(actual, expected) > 0.1


@pytest.mark.parametrize("loss", [name for name, item in LOSSES.items() if item.penalty])
def test_a_penalty_on_change_needs_a_change(loss):
    """In the first optimizer step of a batch there is none, so with one minibatch the loss is the plain gradient."""
    toy, plain = toy_of("unequal"), configured("rloo", True, "gpg", aggregation="constant")
    config = configured("rloo", True, loss, aggregation="constant", minibatches=1)
    assert f"loss={loss}" in (refusal(config) or "") and "trainer.minibatches=1" in (refusal(config) or "")
    actual, same = (expected_gradient(toy, each.algorithm, 2) for each in (config, plain))
    assert error(actual, same) < 1e-5

"""A policy whose responses can be enumerated, and the expected gradient that megasync's functions give for it.

It writes one or two tokens of a vocabulary of three. Its logits depend on what was written before, so a token has an
effect on those after it. Everything is computed for one prompt with a group of responses, which are one optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import torch
from chosen_tokens import chosen_of
from token_rewards import step_of
from torch import Tensor

from megasync.algorithms import estimator_of
from megasync.algorithms.advantages import StepRewards
from megasync.algorithms.choose import chooser_of
from megasync.algorithms.losses import KL_KINDS, policy_loss
from megasync.config.builtin import ADVANTAGES
from megasync.config.schema import AlgorithmConfig

VOCAB, LONGEST = 3, 2


@dataclass(frozen=True, eq=False)
class Toy:
    """Responses as lists of (state, token), with the reward of each token.

    Policies are logits [states, vocab]: ``policy`` is trained, ``behaviour`` samples, ``reference`` is that of KL
    terms. ``values`` are a critic's of each state, ``greedy`` is the reward of a greedy response.
    """

    responses: Sequence[Sequence[tuple[int, int]]]
    token_rewards: Sequence[Sequence[float]]
    policy: Tensor
    behaviour: Tensor
    reference: Tensor
    values: Tensor
    greedy: float = 0.3

    @property
    def rewards(self) -> Tensor:
        """The reward of each response, [responses]."""
        return torch.tensor([sum(each) for each in self.token_rewards], dtype=torch.float64)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(response) for response in self.responses], dtype=torch.float64)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Of each response, [responses]."""
        each = logits.log_softmax(1)
        return torch.stack([sum(each[state, token] for state, token in response) for response in self.responses])

    def visits(self, logits: Tensor) -> Tensor:
        """How often each state is in a response, [states]; without gradient."""
        found = torch.zeros(len(logits), dtype=torch.float64)
        for probability, response in zip(self.log_probs(logits).exp().detach(), self.responses, strict=True):
            for state, _ in response:
                found[state] += probability
        return found


@cache
def toy_of(lengths: str, binary: bool = False, seed: int = 0) -> Toy:
    """With ``lengths`` "equal" all responses have two tokens, with "unequal" the token 0 ends one.

    Every token has a reward or, with ``binary``, the last one that of the response, which is 0 or 1.
    """
    drawn = torch.Generator().manual_seed(seed)
    first = range(VOCAB)
    responses = [
        [(0, one)] if lengths == "unequal" and one == 0 else [(0, one), (1 + one, two)]
        for one in first
        for two in (first if lengths == "equal" or one else [0])
    ]

    def logits() -> Tensor:
        return torch.randn(1 + VOCAB, VOCAB, generator=drawn, dtype=torch.float64)

    policy = logits()
    if binary:
        rewards = [[0.0] * (len(response) - 1) + [float(at % 3 == 1)] for at, response in enumerate(responses)]
    else:
        # A token's reward depends on it and those before it.
        table = logits()
        rewards = [[table[pair].item() for pair in response] for response in responses]
    near = [policy + 0.3 * logits() for _ in range(2)]
    return Toy(responses, rewards, policy, *near, torch.randn(1 + VOCAB, generator=drawn, dtype=torch.float64))


def groups_of(toy: Toy, size: int) -> list[tuple[int, ...]]:
    """Every group of responses that can be sampled, by their places in `Toy.responses`."""
    return list(product(range(len(toy.responses)), repeat=size))


@dataclass(frozen=True)
class Sampled:
    """All groups of a size, one after another, as arrays [tokens]; ``responses`` count over all groups."""

    states: np.ndarray
    tokens: np.ndarray
    advantages: np.ndarray
    responses: np.ndarray
    groups: np.ndarray

    def each_group(self) -> list[slice]:
        bounds = [*np.flatnonzero(np.diff(self.groups, prepend=-1)).tolist(), len(self.groups)]
        return [slice(*pair) for pair in pairwise(bounds)]


def expected_gradient(toy: Toy, config: AlgorithmConfig, size: int, *, stale: bool = False) -> Tensor:
    """Of the loss of a batch's first optimizer step by the policy's logits, over all groups of that size.

    The group is sampled from the policy itself or, if ``stale``, from the behaviour policy.
    """
    theta = toy.policy.clone().requires_grad_()
    sampler = toy.behaviour if stale else toy.policy
    each, old, server, reference = (logits.log_softmax(1) for logits in (theta, toy.policy, sampler, toy.reference))
    # Estimators see no more of the configuration than this.
    in_reward = config.kl_kind if config.kl_coef and config.kl_in == "reward" else ""
    options = tuple(config.advantage_options.items())
    sampled = _sampled(toy, size, config.advantage, config.normalize_std, options, config.kl_coef, in_reward)
    at = sampled.states, sampled.tokens
    lengths = np.bincount(sampled.responses)[sampled.responses]
    divisor = {
        "token": np.bincount(sampled.groups)[sampled.groups],
        "sequence": size * lengths,
        "constant": np.full(len(lengths), size * LONGEST),
    }[config.aggregation]
    probabilities = np.array(groups_of(toy, size))
    probabilities = toy.log_probs(sampler).exp().numpy()[probabilities].prod(1)[sampled.groups]
    columns = {
        "logprobs": each[at],
        "old": old[at],
        "behaviour": server[at],
        "reference": reference[at],
        "entropy": -(each.exp() * each).sum(1)[sampled.states],
        "advantages": torch.from_numpy(sampled.advantages),
        "mask": torch.ones(len(sampled.states)),
        "segments": torch.from_numpy(sampled.responses),
        "weights": torch.from_numpy(probabilities / divisor),
    }
    if chooser_of(config) is not None:
        logprobs = old[at].numpy()
        values = [(logprobs[group], logprobs[group], sampled.advantages[group]) for group in sampled.each_group()]
        columns["chosen"] = torch.cat([chosen_of(config, *each) for each in values])
    loss, _ = policy_loss(config, columns)
    (gradient,) = torch.autograd.grad(loss, theta)
    return gradient


@cache
def _sampled(
    toy: Toy, size: int, advantage: str, normalize_std: bool, options: tuple, kl_coef: float, in_reward: str
) -> Sampled:
    """``in_reward`` is the estimate of the KL term in the rewards; empty without one."""
    config = AlgorithmConfig(advantage=advantage, normalize_std=normalize_std, advantage_options=dict(options))
    estimate, item = estimator_of(config), ADVANTAGES[advantage]
    policy, reference = (logits.log_softmax(1) for logits in (toy.policy, toy.reference))
    kl = kl_coef * KL_KINDS[in_reward](policy, reference) if in_reward else torch.zeros_like(policy)
    squares = 1 - 2 * policy.exp() + policy.exp().square().sum(1, keepdim=True)
    tables = [table.numpy() for table in (kl, policy - reference, squares)]
    # Of each response: the penalties, log-ratios and squared norms of its tokens.
    known = [[table[tuple(zip(*response, strict=True))] for table in tables] for response in toy.responses]
    rewards = [np.array(given) - own[0] for given, own in zip(toy.token_rewards, known, strict=True)]
    found: list[np.ndarray] = []
    places, numbers = [], []
    for number, group in enumerate(groups_of(toy, size)):
        own = [toy.responses[place] for place in group]
        lengths = np.array([len(response) for response in own])
        if item.tokens:
            norms = np.concatenate([known[place][2] for place in group]) if item.norms else None
            rows = [(0, rewards[place].tolist()) for place in group]
            step = step_of(rows, lengths.max(keepdims=True), squared_norms=norms)
            if item.critic:
                step = replace(step, values=np.array([toy.values[state].item() for each in own for state, _ in each]))
            found.append(np.asarray(estimate(step)))
        else:
            of_responses = np.array([rewards[place].sum() for place in group])
            step = StepRewards(
                of_responses,
                np.zeros(size, dtype=np.int64),
                lengths,
                {"only": of_responses},
                {"only": 1.0},
                np.array([known[place][1].sum() for place in group]) if item.reference else None,
                np.full(size, toy.greedy) if item.baseline else None,
            )
            found.append(np.repeat(np.asarray(estimate(step)), lengths))
        places += own
        numbers += [number] * int(lengths.sum())
    states, tokens = np.array([pair for response in places for pair in response]).T
    responses = np.repeat(np.arange(len(places)), [len(response) for response in places])
    return Sampled(states, tokens, np.concatenate(found), responses, np.array(numbers))

"""Every policy loss: its formula and gradient token by token, and what it must not depend on."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from chosen_tokens import chosen_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megasync.algorithms import advantages, covariance, loss_of, losses
from megasync.algorithms.losses import PolicyTokens, TokenLoss
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def drawn(seed: int, alike: bool):
    """Rows (log-prob, old log-prob, advantage, sequence); ``alike``: a sequence has one advantage."""
    draw = np.random.default_rng(seed)
    rows = []
    for sequence in range(draw.integers(1, 5)):
        for place in range(draw.integers(1, 6)):
            logprob, advantage = draw.uniform(-4, -0.05), draw.choice([-1.5, -0.5, 0.0, 0.7, 2.0])
            advantage = rows[-1][2] if alike and place else advantage
            rows.append((logprob, min(-0.01, logprob + draw.normal(0, 0.5)), float(advantage), sequence))
    return rows


def tokens_of(rows) -> PolicyTokens:
    new, old, advantages, segments = (list(column) for column in zip(*rows, strict=True))
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(values, dtype=torch.float64) for values in (old, advantages))
    return PolicyTokens(logprobs, *others, torch.ones(len(rows), dtype=torch.bool), torch.tensor(segments))


def loss(name: str, rows, **options) -> tuple[TokenLoss, PolicyTokens]:
    config = AlgorithmConfig(loss=name, loss_options=options, **CLIP)
    tokens = tokens_of(rows)
    tokens = replace(tokens, chosen=chosen_of(config, *list(zip(*rows, strict=True))[:3]))
    return loss_of(config)(tokens), tokens


def mean_of(row, rows, value: Callable) -> Tensor:
    return torch.stack([value(other) for other in rows if other[3] == row[3]]).mean()


def ratio_of(row) -> Tensor:
    return (row[0] - row[1]).exp()


def ppo(ratio: Tensor, advantage: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def vanilla(row, rows) -> Tensor:
    value = ppo(ratio_of(row), row[2])
    return value.clamp(max=-3.0 * row[2]) if row[2] < 0 else value


def gspo(row, rows) -> Tensor:
    mean = mean_of(row, rows, lambda other: other[0] - other[1]).detach()
    return ppo((mean + row[0] - row[0].detach()).exp(), row[2])


def geo_mean(row, rows) -> Tensor:
    sign = math.copysign(1, row[2]) if row[2] else 0.0

    def least(other) -> Tensor:
        log_ratio = other[0] - other[1]
        return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.28))

    return -row[2] * mean_of(row, rows, least).exp()


def sapo(row, rows) -> Tensor:
    tau = 1.0 if row[2] > 0 else 1.05
    return -row[2] * 4 / tau / (1 + (-tau * (ratio_of(row) - 1)).exp())


def dppo(row, near: Callable[[float, float], bool]) -> Tensor:
    weight = ratio_of(row).clamp(max=20).detach()
    return -weight * row[2] * row[0] * near(math.exp(row[0].item()), math.exp(row[1]))


def dppo_kl(row, rows) -> Tensor:
    def near(p: float, q: float) -> bool:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        return (divergence <= 0.28 or p <= q) if row[2] > 0 else (divergence <= 0.2 or p >= q)

    return dppo(row, near)


# Each token's loss, by the formulas of docs/losses.md.
PLAIN = {
    "vanilla": vanilla,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "cispo": lambda row, rows: -ratio_of(row).clamp(0.8, 1.28).detach() * row[2] * row[0],
    "sapo": sapo,
    "gpg": lambda row, rows: -row[2] * row[0],
    "dro": lambda row, rows: -row[2] * row[0] + 0.05 * (row[0] - row[1]) ** 2,
    "dppo_tv": lambda row, rows: dppo(row, lambda p, q: p - q <= 0.28 if row[2] > 0 else p - q >= -0.2),
    "dppo_kl": dppo_kl,
}
OF_SEQUENCES = ("gspo", "geo_mean")


def test_each_loss_has_a_reference_here():
    assert set(LOSSES) == {*PLAIN, "clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", PLAIN)
@given(seed=st.integers(0, 2**32))
def test_a_loss_and_its_gradient_follow_its_formula(name, seed):
    rows = drawn(seed, alike=name in OF_SEQUENCES)
    actual, tokens = loss(name, rows)
    actual.loss.sum().backward()
    leaf = torch.tensor([row[0] for row in rows], dtype=torch.float64, requires_grad=True)
    rows = [(new, *row[1:]) for new, row in zip(leaf, rows, strict=True)]
    expected = torch.stack([PLAIN[name](row, rows) for row in rows])
    expected.sum().backward()
    torch.testing.assert_close(actual.loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tokens.logprobs.grad, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_the_plain_policy_gradient(name):
    """All ratios are 1 and no covariance is above 1: gradients are -A."""
    rows = [(-0.5, -0.5, 0.2, 0), (-1.5, -1.5, 0.2, 0), (-0.3, -0.3, -0.4, 1), (-2.0, -2.0, -0.4, 1)]
    actual, tokens = loss(name, rows)
    actual.loss.sum().backward()
    expected = [-advantage for _, _, advantage, _ in rows]
    assert tokens.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_that_are_not_kept_change_nothing(name):
    rows = [(-0.5, -0.7, 1.0, 0), (-1.5, -1.0, 1.0, 0), (-0.3, -0.6, -2.0, 1)]
    alone, tokens = loss(name, rows)
    padded = tokens_of([*rows, (0.0, 0.0, 0.0, 7)])
    padded.keep[-1] = False
    if tokens.chosen is not None:
        padded = replace(padded, chosen=torch.cat((tokens.chosen, torch.tensor([True]))))
    actual = loss_of(AlgorithmConfig(loss=name))(padded)
    assert actual.loss[:3].tolist() == pytest.approx(alone.loss.tolist())
    for flags in (actual.clipped, actual.dual_clipped):
        assert flags is None or not flags[-1]


def test_clip_cov_takes_the_gradient_of_the_chosen_tokens():
    rows = [(-0.1 * place, -0.1 * place, 4.0 * (place < 10), 0) for place in range(1, 31)]
    actual, tokens = loss("clip_cov", rows, share=0.1)
    actual.loss.sum().backward()
    assert tokens.chosen.sum() == 3
    assert not tokens.logprobs.grad[tokens.chosen].any() and actual.clipped.tolist() == tokens.chosen.tolist()
    assert tokens.logprobs.grad[~tokens.chosen].tolist() == [
        -row[2] for row in rows if not tokens.chosen[rows.index(row)]
    ]


def test_kl_cov_penalises_the_chosen_tokens():
    rows = [(-0.1, -0.4, 2.0, 0), (-2.0, -2.5, 2.0, 0), (-0.2, -0.1, -2.0, 1), (-3.0, -3.3, -2.0, 1)]
    actual, tokens = loss("kl_cov", rows, share=0.5, coef=2.0)
    expected = [
        2.0 * abs(new - old) * chosen - math.exp(new - old) * advantage
        for (new, old, advantage, _), chosen in zip(rows, tokens.chosen.tolist(), strict=True)
    ]
    assert actual.loss.tolist() == pytest.approx(expected) and tokens.chosen.sum() == 2


@pytest.mark.parametrize("name", [name for name, item in LOSSES.items() if item.chooses])
def test_a_loss_that_treats_tokens_apart_needs_them(name):
    with pytest.raises(ValueError, match="needs `chosen`"):
        loss_of(AlgorithmConfig(loss=name))(tokens_of([(-0.5, -0.7, 1.0, 0)]))


@pytest.mark.parametrize("name", OF_SEQUENCES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_loss_of_sequences_stays_finite(name, advantage):
    """For a negative advantage, a token that became far more likely is not clipped."""
    actual, tokens = loss(name, [(-0.1, -500.0, advantage, 0), (-0.2, -400.0, advantage, 0)])
    actual.loss.sum().backward()
    assert torch.isfinite(actual.loss).all() and torch.isfinite(tokens.logprobs.grad).all()


@pytest.mark.parametrize("name", [name for name, item in LOSSES.items() if item.keys[:1] == ("clip_low",)])
def test_a_lower_bound_of_one_is_none(name):
    """As CISPO was published. geo_mean bounds the logarithm of the ratio, of which 1 is not the limit."""
    rows = [(-6.0, -0.5, -1.0, 0), (-5.0, -0.5, -1.0, 0)]
    config = AlgorithmConfig(loss=name, clip_low=1.0)
    tokens = replace(tokens_of(rows), chosen=chosen_of(config, *list(zip(*rows, strict=True))[:3]))
    actual = loss_of(config)(tokens)
    actual.loss.sum().backward()
    # dppo_kl bounds a divergence, which has no limit.
    assert actual.clipped.any() == (name in ("geo_mean", "dppo_kl"))
    assert bool(tokens.logprobs.grad.all()) == (name not in ("geo_mean", "dppo_kl"))


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_a_loss_of_sequences_needs_them(name):
    tokens = tokens_of([(-0.5, -0.7, 1.0, 0)])
    with pytest.raises(ValueError, match="needs `segments`"):
        loss_of(AlgorithmConfig(loss=name))(PolicyTokens(tokens.logprobs, tokens.old, tokens.advantages, tokens.keep))


@pytest.mark.parametrize("table", [LOSSES, ADVANTAGES], ids=["losses", "advantages"])
def test_the_tables_name_keys_and_options_as_the_functions_do(table):
    for name, item in table.items():
        module = advantages if table is ADVANTAGES else covariance if item.chooses else losses
        functions = [getattr(module, each) for each in (name, *([f"{name}_tokens"] if item.chooses else []))]
        parameters = [each for function in functions for each in inspect.signature(function).parameters.items()]
        own = {key: value.default for key, value in parameters if value.kind is value.KEYWORD_ONLY}
        # Of a critic's advantages, the trainer normalises those of all ranks together.
        elsewhere = {"normalize_std"} if item.critic else set()
        assert set(own) == {*item.keys, *item.options} - elsewhere, name
        assert {key: own[key] for key in item.options} == dict(item.options), name


def halved(tokens: PolicyTokens, *, clip_low: float, share: float = 0.5) -> TokenLoss:
    assert clip_low == 0.2
    return TokenLoss(-share * tokens.advantages * tokens.logprobs)


def test_a_users_own_loss_gets_its_options_and_the_keys_that_it_names():
    actual, _ = loss(f"{__name__}:halved", [(-0.5, -0.7, 1.0, 0)], share=0.25)
    assert actual.loss.tolist() == [0.125]

"""Every policy loss: its formula in plain Python, its gradient by finite differences, what it must not depend on."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from chosen_tokens import chosen_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.algorithms import loss_of
from megasync.algorithms.losses import PolicyTokens, TokenLoss
from megasync.base.importing import load_function
from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig

TOKEN = st.tuples(st.floats(-4, -0.05), st.floats(-4, -0.05), st.sampled_from([-1.5, -0.5, 0.0, 0.7, 2.0]))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=4)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def flat(sequences, advantage_of_sequence: bool = False):
    """Rows (log-prob, old log-prob, advantage, sequence)."""
    return [
        (new, old, sequence[0][2] if advantage_of_sequence else advantage, number)
        for number, sequence in enumerate(sequences)
        for new, old, advantage in sequence
    ]


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


def plain(name: str, rows) -> list[float]:
    """Each token's loss, by the formulas of docs/algorithms.md."""
    return [PLAIN[name](row, rows) for row in rows]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean_of(row, rows, value: Callable) -> float:
    mine = [value(other) for other in rows if other[3] == row[3]]
    return math.fsum(mine) / len(mine)


def ppo(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, clip(ratio, 0.8, 1.28) * advantage)


def vanilla(row, rows) -> float:
    value = ppo(math.exp(row[0] - row[1]), row[2])
    return min(value, -3.0 * row[2]) if row[2] < 0 else value


def geo_mean(row, rows) -> float:
    sign = math.copysign(1, row[2]) if row[2] else 0.0

    def least(other) -> float:
        log_ratio = other[0] - other[1]
        return sign * min(sign * log_ratio, sign * clip(log_ratio, -0.2, 0.28))

    return -row[2] * math.exp(mean_of(row, rows, least))


def sapo(row, rows) -> float:
    tau = 1.0 if row[2] > 0 else 1.05
    return -row[2] * 4 / tau / (1 + math.exp(-tau * (math.exp(row[0] - row[1]) - 1)))


def near_kl(new: float, old: float, advantage: float) -> bool:
    p, q = math.exp(new), math.exp(old)
    divergence = q * (old - new) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return (divergence <= 0.28 or p <= q) if advantage > 0 else (divergence <= 0.2 or p >= q)


def near_tv(new: float, old: float, advantage: float) -> bool:
    moved = math.exp(new) - math.exp(old)
    return moved <= 0.28 if advantage > 0 else moved >= -0.2


PLAIN = {
    "vanilla": vanilla,
    "gspo": lambda row, rows: ppo(math.exp(mean_of(row, rows, lambda other: other[0] - other[1])), row[2]),
    "geo_mean": geo_mean,
    "cispo": lambda row, rows: -clip(math.exp(row[0] - row[1]), 0.8, 1.28) * row[2] * row[0],
    "sapo": sapo,
    "gpg": lambda row, rows: -row[2] * row[0],
    "dro": lambda row, rows: -row[2] * row[0] + 0.05 * (row[0] - row[1]) ** 2,
    "dppo_tv": lambda row, rows: -min(math.exp(row[0] - row[1]), 20) * row[2] * row[0] * near_tv(*row[:3]),
    "dppo_kl": lambda row, rows: -min(math.exp(row[0] - row[1]), 20) * row[2] * row[0] * near_kl(*row[:3]),
}
OF_SEQUENCES = ("gspo", "geo_mean")
# Its weights have no gradient, so a difference of losses is not its gradient.
STOPPED = ("gspo", "cispo", "dppo_tv", "dppo_kl")


def test_each_loss_has_a_reference_here():
    assert set(LOSSES) == {*PLAIN, "clip_cov", "kl_cov"}


@pytest.mark.parametrize("name", PLAIN)
@given(sequences=SEQUENCES)
def test_a_loss_follows_its_formula(name, sequences):
    rows = flat(sequences, name in OF_SEQUENCES)
    found, _ = loss(name, rows)
    assert found.loss.tolist() == pytest.approx(plain(name, rows), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in STOPPED])
@given(sequences=SEQUENCES, place=st.integers(0, 100))
@settings(max_examples=50)
def test_a_gradient_is_the_slope_of_the_loss(name, sequences, place):
    rows = flat(sequences, name in OF_SEQUENCES)
    place %= len(rows)
    found, tokens = loss(name, rows)
    found.loss.sum().backward()
    step = 1e-6
    values = []
    for shift in (-step, step):
        moved = [(new + shift * (at == place), *rest) for at, (new, *rest) in enumerate(rows)]
        values.append(math.fsum(plain(name, moved)))
    left = (math.fsum(plain(name, rows)) - values[0]) / step
    right = (values[1] - math.fsum(plain(name, rows))) / step
    if abs(left - right) < 1e-3:
        # Not at a corner.
        assert tokens.logprobs.grad[place].item() == pytest.approx((left + right) / 2, rel=1e-4, abs=1e-4)


@given(sequences=SEQUENCES)
def test_losses_with_a_stopped_weight_have_the_gradient_of_a_weighted_log_prob(sequences):
    rows = flat(sequences)
    for name in ("cispo", "dppo_tv", "dppo_kl"):
        found, tokens = loss(name, rows)
        found.loss.sum().backward()
        weight = [value / row[0] for value, row in zip(plain(name, rows), rows, strict=True)]
        assert tokens.logprobs.grad.tolist() == pytest.approx(weight, rel=1e-6, abs=1e-9)
    rows = flat(sequences, True)
    found, tokens = loss("gspo", rows)
    found.loss.sum().backward()
    # Where it is not clipped: -s A.
    expected = [0.0 if cut else value for cut, value in zip(found.clipped.tolist(), found.loss.tolist(), strict=True)]
    assert tokens.logprobs.grad.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_the_plain_policy_gradient(name):
    """All ratios are 1 and no covariance is above 1: gradients are -A."""
    rows = [(-0.5, -0.5, 0.2, 0), (-1.5, -1.5, 0.2, 0), (-0.3, -0.3, -0.4, 1), (-2.0, -2.0, -0.4, 1)]
    found, tokens = loss(name, rows)
    found.loss.sum().backward()
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
    found = loss_of(AlgorithmConfig(loss=name))(padded)
    assert found.loss[:3].tolist() == pytest.approx(alone.loss.tolist())
    for flags in (found.clipped, found.dual_clipped):
        assert flags is None or not flags[-1]


def test_clip_cov_takes_the_gradient_of_the_chosen_tokens():
    rows = [(-0.1 * place, -0.1 * place, 4.0 * (place < 10), 0) for place in range(1, 31)]
    found, tokens = loss("clip_cov", rows, share=0.1)
    found.loss.sum().backward()
    assert tokens.chosen.sum() == 3
    assert not tokens.logprobs.grad[tokens.chosen].any() and found.clipped.tolist() == tokens.chosen.tolist()
    assert tokens.logprobs.grad[~tokens.chosen].tolist() == [
        -row[2] for row in rows if not tokens.chosen[rows.index(row)]
    ]


def test_kl_cov_penalises_the_chosen_tokens():
    rows = [(-0.1, -0.4, 2.0, 0), (-2.0, -2.5, 2.0, 0), (-0.2, -0.1, -2.0, 1), (-3.0, -3.3, -2.0, 1)]
    found, tokens = loss("kl_cov", rows, share=0.5, coef=2.0)
    expected = [
        2.0 * abs(new - old) * chosen - math.exp(new - old) * advantage
        for (new, old, advantage, _), chosen in zip(rows, tokens.chosen.tolist(), strict=True)
    ]
    assert found.loss.tolist() == pytest.approx(expected) and tokens.chosen.sum() == 2


@pytest.mark.parametrize("name", [name for name, item in LOSSES.items() if item.chooses])
def test_a_loss_that_treats_tokens_apart_needs_them(name):
    with pytest.raises(ValueError, match="needs `chosen`"):
        loss_of(AlgorithmConfig(loss=name))(tokens_of([(-0.5, -0.7, 1.0, 0)]))


@pytest.mark.parametrize("name", OF_SEQUENCES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_loss_of_sequences_stays_finite(name, advantage):
    """For a negative advantage, a token that became far more likely is not clipped."""
    found, tokens = loss(name, [(-0.1, -500.0, advantage, 0), (-0.2, -400.0, advantage, 0)])
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all() and torch.isfinite(tokens.logprobs.grad).all()


@pytest.mark.parametrize("name", [name for name, item in LOSSES.items() if item.keys[:1] == ("clip_low",)])
def test_a_lower_bound_of_one_is_none(name):
    """As CISPO was published. geo_mean bounds the logarithm of the ratio, of which 1 is not the limit."""
    rows = [(-6.0, -0.5, -1.0, 0), (-5.0, -0.5, -1.0, 0)]
    config = AlgorithmConfig(loss=name, clip_low=1.0)
    tokens = replace(tokens_of(rows), chosen=chosen_of(config, *list(zip(*rows, strict=True))[:3]))
    found = loss_of(config)(tokens)
    found.loss.sum().backward()
    # dppo_kl bounds a divergence, which has no limit.
    assert found.clipped.any() == (name in ("geo_mean", "dppo_kl"))
    assert bool(tokens.logprobs.grad.all()) == (name not in ("geo_mean", "dppo_kl"))


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_a_loss_of_sequences_needs_them(name):
    tokens = tokens_of([(-0.5, -0.7, 1.0, 0)])
    with pytest.raises(ValueError, match="needs `segments`"):
        loss_of(AlgorithmConfig(loss=name))(PolicyTokens(tokens.logprobs, tokens.old, tokens.advantages, tokens.keep))


@pytest.mark.parametrize("table", [LOSSES, ADVANTAGES], ids=["losses", "advantages"])
def test_the_tables_name_keys_and_options_as_the_functions_do(table):
    for name, item in table.items():
        functions = [load_function(each) for each in (item.function, item.chooses) if each]
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
    found, _ = loss(f"{__name__}:halved", [(-0.5, -0.7, 1.0, 0)], share=0.25)
    assert found.loss.tolist() == [0.125]

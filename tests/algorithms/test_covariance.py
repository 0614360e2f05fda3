"""Which tokens Clip-Cov and KL-Cov restrain: by the whole optimizer step, however it is packed and dealt over ranks."""

from __future__ import annotations

import math

from chosen_tokens import chosen_of
from hypothesis import given
from hypothesis import strategies as st

from megasync.config.schema import AlgorithmConfig

# Quarters, so that sums and products are exact in any order.
TOKEN = st.tuples(st.integers(-16, -1), st.integers(-16, -1), st.integers(-8, 8)).map(lambda t: [n / 4 for n in t])
TOKENS = st.lists(TOKEN, min_size=1, max_size=40)
SHARE = st.sampled_from([0.0002, 0.1, 0.3, 1.0])
LOSSES = st.sampled_from(["kl_cov", "clip_cov"])


def choose(loss: str, share: float, tokens, **options) -> list[bool]:
    config = AlgorithmConfig(loss=loss, loss_options={"share": share})
    return chosen_of(config, *zip(*tokens, strict=True), **options).tolist()


def covariances(tokens) -> list[float]:
    logprobs, _, advantages = zip(*tokens, strict=True)
    middle = math.fsum(advantages) / len(tokens), math.fsum(logprobs) / len(tokens)
    return [(a - middle[0]) * (x - middle[1]) for a, x in zip(advantages, logprobs, strict=True)]


@given(LOSSES, TOKENS, SHARE, st.integers(1, 3), st.randoms())
def test_the_choice_does_not_depend_on_how_tokens_are_dealt(loss, tokens, share, ranks, random):
    """Some ranks may have none, as those of earlier pipeline stages."""
    order = list(range(len(tokens)))
    random.shuffle(order)
    dealt = [order[rank::ranks] for rank in range(ranks)]
    assert choose(loss, share, tokens, dealt=dealt) == choose(loss, share, tokens)


@given(TOKENS, SHARE)
def test_kl_cov_chooses_the_share_of_the_largest_covariances(tokens, share):
    """Also where many are equal, as in a step whose responses all have one advantage."""
    chosen, values = choose("kl_cov", share, tokens), covariances(tokens)
    assert sum(chosen) == max(1, int(share * len(tokens)))
    least = min(value for value, own in zip(values, chosen, strict=True) if own)
    most = max((value for value, own in zip(values, chosen, strict=True) if not own), default=-math.inf)
    assert least >= most - 1e-6


@given(TOKENS, SHARE)
def test_clip_cov_draws_a_share_between_its_bounds_from_what_ppo_does_not_clip(tokens, share):
    chosen = choose("clip_cov", share, tokens)
    eligible = [
        1.0 < covariance < 5.0 and not clipped(*token)
        for covariance, token in zip(covariances(tokens), tokens, strict=True)
    ]
    assert all(inside for inside, own in zip(eligible, chosen, strict=True) if own)
    assert sum(chosen) == min(sum(eligible), max(1, int(share * len(tokens))))


def clipped(logprob: float, old: float, advantage: float) -> bool:
    ratio = math.exp(logprob - old)
    return min(max(ratio, 0.8), 1.28) * advantage < ratio * advantage


def test_chance_differs_from_step_to_step():
    tokens = [(-0.25, -0.25, 3.0)] * 10 + [(-2.5, -2.5, 0.0)] * 30
    drawn = [choose("clip_cov", 0.05, tokens, step=step) for step in range(8)]
    assert all(sum(each) == 2 for each in drawn) and len({tuple(each) for each in drawn}) > 4

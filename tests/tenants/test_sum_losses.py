"""Losses of the protocol are those of `losses` with thresholds in place of distances, and sums over masks of theirs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms import losses
from megasync.algorithms.losses import MAX_LOG_RATIO, PolicyTokens
from megasync.tenants.sum_losses import LOSSES

CLIPS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}
OWN = {"clip_low": 0.3, "clip_high": 0.5}
# The same loss of `losses`, from tokens.
SAME = {
    "ppo": lambda tokens: losses.vanilla(tokens, **OWN, dual_clip=None),
    "cispo": lambda tokens: losses.cispo(tokens, **OWN),
    "dro": lambda tokens: losses.dro(tokens, beta=0.3),
    "gspo": lambda tokens: losses.gspo(tokens, **OWN),
}


def columns(seed):
    """(log-probs, inputs, segments), float64."""
    draw = np.random.default_rng(seed)
    segments = np.repeat(np.arange(3), draw.integers(1, 6, 3))
    logprobs = draw.uniform(-4, -0.05, len(segments))
    inputs = {"logprobs": logprobs + draw.normal(0, 0.6, len(segments)), "advantages": draw.normal(size=len(segments))}
    tensors = {name: torch.from_numpy(column) for name, column in inputs.items()}
    return torch.from_numpy(logprobs).requires_grad_(), tensors, torch.from_numpy(segments)


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0]


@pytest.mark.parametrize("name", SAME)
@given(st.integers(0, 2**32))
def test_a_loss_of_a_policy_is_that_of_a_run(name, seed):
    logprobs, inputs, segments = columns(seed)
    tokens = PolicyTokens(logprobs, inputs["logprobs"], inputs["advantages"], logprobs == logprobs, segments)
    options = {option: torch.full_like(logprobs, {**CLIPS, "beta": 0.3}[option]) for option in LOSSES[name].defaults}
    mask = torch.ones_like(logprobs)
    found = LOSSES[name].compute(logprobs, {**inputs, **options, "sequence_ratio_mask": mask}, segments)
    expected = SAME[name](tokens).loss
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, logprobs), gradient(expected, logprobs))


@given(st.integers(0, 2**32))
def test_a_ratio_of_a_sequence_reads_only_its_mask(seed):
    logprobs, inputs, segments = columns(seed)
    mask = torch.ones_like(logprobs)
    for segment in range(3):
        places = (segments == segment).nonzero()[:, 0]
        mask[places[1::2]] = 0
    options = {name: torch.full_like(logprobs, value) for name, value in CLIPS.items()}
    found = LOSSES["gspo"].compute(logprobs, {**inputs, **options, "sequence_ratio_mask": mask}, segments)
    for segment in range(3):
        own = segments == segment
        kept = own & (mask != 0)
        ratio = (logprobs - inputs["logprobs"])[kept].mean().exp()
        bounded = ratio.clamp(*CLIPS.values())
        advantages = inputs["advantages"][own]
        torch.testing.assert_close(found[own], -torch.minimum(ratio * advantages, bounded * advantages))


def test_weights_and_ratios():
    logprobs, inputs, segments = columns(1)
    torch.testing.assert_close(
        LOSSES["importance_sampling"].compute(logprobs, inputs, segments),
        -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"],
    )
    weights = {"weights": inputs["advantages"]}
    found = LOSSES["cross_entropy"].compute(logprobs, weights, segments)
    torch.testing.assert_close(gradient(found, logprobs), -inputs["advantages"])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_loss_is_finite_however_unlikely_its_samples_were(name):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1e4, -2.0]), "advantages": torch.tensor([0.0, 1.0])}
    options = {option: torch.full_like(logprobs, value) for option, value in LOSSES[name].defaults.items()}
    mask = torch.ones_like(logprobs)
    found = LOSSES[name].compute(logprobs, {**inputs, **options, "sequence_ratio_mask": mask}, torch.tensor([0, 1]))
    assert found.isfinite().all() and gradient(found, logprobs).isfinite().all()
    assert found.abs().max() <= np.exp(MAX_LOG_RATIO)

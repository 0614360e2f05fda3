import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms.losses import AGES, KL_KINDS, kl_by_age

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.25, 0.25, 0.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expectation_under_the_policy_is_the_kl_divergence(kind):
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    torch.testing.assert_close((POLICY * KL_KINDS[kind](POLICY.log(), REFERENCE.log())).sum(), exact)


@given(st.floats(-10, 0), st.floats(-10, 0))
def test_estimators_follow_their_formulas(logprob, reference):
    log_ratio = torch.tensor(reference - logprob, dtype=torch.float64)
    expected = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}
    for kind, value in expected.items():
        estimate = KL_KINDS[kind](
            torch.tensor(logprob, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
        )
        torch.testing.assert_close(estimate, value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["k2", "k3"])
@given(logprob=st.floats(-200, 0), reference=st.floats(-200, 0))
def test_k2_and_k3_are_finite_and_never_negative(kind, logprob, reference):
    value = KL_KINDS[kind](torch.tensor(logprob), torch.tensor(reference))
    assert torch.isfinite(value) and value >= -1e-5


@pytest.mark.parametrize("kind", list(KL_KINDS))
def test_equal_policies_have_zero_kl(kind):
    assert KL_KINDS[kind](POLICY.log(), POLICY.log()).abs().max() == 0


def test_the_expected_gradient_of_k2_is_that_of_the_divergence_and_of_k1_is_zero():
    logits = POLICY.log().clone().requires_grad_()

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    logprobs = logits.log_softmax(0)
    exact = gradient((logprobs.exp() * (logprobs - REFERENCE.log())).sum())
    expected = {kind: gradient((POLICY * KL_KINDS[kind](logprobs, REFERENCE.log())).sum()) for kind in ("k1", "k2")}
    torch.testing.assert_close(expected["k2"], exact)
    torch.testing.assert_close(expected["k1"], torch.zeros_like(exact), atol=1e-12, rtol=0)


def test_the_kl_of_each_age_is_the_mean_over_its_tokens():
    trainer, behaviour = torch.tensor([-1.0, -2.0, -3.0, math.nan, -1.0]), torch.tensor([-1.5, -2.0, -2.0, -1.0, -1.2])
    keep, ages = torch.tensor([True, True, True, False, True]), torch.tensor([0, 0, 2, 0, 50])
    sums = kl_by_age(trainer, behaviour, keep, ages)
    assert len(sums) == 2 * AGES
    expected = {0: math.exp(0.5) - 1 - 0.5, 2: math.exp(-1) - 1 + 1, AGES - 1: math.exp(0.2) - 1 - 0.2}
    tokens = {0: 2, 2: 1, AGES - 1: 1}
    for age in range(AGES):
        assert sums[f"server_kl@{age}"].item() == pytest.approx(expected.get(age, 0.0), rel=1e-5)
        assert sums[f"tokens@{age}"] == tokens.get(age, 0)

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megasync.algorithms.losses import policy_loss
from megasync.config.schema import AlgorithmConfig
from megasync.errors import ConfigError

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, correction="token", correction_cap=2.0)


def drawn(seed: int) -> list[dict]:
    """Tokens whose ratios are on both sides of every bound."""
    draw = np.random.default_rng(seed)
    tokens = []
    for _ in range(draw.integers(1, 17)):
        logprob = draw.uniform(-4, -0.05)
        near = {name: logprob + draw.normal(0, 0.8) for name in ("old", "behaviour", "reference")}
        token = {"logprobs": logprob, **near, "entropy": draw.uniform(0, 5), "advantages": draw.uniform(-3, 3)}
        tokens.append(token | {"mask": int(draw.random() < 0.8), "segments": int(draw.integers(4))})
    return tokens


TOKENS = st.integers(0, 2**32).map(drawn)
DUAL_CLIPS = st.sampled_from([None, 1.1, 3.0])
CONFIGS = st.builds(
    AlgorithmConfig,
    clip_low=st.sampled_from([0.05, 0.2, 0.5]),
    clip_high=st.sampled_from([0.1, 0.28, 0.9]),
    dual_clip=DUAL_CLIPS,
    correction=st.sampled_from(["none", "token", "sequence", "product"]),
    correction_cap=st.sampled_from([1.0, 1.5, 4.0]),
    correction_floor=st.sampled_from([0.0, 0.3, 1.0]),
    correction_outside=st.sampled_from(["cap", "mask"]),
    rejection=st.sampled_from(["none", "sequence", "product", "token"]),
    rejection_floor=st.sampled_from([0.0, 0.3, 0.9]),
    rejection_cap=st.sampled_from([None, 1.1, 4.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    kl_kind=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
) | st.builds(AlgorithmConfig, ratio=st.just("behaviour"), correction=st.just("none"), dual_clip=DUAL_CLIPS)


def tensors(tokens):
    """Columns as tensors; log-probs and entropy ask for gradients."""
    made = {}
    for name in tokens[0]:
        column = [token[name] for token in tokens]
        kind = torch.int64 if name in ("mask", "segments") else torch.float32
        made[name] = torch.tensor(column, dtype=kind)
    made["logprobs"].requires_grad_()
    made["entropy"].requires_grad_()
    return made


def reference(config, tokens):
    """The formulas of docs/losses.md in plain Python: loss, d loss / d logprob of each token."""
    loss, gradient = 0.0, []
    for token in tokens:
        if not token["mask"]:
            gradient.append(0.0)
            continue
        lp, advantage = token["logprobs"], token["advantages"]
        ratio = math.exp(lp - token["old" if config.ratio == "trainer" else "behaviour"])
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        weight = reference_weight(config, token, tokens)
        surrogate = min(ratio * advantage, bounded * advantage)
        slope = 0.0 if bounded * advantage < ratio * advantage else -weight * ratio * advantage
        if config.dual_clip is not None and advantage < 0 and config.dual_clip * advantage > surrogate:
            surrogate, slope = config.dual_clip * advantage, 0.0
        loss -= weight * surrogate
        log_ratio = token["reference"] - lp
        value, derivative = {
            "k1": (-log_ratio, 1.0),
            "k2": (log_ratio**2 / 2, -log_ratio),
            "k3": (math.exp(log_ratio) - 1 - log_ratio, 1 - math.exp(log_ratio)),
        }[config.kl_kind]
        loss += config.kl_coef * value - config.entropy_coef * token["entropy"]
        gradient.append(slope + config.kl_coef * derivative)
    return loss, gradient


def reference_weight(config, token, tokens):
    sequence = [other for other in tokens if other["mask"] and other["segments"] == token["segments"]]
    if config.rejection != "none":
        ratios = [reference_ratio("token", other, sequence) for other in sequence]
        if config.rejection != "token":
            ratios = [reference_ratio(config.rejection, token, sequence)]
        cap = math.inf if config.rejection_cap is None else config.rejection_cap
        # Rounding decides about a ratio at a bound.
        assume(all(abs(ratio - bound) > 1e-5 * bound for ratio in ratios for bound in (config.rejection_floor, cap)))
        if not all(config.rejection_floor <= ratio <= cap for ratio in ratios):
            return 0.0
    if config.correction == "none":
        return 1.0
    ratio = reference_ratio(config.correction, token, sequence)
    bounds = config.correction_floor, config.correction_cap
    assume(all(abs(ratio - bound) > 1e-5 * bound for bound in bounds if bound))
    if config.correction_outside == "mask" and not bounds[0] <= ratio <= bounds[1]:
        return 0.0
    return min(max(ratio, bounds[0]), bounds[1])


def reference_ratio(level, token, sequence):
    mine = [token] if level == "token" else sequence
    total = math.fsum(other["old"] - other["behaviour"] for other in mine)
    return math.exp(total / len(mine) if level == "sequence" else total)


@given(CONFIGS, TOKENS)
def test_loss_and_gradient_are_those_of_the_formulas(config, tokens):
    inputs = tensors(tokens)
    loss, _ = policy_loss(config, inputs)
    loss.backward()
    expected, gradient = reference(config, tokens)
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert inputs["logprobs"].grad.tolist() == pytest.approx(gradient, rel=1e-3, abs=1e-4)
    assert inputs["entropy"].grad.tolist() == pytest.approx([-config.entropy_coef * t["mask"] for t in tokens])


@given(CONFIGS, TOKENS, st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_masked_tokens_reach_neither_sums_nor_gradients(config, tokens, garbage):
    clean, spoilt = tensors(tokens), tensors(tokens)
    masked = spoilt["mask"] == 0
    for name, values in spoilt.items():
        if name not in ("mask", "segments"):
            values.data[masked] = garbage
    (loss, sums), (spoilt_loss, spoilt_sums) = policy_loss(config, clean), policy_loss(config, spoilt)
    loss.backward()
    spoilt_loss.backward()
    assert torch.equal(loss, spoilt_loss)
    assert all(torch.equal(sums[name], spoilt_sums[name]) for name in sums)
    assert torch.equal(clean["logprobs"].grad, spoilt["logprobs"].grad)
    assert not spoilt["logprobs"].grad[masked].any()


@given(CONFIGS, TOKENS, TOKENS)
def test_sums_of_two_microbatches_are_the_sums_of_both_together(config, first, second):
    second = [token | {"segments": token["segments"] + 4} for token in second]
    parts = [policy_loss(config, tensors(part)) for part in (first, second)]
    loss, sums = policy_loss(config, tensors(first + second))
    torch.testing.assert_close(loss, parts[0][0] + parts[1][0], rtol=1e-4, atol=1e-3)
    for name, value in sums.items():
        torch.testing.assert_close(value, parts[0][1][name] + parts[1][1][name], rtol=1e-4, atol=1e-3)


def inputs(**changes):
    plain = {
        "logprobs": torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True),
        "old": torch.full((4,), -1.0),
        "behaviour": torch.full((4,), -1.0),
        "advantages": torch.ones(4),
        "mask": torch.tensor([1, 1, 1, 0]),
    }
    return plain | changes


def test_metrics_of_absent_inputs_are_absent():
    _, sums = policy_loss(CONFIG, inputs())
    assert not {"kl", "entropy"} & set(sums)


def test_by_default_no_token_exceeds_cap_times_dual_clip():
    """Without dual clip the loss of a token with a negative advantage grows up to exp(20)."""
    stale = inputs(old=torch.full((4,), -30.0), behaviour=torch.full((4,), -60.0))
    loss, sums = policy_loss(AlgorithmConfig(), stale | {"advantages": -torch.ones(4)})
    loss.backward()
    assert loss.item() == pytest.approx(3 * 2.0 * 3.0)  # three tokens, correction_cap, dual_clip
    assert sums["dual_clip_fraction"] == 3 and not stale["logprobs"].grad.any()


def test_only_the_current_policy_is_differentiated():
    leaves = {name: torch.full((4,), -1.1, requires_grad=True) for name in inputs() if name != "mask"}
    loss, _ = policy_loss(replace(CONFIG, kl_coef=0.1), {**leaves, "reference": torch.zeros(4), "mask": torch.ones(4)})
    loss.backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == {"logprobs"}


@pytest.mark.parametrize("tokens", [0, 4])
def test_without_trained_tokens_loss_and_gradient_are_zero(tokens):
    empty = {name: value[:tokens] for name, value in inputs(mask=torch.zeros(4)).items()}
    leaf = empty["logprobs"] = empty["logprobs"].detach().requires_grad_()
    loss, sums = policy_loss(CONFIG, empty)
    loss.backward()
    assert loss == 0 and not any(sums.values()) and not leaf.grad.any()


def test_half_precision_inputs_are_summed_in_float32():
    half = {name: value.detach().bfloat16() if value.is_floating_point() else value for name, value in inputs().items()}
    loss, _ = policy_loss(CONFIG, half)
    assert loss.dtype == torch.float32 and loss == -3


def test_a_huge_ratio_stays_finite():
    logprobs = torch.tensor([0.0, 0.0, 0.0, 0.0], requires_grad=True)
    loss, _ = policy_loss(CONFIG, inputs(logprobs=logprobs, old=torch.full((4,), -500.0), advantages=-torch.ones(4)))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("key, name", [("kl_coef", "reference"), ("entropy_coef", "entropy")])
def test_a_coefficient_without_its_column_is_refused(key, name):
    with pytest.raises(ValueError, match=rf"need the columns \['{name}'\]"):
        policy_loss(replace(CONFIG, **{key: 0.1}), inputs())


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_correcting_a_ratio_that_is_already_against_the_behaviour_policy_is_refused(correction):
    with pytest.raises(ConfigError, match="algorithm.ratio.*algorithm.correction"):
        policy_loss(replace(CONFIG, ratio="behaviour", correction=correction), inputs())

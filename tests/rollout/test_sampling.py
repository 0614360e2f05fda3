"""What is trained is sampled from the distribution that the trainer scores."""

from __future__ import annotations

import pytest

from megasync.config.schema import SamplingConfig
from megasync.errors import DataError
from megasync.rollout.client import base_params, check_trained, merge_params
from megasync.rollout.inflight import RequestGate
from megasync.rollout.workflow import SampleClient

BASE = base_params(SamplingConfig(temperature=0.8))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperatur", 0.5, "did you mean 'temperature'"),
        ("temperature", -1, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("top_p", 0, "top_p"),
        ("top_k", 0, "top_k"),
        ("max_new_tokens", 0, "max_new_tokens"),
        ("stop", ["x", ""], "stop contains an empty text"),
    ],
)
def test_parameters_are_checked(name, value, message):
    with pytest.raises(DataError, match=message):
        merge_params(BASE, {name: value})


def test_stop_conditions_are_allowed_in_training_rollouts():
    asked = {"max_new_tokens": 3, "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True, "temperature": 0.8}
    check_trained(merge_params(BASE, asked), BASE)


def test_every_sampling_parameter_is_classified_by_its_effect_on_the_distribution():
    """A new one has to be looked at."""
    only_ends = {"max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim"}
    only_text = {"skip_special_tokens", "spaces_between_special_tokens"}
    bending = {name for name in BASE if name not in only_ends | only_text}
    for name in bending:
        with pytest.raises(DataError, match=rf"{name}=0.123.*the trainer scores.*eval.sampling"):
            check_trained(BASE | {name: 0.123}, BASE)


def test_what_is_trained_is_truncated_as_configured_and_not_otherwise():
    base = base_params(SamplingConfig(top_k=20, top_p=0.9, min_p=0.1))
    check_trained(merge_params(base, {"top_k": 20}), base)
    for name, value in {"top_k": -1, "top_p": 1.0, "min_p": 0.0}.items():
        with pytest.raises(DataError, match=rf"{name}=.*rollout.sampling.{name}"):
            check_trained(merge_params(base, {name: value}), base)


@pytest.mark.parametrize("trained", [True, False])
async def test_only_training_rollouts_set_the_trained_flag(fake_client, trained):
    client = fake_client()
    sample = SampleClient(client, RequestGate(), routing_key="0:1", batch=0 if trained else None)
    await sample.generate([1])
    await sample.chat([{"role": "user", "content": "x"}])
    assert [options.get("trained", False) for _, options in client.calls] == [trained] * 2

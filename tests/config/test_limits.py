"""Every key has its limits, and a value outside them is refused with the key, the value and what is allowed."""

import math
from copy import deepcopy
from typing import get_type_hints

import pytest

from megasync.config import load_config
from megasync.config.limits import PATH, Choice, Range, check_limits, keys_of, limit_of, value_of
from megasync.errors import ConfigError

SOUND = load_config(
    {
        "model": {"path": "m"},
        "data": {"train": {"kind": "digits", "source": "copy"}, "eval": {"kind": "digits", "source": "copy"}},
        "rollout": {"environment": {"kind": "gymnasium"}, "rewards": {"own": {"function": "m:f"}}},
        "eval": {"sets": {"more": {"data": {"kind": "digits", "source": "copy"}}}},
        "teachers": {"guide": {"path": "t"}},
        "reward_models": {"judge": {"kind": "generative", "path": "j"}},
    }
)
LIMITS = {key: limit_of(item) for key, _, item in keys_of(SOUND)}
RANGES = {key: limit for key, limit in LIMITS.items() if isinstance(limit, Range)}
CHOICES = {key: limit for key, limit in LIMITS.items() if isinstance(limit, Choice)}
PATHS = [key for key, limit in LIMITS.items() if limit is PATH]
# Numbers and texts that accept every value of their type, or that `check` validates with other keys.
UNLIMITED = {
    *(f"{data}.{key}" for data in ("data.train", "data.eval", "eval.sets.more.data") for key in ("source", "split")),
    *("sft.answer", "data.prompt.system"),
    *(f"rollout.rewards.own.{key}" for key in ("function", "model")),
    *("rollout.environment.system", "rollout.chat.tool_format", "rollout.chat.reasoning_format"),
    *(f"reward_models.judge.{key}" for key in ("system", "yes_token", "no_token")),
}


@pytest.fixture
def config():
    return deepcopy(SOUND)


def test_every_number_and_text_has_a_limit_or_is_listed_as_unlimited():
    hints = {key: get_type_hints(type(section))[item.name] for key, section, item in keys_of(SOUND)}
    scalar = {key for key, hint in hints.items() if hint in (int, float, str, int | None, float | None, str | None)}
    assert {key for key in scalar if LIMITS[key] is None} == UNLIMITED


def test_the_defaults_are_within_their_limits(config):
    check_limits(config)


def set_value(config, key, value):
    section, item = next((section, item) for name, section, item in keys_of(config) if name == key)
    setattr(section, item.name, value)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_limits(config)
    return str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, 10**30])
def test_an_infinite_or_huge_number_is_refused_for_every_key(value):
    for key, allowed in RANGES.items():
        config = deepcopy(SOUND)
        set_value(config, key, value)
        message = refused(config)
        assert message.startswith(f"{key}={value}") and str(allowed) in message


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    ("path", "reason"),
    [("", "empty"), ("a" * 300, "too long"), ("a\0b", "null byte"), ("~no-such-user/a", "home directory")]
    + [(f"{scheme}://a", "addresses are not supported") for scheme in ("s3", "file", "abfs+x")],
)
def test_an_invalid_path_is_refused_with_the_reason(config, key, path, reason):
    set_value(config, key, path)
    message = refused(config)
    assert message.startswith(f"{key}=") and reason in message and len(message) < 400


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_below_or_above_its_range_is_refused(key):
    allowed = RANGES[key]
    outside = [allowed.low if allowed.open_low else allowed.low - 1, math.nan]
    if allowed.high < math.inf:
        outside.append(allowed.high if allowed.open_high else allowed.high + 1)
    for value in outside:
        config = deepcopy(SOUND)
        set_value(config, key, value)
        message = refused(config)
        assert message.startswith(f"{key}={value}") and str(allowed) in message


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_an_unknown_choice_is_refused_with_the_known_ones(config, key):
    set_value(config, key, "nonsense")
    message = refused(config)
    assert f"{key}='nonsense'" in message and all(option in message for option in CHOICES[key].options)


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("name", "a/b", "run-1.x"),
        ("rollout.workflow", "package.module", "package.module:function"),
        ("rollout.reward", "my reward:f", "m:f"),
        ("rollout.reward", "maths", "math"),
        ("rollout.environment.kind", "gym", "gymnasium"),
        ("cluster.address", "head", "10.0.0.1:6379"),
        ("cluster.host", "a b", "fe80::1"),
        ("eval.sets.more.reward", "maths", "code"),
    ],
)
def test_a_text_of_the_wrong_form_is_refused_with_the_form(config, key, bad, good):
    set_value(config, key, bad)
    message = refused(config)
    assert f"{key}={bad!r}" in message and str(LIMITS[key]) in message
    set_value(config, key, good)
    check_limits(config)


def test_an_absent_section_has_no_values(config):
    config.data.eval = None
    assert value_of(config, "data.eval.size") is None
    check_limits(config)


def test_a_range_describes_whether_it_includes_its_ends():
    assert str(Range(0, 1, open_low=True)) == "above 0 and at most 1"
    assert str(Range(1)) == "at least 1"
    assert not Range(0, 1, open_high=True).holds(1)

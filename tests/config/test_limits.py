"""Every key has its limits, and a value outside them is refused with the key, the value and what is allowed."""

import math
from copy import deepcopy

import pytest

from megasync.config import load_config
from megasync.config.limits import CHOICES, FREE, PATHS, PATTERNS, RANGES, Range, check_limits, value_of
from megasync.config.load import schema_keys, section_of
from megasync.errors import ConfigError

LEAVES = {key for key, hint in schema_keys() if section_of(hint) is None}


@pytest.fixture(scope="module")
def sound():
    values = {
        "model": {"path": "m"},
        "data": {"train": {"kind": "digits", "source": "copy"}, "eval": {"kind": "digits", "source": "copy"}},
        "rollout": {"environment": {"kind": "gymnasium"}},
    }
    return load_config(values)


def test_every_key_of_the_schema_stands_in_exactly_one_table():
    tables = [set(RANGES), set(CHOICES), set(PATTERNS), FREE]
    assert set().union(*tables) == LEAVES
    assert sum(map(len, tables)) == len(LEAVES)


def test_the_defaults_are_within_their_limits(sound):
    check_limits(sound)


def set_value(config, key, value):
    *sections, name = key.split(".")
    node = config
    for section in sections:
        node = getattr(node, section)
    setattr(node, name, value)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_limits(config)
    return str(caught.value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, 10**30])
def test_what_is_infinite_or_nearly_so_is_refused_for_every_key(sound, value):
    for key, allowed in RANGES.items():
        config = deepcopy(sound)
        set_value(config, key, value)
        message = refused(config)
        assert message.startswith(f"{key}={value}") and str(allowed) in message


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize(
    ("path", "reason"),
    [("", "empty"), ("a" * 300, "too long"), ("a\0b", "null byte"), ("~no-such-user/a", "home directory")],
)
def test_a_path_that_the_file_system_refuses_is_told_with_the_reason(sound, key, path, reason):
    config = deepcopy(sound)
    set_value(config, key, path)
    message = refused(config)
    assert message.startswith(f"{key}=") and reason in message and len(message) < 400


@pytest.mark.parametrize("key", sorted(RANGES))
def test_a_number_below_or_above_its_range_is_refused(sound, key):
    allowed = RANGES[key]
    outside = [allowed.low if allowed.open_low else allowed.low - 1, math.nan]
    if allowed.high < math.inf:
        outside.append(allowed.high if allowed.open_high else allowed.high + 1)
    for value in outside:
        config = deepcopy(sound)
        set_value(config, key, value)
        message = refused(config)
        assert message.startswith(f"{key}={value}") and str(allowed) in message


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(sound, key):
    config = deepcopy(sound)
    set_value(config, key, "nonsense")
    message = refused(config)
    assert f"{key}='nonsense'" in message and all(choice in message for choice in CHOICES[key])


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
    ],
)
def test_a_text_of_the_wrong_form_is_refused_with_the_form(sound, key, bad, good):
    config = deepcopy(sound)
    set_value(config, key, bad)
    message = refused(config)
    assert f"{key}={bad!r}" in message and PATTERNS[key][1] in message
    set_value(config, key, good)
    check_limits(config)


def test_an_absent_section_has_no_values(sound):
    config = deepcopy(sound)
    config.data.eval = None
    assert value_of(config, "data.eval.size") is None
    check_limits(config)


def test_ranges_say_whether_their_ends_belong_to_them():
    assert str(Range(0, 1, open_low=True)) == "above 0 and at most 1"
    assert str(Range(1)) == "at least 1"
    assert not Range(0, 1, open_high=True).holds(1)

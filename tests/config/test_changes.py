"""For every key it is decided whether a resumed run may change it; otherwise the error has the reason and the fix."""

import pytest

from megasync.config import Config, load_config
from megasync.config.changes import FIXED, FREE, KEY_BY_KEY, changes, check_changes, fixed, why_fixed
from megasync.config.load import schema_keys, section_of
from megasync.errors import ConfigError

SECTIONS = {key for key, hint in schema_keys() if section_of(hint) is not None} | {""}
LEAVES = [key for key, hint in schema_keys() if section_of(hint) is None]


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_is_either_fixed_with_a_reason_or_free(key):
    reason = why_fixed(key)
    assert reason is None or (len(reason) > 40 and ";" in reason), "a reason says what to do instead"
    assert (key in fixed()) == (reason is not None)


def test_the_tables_contain_existing_keys_only_and_each_once():
    assert FIXED.keys().isdisjoint(FREE)
    assert FIXED.keys() | FREE <= {*LEAVES, *SECTIONS}
    assert set(KEY_BY_KEY) <= SECTIONS


@pytest.mark.parametrize("section", KEY_BY_KEY)
def test_a_new_key_in_a_section_with_both_kinds_needs_a_decision(section):
    with pytest.raises(KeyError, match="neither in FIXED nor in FREE"):
        why_fixed(f"{section}.something_new".lstrip("."))


def test_keys_of_named_sections_follow_their_parent_section():
    assert why_fixed("eval.sets.mine.repeats") is None
    assert why_fixed("reward_models.judge.servers") is None


def minimal(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}}, overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.dtype=float32", "model.dtype=float32 cannot replace bfloat16 .*export the newest"),
        ("rollout.sampling.temperature=0.5", r"temperature=0.5 cannot replace 1.0 .*the distribution"),
        ("data.shuffle=false", "data.shuffle=false cannot replace true .*start a new run"),
        ("model.path=elsewhere", "model.path=elsewhere cannot replace m .*symbolic link"),
        ("data.train={kind: digits, source: addition}", "data.train.kind=digits cannot replace null"),
        ("seed=3", "seed=3 cannot replace 0"),
    ],
)
def test_a_change_of_a_fixed_key_is_refused_with_the_reason(override, words):
    with pytest.raises(ConfigError, match=words):
        check_changes(minimal(), minimal(override), 0)


def test_all_reasons_are_given_at_once():
    with pytest.raises(ConfigError, match=r"seed=3 .*model.dtype=float32 .*total_steps=5 is less than the 7 trained"):
        check_changes(minimal(), minimal("seed=3", "model.dtype=float32", "schedule.total_steps=5"), 7)


def test_changes_of_free_keys_are_allowed():
    overrides = (
        "schedule.groups_per_step=3",
        "trainer.tensor_parallel=2",
        "timeouts.request=7",
        "cluster.device=cpu",
        "schedule.total_steps=7",
    )
    check_changes(minimal(), minimal(*overrides), 7)
    found = {key: (old, new) for key, old, new in changes(minimal(), minimal(*overrides))}
    assert found.keys() == {override.partition("=")[0] for override in overrides}
    assert found["schedule.groups_per_step"] == (16, 3)

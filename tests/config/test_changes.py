"""A resumed run may change every key but those that are fixed; the error then has the reason and the fix."""

import pytest

from megasync.config import Config, load_config
from megasync.config.changes import changes, check_changes, leaves
from megasync.errors import ConfigError

FIXED = {key: reason for key, reason in leaves() if reason}


@pytest.mark.parametrize("key", FIXED)
def test_a_reason_says_what_to_do_instead(key):
    assert len(FIXED[key]) > 40 and ";" in FIXED[key]


def test_the_keys_that_a_resumed_run_depends_on_are_fixed():
    """What names the run directory, orders prompts, forms weights, or decides what responses were sampled from."""
    assert {
        key.rpartition(".")[0] + "." if key.startswith(("data.train", "trainer.lora")) else key for key in FIXED
    } == {
        *("name", "run_root", "seed", "model.path", "model.dtype", "critic.enabled", "critic.path", "trainer.lora."),
        *("data.train.", "data.sets", "data.shuffle", "data.prompt.examples"),
        *(f"rollout.sampling.{key}" for key in ("temperature", "top_p", "top_k", "min_p")),
    }


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

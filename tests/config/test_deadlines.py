"""The defaults satisfy all relations between deadlines, and a violated relation is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megasync.cluster import remote_buffer
from megasync.config import Config
from megasync.config.deadlines import BUFFER_RESTART, FIXED, RELATIONS, Relation, check_deadlines
from megasync.config.load import schema_keys
from megasync.config.schema import EnvironmentConfig, RewardModelConfig
from megasync.errors import ConfigError
from megasync.preflight.check import check_config

KEYS = {key for key, _ in schema_keys()}


def everything() -> Config:
    """Defaults, with each part that has deadlines of its own."""
    config = Config()
    config.rollout.agent = "package:agent"
    config.rollout.workers = 2
    config.rollout.environment = EnvironmentConfig(kind="gymnasium")
    config.rollout.tools.functions = ["package:search"]
    config.reward_models = {"grader": RewardModelConfig()}
    return config


def test_the_defaults_satisfy_every_relation():
    config = everything()
    assert all(relation.applies(config) for relation in RELATIONS)
    check_deadlines(config)


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: f"{r.longer} {' '.join(str(t[0]) for t in r.shorter)}")
def test_each_violated_relation_is_refused_with_its_keys_values_and_fix(relation: Relation, monkeypatch):
    monkeypatch.setattr("megasync.config.deadlines.RELATIONS", (relation,))
    config = everything()
    section, _, key = relation.longer.partition(".")
    setattr(getattr(config, section), key, 1.5)
    with pytest.raises(ConfigError, match=re.escape(f"{relation.longer}=1.5 must be longer than")) as refused:
        check_deadlines(config)
    message = str(refused.value)
    assert relation.why in message and f"raise {relation.longer} above " in message
    names = {factor for term in relation.shorter for factor in term if isinstance(factor, str)}
    assert names <= KEYS | set(FIXED)
    assert all(f"{name}=" in message for name in names)


def test_a_deadline_must_be_longer_and_not_equal():
    config = Config()
    config.timeouts.weight_sync = config.timeouts.sync_stall
    with pytest.raises(ConfigError, match=r"timeouts\.weight_sync=30 must be longer than timeouts\.sync_stall=30:"):
        check_deadlines(config)


def test_a_relation_of_an_unused_component_is_not_checked():
    config = Config()
    config.timeouts.agent = 100_000.0
    check_deadlines(config)
    with pytest.raises(ConfigError, match=r"timeouts\.agent=100000 \+ timeouts\.reward=60 = 100060 s: no group"):
        check_deadlines(config, own_agent=True)


def test_relations_are_checked_for_training_and_not_for_serving_only(make):
    short = make("timeouts.no_progress=600")
    with pytest.raises(ConfigError, match=r"timeouts\.no_progress=600 must be longer than timeouts\.request=600"):
        check_config(short)
    check_config(short, training=False)


def test_a_step_restart_or_sync_may_take_longer_than_no_progress(make):
    check_config(make("timeouts.train_step=7200", "timeouts.trainer_start=3600", "timeouts.weight_sync=3600"))


def test_fixed_waits_match_the_code():
    assert FIXED == {
        BUFFER_RESTART: remote_buffer.PULSE_SECONDS + remote_buffer.ANSWER_SECONDS + remote_buffer.START_SECONDS
    }


def test_slurm_signals_early_enough_for_a_clean_end():
    script = (Path(__file__).parents[2] / "launch" / "slurm.sbatch").read_text()
    (lead,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    timeouts = Config().timeouts
    # Trainer ranks and servers each have `shutdown` to end, one after the other.
    assert 2 * timeouts.shutdown < float(lead)

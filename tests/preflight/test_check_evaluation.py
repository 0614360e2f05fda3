"""Held-out sets that are accepted, and values of a set; `refused.jsonl` has contradictions."""

import pytest

from megasync.config.rules import check_rules
from megasync.errors import ConfigError
from megasync.preflight.check import check_config

SET = "eval.sets.hard={data: {kind: digits, source: copy, split: test}}"


def test_named_sets_are_accepted_with_and_without_data_eval(make):
    check_config(make(SET, "schedule.stop_at_score=0.9"))
    check_config(make(SET, "schedule.stop_at_score=0.9", "data.eval=null"))
    check_config(make(SET, "eval.temperatures=[0.0,0.8]", "eval.repeats=8"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.sets.hard.sample=4", "did you mean 'eval.sets.hard.samples'"),
        ("eval.sets.hard={}", "eval.sets.hard.data.kind"),
        ("eval.sets.hard.temperatures=0", "eval.sets.hard.temperatures=0 has the wrong type"),
    ],
)
def test_values_of_a_set_are_checked_like_all_others(make, override, message):
    with pytest.raises(ConfigError) as caught:
        make(override)
    assert message in str(caught.value)


def test_exact_evaluations_leave_a_server_to_generate(make):
    for overrides in (
        ["rollout.servers=1"],
        ["rollout.servers=2"],
        ["rollout.servers=4", "eval.servers=3"],
        ["rollout.servers=1", "cluster.colocate=true", "schedule.max_staleness=0"],
    ):
        check_rules(make("eval.exact=true", *overrides), within=("eval",))


def test_servers_alone_do_not_evaluate(make):
    idle = make("eval.servers=2", "rollout.servers=1")
    check_rules(idle, within=("eval",), training=False)
    with pytest.raises(ConfigError, match=r"eval.servers=2 .*\n.*rollout.servers=1"):
        check_rules(idle, within=("eval",))

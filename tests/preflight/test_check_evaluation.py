"""Contradictions of held-out sets are refused with the key of the set."""

import pytest

from megasync.errors import ConfigError
from megasync.preflight.check import check_config
from megasync.preflight.check_evaluation import check_evaluation

SET = "eval.sets.hard={data: {kind: digits, source: copy, split: test}}"


def test_named_sets_are_accepted_with_and_without_data_eval(make):
    check_config(make(SET, "schedule.stop_at_score=0.9"))
    check_config(make(SET, "schedule.stop_at_score=0.9", "data.eval=null"))
    check_config(make(SET, "eval.temperatures=[0.0,0.8]", "eval.repeats=8"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["eval.sets={a b: {data: {kind: digits, source: copy}}}"], ["eval.sets.a b", "letters"]),
        (["eval.sets={eval: {data: {kind: digits, source: copy}}}"], ["eval.sets.eval", "choose another name"]),
        (["eval.sets.hard.samples=0"], ["eval.sets.hard.samples=0", "at least 1"]),
        (["eval.sets.hard.data.kind=csv"], ["eval.sets.hard.data.kind='csv'", "digits"]),
        (["eval.sets.hard.data={kind: jsonl, source: /absent.jsonl}"], ["eval.sets.hard.data.source='/absent.jsonl'"]),
        (["eval.sets.hard.data.size=5"], ["eval.sets.hard.samples=128", "eval.sets.hard.data.size=5"]),
        (["eval.sets.hard.reward=maths"], ["eval.sets.hard.reward='maths'"]),
        (["eval.sets.hard.temperatures=[]"], ["eval.sets.hard.temperatures=[]"]),
        (["eval.sets.hard.temperatures=[0.0,.nan]"], ["eval.sets.hard.temperatures=[0.0, nan]", "finite"]),
        (["eval.temperatures=[0.0,.inf]"], ["eval.temperatures=[0.0, inf]", "finite"]),
        (["eval.sets.hard.repeats=4"], ["eval.sets.hard.repeats=4", "greedy", "eval.sets.hard.temperatures=[0.0]"]),
        (["eval.repeats=4"], ["eval.repeats=4", "greedy"]),
        (["eval.sets.hard.sampling.top_p=0"], ["eval.sets.hard.sampling.top_p=0"]),
        (["eval.sampling.top_k=0"], ["eval.sampling.top_k=0"]),
        (
            ["data.eval=null", "eval.sets.hard.temperatures=[1.0]", "schedule.stop_at_score=0.5"],
            ["stop_at_score=0.5", "[1.0]", "put 0 first"],
        ),
        (["eval.every_steps=0", "schedule.stop_at_score=0.5"], ["stop_at_score=0.5", "eval.every_steps=0"]),
    ],
)
def test_a_contradiction_is_refused_with_its_keys(make, overrides, named):
    with pytest.raises(ConfigError) as caught:
        check_config(make(SET, *overrides))
    for part in named:
        assert part in str(caught.value)


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
        check_evaluation(make("eval.exact=true", *overrides), own_eval_rows=False)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["eval.servers=2", "rollout.servers=4"], ["eval.servers=2", "eval.exact=false"]),
        (["eval.exact=true", "eval.servers=2", "rollout.servers=2"], ["eval.servers=2", "rollout.servers=2", "3 or"]),
        (["eval.exact=true", "eval.servers=2", "rollout.servers=1"], ["rollout.servers=1", "eval.servers to 1"]),
        (["eval.exact=true", "eval.servers=2", "cluster.colocate=true"], ["eval.servers=2", "cluster.colocate=true"]),
        (["eval.exact=true", "eval.servers=2", "sync.transport=adapters"], ["eval.servers=2", "sync.transport"]),
    ],
)
def test_servers_of_evaluations_that_would_do_nothing_or_too_much_are_refused(make, overrides, parts):
    with pytest.raises(ConfigError) as error:
        check_evaluation(make(*overrides), own_eval_rows=False)
    assert all(part in str(error.value) for part in parts), error.value
    check_evaluation(make(*overrides), own_eval_rows=False, training=False)

"""What a workflow may return, and what happens to values that nothing behind the door could take."""

import dataclasses
import json
import logging

import numpy as np
import pytest
import torch

from megasync.buffer.payload import decode, encode
from megasync.errors import DataError
from megasync.observe.metrics import MetricsLog, read_metrics
from megasync.rollout.metrics import RolloutMetrics
from megasync.rollout.selection import summarize
from megasync.rollout.workflow import TrajectoryCheck, single_turn
from megasync.trajectory import Group, Trajectory


class Trap:
    """A user's own class, which raises when anybody looks at it as a number."""

    def __float__(self):
        raise RuntimeError("not a number")


def test_a_workflow_returns_one_trajectory_or_a_list(make_trajectory):
    one = make_trajectory()
    assert TrajectoryCheck(single_turn).check(one) == [one]
    assert TrajectoryCheck(single_turn).check([one, one]) == [one, one]
    for wrong in (None, "text", [one, "text"], (one,)):
        with pytest.raises(DataError, match=r"workflow\.single_turn must return a Trajectory"):
            TrajectoryCheck(single_turn).check(wrong)


@pytest.mark.parametrize(
    "value",
    [None, "1.0", b"1", float("nan"), float("inf"), 10**400, [1.0], {}, object(), Trap(), 1j, np.array([1.0, 2.0])]
    + [np.float32("nan"), torch.tensor([1.0, 2.0]), torch.tensor(float("inf"))],
    # Not `repr`: processes that share the tests must agree on their names, and it has addresses.
    ids=lambda value: type(value).__name__,
)
def test_a_metric_that_is_no_number_is_dropped_and_reported_once(make_trajectory, caplog, value):
    check = TrajectoryCheck(single_turn)
    with caplog.at_level(logging.WARNING, "megasync.rollout.workflow"):
        for _ in range(3):
            (taken,) = check.check(make_trajectory(metrics={"exit_code": value, "turns": 2}))
            assert taken.metrics == {"turns": 2.0}
    assert len(caplog.records) == 1
    assert "The metric exit_code of the workflow" in caplog.text


@pytest.mark.parametrize("value", [2, True, np.float32(0.5), np.int64(3), np.bool_(1), torch.tensor(2), np.array(7)])
def test_scalars_of_other_libraries_become_floats(make_trajectory, value):
    (taken,) = TrajectoryCheck(single_turn).check(make_trajectory(metrics={"x": value}))
    assert taken.metrics == {"x": float(value)}
    assert type(taken.metrics["x"]) is float


@pytest.mark.parametrize("metrics", [None, [], "x", {7: 1.0}, {("a", "b"): 1.0}, {"\ud800": 1.0}])
def test_metrics_under_names_that_are_no_text_are_dropped(make_trajectory, metrics):
    trajectory = dataclasses.replace(make_trajectory(), metrics=metrics)
    (taken,) = TrajectoryCheck(single_turn).check(trajectory)
    assert taken.metrics == {}


@pytest.mark.parametrize(
    "field, values",
    [
        ("response_ids", [1.5, 2]),
        ("response_ids", ["1", "2"]),
        ("response_ids", [1]),
        ("prompt_ids", [None]),
        ("loss_mask", [1, None]),
        ("loss_mask", [1, 1, 1]),
        ("versions", [0, "0"]),
        ("logprobs", [-0.1, None]),
        ("logprobs", [-0.1, "-0.1"]),
        ("logprobs", [-0.1, 10**400]),
    ],
)
def test_tokens_of_the_wrong_kind_or_number_are_refused_by_their_name(make_trajectory, field, values):
    with pytest.raises(ValueError, match=rf"{field}: .* is not a sequence of|has \d entries for \d response tokens"):
        dataclasses.replace(make_trajectory(), **{field: values})


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.1, float("nan")]},
        {"logprobs": [-0.1, -1e300]},
        {"arrays": {"values": np.array([0.0, np.inf])}},
        {"arrays": {"words": np.array(["a", "b"])}},
        {"text": b"x"},
        {"finish_reason": None},
    ],
    ids=repr,
)
def test_numbers_that_are_not_finite_and_texts_that_are_none_are_errors_of_the_sample(make_trajectory, changes):
    with pytest.raises(DataError, match=r"workflow\.single_turn returned a trajectory with"):
        TrajectoryCheck(single_turn).check(dataclasses.replace(make_trajectory(), **changes))


def test_what_passes_reaches_the_ledger_and_the_metrics_of_the_run(tmp_path):
    """Arrays, odd texts and bad metrics of one trajectory, through everything behind the check."""
    given = Trajectory(
        [1], np.array([5, 6]), torch.tensor([1, 1]), [np.float64(-0.1), -0.2], [np.int64(0), 0], text="a\ud800b"
    )
    given = dataclasses.replace(given, metrics={"good": np.float32(2), "bad": None})
    (taken,) = TrajectoryCheck(single_turn).check(given)
    assert taken.response_ids.tolist() == [5, 6] and taken.text == "a?b"
    assert (taken.loss_mask, taken.versions) == ([1, 1], [0, 0])
    encoded = encode(Group("0:0", [taken]))
    assert decode(encoded.header, encoded.body).trajectories == [dataclasses.replace(taken, text="")]
    json.dumps(taken.text, ensure_ascii=False).encode()
    metrics = RolloutMetrics(window=2)
    metrics.add_scored(summarize([taken]))
    written = MetricsLog(tmp_path, tensorboard=True)
    written.log(1, metrics.snapshot([]))
    written.close()
    assert read_metrics(tmp_path)["rollout/good"] == [2.0]


def test_a_metric_called_like_one_of_the_rollouts_own_does_not_mix_with_it(make_trajectory):
    metrics = RolloutMetrics(window=2)
    metrics.add_scored(summarize([make_trajectory(reward=1.0, metrics={"reward_mean": 50.0, "tokens": 50.0})]))
    snapshot = metrics.snapshot([])
    assert (snapshot["rollout/reward_mean"], snapshot["rollout/tokens"]) == (1.0, 0.0)

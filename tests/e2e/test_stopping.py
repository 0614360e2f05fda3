"""Every way to stop a run: a signal during the start, two signals, or a failure inside. Nothing is left running.

One SIGINT ends the run of `test_whole_run.py`, SIGTERM that of `test_scaling.py`, SIGKILL those of
`test_adapter_run.py` and `test_repeatability.py`.
"""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.real

ENDLESS = {"total_steps": 100_000}
ONE_SERVER = {"servers": 1}
ONE_RANK = {"tensor_parallel": 1}


def test_an_interrupt_during_the_start_cleans_up(miniature, launch) -> None:
    run = launch("train", miniature())
    run.wait_for("starting Ray")
    # Let some of the processes come up first.
    while len(run.family()) < 8:
        assert run.process.poll() is None, run.output
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.survivors() == []


def test_a_second_interrupt_stops_immediately(miniature, launch) -> None:
    # Long answers keep the first interrupt busy: the servers never finish a batch.
    schedule = ENDLESS | {"samples_per_group": 64, "groups_per_step": 16}
    run = launch("train", miniature(schedule=schedule, rollout=ONE_SERVER, trainer=ONE_RANK))
    run.wait_for("held-out score")
    run.signal(signal.SIGINT)
    run.signal(signal.SIGINT)
    assert run.wait() in (0, 130), run.output
    assert run.survivors() == []


def test_a_server_that_cannot_be_replaced_ends_the_run_which_reports_its_log_and_saves(
    miniature, launch, the_run_dir
) -> None:
    rollout = {"min_servers": 2, "health": {"restarts": 0}}
    run = launch("train", miniature(schedule=ENDLESS, rollout=rollout, trainer=ONE_RANK))
    run.wait_for("step 3/")
    (scheduler, *_) = run.find("sglang::scheduler")
    scheduler.kill()
    assert run.wait() == 2, run.output
    assert "1 servers are left, fewer than rollout.min_servers=2" in run.output and "its log" in run.output
    assert list((the_run_dir() / "checkpoints").glob("step-*/COMPLETE"))
    assert run.survivors() == []


def test_a_dead_rank_without_restarts_left_ends_the_run_with_its_cause(miniature, launch) -> None:
    run = launch("train", miniature(schedule=ENDLESS, rollout=ONE_SERVER), "trainer.max_restarts=0")
    run.wait_for("step 3/")
    ranks = run.find("TrainerRank")
    assert len(ranks) == 2
    ranks[1].kill()
    assert run.wait() == 2, run.output
    assert "trainer" in run.output and "died" in run.output
    assert run.survivors() == []

"""A small model with experts, whose trainer sends each token to the experts that the server chose."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megasync.buffer.groups import TRAINED
from megasync.buffer.ledger import Ledger
from megasync.buffer.segments import load
from megasync.models import fetch
from megasync.trajectory import ROUTES

pytestmark = pytest.mark.real

STEPS = 4


@pytest.fixture
def config(miniature, tmp_path) -> Path:
    return miniature(
        model={"path": str(fetch("digits_moe", tmp_path / "digits_moe"))},
        schedule={"total_steps": STEPS, "groups_per_step": 4, "samples_per_group": 4, "max_staleness": 0},
        # The router forwards what a request asks for; two pieces of each response come before its routes.
        rollout={"servers": 1, "deterministic": True, "routing_replay": True, "stream_interval": 2},
        trainer={
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
            "recompute": "full",
            "optimizer": {"lr": 1.0e-2},
        },
        checkpoint={"every_steps": 2, "export": False},
        data={"eval": None},
        eval=None,
    )


def steps_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]


def groups_since_the_checkpoint(run_dir: Path) -> list:
    """The groups that were trained after the newest checkpoint, whose bodies the ledger keeps until the next one."""
    path = run_dir / "ledger.db"
    with closing(sqlite3.connect(path)) as database:
        states = dict(database.execute("SELECT uid, state FROM groups"))
    ledger = Ledger(path)
    try:
        uids = [uid for uid, state in states.items() if state in TRAINED]
        return [load(group) for group in ledger.payloads(uids).values()]
    finally:
        ledger.close()


def kill_after(step: int, config: Path, launch, *overrides: str) -> None:
    run = launch("train", config, *overrides)
    run.wait_for(f"step {step}/")
    run.process.kill()
    run.wait()
    run.kill_everything()


def test_every_trained_response_has_its_routes(config, launch, the_run_dir):
    """In the ledger of a killed run; the next test resumes one.

    In the standard tier, `tests/buffer/test_payload.py` restores such arrays, and `tests/rollout/test_routes.py`
    completes responses of an earlier life.
    """
    # A synchronous run does not keep what it has trained: it would be too old to be trained again.
    kill_after(3, config, launch, "schedule.max_staleness=2")
    groups = groups_since_the_checkpoint(the_run_dir())
    assert groups
    for group in groups:
        for trajectory in group.trajectories:
            routes = trajectory.arrays[ROUTES]
            assert routes.shape == (len(trajectory.prompt_ids) + len(trajectory.response_ids) - 1, 2, 2)
            assert routes.dtype == np.uint8 and routes.max() < 8
            assert (routes[..., 0] != routes[..., 1]).all()


@pytest.mark.matrix
def test_a_killed_run_repeats_the_one_that_was_not(config, launch, the_run_dir, tmp_path):
    whole = launch("train", config)
    assert whole.wait() == 0, whole.output
    expected = steps_of(the_run_dir())
    # The same weights in float32 choose the same experts, so replay changes nothing.
    assert all(row["train/logprob_diff"] < 1e-5 for row in expected)
    shutil.move(the_run_dir(), tmp_path / "whole")
    kill_after(3, config, launch)
    resumed = launch("resume", the_run_dir())
    assert resumed.wait() == 0, resumed.output
    found = {row["step"]: row for row in steps_of(the_run_dir())}
    for row in expected:
        assert found[row["step"]]["train/loss"] == pytest.approx(row["train/loss"], abs=1e-5), row["step"]

"""A small model with experts, whose trainer sends each token to the experts that the server chose."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megasync.buffer.groups import TRAINED
from megasync.buffer.ledger import Ledger
from megasync.buffer.segments import load
from megasync.starters.fetch import fetch
from megasync.trajectory import ROUTES

pytestmark = pytest.mark.real


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


def test_every_trained_response_has_its_routes(miniature, launch, the_run_dir, tmp_path):
    """In the ledger of a killed run; `test_repeatability.py` resumes one.

    In the standard tier, `tests/buffer/test_payload.py` restores such arrays, and `tests/rollout/test_routes.py`
    completes responses of an earlier life.
    """
    config = miniature(
        model={"path": str(fetch("digits_moe", tmp_path / "digits_moe"))},
        # A synchronous run does not keep what it has trained: it would be too old to be trained again.
        schedule={"max_staleness": 2},
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
    run = launch("train", config)
    run.wait_for("step 3/")
    run.die()
    groups = groups_since_the_checkpoint(the_run_dir())
    assert groups
    for group in groups:
        for trajectory in group.trajectories:
            routes = trajectory.arrays[ROUTES]
            assert routes.shape == (len(trajectory.prompt_ids) + len(trajectory.response_ids) - 1, 2, 2)
            assert routes.dtype == np.uint8 and routes.max() < 8
            assert (routes[..., 0] != routes[..., 1]).all()

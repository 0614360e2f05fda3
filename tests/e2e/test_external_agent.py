"""A run whose agents are programs outside of it, with real ranks and servers: they and a worker are killed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from run_metrics import rows_of

from megasync.lab.chaos.report import read_ledger

pytestmark = pytest.mark.real

AGENT = Path(__file__).parents[2] / "examples" / "external_agent" / "agent.py"
PATIENCE = 240.0


class Sessions:
    """The sessions of a run as a program outside sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def counts(self) -> dict:
        headers = {"Authorization": f"Bearer {(self.folder / 'key').read_text()}"}
        try:
            return httpx.get((self.folder / "worker-0.url").read_text() + "/sessions", headers=headers).json()
        except httpx.TransportError:
            return {}

    def wait_for(self, holds: Callable[[dict], object]) -> dict:
        deadline = time.monotonic() + PATIENCE
        while not holds(counts := self.counts()):
            assert time.monotonic() < deadline, counts
            time.sleep(0.02)
        return counts


@pytest.fixture
def chat_model(digits_model: Path) -> Iterator[Path]:
    template = digits_model / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    yield digits_model
    template.unlink()


def test_samples_of_killed_agents_and_workers_are_played_by_others(
    miniature, chat_model, launch, execute, the_run_dir, tmp_path
) -> None:
    config = miniature(
        schedule={"total_steps": 8, "groups_per_step": 4, "samples_per_group": 4},
        rollout={
            "servers": 1,
            "workers": 1,
            "agent": "external",
            # Equal rewards are no loss of a sample.
            "groups": {"drop_uniform": False},
        },
        data={"eval": None},
        eval=None,
        timeouts={"heartbeat": 3.0},
        checkpoint={"export": False},
    )
    run = launch("train", config)
    run.wait_for("programs outside open sessions")
    run_dir = the_run_dir()
    sessions = Sessions(run_dir / "sessions")
    first = execute(sys.executable, AGENT, sessions.folder)
    sessions.wait_for(lambda counts: counts.get("closed"))
    # In mid-session: one that is stopped closes nothing.
    first.process.send_signal(signal.SIGSTOP)
    while not sessions.counts().get("open"):
        first.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        first.process.send_signal(signal.SIGSTOP)
    first.process.kill()
    sessions.wait_for(lambda counts: counts.get("silent"))
    execute(sys.executable, AGENT, sessions.folder)
    sessions.wait_for(lambda counts: counts.get("open"))
    # One that has started: Ray's title names its last call.
    while not (workers := run.find("RolloutWorker.poll")):
        time.sleep(0.2)
    workers[0].send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.output
    last = rows_of(run_dir)[-1]
    assert (last["rollout/groups_dropped"], last["rollout/samples_failed"]) == (0.0, 0.0)
    assert last["rollout/workers_lost"] >= 1
    counts = read_ledger(run_dir / "ledger.db")
    assert (counts.trained, counts.dropped) == (32, 0)
    assert counts.admitted == counts.trained + counts.live
    assert run.survivors() == []

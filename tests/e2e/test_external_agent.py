"""A run whose agents are programs outside of it, with real ranks and servers: they and a worker are killed."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from run_metrics import rows_of
from waits import wait_until

from megasync.lab.chaos.report import read_ledger

pytestmark = pytest.mark.real

AGENT = Path(__file__).parents[2] / "examples" / "external_agent" / "agent.py"


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
        def held() -> dict | None:
            counts = self.counts()
            return counts if holds(counts) else None

        return wait_until(held, self.counts)


def kill_in_session(program, sessions: Sessions) -> None:
    """Kills a program while it has sessions open, and returns when they are taken for lost."""
    sessions.wait_for(lambda counts: counts.get("claimed"))
    # One that is stopped closes nothing.
    program.process.send_signal(signal.SIGSTOP)
    while not sessions.counts().get("open"):
        program.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        program.process.send_signal(signal.SIGSTOP)
    program.process.kill()
    sessions.wait_for(lambda counts: counts.get("silent"))


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
    kill_in_session(first, sessions)
    execute(sys.executable, AGENT, sessions.folder)
    sessions.wait_for(lambda counts: counts.get("open"))
    # One that has started: Ray's title names its last call.
    wait_until(lambda: run.find("RolloutWorker.poll"))[0].send_signal(signal.SIGKILL)
    step = run.last_step()
    run.wait_for(f"step {step + 1}/")
    lost = max(row.get("rollout/workers_lost", 0.0) for row in rows_of(run_dir))
    sessions.wait_for(lambda counts: counts.get("open"))
    run.process.kill()
    assert run.survivors() == []
    # The program lives on, and finds the resumed run by its folder.
    run = launch("resume", run_dir)
    assert run.wait() == 0, run.output
    last = rows_of(run_dir)[-1]
    assert (last["rollout/groups_dropped"], last["rollout/samples_failed"]) == (0.0, 0.0)
    assert lost >= 1
    counts = read_ledger(run_dir / "ledger.db")
    assert (counts.trained, counts.dropped) == (32, 0)
    assert counts.admitted == counts.trained + counts.live
    assert run.survivors() == []


def test_an_evaluation_is_played_by_programs_outside_of_which_one_is_killed(
    miniature, chat_model, launch, execute, tmp_path
) -> None:
    data = {"kind": "digits", "source": "copy", "size": 96, "seed": 1, "options": {"length": 3}}
    config = miniature(
        data={"eval": data},
        eval={"samples": 96},
        rollout={"servers": 1, "workers": 1, "agent": "external"},
        trainer=None,
        timeouts={"heartbeat": 3.0},
    )
    out = tmp_path / "scores"
    run = launch("eval", config, "--out", out)
    run.wait_for("programs outside open sessions")
    sessions = Sessions(out / "sessions")
    first = execute(sys.executable, AGENT, sessions.folder)
    kill_in_session(first, sessions)
    execute(sys.executable, AGENT, sessions.folder)
    assert run.wait() == 0, run.output
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["number"] for answer in answers) == list(range(96))
    assert all(answer["reward"] is not None for answer in answers)
    assert run.survivors() == []

"""What `made_runs` lacks for the page and its benchmark: faults, many responses, a dialogue, and a run that is live.

`python watched_run.py RUN STEPS SECONDS` is the driver of a live one: it holds the run's lock and trains a step every
so many seconds, until it is killed or done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from made_runs import BEGIN, STEP_SECONDS, begin_run, made_state, make_run, step_metrics

from megasync.app.run_lock import RunLock
from megasync.observe import trace
from megasync.observe.events import END, FAULT, MESSAGE, RECOVERY, START, EventLog
from megasync.observe.metrics import MetricsLog
from megasync.observe.rollouts import IndexRow, Response, RolloutLog, recorded
from megasync.observe.state_file import write_state
from megasync.trajectory import ANSWER, Trajectory, Turn
from megasync.trajectory.runs import Runs


def finished_run(run_dir: Path, steps: int = 60, total: int | None = None, status: str = "finished") -> Path:
    """A run that has ended: finished, stopped or failed; "running" if its driver was killed."""
    options = {"steps": steps, "total_steps": total or steps, "status": status, "rollouts": False}
    # `add_dialogue` writes a tokenizer there.
    return make_run(run_dir.parent, run_dir.name, settings=[f"model.path={run_dir / 'export'}"], **options)


def add_faults(run_dir: Path) -> None:
    """A server and a rank that died and came back; a server that has not."""
    events = EventLog(run_dir)
    events.write(FAULT, "its process has ended with signal 9", "server-0", at=BEGIN + 30.2, step=10)
    events.write(RECOVERY, "serves version 11", "server-0", at=BEGIN + 36.9)
    events.write(FAULT, "its process has ended with exit code 1", "rank 1", at=BEGIN + 40.4, step=34)
    events.write(RECOVERY, "all ranks hold step 34", "rank 1", at=BEGIN + 47.0)
    events.write(FAULT, "it does not answer its probes", "server-1", at=BEGIN + 60)
    events.close()
    hang = run_dir / "hang"
    hang.mkdir()
    (hang / "20261124-231500.txt").write_text(
        "Hang report of 2026-11-24 23:15:00 UTC\nNo progress for 600 s.\n\ntrainer: waiting for groups\n"
    )
    failed = run_dir / "failed_steps"
    failed.mkdir()
    record = {"step": 34, "version": 33, "error": "rank 1 ended with exit code 1", "uids": ["0:7"], "batch": []}
    (failed / "step-00000034-0-7.json").write_text(json.dumps(record))


def add_responses(run_dir: Path, count: int, step_of: int = 100) -> None:
    """`count` recorded responses in groups of 8, `step_of` a step."""
    log = RolloutLog(run_dir, "trainer-0", 1 << 34)
    ids = np.arange(6, dtype=np.int32)
    logprobs = np.full(6, -0.5, np.float32)
    response = Response(ids, ids, logprobs, Runs.fill(1, 6), Runs.fill(0, 6), logprobs + 0.01, logprobs)
    rows = [
        IndexRow(
            uid=f"0:{number // 8}", sample=number % 8, step=1 + number // step_of, version=number // step_of,
            time=BEGIN + number / step_of, tokens=6, prompt_tokens=6, reward=float(number % 3 == 0), advantage=0.1,
            staleness=number % 2, finish_reason="stop", gap=0.01,
        )
        for number in range(count)
    ]  # fmt: skip
    log.append((row, response) for row in rows)


def add_trace(run_dir: Path, steps: int, responses: int) -> None:
    """Spans of the driver and of a rank in each step, and of its groups of 8 responses, up to `responses` in all."""
    groups = responses // 8 // steps
    rng = np.random.default_rng(0)
    values = step_metrics(1, rng)
    wait, train, sync = (values[f"time/{part}"] for part in ("wait_for_groups", "train", "sync"))
    for first in range(1, steps + 1, 100):
        # No more than a process keeps in its queue.
        with trace.recording(run_dir, "driver"):
            for step in range(first, min(first + 100, steps + 1)):
                at = BEGIN + STEP_SECONDS * step
                trained, published, end = at + wait, at + wait + train, at + STEP_SECONDS
                trace.complete("trainer", "wait for groups", at, trained, step=step)
                trace.complete("trainer", "train", trained, published, step=step, version=step - 1)
                trace.complete("trainer", "publish", published, published + sync, step=step, version=step)
                for server in range(2):
                    trace.complete("sync", "pause", published, published + 0.03, server=f"server-{server}")
                    trace.complete(f"server-{server}", "generating", at, end, running=30, waiting=4, cache=0.4)
                for group in range(groups):
                    uid = f"0:{(step - 1) * groups + group}"
                    begun = at - 1 + group / groups
                    for sample in range(8):
                        trace.complete("generate", "generate", begun, begun + 0.4, uid=uid, sample=sample, tokens=6)
                    trace.complete("reward", "score", begun + 0.4, begun + 0.5, uid=uid, responses=8)
                    trace.complete("group", "group", begun, begun + 0.5, uid=uid, outcome="finished")
                    trace.complete("buffer", "finished", begun + 0.5, max(trained, begun + 0.5), uid=uid, step=step)
    with trace.recording(run_dir, "trainer-0"):
        for step in range(1, steps + 1):
            trained, part = BEGIN + STEP_SECONDS * step + wait, train / 4
            for number, name in enumerate(("load", "score", "forward_backward", "optimizer")):
                trace.complete("rank", name, trained + number * part, trained + (number + 1) * part)


def add_dialogue(run_dir: Path, parts: Sequence[tuple[Turn, str]]) -> None:
    """Records a response of turns, whose places follow from their texts, and the tokenizer of the run's export."""
    from tiny_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(run_dir / "export")
    ids, mask, turns = list[int](), list[int](), list[Turn]()
    for turn, text in parts:
        added = tokenizer(text, add_special_tokens=False)["input_ids"]
        turns.append(replace(turn, start=len(ids), end=len(ids) + len(added)))
        ids += added
        mask += [int(turn.role == ANSWER)] * len(added)
    logprobs = -(np.arange(len(ids)) % 7) / 2
    prompt = tokenizer("<bos>user: 1 + 2?<eos><bos>assistant: ", add_special_tokens=False)["input_ids"]
    said = Trajectory(prompt, ids, mask, logprobs, [3] * len(ids), reward=1.0, metrics={"turns": 2.0}, turns=turns)
    log = RolloutLog(run_dir, "trainer-1", 1 << 30)
    log.append([recorded("0:1", 0, said, step=4, version=3, time=BEGIN + 90, advantage=0.5)])
    log.append_answer("0:1", "522,251")


def drive(run_dir: Path, steps: int, seconds: float) -> None:
    """A live run, in this process."""
    begin_run(run_dir, steps)
    events, metrics, rng = EventLog(run_dir), MetricsLog(run_dir, tensorboard=False), np.random.default_rng(0)

    def record(step: int, status: str) -> None:
        now = time.time()
        activities = {"trainer": ("waiting for groups", now - 0.6), "rollout": ("generating", now - 2)}
        state = made_state(step, steps, status, now)
        write_state(run_dir, msgspec.structs.replace(state, pid=os.getpid(), activities=activities))

    with RunLock(run_dir):
        events.write(START, "run started")
        record(0, "starting")
        for step in range(1, steps + 1):
            time.sleep(seconds)
            metrics.log(step, {"version": step, **step_metrics(step, rng)})
            record(step, "running")
            events.write(MESSAGE, f"step {step} is trained")
        events.write(END, "run finished")
        record(steps, "finished")


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""A run directory as a driver writes it, without a run: through the same writers and in the same order.

`python watched_run.py RUN STEPS SECONDS` is the driver of a live one: it holds the run's lock and trains a step every
so many seconds, until it is killed or done.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megasync.app.run_lock import RunLock
from megasync.observe import trace
from megasync.observe.events import END, EVALUATION, FAULT, MESSAGE, RECOVERY, START, EventLog
from megasync.observe.metrics import METRICS_FILE
from megasync.observe.rollouts import Response, RolloutLog, Row, recorded
from megasync.observe.state_file import BufferState, ProcessState, RankState, RunState, write_state
from megasync.trajectory import ANSWER, Trajectory, Turn
from megasync.trajectory.runs import Runs

CONFIG = """\
name: {name}
schedule:
  total_steps: {steps}
  groups_per_step: 16
  samples_per_group: 8
  max_staleness: 1
  weight_sync_steps: 1
  stop_at_score: 0.99
"""
BEGUN = 1_795_000_000.0


def metrics_of(step: int) -> dict[str, float]:
    """What a trained step logs, a deterministic function of its number."""
    progress = 1 - math.exp(-step / 40)
    noise = math.sin(step * 12.9898) * 0.03
    wait, train, sync = 0.4 + 0.1 * math.sin(step / 3), 0.6, 0.15
    return {
        "version": step,
        "train/reward": progress + noise,
        "train/loss": -0.02 * progress,
        "train/grad_norm": 0.06 + abs(noise),
        "train/lr": 1e-3,
        "train/entropy": 2.7 * (1 - progress) + 0.1,
        "train/tokens": 1200 + step,
        "train/tokens_per_second": 900.0 + step,
        "train/staleness_mean": 0.8 + noise,
        "train/staleness_max": 2.0 if step % 17 == 0 else 1.0,
        "train/clip_fraction": 0.02 + abs(noise) / 4,
        "train/dual_clip_fraction": 0.001,
        "train/is_outside_fraction": 0.01,
        "train/is_rejected_fraction": 0.002,
        "train/logprob_diff": 0.05 + abs(noise) / 3,
        "train/server_kl@0": 1e-6,
        "train/server_kl@1": 0.004 + abs(noise) / 50,
        "sync/parity": 0.002,
        "sync/stage_seconds": 0.1,
        "sync/commit_seconds": 0.04,
        "sync/verify_seconds": 0.01,
        "sync/pause_seconds": 0.03,
        "sync/bytes": 797_696.0,
        "time/step": wait + train + sync + 0.01,
        "time/wait_for_groups": wait,
        "time/train": train,
        "time/sync": sync,
        "rollout/reward_mean": progress + noise,
        "rollout/response_length": 4.5 + step / 100,
        "rollout/truncated_share": 0.2 * (1 - progress),
        "rollout/tokens_per_second": 1100.0 - step / 4,
        "rollout/inflight_requests": 60.0,
        "rollout/inflight_limit": 128.0,
        "rollout/dropped_all_solved": float(step // 5),
        "buffer/generating": 10.0,
        "buffer/returned": 0.0,
        "buffer/finished": 14.0,
        "buffer/leased": 0.0,
        "buffer/unpublished": 0.0,
        "fleet/healthy": 2.0,
        "fleet/dead": 0.0,
        "groups/admitted": 16.0 * step + step // 5 + 24,
        "groups/trained": 16.0 * step,
        "groups/dropped": float(step // 5),
        "groups/live": 24.0,
    }


def metrics_line(step: int, at: float, values: dict[str, float]) -> str:
    return json.dumps({"step": step, "time": round(at, 3)} | values) + "\n"


def begin(run_dir: Path, steps: int) -> None:
    """The files of a run before its first step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "custom.json").write_text("[]")
    (run_dir / "config.yaml").write_text(CONFIG.format(name=run_dir.name, steps=steps))
    (run_dir / "driver.lock").touch()


def state_of(step: int, steps: int, at: float, status: str, **more: object) -> RunState:
    metrics = metrics_of(step)
    live = int(metrics["groups/live"])
    return RunState(
        time=at,
        pid=os.getpid(),
        host="node-1",
        started=at - step,
        status=status,  # pyright: ignore[reportArgumentType]
        step=step,
        total_steps=steps,
        version=step,
        activities={
            "trainer": ("waiting for groups", at - 0.6),
            "rollout": ("generating 10 groups", at - 2),
            "sync": ("idle", at - 1),
        },
        servers=[
            ProcessState(
                name=f"server-{n}", state="healthy", since=at - 300, pid=4000 + n, url=f"http://127.0.0.1:{30000 + n}",
                starts=1, version=step, running=28 + n, waiting=4, cache_use=0.31 + n / 10, throughput=560.0,
            )
            for n in range(2)
        ],
        router=ProcessState(name="router", state="up", pid=3999, since=at - 300),
        ranks=[RankState(rank=n, pid=5000 + n, node="node-1") for n in range(2)],
        workers=[ProcessState(name="worker-0", state="up", pid=6000, groups=10, since=at - 300)],
        buffer=BufferState(
            slots={"generating": 10, "returned": 0, "finished": 14, "leased": 0, "unpublished": 0},
            capacity=32,
            admitted=int(metrics["groups/admitted"]),
            trained=int(metrics["groups/trained"]),
            dropped={"all_solved": step // 5},
            live=live,
            waiting={"lease": "2 of 16 groups are finished"},
        ),
        eta_seconds=float(steps - step),
        **more,
    )  # fmt: skip


def metrics_lines(steps: int, begun: float) -> Iterator[str]:
    at = begun
    yield metrics_line(0, at, {"eval/score": 0.0, "eval/score@0": 0.0, "eval/failed": 0.0})
    for step in range(1, steps + 1):
        values = metrics_of(step)
        at += values["time/step"]
        yield metrics_line(step, at, values)
        if step % 10 == 0:
            score = 1 - math.exp(-step / 50)
            yield metrics_line(step, at + 0.1, {"eval/score": score, "eval/score@0": score, "eval/failed": 0.0})


def finished_run(run_dir: Path, steps: int = 60, total: int | None = None, status: str = "finished") -> Path:
    """A run that has ended: finished, stopped or failed; "running" if its driver was killed."""
    total = total or steps
    begin(run_dir, total)
    lines = list(metrics_lines(steps, BEGUN))
    (run_dir / METRICS_FILE).write_text("".join(lines))
    end = json.loads(lines[-1])["time"]
    events = EventLog(run_dir)
    events.write(START, "run started", at=BEGUN - 20)
    events.write(MESSAGE, "both servers hold version 1", at=BEGUN + 1)
    events.write(EVALUATION, "held-out score 0.181 after step 10", at=BEGUN + 12, step=10)
    if status not in ("running", "starting"):
        events.write(END, f"run {status}", at=end)
    events.close()
    reason = "trainer rank 1 ended: out of memory" if status == "failed" else ""
    write_state(run_dir, state_of(steps, total, end, status, reason=reason))
    return run_dir


def add_faults(run_dir: Path) -> None:
    """A server and a rank that died and came back; a server that has not."""
    events = EventLog(run_dir)
    events.write(FAULT, "its process has ended with signal 9", "server-0", at=BEGUN + 20.2, step=17)
    events.write(RECOVERY, "serves version 21", "server-0", at=BEGUN + 26.9)
    events.write(FAULT, "its process has ended with exit code 1", "rank 1", at=BEGUN + 40.4, step=34)
    events.write(RECOVERY, "all ranks hold step 34", "rank 1", at=BEGUN + 47.0)
    events.write(FAULT, "it does not answer its probes", "server-1", at=BEGUN + 60)
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
        Row(
            uid=f"0:{number // 8}", sample=number % 8, step=1 + number // step_of, version=number // step_of,
            time=BEGUN + number / step_of, tokens=6, prompt_tokens=6, reward=float(number % 3 == 0), advantage=0.1,
            staleness=number % 2, finish_reason="stop", gap=0.01,
        )
        for number in range(count)
    ]  # fmt: skip
    log.append((row, response) for row in rows)


def add_trace(run_dir: Path, steps: int, responses: int) -> None:
    """Spans of the driver and of a rank in each step, and of its groups of 8 responses, up to `responses` in all."""
    groups = responses // 8 // steps
    at = BEGUN
    for first in range(1, steps + 1, 100):
        # No more than a process keeps in its queue.
        with trace.recording(run_dir, "driver"):
            for step in range(first, min(first + 100, steps + 1)):
                values = metrics_of(step)
                trained = at + values["time/wait_for_groups"]
                published = trained + values["time/train"]
                end = at + values["time/step"]
                trace.complete("trainer", "wait for groups", at, trained, step=step)
                trace.complete("trainer", "train", trained, published, step=step, version=step - 1)
                trace.complete(
                    "trainer", "publish", published, published + values["time/sync"], step=step, version=step
                )
                for server in range(2):
                    pause = values["sync/pause_seconds"]
                    trace.complete("sync", "pause", published, published + pause, server=f"server-{server}")
                    trace.complete(f"server-{server}", "generating", at, end, running=30, waiting=4, cache=0.4)
                for group in range(groups):
                    uid = f"0:{(step - 1) * groups + group}"
                    begun = at - 1 + group / groups
                    for sample in range(8):
                        trace.complete("generate", "generate", begun, begun + 0.4, uid=uid, sample=sample, tokens=6)
                    trace.complete("reward", "score", begun + 0.4, begun + 0.5, uid=uid, responses=8)
                    trace.complete("group", "group", begun, begun + 0.5, uid=uid, outcome="finished")
                    trace.complete("buffer", "finished", begun + 0.5, max(trained, begun + 0.5), uid=uid, step=step)
                at = end
    at = BEGUN
    with trace.recording(run_dir, "trainer-0"):
        for step in range(1, steps + 1):
            values = metrics_of(step)
            trained = at + values["time/wait_for_groups"]
            for number, name in enumerate(("load", "score", "forward_backward", "optimizer")):
                part = values["time/train"] / 4
                trace.complete("rank", name, trained + number * part, trained + (number + 1) * part)
            at += values["time/step"]


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
    log.append([recorded("0:1", 0, said, step=4, version=3, time=BEGUN + 90, advantage=0.5)])
    log.append_answer("0:1", "522,251")


def drive(run_dir: Path, steps: int, seconds: float) -> None:
    """A live run, in this process."""
    begin(run_dir, steps)
    events = EventLog(run_dir)
    with RunLock(run_dir), (run_dir / METRICS_FILE).open("a") as metrics:
        events.write(START, "run started")
        write_state(run_dir, state_of(0, steps, time.time(), "starting"))
        for step in range(1, steps + 1):
            time.sleep(seconds)
            metrics.write(metrics_line(step, time.time(), metrics_of(step)))
            metrics.flush()
            write_state(run_dir, state_of(step, steps, time.time(), "running"))
            events.write(MESSAGE, f"step {step} is trained")
        events.write(END, "run finished")
        write_state(run_dir, state_of(steps, steps, time.time(), "finished"))


if __name__ == "__main__":
    drive(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""Run directories as runs leave them, without running anything: the real writers write made-up measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from passing_time import Clock

from megasync.buffer.groups import GroupEntry, GroupState
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.buffer.ledger import Ledger
from megasync.buffer.state import BufferStatus
from megasync.config import CONFIG_FILE, CUSTOM_FILE, ROWS_FILE, Config, load_config, save_config
from megasync.observe import trace
from megasync.observe.events import CHECKPOINT, END, EVALUATION, FAULT, RECOVERY, START, EventLog
from megasync.observe.metrics import MetricsLog
from megasync.observe.rollouts import IndexRow, Response, RolloutLog
from megasync.observe.samples import append_answers
from megasync.observe.state_file import BufferState, ProcessState, RankState, RunState, write_state
from megasync.trajectory.runs import Runs

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
# When every made run starts, in seconds since the epoch, and how long a step takes.
BEGIN, STEP_SECONDS = 1_764_000_000.0, 2.0
GROUPS, SAMPLES = 4, 4
SETTINGS = (
    *("schedule.groups_per_step=4", "schedule.samples_per_group=4", "schedule.max_staleness=1"),
    *("schedule.stop_at_score=null", "cluster.device=cpu"),
)
# As a user may name a prompt or a model may answer.
HOSTILE = "<script>alert('x')</script> & \"quoted\" | \u2028 ```"


def make_run(
    folder: Path,
    name: str = "made-20260101-000000",
    *,
    steps: int = 20,
    total_steps: int = 20,
    status: str = "finished",
    supervised: bool = False,
    older: bool = False,
    seed: int = 0,
    settings: Sequence[str] = (),
    rollouts: bool = True,
) -> Path:
    """Writes a run of `steps` steps and returns its directory.

    `status` is what its state says; a crashed run says "running", and no process holds its lock. An `older` run has
    only what runs had before there were events, a state and recorded responses. Step 5 has a fault, if there are so
    many; the reward of step 3 is not finite.
    """
    run_dir = folder / name
    begin_run(run_dir, total_steps, *settings)
    if supervised:
        (run_dir / ROWS_FILE).write_text(json.dumps({"rows": 64, "rows_per_step": 4, "digest": "0"}))
    clock, rng = Clock(BEGIN), np.random.default_rng(seed)
    metrics, events = MetricsLog(run_dir, tensorboard=False, clock=clock), EventLog(run_dir, clock=clock)
    if not older:
        events.write(START, name, pid=1, host="made", versions={"megasync": "0.1.0", "torch": "2.11.0"})
    for step in range(steps + 1):
        clock.now = BEGIN + 10 + STEP_SECONDS * step
        if step:
            values = _supervised_step(step, rng) if supervised else step_metrics(step, rng)
            metrics.log(step, {"version": 0 if supervised else step, **values})
        if step % 10 == 0:
            _evaluate(run_dir, metrics, None if older else events, step, supervised, total_steps)
        if step == 5 and not older:
            clock.now += 0.1
            events.write(FAULT, f"its process has ended: exit status -9 {HOSTILE}", "server-0", step=step)
            clock.now += 0.5
            events.write(RECOVERY, "restarted, and has the weights", "server-0", step=step)
    metrics.close()
    if not older and rollouts and not supervised:
        write_rollouts(run_dir, steps, rng)
    if not supervised:
        write_ledger(run_dir, steps)
    saved = run_dir / "checkpoints" / f"step-{steps:08d}"
    if status in ("finished", "stopped"):
        saved.mkdir(parents=True)
        (saved / "COMPLETE").touch()
    if not older:
        if status not in ("running", "starting"):
            events.write(CHECKPOINT, f"checkpoint: {saved}", step=steps)
            events.write(END, status, status=status)
        write_state(run_dir, made_state(steps, total_steps, status, clock.now, supervised))
    events.close()
    return run_dir


def begin_run(run_dir: Path, total_steps: int, *settings: str) -> None:
    """The files of a run before its first step."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / CUSTOM_FILE).write_text("[]")
    save_config(_config(f"schedule.total_steps={total_steps}", *settings), run_dir / CONFIG_FILE)
    (run_dir / "driver.lock").write_text(json.dumps({"pid": 1, "host": "made"}))


@lru_cache
def _config(*settings: str) -> Config:
    return load_config(QUICKSTART, [*SETTINGS, *settings])


def made_state(step: int, total_steps: int, status: Any, now: float, supervised: bool = False) -> RunState:
    return RunState(
        time=now,
        pid=1,
        host="made",
        started=BEGIN,
        status=status,
        reason="CUDA out of memory" if status == "failed" else "interrupted" if status == "stopped" else "",
        step=step,
        total_steps=total_steps,
        version=0 if supervised else step,
        activities={"trainer": ("training", now - 1.0), "rollout": ("generating", now - 30.0)},
        servers=[]
        if supervised
        else [
            ProcessState(name=f"server-{n}", state="healthy", since=BEGIN, pid=10 + n, version=step, running=3)
            for n in range(2)
        ],
        ranks=[RankState(rank=n, pid=20 + n, node="made", device="NVIDIA H100 80GB HBM3") for n in range(2)],
        buffer=None if supervised else made_buffer(step),
        eta_seconds=(total_steps - step) * STEP_SECONDS,
    )


def made_buffer(step: int) -> BufferState:
    slots = {"generating": 3, "returned": 0, "finished": 2, "leased": 0, "unpublished": 0}
    trained, dropped = GROUPS * step, step // 4
    return BufferState(
        slots=slots,
        capacity=2 * GROUPS,
        admitted=trained + dropped + 5,
        trained=trained,
        dropped={"reward_failed": dropped} if dropped else {},
        live=5,
        waiting={"lease": "2 of 4 groups are finished"},
    )


def write_ledger(run_dir: Path, steps: int) -> None:
    """A ledger of the same counts as `made_buffer`."""
    held = made_buffer(steps)
    states = [
        *[GroupState.PUBLISHED] * held.trained,
        *[GroupState.DROPPED] * sum(held.dropped.values()),
        *[GroupState.GENERATING] * held.live,
    ]
    with closing(Ledger(run_dir / LEDGER_FILE)) as ledger:
        for number, state in enumerate(states):
            reason = "reward_failed" if state == GroupState.DROPPED else ""
            ledger.mark(GroupEntry(f"0:{number}", number, state, 0.0, reason=reason))
        ledger.write(BufferStatus())


def write_rollouts(run_dir: Path, steps: int, rng: np.random.Generator) -> None:
    """Two groups of two responses a step, and a dropped one every fourth step, by one rank and one worker."""
    trained, dropped = (RolloutLog(run_dir, name, 1 << 20) for name in ("trainer-0", "worker-0"))
    for step in range(1, steps + 1):
        trained.append(_response(f"0:{4 * step + group}", sample, step, rng) for group in (0, 1) for sample in (0, 1))
        for group in (0, 1):
            dropped.append_answer(f"0:{4 * step + group}", f"answer {step} {HOSTILE}")
        if step % 4 == 0:
            dropped.append([_response(f"1:{step}", 0, 0, rng, version=step, reason="reward_failed")])


def write_trace(run_dir: Path, steps: int) -> None:
    """Steps as `_step` times them, by the driver and one rank; spans of requests have a hostile name."""
    with trace.recording(run_dir, "driver"):
        for step in range(1, steps + 1):
            begun = BEGIN + 10 + STEP_SECONDS * (step - 1)
            for name, start, end in (("wait for groups", 0.0, 0.6), ("train", 0.6, 1.6), ("publish", 1.6, 1.9)):
                trace.complete("trainer", name, begun + start, begun + end, step=step)
            for number in range(SAMPLES):
                trace.complete("generate", HOSTILE, begun, begun + 0.3 * (1 + number), uid=f"0:{step}")
    with trace.recording(run_dir, "trainer-0"):
        for step in range(1, steps + 1):
            begun = BEGIN + 10 + STEP_SECONDS * (step - 1)
            for name, start, end in (("load", 0.6, 0.7), ("forward_backward", 0.7, 1.5)):
                trace.complete("rank", name, begun + start, begun + end)


def _response(
    uid: str, sample: int, step: int, rng: np.random.Generator, version: int | None = None, reason: str = ""
) -> tuple[IndexRow, Response]:
    version = max(0, step - 1) if version is None else version
    count = int(rng.integers(4, 40))
    staleness = min(version, int(rng.integers(0, 2)))
    split = count // 2
    logprobs = -rng.random(count).astype(np.float32)
    row = IndexRow(
        uid=uid,
        sample=sample,
        step=step,
        version=version,
        time=BEGIN + 10 + STEP_SECONDS * (step or version),
        tokens=count,
        prompt_tokens=6,
        set="train",
        reward=float(rng.random()),
        advantage=None if reason else float(rng.normal()),
        staleness=staleness,
        finish_reason="stop" if count < 30 else "length",
        dropped=reason,
        gap=None if reason else 0.02,
        metrics={"reward/digit_reward": 0.5},
    )
    response = Response(
        prompt_ids=np.arange(6, dtype=np.int32),
        ids=rng.integers(0, 12, count).astype(np.int32),
        logprobs=logprobs,
        mask=Runs.of([1] * count),
        versions=Runs.of([version - staleness] * split + [version] * (count - split)),
        trainer_logprobs=None if reason else logprobs + np.float32(0.02),
        text=HOSTILE if sample else "",
        problem="ValueError: no answer" if reason else "",
    )
    return row, response


def step_metrics(step: int, rng: np.random.Generator) -> Mapping[str, float]:
    progress = 1 - np.exp(-step / 30)
    held = made_buffer(step)
    return {
        "train/sequences": GROUPS * SAMPLES,
        "train/tokens": 320.0 + step,
        "train/tokens_per_second": 160.0 + rng.normal(),
        "train/reward": float("nan") if step == 3 else progress,
        "train/staleness_mean": 0.6,
        "train/staleness_max": 1.0,
        "train/token_staleness": 0.4,
        "train/token_staleness@0": 0.6,
        "train/token_staleness@1": 0.4,
        "train/mfu": 0.3 + 0.01 * rng.random(),
        "train/tokens_per_second_per_device": 300.0,
        "train/response_length": 19.0 + step / 10,
        "train/response_length_p90": 29.0 + step / 10,
        "train/loss": 0.1 * rng.normal(),
        "train/grad_norm": 0.5 + 0.1 * rng.random(),
        **{f"norms/{kind}/{of}": rng.random() for kind in ("grad", "weight") for of in ("embedding", "layers_0-1")},
        "train/lr": 1e-3,
        "train/entropy": 2.5 - progress,
        "train/clip_fraction": 0.01,
        "train/is_outside_fraction": 0.002,
        "train/logprob_diff": 0.02 + 0.001 * rng.random(),
        "train/server_kl@0": 0.001,
        "train/server_kl@1": 0.004,
        "time/step": STEP_SECONDS,
        "time/wait_for_groups": 0.6,
        "time/train": 1.0,
        "time/sync": 0.3,
        "sync/version": step,
        "sync/bytes": 8e5,
        "sync/bytes_per_second": 9e6,
        "sync/stage_seconds": 0.1,
        "sync/commit_seconds": 0.04,
        "sync/verify_seconds": 0.01,
        "sync/pause_seconds": 0.03,
        "rollout/reward_mean": progress + 0.05 * rng.normal(),
        "rollout/response_length": 20.0 + step / 10,
        "rollout/truncated_share": 0.2,
        "rollout/tokens": 400.0 * step,
        "rollout/tokens_per_second": 200.0 + rng.normal(),
        "rollout/dropped_reward_failed": held.dropped.get("reward_failed", 0),
        "fleet/healthy": 1.0 if step == 5 else 2.0,
        "fleet/restarting": 1.0 if step == 5 else 0.0,
        "faults/trainer_restarts": 0.0,
        **{f"buffer/{state}": float(count) for state, count in held.slots.items()},
        "groups/admitted": held.admitted,
        "groups/trained": held.trained,
        "groups/live": held.live,
        "groups/dropped": sum(held.dropped.values()),
    }


def _supervised_step(step: int, rng: np.random.Generator) -> Mapping[str, float]:
    return {
        "sft/loss": 2.0 * np.exp(-step / 30) + 0.05 * rng.random(),
        "train/tokens": 500.0,
        "train/tokens_per_second": 250.0,
        "train/grad_norm": 1.0,
        "train/lr": 1e-3,
    }


def _evaluate(
    run_dir: Path, metrics: MetricsLog, events: EventLog | None, step: int, supervised: bool, total_steps: int
) -> None:
    progress = step / total_steps
    if supervised:
        metrics.log(step, {"sft/validation_loss": 2.0 - progress})
        return
    metrics.log(
        step, {"eval/score": progress, "eval/score@0": progress, "eval/score@1": progress / 2, "eval/seconds": 1.0}
    )
    append_answers(run_dir, step, step, [(f"{n}+1=", f"{HOSTILE} {step}", progress) for n in range(3)])
    if events is not None:
        events.write(EVALUATION, f"held-out score {progress:.3f} after step {step} (version {step})", step=step)

"""Real runs with rollout workers: whatever befalls these, nothing is lost and nothing is left behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import deadly_workflow
import pytest
from processes import gone, lives, with_word
from run_metrics import rows_of
from tool_model import make_tool_models
from waits import wait_until

import megasync
from megasync.config import load_config
from megasync.data import load_dataset
from megasync.lab.chaos.report import read_ledger

pytestmark = [pytest.mark.real, pytest.mark.matrix, pytest.mark.timeout(900)]

SUPPORT = Path(deadly_workflow.__file__).parent


def test_workers_hang_and_are_killed_by_a_prompt_and_their_driver_dies_and_is_resumed(
    miniature, launch, the_run_dir, monkeypatch, tmp_path
) -> None:
    data = {"kind": "digits", "source": "copy", "size": 32, "options": {"length": 3}}
    config = miniature(
        data={"train": data, "eval": None, "prompt": {"max_tokens": 16}},
        eval=None,
        schedule={"total_steps": 100_000},
        rollout={"servers": 1, "workers": 2, "workflow": "deadly_workflow:rollout"},
        trainer={"tensor_parallel": 1},
        checkpoint={"every_steps": 5},
        timeouts={"rollout_worker": 20.0, "reward": 10.0},
    )
    rows, _ = load_dataset(load_config(config).data.train)
    monkeypatch.setenv(deadly_workflow.PROMPT, rows[5]["prompt"])
    word = f"left-behind-of-{tmp_path}"
    monkeypatch.setenv(deadly_workflow.WORD, word)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    run = launch("train", config)

    def logged(text: str) -> None:
        def found() -> bool:
            run.family()
            assert run.process.poll() is None, run.output
            return text in (the_run_dir() / "logs" / "controller.log").read_text()

        wait_until(found, lambda: f"{text!r} was not logged")

    run.wait_for("step 2/")
    logged("Poison prompt, not run again")
    assert gone(lambda: with_word(word))
    (report,) = (the_run_dir() / "poison").iterdir()
    assert json.loads(report.read_text())["row"]["prompt"] == rows[5]["prompt"]
    # One that has started: Ray's title names its last call.
    hung = wait_until(lambda: run.find("RolloutWorker.poll"))[0]
    hung.send_signal(signal.SIGSTOP)
    logged("it has not answered for")
    step = run.last_step()
    run.wait_for(f"step {step + 3}/")
    assert not lives(hung)
    run.process.kill()
    assert run.survivors() == []

    run = launch("resume", the_run_dir())
    run.wait_for("resuming after step")
    run.wait_for(f"step {step + 5}/")
    run.ends_cleanly(signal.SIGINT, the_run_dir())
    counts = read_ledger(the_run_dir() / "ledger.db")
    assert counts.admitted == counts.trained + counts.dropped + counts.live
    trained = rows_of(the_run_dir())
    steps = [row["step"] for row in trained if "time/step" in row]
    assert steps == list(range(1, len(steps) + 1))
    # The prompt comes again in each pass over the rows, so the last steps may be without workers.
    assert 2.0 in [row["rollout/workers"] for row in trained[step:]]
    assert counts.trained == 4 * len(steps)
    assert 0 < counts.dropped <= 1 + len(steps) * 4 // 32


def test_environments_in_processes_of_workers_are_played_and_trained(miniature, tmp_path) -> None:
    (model,) = make_tool_models(tmp_path, versions=1)
    config = miniature(
        model={"path": str(model)},
        data={"train": None, "eval": None, "prompt": {"format": "chat", "max_tokens": 64}},
        eval=None,
        schedule={"total_steps": 2, "groups_per_step": 2, "samples_per_group": 2},
        rollout={
            "servers": 1,
            "workers": 2,
            "environment": {"kind": "envs:Counter", "max_turns": 2, "isolation": "process", "pool": 2},
            "sampling": {"max_new_tokens": 10},
            "context_length": 1024,
        },
        trainer={"tensor_parallel": 1},
        checkpoint={"export": False},
    )
    rows = [{"prompt": f"play {number}", "goal": 3} for number in range(8)]
    result = megasync.AsyncTrainer(config, train_dataset=rows).train()
    assert (result.step, result.stopped) == (2, "")
    last = rows_of(result.run_dir)[-1]
    assert last["rollout/environment/turns"] == 2.0
    assert last["rollout/environment/finished"] == 0.0
    assert last["rollout/samples_failed"] == 0.0
    assert last["rollout/workers"] == 2.0

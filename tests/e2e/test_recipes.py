"""Recipes of docs/recipes that no other test runs: each for three steps, by the command of its page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from run_metrics import steps_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
SHORT = (
    "schedule.total_steps=3",
    "trainer.optimizer.warmup_steps=0",
    "eval.samples=8",
    "checkpoint.export=false",
    "observe.live=false",
)
# What runs a recipe, and the keys that say which model is there already.
RECIPES = {
    "lora": ("configs/recipes/lora.yaml", ["model.path={model}"]),
    "distillation": ("configs/recipes/distillation.yaml", ["model.path={model}", "teachers.solver.path={model}"]),
    "tool_agent": ("examples/calculator/train.py", []),
    "mcp_agent": ("examples/mcp_agent/train.py", []),
    "code": ("examples/programs/train.py", []),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name, execute, the_run_dir, digits_model, tmp_path, monkeypatch):
    if name == "mcp_agent":
        pytest.importorskip("mcp", reason="megasync install mcp")
    monkeypatch.chdir(tmp_path)
    started, keys = RECIPES[name]
    program = [ROOT / started] if started.endswith(".py") else ["-m", "megasync", "train", ROOT / started]
    keys = [key.format(model=digits_model) for key in keys]
    # Programs make their model, in which one thread is fastest beside other tests.
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    run = execute(sys.executable, *program, *keys, *SHORT, f"run_root={tmp_path / 'runs'}")
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert [row["step"] for row in steps] == [1, 2, 3]
    last = steps[-1]
    assert last["train/grad_norm"] >= 0
    if name == "lora":
        assert last["sync/bytes"] < 200_000
    if name == "distillation":
        assert last["teachers/solver/requests"] >= 3 * 16 * 16
    if name in ("tool_agent", "mcp_agent"):
        assert last["rollout/tool_calls"] > 0 and last["rollout/turns"] > 1
    if name == "code":
        assert any(row["rollout/reward_mean"] > 0 for row in steps)
    assert run.survivors() == []

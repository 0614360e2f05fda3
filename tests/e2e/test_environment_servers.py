"""Recipes whose environments have servers of their own: real ranks, a real model server, public environments.

Each runs as its page says, for three steps, with a model of a few weights in place of SmolLM2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nltk_words import write_nltk_words
from run_metrics import steps_of
from tool_model import make_tool_models

pytestmark = pytest.mark.real

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
SMALL = (
    *("model.dtype=float32", "schedule.total_steps=3", "schedule.groups_per_step=2", "schedule.samples_per_group=2"),
    *("rollout.servers=1", "rollout.context_length=4096", "data.prompt.max_tokens=2000", "rollout.mem_fraction=0.3"),
    *("trainer.data_parallel=1", "sync.parity_every=1", "checkpoint.export=false", "observe.live=false"),
    *("rollout.sampling.max_new_tokens=24", "rollout.environment.max_turns=2", "timeouts.environment=240"),
)


def program(name: str, command: str) -> Path:
    path = Path(sys.prefix) / name / "bin" / command
    if not path.exists():
        pytest.skip(f"needs {name} in an environment of its own: megasync install {name}")
    return path


@pytest.fixture
def train(launch, the_run_dir, tmp_path, monkeypatch):
    """Runs a recipe in an empty folder; returns the metrics of the last step."""
    monkeypatch.chdir(tmp_path)
    (model,) = make_tool_models(tmp_path, versions=1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))

    def run(recipe: str, *keys: str) -> dict:
        keys = (f"model.path={model}", f"run_root={tmp_path / 'runs'}", *SMALL, *keys)
        run = launch("train", RECIPES / f"{recipe}.yaml", *keys)
        assert run.wait() == 0, run.output
        steps = steps_of(the_run_dir())
        assert [row["step"] for row in steps] == [1, 2, 3]
        assert run.survivors() == []
        last = steps[-1]
        assert last["rollout/samples_failed"] == 0.0 and last["rollout/turns"] >= 1.0
        assert last["sync/parity"] < 1e-4
        return last

    return run


@pytest.mark.parametrize(("game", "workers"), [("Hangman-v0", 0), ("Wordle-v0", 1)])
def test_games_of_textarena_are_trained_through_verifiers(train, the_run_dir, tmp_path, monkeypatch, game, workers):
    program("verifiers", "python")
    monkeypatch.setenv("NLTK_DATA", str(write_nltk_words(tmp_path / "nltk")))
    last = train("verifiers", f"data.train.options.game={game}", "data.train.size=8", f"rollout.workers={workers}")
    assert "rollout/reward/game_reward" in last
    (log,) = (the_run_dir() / "logs").glob("environment-textarena-*.log")
    assert "EnvServer up: taskset=textarena" in log.read_text()


def test_openenvs_own_example_is_trained_on_a_server_of_the_run(train, tmp_path):
    subprocess.run([program("openenv", "openenv"), "init", "echo_env", "--output-dir", tmp_path], check=True)
    rows = [json.dumps({"prompt": f"Say something. {number}"}) for number in range(8)]
    (tmp_path / "echo_rows.jsonl").write_text("\n".join(rows))
    last = train("openenv")
    assert last["rollout/environment/turns"] == 2.0
    # A longer message has a higher reward, up to 1 a turn.
    assert 0 < last["train/reward"] <= 2.0

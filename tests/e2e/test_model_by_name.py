"""A whole run of a model that a hub on loopback serves under a name."""

from __future__ import annotations

import pytest
from local_hub import LocalHub, environment, model_files

from megasync.config import load_config

SMALL = {"rollout": {"servers": 1}, "trainer": {"tensor_parallel": 1}}
pytestmark = pytest.mark.real


def test_a_run_downloads_its_model_once_and_a_resumed_one_keeps_the_commit(
    miniature, launch, the_run_dir, digits_model, monkeypatch, tmp_path
) -> None:
    hub, files = LocalHub(), model_files(digits_model)
    commit = hub.push("tiny/digits", files)
    for name, value in environment(hub, tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    config = miniature(
        model={"path": "tiny/digits"},
        schedule={"total_steps": 1},
        rollout={"servers": 1},
        trainer={"tensor_parallel": 1},
    )
    run = launch("train", config)
    assert run.wait() == 0, run.output
    run_dir = the_run_dir()
    assert load_config(run_dir / "config.yaml").model.path == f"tiny/digits@{commit}"
    assert (run_dir / "export" / "tokenizer.json").read_bytes() == files["tokenizer.json"]
    newer = hub.push("tiny/digits", files | {"model.safetensors": b"newer"})
    resumed = launch("resume", run_dir, "schedule.total_steps=2")
    assert resumed.wait() == 0, resumed.output
    assert "step 2/2" in resumed.output
    assert len(hub.downloads()) == 1 and not any(newer in path for _, path, _ in hub.requests)
    hub.close()

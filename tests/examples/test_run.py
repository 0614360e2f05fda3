"""The example's configurations can be planned with what `run.py` supplies, and the table that it prints."""

import json
from pathlib import Path

import pytest
from deepresearch import run
from deepresearch.agent import SearchAgent
from deepresearch.folders import DataFolder
from deepresearch.report import results_table

from megasync.base.importing import load_callable
from megasync.config import load_config
from megasync.config.pools import pool_specs
from megasync.preflight.check import check_config

FOLDER = Path(run.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_of_the_example_can_be_planned(path, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    config = load_config(path, run.supplied(DataFolder(tmp_path), "http://127.0.0.1:8101"))
    if config.model.config is None:
        config.model.config = "configs/models/qwen3_8b.json"
        config.model.path = str(tmp_path / "absent")
    check_config(config, planning=True)
    assert pool_specs(config)["auxiliary-refiner"].slots == 1
    agent = load_callable(config.rollout.workflow, config.rollout.workflow_options)
    assert isinstance(agent, SearchAgent)


def test_the_table_has_a_line_for_each_step_and_a_dash_for_what_a_step_lacks(tmp_path):
    rows = [
        {"step": 0, "eval/score": 0.25},
        {"step": 1, "train/reward": 0.5, "rollout/agent/searches": 1.5},
        {"step": 1, "eval/score": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = results_table(tmp_path).splitlines()[2:]
    assert first.startswith("| 0 | - | 0.25 | - ")
    assert second.startswith("| 1 | 0.5 | 0.75 | - ") and "| 1.5 |" in second

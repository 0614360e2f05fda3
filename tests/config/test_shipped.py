"""The shipped configurations are valid and refer only to things that exist."""

from pathlib import Path

import pytest

from megasync.base.importing import load_function
from megasync.config import load_config
from megasync.config.schema import Config
from megasync.data import load_dataset
from megasync.errors import ConfigError
from megasync.models import MODELS
from megasync.preflight.check import check_config
from megasync.rewards import load_reward

CONFIGS = Path(__file__).parents[2] / "configs"
SHARED = ("base", "smollm2")
RUNNABLE = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {*SHARED})


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)


def load(name: str, tmp_path: Path) -> Config:
    """The configuration, with a model that must be fetched first treated as present."""
    config = load_config(CONFIGS / f"{name}.yaml")
    if config.model.config is None:
        assert config.model.path.removeprefix("models/") in MODELS
        config.model.config = str(CONFIGS / "models" / "qwen3_8b.json")
        config.model.path = str(tmp_path / "absent")
    return config


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shipped_configuration_can_be_planned(name, tmp_path):
    check_config(load(name, tmp_path), planning=True)


@pytest.mark.parametrize("name", RUNNABLE)
def test_functions_that_a_configuration_names_exist(name, tmp_path):
    rollout = load(name, tmp_path).rollout
    if rollout.workflow is not None:
        assert callable(load_function(rollout.workflow))
    if rollout.reward is not None:
        assert callable(load_reward(rollout.reward))


@pytest.mark.parametrize("name", ["quickstart", "smollm2_reasoning", "smollm2_chain_sum", "first_gpu"])
def test_generated_datasets_come_with_a_verifier_and_enough_held_out_rows(name, tmp_path):
    config = load(name, tmp_path)
    rows, verifier = load_dataset(config.data.train)
    held_out, _ = load_dataset(config.data.eval)
    assert callable(verifier)
    assert len(held_out) >= config.eval.samples
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize("name", ["quickstart", "smollm2_reasoning", "smollm2_chain_sum"])
def test_a_cpu_configuration_has_a_distributed_topology(name, tmp_path):
    """At least two trainer ranks and two servers, so that it demonstrates the distributed system."""
    config = load(name, tmp_path)
    trainer = config.trainer
    assert trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel >= 2
    assert config.rollout.servers >= 2
    assert config.cluster.device == "cpu"


def test_a_shipped_configuration_that_is_not_here_is_offered(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"check the path, or copy the shipped one here: megasync files \."):
        load_config("configs/quickstart.yaml")
    with pytest.raises(ConfigError, match=r"does not exist; check the path$"):
        load_config("configs/mine.yaml")

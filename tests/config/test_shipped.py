"""The shipped configurations are valid and refer only to things that exist."""

import shutil
from pathlib import Path

import pytest
from header_files import write_headers

from megasync.base import missing
from megasync.base.importing import load_function
from megasync.config import builtin, load_config
from megasync.config.builtin import REWARDS
from megasync.config.schema import Config, DatasetConfig
from megasync.data import load_dataset
from megasync.errors import ConfigError
from megasync.planning.finding import OK
from megasync.planning.plan import Plan, resolve
from megasync.planning.run_doctor import find_contradiction
from megasync.starters.digits import digits_tokenizer
from megasync.starters.fetch import MODELS
from megasync.tenants.checks import check_as_run

CONFIGS = Path(__file__).parents[2] / "configs"
SHARED = ("base", "smollm2")
RUNNABLE = sorted({str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")} - {*SHARED})
ON_GPUS = [name for name in RUNNABLE if "qwen3" in name]
# What the program or the run before a recipe makes.
MADE = ("models/calculator", "models/code", "models/shop", "models/swe_agent/model", "runs/quickstart/export")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)


def load(name: str, tmp_path: Path) -> Config:
    """The configuration, with a model that must be fetched first treated as present."""
    config = load_config(CONFIGS / f"{name}.yaml")
    if config.model.config is None:
        assert config.model.path in MADE or config.model.path.removeprefix("models/") in MODELS
        config.model.config = str(CONFIGS / "models" / "qwen3_8b.json")
        config.model.path = str(tmp_path / "absent")
    if config.data.train is None:
        # The program that names this file brings the rows.
        config.data.train = config.data.eval = DatasetConfig("jsonl", "rows.jsonl")
    return config


@pytest.mark.every(3)
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_shipped_configuration_can_be_planned(name, tmp_path):
    check_as_run(load(name, tmp_path), planning=True)


BUILTIN = [
    (table, name)
    for table, places in vars(builtin).items()
    if isinstance(places, dict) and not table.startswith("_")
    for name, place in places.items()
    if isinstance(place, str)
]


@pytest.mark.parametrize(("table", "name"), BUILTIN)
def test_what_a_builtin_name_stands_for_can_be_loaded(table, name):
    assert callable(load_function(getattr(builtin, table)[name]))


@pytest.mark.parametrize("name", RUNNABLE)
def test_functions_that_a_configuration_names_exist(name, tmp_path):
    rollout = load(name, tmp_path).rollout
    if rollout.workflow is not None:
        assert callable(load_function(rollout.workflow))
    if rollout.reward is not None:
        assert callable(load_function(REWARDS.get(rollout.reward, rollout.reward)))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_configuration_for_gpus_fits_its_nodes_and_a_node_with_the_model_accepts_it(name, tmp_path, monkeypatch):
    """The plan fits into 80 GB a device, and `megasync doctor` finds no contradiction. Rows are on a hub."""
    config = load(name, tmp_path)
    plan = resolve(config)
    assert isinstance(plan, Plan) and plan.refusals == ()
    used = {size for size in ("8", "32") if f"_{size}_gpus" in name}
    assert plan.nodes == {"8": 1, "32": 4}[used.pop()] if used else plan.nodes in (1, 4)
    digits_tokenizer().save_pretrained(folder := tmp_path / "model")
    shutil.copy(config.model.config, folder / "config.json")
    write_headers(folder, files=16)
    config.model.path = str(folder)
    monkeypatch.setattr(missing, "find_spec", lambda package: package)
    found = find_contradiction(config, lambda as_run: check_as_run(as_run) or ())
    assert (found.status, found.detail) == (OK, "no contradictions")


@pytest.mark.parametrize(
    "name", ["quickstart", "smollm2_reasoning", "smollm2_chain_sum", "recipes/smollm2_family", "first_gpu"]
)
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

"""Functions that a configuration names are loaded, and refused at once if they could not be called."""

import pytest

from megasync.algorithms.choose import estimator_of, loss_of
from megasync.app.workload import PythonArguments, load_workflow
from megasync.base.importing import load_callable, load_function
from megasync.concurrency.foreign import ForeignExit
from megasync.config.schema import AlgorithmConfig, Config, DataConfig
from megasync.data.curriculum import RowHistory, curriculum_of
from megasync.environments.protocol import environment_factory
from megasync.errors import ConfigError

MODULE = """
import sys

async def workflow(client, sample): pass
async def no_sample(client): pass
def not_async(client, sample): pass

def estimator(rewards, *, scale=1.0): sys.exit(0)
def two(rewards, more): pass

def policy(history, epoch): sys.exit(0)
def no_epoch(history): pass

class Environment:
    def reset(self, sample): pass
    def step(self, action): pass
    def close(self): pass

class NoAction(Environment):
    def step(self): pass

class Half(Environment):
    async def step(self, action): pass

class Exits:
    def __init__(self): sys.exit(0)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(MODULE)
    (tmp_path / "own_program.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "own_interruption.py").write_text("raise GeneratorExit\n")
    monkeypatch.syspath_prepend(tmp_path)


def workflow(name):
    return load_workflow(Config(), PythonArguments(rollout=f"own_functions:{name}"), None)


def curriculum(name):
    return curriculum_of(DataConfig(curriculum=f"own_functions:{name}"))


def environment(name):
    return environment_factory(f"own_functions:{name}", {})


def estimator(name):
    return estimator_of(AlgorithmConfig(advantage=f"own_functions:{name}"))


def loss(name):
    return loss_of(AlgorithmConfig(loss=f"own_functions:{name}"))


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (workflow, "no_sample", "no_sample must be written as `async def rollout.client, sample.`"),
        (workflow, "not_async", "not_async must be written as `async def rollout"),
        (workflow, "missing", "has no 'missing'"),
        (estimator, "two", "'own_functions:two' must take one argument beside its options"),
        (loss, "two", "'own_functions:two' must take one argument beside its options"),
        (curriculum, "no_epoch", "must take a row's history and an epoch"),
        (environment, "NoAction", r"step of the environment .* must take 1 argument"),
        (environment, "Half", "is async in step only"),
    ],
)
def test_a_function_with_another_signature_is_refused(load, name, message):
    with pytest.raises(ConfigError, match=message):
        load(name)


@pytest.mark.parametrize(("load", "name"), [(workflow, "workflow"), (environment, "Environment")])
def test_a_function_with_the_right_signature_is_loaded(load, name):
    assert load(name) is not None


@pytest.mark.parametrize("name", ["own_program", "own_interruption"])
def test_a_module_that_exits_when_it_is_imported_is_refused(name):
    with pytest.raises(ConfigError, match=f"importing {name} failed: .*Exit: .*__name__ == '__main__'"):
        load_function(f"{name}:reward")


def test_a_class_that_exits_when_it_is_made_is_refused():
    with pytest.raises(ConfigError, match="own_functions:Exits' cannot be made with its options {}: SystemExit: 0"):
        load_callable("own_functions:Exits")


def test_an_exit_of_an_estimator_or_a_curriculum_is_an_error_that_names_it():
    with pytest.raises(ForeignExit, match="the function 'own_functions:estimator' raised SystemExit: 0"):
        estimator("estimator")(None)
    with pytest.raises(ForeignExit, match="data.curriculum=own_functions:policy raised SystemExit: 0"):
        curriculum("policy")(RowHistory(), 0)

"""Finding functions by name, and what a workflow may return."""

import sys

import pytest

from megasync.base.importing import load_function
from megasync.cli import commands as cli
from megasync.errors import ConfigError
from megasync.rollout.workflow import single_turn


def test_a_function_is_found_by_module_and_name():
    assert load_function("megasync.rollout.workflow:single_turn") is single_turn


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("json.dumps", "write it as package.module:function"),
        ("json:", "write it as package.module:function"),
        ("no_such_module_at_all:f", "there is no module 'no_such_module_at_all'"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("json:no_such", "the module json has no 'no_such'"),
        ("json:__name__", "is a str, not a function"),
    ],
)
def test_each_wrong_part_has_its_own_message(reference, message):
    with pytest.raises(ConfigError, match=message):
        load_function(reference)


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "needy_reward.py").write_text("import no_such_dependency")
    with pytest.raises(ConfigError, match="importing broken_reward failed: RuntimeError: no licence"):
        load_function("broken_reward:f")
    with pytest.raises(ConfigError, match="needy_reward needs the module 'no_such_dependency'"):
        load_function("needy_reward:f")


def test_the_program_finds_functions_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "reward_of_this_folder.py").write_text("def exact(): pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["megasync", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert load_function("reward_of_this_folder:exact").__name__ == "exact"

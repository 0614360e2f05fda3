"""Each requirement of a configuration on this machine, missing one at a time."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from megasync.cli.commands import app
from megasync.config import load_config
from megasync.device import Device
from megasync.planning import run_doctor
from megasync.planning.finding import FAILURE, OK, WARNING
from megasync.planning.run_doctor import examine_for
from megasync.planning.start_checks import check_run
from megasync.starters.fetch import fetch

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ROWS = "{kind: digits, source: increment}"
TOO_FEW_ROWS = ("sft.rows_per_step=1", "trainer.data_parallel=2")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    return fetch("digits", tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def model(fetched, tmp_path):
    return Path(shutil.copytree(fetched, tmp_path / "digits"))


@pytest.fixture
def examine(model, tmp_path):
    """The findings that are not OK, for a configuration with these changes."""

    def examine(*overrides, change=None):
        always = [f"model.path={model}", f"run_root={tmp_path / 'runs'}", "cluster.device=cpu"]
        config = load_config(CONFIG, [*always, *overrides])
        if change is not None:
            change(config)
        found = list(examine_for(config, check_run))
        assert all(finding.subject and finding.detail for finding in found)
        assert all((finding.status == OK) == (finding.fix == "") for finding in found)
        return [finding for finding in found if finding.status != OK]

    return examine


def only(findings, subject):
    (found,) = findings
    assert (found.subject, found.status) == (subject, FAILURE)
    return found


def test_a_machine_that_meets_all_requirements(examine, tmp_path):
    assert examine() == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["{", "{}"])
def test_a_tokenizer_that_cannot_be_loaded(model, damage):
    (model / "tokenizer.json").write_text(damage)
    (finding,) = run_doctor.check_tokenizer(load_config(CONFIG, [f"model.path={model}"]))
    assert finding.status == FAILURE and "no tokenizer" in finding.detail and "tokenizer files" in finding.fix


def test_a_run_folder_that_cannot_be_written(examine, monkeypatch):
    monkeypatch.setattr(run_doctor, "writable", lambda path: False)
    assert "run_root" in only(examine(), "run folder").fix


def test_a_disk_without_room_for_the_checkpoints(examine):
    found = only(examine("checkpoint.keep=1000000000"), "run folder")
    assert "1000000001 checkpoints need" in found.detail and "checkpoint.keep=1000000000" in found.fix


def test_generation_without_a_key_on_a_network(examine):
    found = [finding for finding in examine("cluster.host=192.0.2.1", "cluster.generation_key=never")]
    access = next(finding for finding in found if finding.subject == "access")
    assert access.status == WARNING and "generation requires no key" in access.detail


def test_missing_gpus(examine):
    alone = only(examine("cluster.device=cuda"), "devices")
    assert "this machine has no GPU" in alone.detail and "cluster.device=cpu" in alone.fix
    # One of several machines: perhaps that of the driver.
    (found,) = examine("cluster.device=cuda", "cluster.address=auto")
    assert (found.subject, found.status) == ("devices", WARNING) and "driver" in found.fix


def test_fewer_gpus_than_the_pools_need(examine, monkeypatch):
    monkeypatch.setattr(run_doctor, "resolve_device", lambda kind: Device("cuda"))
    monkeypatch.setattr(run_doctor, "check_machine", lambda kind, trains: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = only(examine(), "devices")
    assert found.detail == "4 GPUs needed, 3 available" and "rollout.servers" in found.fix
    assert examine("cluster.address=auto") == []


def test_a_plan_without_the_teachers_folder_compares_nothing(model, tmp_path):
    absent = "teachers.one.path=/absent"
    planned = CliRunner().invoke(app, ["plan", str(CONFIG), f"model.path={model}", f"run_root={tmp_path}", absent])
    assert planned.exit_code == 0 and "one" in planned.stdout


def test_a_supervised_run_is_examined_as_one(examine, tmp_path):
    """It needs neither training prompts nor servers nor teachers."""
    assert examine("data.train=null", "teachers.one.path=/absent", f"sft.train={ROWS}") == []
    assert "sft.rows_per_step=1" in only(examine(f"sft.train={ROWS}", *TOO_FEW_ROWS), "configuration").detail


def test_less_memory_than_the_pools_need_is_a_warning(examine, model, monkeypatch):
    teacher = f"teachers.one={{path: {model}}}"
    monkeypatch.setattr(run_doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=6 * 10**9))
    (finding,) = examine(teacher)
    assert (finding.subject, finding.status) == ("run memory", WARNING)
    assert "1.1 GB teachers.one" in finding.detail and "max_total_tokens" in finding.fix
    assert examine(f"teachers.one={{path: {model}, max_total_tokens: 4096}}") == []

"""`megasync rehearse`: which ranks, the verdict, and children that do not outlive a rehearsal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import command_line
from rich.console import Console
from typer.testing import CliRunner
from waits import PATIENCE, wait_until

from megasync.cli.commands import app
from megasync.config import load_config
from megasync.errors import ConfigError, TrainingError
from megasync.lab.rehearsal import command, driver
from megasync.lab.rehearsal.command import rehearse_config
from megasync.lab.rehearsal.driver import rehearse
from megasync.lab.rehearsal.render import rehearsal_data, rehearsal_tables
from megasync.lab.rehearsal.report import RankReport, Rehearsal
from megasync.preflight.check import model_layout

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/qwen3_8b_math.yaml"
GPUS = ["model.config=" + str(ROOT / "configs/models/qwen3_8b.json")]


def children() -> set[str]:
    """Processes of rehearsals on this machine that this test process started."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {line for line in listed.stdout.splitlines() if "rehearsal.child" in line}


@pytest.mark.parametrize("rank", ["4", "-1", "first", "0,", ""])
def test_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(ConfigError, match=r"must be sample, all, or ranks from 0 to 3 such as 0,3"):
        rehearse_config(CONFIG, GPUS, rank, None, False)


def test_an_unsupported_megatron_is_refused():
    with pytest.raises(ConfigError, match=r"--megatron 0\.15\.0 is not supported; it must be 0\.16\.1"):
        rehearse_config(CONFIG, GPUS, "sample", "0.15.0", False)


def test_a_service_is_refused_with_what_counts_its_memory():
    with pytest.raises(ConfigError, match=r"ranks of a service hold adapters of many models.*`megasync plan`"):
        rehearse_config(CONFIG, [*GPUS, "serve={}"], "sample", None, False)


def test_the_first_difference_is_named():
    held, planned = {"weights": 3 * 10**9}, {"weights": 2 * 10**9}
    ranks = (
        RankReport(0, 10**9, held, held, 1.0, ()),
        RankReport(2, 10**9, held, planned, 1.5, ("weights: too many", "more")),
        RankReport(3, 0, {}, {}, 0.5, ("AssertionError: no",)),
    )
    run = Rehearsal("0.16.1", ranks)
    assert run.difference == "rank 2: weights: too many"
    layout, _ = model_layout(load_config(CONFIG, GPUS), planning=True)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(rehearsal_tables([run], layout))
    text = console.export_text()
    assert "3.00|2.00" in text and "rank 2: weights: too many" in text
    assert "2 of 3 rehearsed ranks differ, in 3 place(s)" in text
    data = rehearsal_data([run], layout)
    assert not data["ok"] and data["rehearsals"][0]["ranks"][2]["tp"] == 3


@pytest.mark.processes
def test_a_sound_configuration_ends_with_status_0_and_json():
    result = CliRunner().invoke(app, ["rehearse", str(CONFIG), *GPUS, "--rank", "3", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    (run,) = data["rehearsals"]
    assert data["ok"] and run["difference"] is None and [rank["rank"] for rank in run["ranks"]] == [3]
    assert not children()


@pytest.mark.processes
def test_a_configuration_for_cpus_is_rehearsed_with_its_own_layers(tmp_path):
    """Megatron's local experts have other names than Transformer Engine's; no GPU package is needed."""
    overrides = [*GPUS, "cluster.device=cpu", "trainer.tensor_parallel=2", "rollout.tensor_parallel=1"]
    assert rehearse_config(CONFIG, overrides, "0,1", None, True)


def test_a_difference_ends_with_status_1(monkeypatch):
    wrong = Rehearsal("0.16.1", (RankReport(1, 0, {}, {}, 0.5, ("AssertionError: no",)),))
    monkeypatch.setattr(command, "rehearse", lambda *_: wrong)
    result = CliRunner().invoke(app, ["rehearse", str(CONFIG), *GPUS, "--rank", "1"])
    assert result.exit_code == 1
    assert "rank 1: AssertionError: no" in result.output


@pytest.mark.processes
def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(driver, "START_SECONDS", 0.01)
    with pytest.raises(TrainingError, match=r"a process that rehearses ranks did not answer within 0\.01 s"):
        rehearse(load_config(CONFIG, GPUS), [0], "0.16.1")
    assert not children()


@pytest.mark.processes
def test_a_rank_past_its_deadline_is_a_difference_and_others_go_on():
    found = rehearse(load_config(CONFIG, GPUS), [0, 1], "0.16.1", rank_seconds=0.01)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert all("did not answer within 0.01 s" in rank.differences[0] for rank in found.ranks)
    assert not children()


@pytest.mark.processes
def test_a_process_is_replaced_after_some_ranks(monkeypatch):
    monkeypatch.setattr(driver, "RANKS_A_CHILD", 1)
    found = rehearse(load_config(CONFIG, GPUS), [0, 1], "0.16.1")
    assert found.difference is None and [rank.rank for rank in found.ranks] == [0, 1]
    assert not children()


@pytest.mark.processes
def test_ctrl_c_leaves_no_process_behind():
    # So many ranks that it cannot end before the signal.
    many = ["trainer.data_parallel=64", "cluster.address=auto", "cluster.host=auto"]
    arguments = [sys.executable, "-m", "megasync", "rehearse", str(CONFIG), *GPUS, *many, "--rank", "all"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            session = _child_of(process.pid)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
    assert not Path(f"/proc/{session}").exists()


def _child_of(pid: int) -> int:
    """The first process that rehearses for this one, once it exists."""
    children = psutil.Process(pid).children
    return wait_until(lambda: [child.pid for child in children() if "rehearsal.child" in command_line(child)])[0]

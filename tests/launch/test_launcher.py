"""`megasync launch --dry-run` prints the commands of a job; invalid arguments are refused before any command runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasync.cli.commands import app
from megasync.config import load_config
from megasync.errors import ConfigError, MegasyncError
from megasync.launch.hosts import Host
from megasync.launch.launcher import Job


def dry_run(config: Path, *arguments: str) -> list[list[str]]:
    result = CliRunner().invoke(app, ["launch", str(config), "--dry-run", *arguments])
    assert result.exit_code == 0, result.output
    note, *lines = result.stdout.splitlines()
    assert note.startswith("# ") and "ray_bind.so" in note
    return [shlex.split(line) for line in lines]


def after(words: list[str], mark: str) -> list[str]:
    return words[words.index(mark) + 1 :]


def test_a_dry_run_prints_the_head_the_others_the_doctor_and_the_run_in_order(config_file: Path) -> None:
    head, other, doctor, run = dry_run(
        config_file, "--hosts", "a,b", "--shell", "at", "--interface", "ib0", "schedule.total_steps=3"
    )
    assert [words[:2] for words in (head, other, doctor, run)] == [["at", "a"], ["at", "b"], ["at", "a"], ["at", "a"]]
    for words, peer in ((head, "b"), (other, "a"), (doctor, "b"), (run, "b")):
        assert after(words, "--peer")[0] == peer and after(words, "--interface")[0] == "ib0"
        assert after(words, "--folder")[0] == str(Path.cwd())
    assert "--head" not in head and after(other, "--head")[0] == "HEAD:PORT"
    assert after(head, "--devices")[0] == "8"
    assert after(doctor, "megasync")[:3] == ["doctor", "--cluster", "HEAD:PORT"] and "schedule.total_steps=3" in doctor
    driver = after(run, "megasync")
    assert driver[:3] == ["train", str(config_file), "schedule.total_steps=3"]
    assert driver[3:] == ["cluster.address=HEAD:PORT", "cluster.host=auto"]


def test_a_dry_run_shows_no_token(config_file: Path) -> None:
    assert "TOKEN" not in str(dry_run(config_file, "--hosts", "a,b")).upper()


def test_hosts_of_a_pool_mark_their_ray_nodes(config_file: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a trainer\nb rollout\n")
    head, other, _, run = dry_run(config_file, "--hosts", str(hosts), "--shell", "at", "--continue", "this.run")
    assert (after(head, "--pool")[0], after(other, "--pool")[0]) == ("trainer", "rollout")
    assert after(run, "--continue")[0] == "this.run"


def test_ssh_receives_the_command_as_one_line(config_file: Path) -> None:
    (head, *_) = dry_run(config_file, "--hosts", "a")
    assert head[0] == "ssh" and head[-2] == "a" and "megasync.launch.node" in head[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--hosts h1,h2"),
        (["--hosts", "a", "--slurm"], "--hosts h1,h2"),
        (["--hosts", "a,a"], "listed twice"),
        (["--slurm"], "SLURM_JOB_NODELIST is not set"),
        (["--hosts", "a", "no.such=key"], "no.such"),
        (["--hosts", "a", "--shell", "ssh 'x", "--dry-run"], "is not a command: No closing quotation"),
        (["--hosts", "a", "--shell", " ", "--dry-run"], "is not a command"),
        (["--hosts", "a,b", "--rank", "2", "--continue", "f"], "--rank 2 needs --hosts with more than 2 hosts"),
        (["--hosts", "a,b", "--rank", "0"], "--continue FILE in a folder"),
        (["--hosts", "a,b", "--rank", "0", "--continue", "f"], "RAY_AUTH_TOKEN in the environment of each"),
    ],
)
def test_invalid_launches_are_refused(config_file: Path, arguments: list[str], words: str, monkeypatch) -> None:
    for variable in ("SLURM_JOB_NODELIST", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(MegasyncError, match=words):
        CliRunner().invoke(app, ["launch", str(config_file), *arguments], catch_exceptions=False)


def test_an_environment_that_ray_cannot_start_from_is_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="/an env/bin/python, because that path has a space"):
        Job([Host("a")], load_config(config_file), config_file, [], Path("/"), python="/an env/bin/python")


@pytest.mark.parametrize(("change", "command"), [("seed=1", "train"), ("serve={}", "serve")])
def test_the_driver_runs_what_the_configuration_is_for(config_file: Path, change: str, command: str) -> None:
    config = load_config(config_file, [change])
    job = Job([Host("a")], config, config_file, [change], Path("/"), continue_file=Path("this.run"))
    assert job.driver("a:1")[1:6] == ["-m", "megasync", command, "--continue", "this.run"]

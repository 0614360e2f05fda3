"""The command line: fast help, one message per error, and results with their paths."""

import errno
import importlib.util
import io
import os
import pydoc
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from made_runs import make_run
from typer.testing import CliRunner

import megasync
from megasync.base import missing, shipped
from megasync.cli import commands as cli
from megasync.errors import TrainingError
from megasync.observe.samples import append_answers

ROOT = Path(__file__).parents[2]
COMMANDS = tuple(command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(*arguments, **environment):
    command = [sys.executable, "-c", "from megasync.cli.commands import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


@pytest.fixture
def here(monkeypatch, capsys):
    """The program inside this process, where torch is imported once: (status, stdout, stderr)."""
    monkeypatch.delenv("MEGASYNC_DEBUG", raising=False)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["megasync", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def test_help_lists_every_command():
    text = CliRunner().invoke(cli.app, ["--help"]).output
    assert {"train", "check-layout", "eval"} <= {*COMMANDS} and all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command):
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"megasync {command}" in result.output


@pytest.mark.processes
def test_short_help_and_the_version():
    assert (
        CliRunner().invoke(cli.app, ["train", "-h"]).output == CliRunner().invoke(cli.app, ["train", "--help"]).output
    )
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"megasync {megasync.__version__}\n"


def test_the_package_shows_what_is_public():
    assert {"AsyncTrainer", "Config", "MegasyncError", "RunResult", "Service", "Trajectory"} <= {*dir(megasync)}
    assert all(getattr(megasync, name) for name in dir(megasync))
    text = pydoc.render_doc(megasync, renderer=pydoc.plaintext)
    assert "class AsyncTrainer" in text and "rollout" in text


@pytest.mark.processes
def test_help_imports_no_heavy_packages():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom megasync import cli\n"
        "CliRunner().invoke(cli.app, ['train', '--help'])\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'transformers', 'omegaconf', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.processes
def test_an_error_is_one_message_on_stderr_and_status_2():
    result = run("plan", "configs/qwen3_8b_math.yaml", "trainer.tensor_paralel=2")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "trainer.tensor_parallel" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.processes
def test_debug_mode_prints_the_traceback():
    result = run("plan", "nowhere.yaml", MEGASYNC_DEBUG="1")
    assert "Traceback" in result.stderr and "nowhere.yaml" in result.stderr and result.returncode != 0


def test_a_missing_argument_is_explained(here):
    status, _, err = here("train")
    assert status == 2 and "CONFIG" in err


@pytest.mark.processes
def test_a_bad_configuration_is_refused_before_a_run_starts(tmp_path):
    result = run("train", "configs/quickstart.yaml", f"model.path={tmp_path}/digits", f"run_root={tmp_path}/runs")
    assert result.returncode == 2 and "megasync fetch digits" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_plan_prints_the_plan_with_overrides_applied(here):
    status, out, _ = here("plan", "configs/qwen3_8b_math.yaml", "rollout.servers=2", "--device-memory", "20")
    assert status == 2
    assert all(text in out for text in ("2 server(s)", "20.0 GB", "nearest configuration that fits"))


@pytest.mark.parametrize(
    ("command", "more"), [("resume", []), ("scale", ["rollout=2"]), ("stacks", []), ("export", ["out"])]
)
def test_a_folder_that_is_not_a_run_directory_is_refused(here, command, more, tmp_path):
    status, _, err = here(command, tmp_path / "absent", *more)
    assert status == 2 and "absent" in err


@pytest.mark.parametrize(
    ("config", "override", "said"),
    [
        ("serve_quickstart", "trainer.lora.rank=0", "serve needs trainer.lora.rank above 0"),
        ("quickstart", "seed=1", "serve is not set; write `serve: {}`"),
        ("serve_quickstart", "serve.prot=1", "serve.port"),
    ],
)
def test_a_service_is_refused_before_anything_starts(here, tmp_path, config, override, said):
    status, out, err = here("serve", f"configs/{config}.yaml", f"run_root={tmp_path}", override)
    assert (status, out) == (2, "") and said in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_of_process_to_kill_is_refused(here):
    status, _, err = here("chaos", "configs/quickstart.yaml", "--kill", "server,gpu")
    assert status == 2 and "gpu" in err and "server, router, rank, worker, controller" in err


def test_simulate_reports_finished_seeds_and_prints_a_history(here):
    status, out, _ = here("simulate", "--seeds", "3")
    assert status == 0 and "finished" in out
    status, out, _ = here("simulate", "--seed", "1", "--history")
    assert status == 0 and "buffer admit(" in out and "publish" in out


@pytest.mark.parametrize("size", ["3", "servers=3", "rollout=", "rollout=many", "rollout=-1"])
def test_an_invalid_size_is_refused_with_the_correct_form(here, size, tmp_path):
    status, _, err = here("scale", tmp_path, "--", size)
    assert status == 2 and size in err and "rollout=N" in err


def test_export_refuses_a_folder_that_is_not_empty(here, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    status, _, err = here("export", tmp_path / "run", tmp_path / "out")
    assert status == 2 and "not empty" in err
    assert (tmp_path / "out" / "mine.txt").exists()


def test_fetch_creates_a_model_and_refuses_unknown_names(here, tmp_path):
    status, out, _ = here("fetch", "digits", "--out", tmp_path / "digits")
    assert status == 0 and str(tmp_path / "digits") in out
    assert (tmp_path / "digits" / "config.json").is_file()
    status, _, err = here("fetch", "gpt-9", "--out", tmp_path / "x")
    assert status == 2 and "digits" in err


def test_doctor_exits_with_status_1_on_a_failure(monkeypatch):
    from megasync.planning import doctor

    findings = [doctor.Finding("disk", doctor.FAILURE, "full", "free some space")]
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda config, refuse: asked.append(config) or findings)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "free some space" in result.output
    CliRunner().invoke(cli.app, ["doctor", "configs/quickstart.yaml", "name=other"])
    assert asked[0] is None and asked[1].name == "other"
    findings[:] = [doctor.Finding("disk", doctor.WARNING, "nearly full", "watch it")]
    assert CliRunner().invoke(cli.app, ["doctor"]).exit_code == 0


class FakeTrainer:
    """A run that returns or raises `outcome`."""

    def __init__(self, outcome):
        self.outcome = outcome

    def train(self):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def test_the_result_shows_answers_scores_and_existing_paths(tmp_path, capsys):
    from rich.console import Console

    from megasync.observe.result import RunResult, show_result

    append_answers(tmp_path, 0, 0, [("+12=", "99", 0.0)])
    append_answers(tmp_path, 30, 30, [("+12=", "23", 1.0)])
    (tmp_path / "curve.png").touch()
    result = RunResult(
        run_dir=tmp_path,
        step=30,
        version=30,
        scores=[(0, 0.0), (30, 0.95)],
        export_dir=tmp_path / "export",
        stopped="held-out score 0.950 is above 0.9",
    )
    show_result(result, Console())
    text = capsys.readouterr().out
    for part in ("+12=", "99", "23", "30 steps", "0.000 -> 0.950", "curve.png", "samples.jsonl", "export", "above 0.9"):
        assert part in text
    assert "tensorboard" not in text  # there is none in this run
    assert "to resume" not in text
    show_result(replace(result, stopped="SIGINT", finished=False), Console())
    assert f"to resume: megasync resume {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "custom.json").write_text('{"reward": "mine.score", "train_dataset": "10 rows"}')
    show_result(replace(result, stopped="SIGINT", finished=False), Console())
    resumed = f"AsyncTrainer.resume('{tmp_path}', reward=..., train_dataset=...).train()"
    assert resumed in capsys.readouterr().out.replace("\n", "")


def test_an_interrupted_run_exits_with_status_130(here, monkeypatch, tmp_path):
    from megasync.app import async_trainer

    interrupt = KeyboardInterrupt("stopped by SIGINT before the run could finish cleanly")
    monkeypatch.setattr(async_trainer.AsyncTrainer, "resume", lambda *_: FakeTrainer(interrupt))
    status, _, err = here("resume", tmp_path)
    assert status == 130 and "stopped by SIGINT" in err


def test_an_error_during_training_is_reported(here, monkeypatch, tmp_path):
    from megasync.app import async_trainer
    from megasync.starters.fetch import fetch

    fetch("digits", tmp_path / "digits")
    monkeypatch.setattr(async_trainer, "AsyncTrainer", lambda _: FakeTrainer(TrainingError("server 1 died")))
    status, _, err = here("train", "configs/quickstart.yaml", f"model.path={tmp_path}/digits")
    assert status == 2 and "TrainingError: server 1 died" in err


def test_an_impossible_evaluation_is_refused_before_servers_start(here, tmp_path):
    status, _, err = here("eval", "configs/quickstart.yaml", "--model", "a", "--checkpoint", "b")
    assert status == 2 and "--model a and --checkpoint b exclude each other" in err
    status, _, err = here("eval", tmp_path)
    assert status == 2 and "neither a configuration file nor a run directory" in err
    run_dir, full = tmp_path / "run", tmp_path / "full"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(
        (ROOT / "configs" / "quickstart.yaml").read_text().replace("base: base.yaml", "")
    )
    status, _, err = here("eval", run_dir)
    assert status == 2 and "has no complete checkpoint yet" in err
    assert not list(run_dir.glob("eval-*")), "a refused evaluation leaves nothing behind"
    full.mkdir()
    (full / "something").touch()
    status, _, err = here("eval", run_dir, "--out", full)
    assert status == 2 and f"{full} is not empty" in err
    (run_dir / "custom.json").write_text('["train_dataset", "reward"]')
    status, _, err = here("eval", run_dir)
    assert status == 2 and "was started from Python with its own reward" in err


def test_a_sigterm_outside_of_an_event_loop_ends_a_command_as_ctrl_c_does(capsys):
    """Python's own way would skip the cleanup of what is half written, such as the export that an evaluation serves."""
    before, cleaned = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(typer.Exit) as ended, cli._interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert (ended.value.exit_code, cleaned) == (130, [True])
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_without_its_packages_names_what_installs_them(here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(missing, "find_spec", lambda name: None if name in ("ray", "sglang") else find(name))
    status, out, err = here("quickstart")
    assert (status, out) == (2, "") and "ray, sglang; run `megasync install cpu`" in err and not any(tmp_path.iterdir())


def test_a_module_of_a_run_that_cannot_be_imported_is_no_traceback(here, monkeypatch):
    def absent(*_, **__):
        raise ModuleNotFoundError("No module named 'ray.util'", name="ray.util")

    monkeypatch.setattr("megasync.app.mailbox.ask", absent)
    status, _, err = here("scale", "run", "rollout=2")
    assert status == 2 and err == f"ray is not installed in this environment; {missing.FIX}\n"


def test_install_hands_over_to_this_environments_python(here, monkeypatch, tmp_path):
    became = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.append(words))
    here("install", "cpu", "trackers", "--env", str(tmp_path / "a b"))
    assert became == [[sys.executable, "-P", "-m", "megasync.install", "cpu", "trackers", "--env", f"{tmp_path}/a b"]]
    status, _, err = here("install", "nonesuch")
    assert status == 2 and "'nonesuch' cannot be installed; name one of: " in err and " cpu " in err
    assert len(became) == 1


@pytest.mark.parametrize("command", [["plan"], ["resume"], ["report"], ["export"], ["files"], ["init"], ["trace"]])
@pytest.mark.parametrize("path", ["x" * 300, "loop", "gr\udcff"])
def test_a_path_that_no_file_can_have_is_refused_by_every_command(here, monkeypatch, tmp_path, command, path):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    status, _, err = here(*command, path, *(["out"] if command == ["export"] else []))
    assert status == 2 and "is not a usable path: " in err and not Path("out").exists()


@pytest.mark.parametrize(
    "arguments", [["compare", "a", "b", "--threshold", "nan"], ["launch", "a.yaml", "--hosts", "a", "--wait", "inf"]]
)
def test_an_option_that_is_no_number_is_refused(here, arguments):
    status, _, err = here(*arguments)
    assert status == 2 and f"{arguments[-2]}={arguments[-1]} must be a finite number" in err


def test_a_working_directory_that_was_removed_is_said(here, monkeypatch, tmp_path):
    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    status, _, err = here("plan", "run.yaml")
    assert status == 2 and "the working directory cannot be entered" in err and "cd to another one" in err


@pytest.mark.parametrize(("number", "status", "said"), [(errno.EPIPE, 0, ""), (errno.ENOSPC, 2, "free some space")])
def test_output_that_nobody_takes_is_no_traceback(here, monkeypatch, number, status, said):
    """As of `| head`, which ends first, and of a full disk."""
    stdout = sys.stdout

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Full())
    ended, _, err = here("plan", "configs/qwen3_8b_math.yaml")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert ended == status and said in err and "Traceback" not in err and "some code" not in err


@pytest.mark.parametrize("markdown", [[], ["--markdown"]])
def test_a_report_is_no_folder(here, tmp_path, markdown):
    run_dir = make_run(tmp_path, steps=2)
    status, _, err = here("report", run_dir, *markdown, "--out", ".")
    assert status == 2 and "it is a folder; choose another file with --out" in err


def test_files_says_where_the_shipped_files_are_and_copies_them(here, tmp_path):
    _, out, _ = here("files")
    assert str(shipped.ROOT / "configs") in out
    status, out, _ = here("files", str(tmp_path / "mine"))
    assert status == 0 and out.startswith("wrote ") and (tmp_path / "mine/configs/quickstart.yaml").is_file()

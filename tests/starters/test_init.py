"""`megasync init`: its questions, and what it refuses before it writes anything."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megasync.cli import commands as cli
from megasync.cli import questions
from megasync.config import load_config
from megasync.starters import TEMPLATES
from megasync.starters import folder as folder_module

FILES = {"run.yaml", "data", "reward.py", "test_reward.py", "models"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory. The small model is a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder_module, "fetch", lambda name, out: (out.parent.mkdir(), out.write_text(name)))


@pytest.fixture
def init(monkeypatch, capsys):
    """The command in this process: (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["megasync", "init", *map(str, arguments)])
        monkeypatch.setattr(cli, "end_process", lambda *_: None)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


@pytest.fixture
def answers(monkeypatch):
    """Answers questions in a terminal, one after the other."""

    def give(*given):
        left = list(given)

        def prompt(question, default):
            answer = left.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer or default

        monkeypatch.setattr(questions.typer, "prompt", prompt)
        monkeypatch.setattr(questions.sys.stdin, "isatty", lambda: True, raising=False)
        return left

    return give


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_a_folder_alone_gets_the_default_template_and_the_commands_to_go_on_with(init):
    status, out, _ = init("my run", "--gpus", "0")
    assert status == 0 and names("my run") == FILES
    assert "cd 'my run'" in out and "megasync train run.yaml" in out and "20 rows" in out
    assert "name: my-run\n" in Path("my run", "run.yaml").read_text()


def test_its_help_names_every_template():
    text = CliRunner().invoke(cli.app, ["init", "--help"]).output
    assert [name for name in TEMPLATES if f" {name} " not in " ".join(text.split())] == []


def test_a_configuration_of_another_library_becomes_a_run_and_a_report(init, tmp_path):
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet \\\n"
        "    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.n=5 trainer.made_up=1\n"
    )
    status, out, _ = init("mine", "--from", "verl", "run.sh")
    assert status == 0 and names("mine") == {"run.yaml", "translation.md"} and "megasync train mine/run.yaml" in out
    config = load_config(Path("mine", "run.yaml"))
    assert (config.name, config.model.path, config.schedule.samples_per_group) == ("mine", "Qwen/Qwen3-8B", 5)
    assert "made_up" in Path("mine", "translation.md").read_text()


def test_without_a_folder_it_is_the_working_directory(init, tmp_path):
    status, out, _ = init("--template", "lora", "--gpus", "0")
    assert status == 0 and names(tmp_path) == FILES and "cd " not in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", "--template", "mathematic"], "did you mean 'math'?"),
        (["a", "--template", "tolls"], "did you mean 'tools'?"),
        (["a", "--template", "xyz"], ", ".join(TEMPLATES)),
        (["a", "--model", "digit"], "did you mean 'digits'?"),
        (["a", "--model", "./nowhere"], "'./nowhere' is neither"),
        (["a", "--template", "tools", "--model", "digits"], "needs a model with a chat template"),
        (["full"], "full is not empty: it holds kept"),
        (["full/kept"], "is a file"),
        (["full/kept/a"], "is a file"),
        (["locked/a"], "cannot be written"),
        ([], "there is no terminal"),
        (["a", "--from", "verl", "nowhere.sh"], "nowhere.sh"),
        (["a", "--from", "verrl", "full/kept"], "did you mean 'verl'?"),
        (["a", "--from", "verl", "full/kept", "--template", "math"], "leave --template"),
        (["full", "--from", "verl", "full/kept"], "full is not empty"),
    ],
)
def test_a_refusal_names_value_and_fix_and_writes_nothing(init, tmp_path, given, said, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    (tmp_path / "locked").mkdir()
    # The superuser may write everywhere.
    monkeypatch.setattr(folder_module.os, "access", lambda path, mode: "locked" not in str(path))
    status, out, err = init(*given)
    assert status == 2 and said in err and out == ""
    assert names(tmp_path) == {"full", "locked"} and names("full") == {"kept"} and names("locked") == set()


def test_a_model_that_no_family_covers_is_refused(init, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    status, _, err = init("a", "--model", "model")
    assert status == 2 and "gpt2" in err and names(tmp_path) == {"model"}


def test_a_hub_that_cannot_be_reached_is_said_and_the_name_is_kept(init, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, out, _ = init("a", "--model", "someone/model", "--gpus", "2")
    assert status == 0 and "someone/model was not checked here" in out
    assert "path: someone/model\n" in Path("a", "run.yaml").read_text() and "models" not in names("a")


def test_questions_are_asked_again_until_the_answer_can_be_used(init, answers, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    left = answers("full", "mine", "tols", "tools", "smollm", "digits", "")
    status, out, err = init()
    assert status == 0 and left == [] and names("mine") == FILES | {"tools.py"}
    assert "is not empty" in err and "did you mean 'tools'?" in err and "did you mean 'smollm2'?" in err
    assert "needs a model with a chat template" in err
    assert all(name in out for name in TEMPLATES)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_cannot_be_finished_is_removed(init, tmp_path, monkeypatch, failure):
    def fail(name, out):
        raise failure

    monkeypatch.setattr(folder_module, "fetch", fail)
    (tmp_path / "empty").mkdir()
    for folder in ("new", "empty"):
        status, _, err = init(folder)
        assert status == (130 if isinstance(failure, KeyboardInterrupt) else 2)
        assert isinstance(failure, KeyboardInterrupt) or "No space left" in err
    assert names(tmp_path) == {"empty"} and names("empty") == set()


@pytest.mark.matrix
@pytest.mark.processes
def test_ctrl_c_at_a_question_writes_nothing(tmp_path):
    """In a real terminal, where the key is a signal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megasync", "init"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    try:
        while "Template [reward]" not in shown:
            shown += os.read(ours, 4096).decode()
            if shown.rstrip().endswith("Folder [my-run]:"):
                os.write(ours, b"\n")
        # Python may take a signal right before it waits for a line, and then acts on it with the next key.
        while process.poll() is None:
            os.write(ours, b"\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        assert process.returncode == 130
    finally:
        process.kill()
        os.close(ours)
    assert names(tmp_path) == set()

"""`megasync install` refuses before it changes anything, installs the pins in order, and goes on where it stopped.

These tests install nothing: what would be run is recorded.
"""

import os
import shutil
import signal
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megasync.base.locks import is_locked
from megasync.base.missing import apart_program, fix_for_module, require
from megasync.errors import ConfigError, MegasyncError
from megasync.install import environment, make_environment, pins
from megasync.install.steps import Steps

HASHED = "six==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def env(tmp_path, monkeypatch):
    """An environment without packages, and locks of a few pins."""
    env, locks = tmp_path / "env", tmp_path / "launch"
    packages = env / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    locks.mkdir()
    (locks / "cpu.lock").write_text("# all\na-1==2\ntorch==2.13.0\n" + "".join(f"p{n}==1\n" for n in range(60)))
    (locks / "gpu.lock").write_text(HASHED + "zss==1 \\\n    --hash=sha256:cc\nnot-here==1 ; os_name == 'nt'\n")
    (locks / "extra.lock").write_text("more==1\n")
    (locks / "rehearsal.lock").write_text("read==3\n")
    monkeypatch.setattr(pins, "LOCKS", locks)
    monkeypatch.setattr(sys, "prefix", str(env))
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda kind: str(packages))
    return env


@pytest.fixture
def commands(env, monkeypatch):
    """The commands that were run; each installs what it names."""
    ran = []

    def run(steps, title, commands, **_):
        steps.ran = True
        for command in commands:
            words = command[command.index("install") + 1 :]
            if "--requirement" in words:
                words += Path(words.pop()).read_text().split("\n")
            ran.append([word for word in words if word])
            if "--target" in words:
                Path(words[words.index("--target") + 1]).mkdir(parents=True)
            for word in words:
                if "==" in word and not word.startswith(" "):
                    put(env, word.split(" ")[0].replace("==", "-"))

    monkeypatch.setattr(Steps, "run", run)
    return ran


def put(env, name, *, finished=True):
    info = env / "lib" / "python3.11" / "site-packages" / f"{name}.dist-info"
    info.mkdir(exist_ok=True)
    if finished:
        (info / "INSTALLER").write_text("pip\n")


def requirements(command):
    return [word for word in command if "==" in word]


def test_torch_comes_first_with_its_dependencies_then_the_lock_without_in_batches(commands):
    assert make_environment(["cpu"])
    torch, *batches = commands
    assert "--no-deps" not in torch and requirements(torch) == ["torch==2.13.0"]
    assert all("--no-deps" in batch for batch in batches)
    assert [len(requirements(batch)) for batch in batches] == [25, 25, 11]
    assert requirements(batches[0])[0] == "a-1==2"


def test_what_is_there_is_not_installed_again_and_what_was_not_finished_is(commands, env):
    make_environment(["cpu"])
    commands.clear()
    assert not make_environment(["cpu"]) and commands == []
    shutil.rmtree(env / "lib/python3.11/site-packages/p7-1.dist-info")
    put(env, "p7-0.9")
    (env / "lib/python3.11/site-packages/p8-1.dist-info/INSTALLER").unlink()
    assert make_environment(["cpu", "extra"])
    assert list(map(requirements, commands)) == [["p7==1", "p8==1"], ["more==1"]]


def test_pip_finds_no_metadata_of_a_package_that_was_not_finished(commands, env, monkeypatch):
    put(env, "p8-1", finished=False)
    monkeypatch.setattr(Steps, "run", lambda *_, **__: None)
    make_environment(["cpu"])
    assert not (env / "lib/python3.11/site-packages/p8-1.dist-info").exists()


def test_a_build_tag_is_no_other_version(commands, env):
    put(env, "torch-2.13.0+cpu")
    make_environment(["cpu"])
    assert all("torch==2.13.0" not in command for command in commands)


def test_the_gpu_lock_is_installed_by_hashes_wheels_first_and_brings_what_is_read(commands, env):
    make_environment(["gpu"])
    wheels, built, read = commands
    assert ":all:" in wheels and "--require-hashes" in wheels and "    --hash=sha256:bb" in wheels
    assert "--no-build-isolation" in built and "--require-hashes" in built and ":all:" not in built
    assert [requirement.split(" ")[0] for requirement in requirements(built)] == ["zss==1"]
    assert "--ignore-requires-python" in read and (env / "rehearsal" / "read-3").is_dir()
    assert not any("not-here" in word for command in commands for word in command)


def test_an_environment_of_its_own_is_made_in_a_folder_of_the_runs_and_completed(commands, env, monkeypatch):
    (pins.LOCKS / "verifiers.lock").write_text("odd==1\nmore==9\n")
    run, made = Steps.run, []

    def making(steps, title, commands, **options):
        if commands[0][1:3] == ["-m", "venv"]:
            made.append(Path(commands[0][3]))
            packages = made[0] / "lib" / "python3.11" / "site-packages"
            for name in ("pip-23", "more-9", "odd-0"):
                (packages / f"{name}.dist-info").mkdir(parents=True)
                (packages / f"{name}.dist-info" / "INSTALLER").write_text("pip\n")
            (made[0] / "bin").mkdir()
            (made[0] / "bin" / "python").touch()
        else:
            run(steps, title, commands, **options)

    monkeypatch.setattr(Steps, "run", making)
    with pytest.raises(ConfigError, match=r"there is no .*verifiers/bin/python; run `megasync install verifiers`"):
        apart_program("verifiers", "python")
    make_environment(["verifiers"])
    assert made == [env / "verifiers"]
    assert list(map(requirements, commands)) == [["odd==1"]]
    assert apart_program("verifiers", "python") == env / "verifiers" / "bin" / "python"


@pytest.mark.parametrize(
    ("names", "change", "words"),
    [
        (["nonesuch"], None, "'nonesuch' cannot be installed; name one of: cpu extra gpu rehearsal"),
        (["cpu", "gpu"], None, "--env DIR"),
        (
            ["cpu"],
            (environment, "SUPPORTED", ((3, 9),)),
            "is not supported: the packages of a run exist for Python 3.9",
        ),
        (["cpu"], (environment.os, "access", lambda *_: False), "cannot be written; make a new environment"),
        (["cpu"], (environment.shutil, "disk_usage", lambda _: Usage(9, 9, 10**9)), "needs about 4 GB, and 1.0 GB are"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_changed(commands, monkeypatch, names, change, words):
    if change:
        monkeypatch.setattr(*change)
    with pytest.raises(ConfigError, match="(?s).*".join(map(pins.re.escape, words.split("*")))):
        make_environment(names)
    assert commands == []


def test_the_systems_own_python_is_left_alone(commands, env, monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", str(env))
    (env / "lib/python3.11/site-packages/EXTERNALLY-MANAGED").touch()
    with pytest.raises(ConfigError, match="belongs to the operating system.*--env DIR"):
        make_environment(["cpu"])
    assert commands == []


def test_a_package_that_is_compiled_needs_a_compiler_and_headers(commands, env, monkeypatch):
    (pins.LOCKS / "cpu.lock").write_text("pycosat==1\n")
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="pycosat is compiled here, and there is no compiler cc; .*build-essential"):
        make_environment(["cpu"])
    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    with pytest.raises(ConfigError, match=r"has no Python\.h.*python3-dev"):
        make_environment(["cpu"])
    assert commands == []


@pytest.mark.parametrize("make", [lambda folder: folder.touch(), lambda folder: (folder / "data").mkdir(parents=True)])
def test_a_folder_that_is_no_environment_is_left_alone(commands, tmp_path, make):
    make(folder := tmp_path / "mine")
    with pytest.raises(ConfigError, match="mine exists and is not a virtual environment"):
        make_environment(["cpu"], folder)
    assert commands == []


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "NewConnectionError: Failed to establish a new connection\nERROR: No matching distribution found for a==1",
            "HTTPS_PROXY",
        ),
        ("ERROR: No matching distribution found for torch==9", "the package index has no torch==9 for this Python"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "not the one that the lock names"),
        ("error: command 'gcc' failed: No such file or directory", "build-essential and python3-dev"),
        ("OSError: [Errno 30] Read-only file system: '/x'", "cannot be written: '/x'; see the log"),
        ("something else", "failed:\nsomething else\n"),
    ],
)
def test_a_step_that_fails_names_its_cause_and_can_be_repeated(tmp_path, capsys, output, words):
    steps = Steps(tmp_path)
    with pytest.raises(MegasyncError) as refused:
        steps.run("packages", [["sh", "-c", 'echo "$0"; exit 1', output], ["touch", str(tmp_path / "next")]])
    assert words in str(refused.value) and "goes on where it stopped" in str(refused.value)
    assert str(tmp_path / "install.log") in str(refused.value) and output in (tmp_path / "install.log").read_text()
    assert capsys.readouterr().out == "packages ... failed\n" and not (tmp_path / "next").exists()


def test_a_terminal_shows_how_many_packages_pip_has_come_to(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    Steps(tmp_path).run("packages", [["echo", "Collecting a\nCollecting b"], ["echo", "Collecting c"]], count=3)
    assert "\rpackages ... 2 of 3 \rpackages ... 3 of 3 \rpackages ..." in capsys.readouterr().out


def test_a_second_installation_waits_for_the_first_and_for_what_a_killed_one_left_running(tmp_path, monkeypatch):
    first, second, log = Steps(tmp_path), Steps(tmp_path), tmp_path / "install.log"
    begun, waits = threading.Event(), threading.Event()
    monkeypatch.setattr(second, "say", lambda text: waits.set() if "is under way" in text else None)

    def install():
        with second.alone():
            begun.set()

    waiting = threading.Thread(target=install)
    with first.alone():
        # As pip does when only its parent is killed: it goes on.
        first.run("packages", [["sh", "-c", "sleep infinity > /dev/null 2>&1 & echo $!"]])
        waiting.start()
        while not waits.wait(0.05):
            assert waiting.is_alive() and not begun.is_set()
    assert is_locked(log) and not begun.is_set()
    os.kill(int(log.read_text()), signal.SIGKILL)
    waiting.join()
    assert begun.is_set() and not is_locked(log)


def test_an_environment_that_cannot_be_written_is_not_locked(tmp_path):
    with Steps(tmp_path / "missing").alone():
        pass


def test_a_missing_package_of_a_run_is_named_with_the_command_that_installs_it():
    assert "megasync install cpu" in str(fix_for_module("ray.util")) and "ray is not" in str(fix_for_module("ray"))
    assert fix_for_module("my_reward") is fix_for_module(None) is None
    require("json")
    with pytest.raises(ConfigError, match="no_such_package; run `megasync install cpu`"):
        require("json", "no_such_package")


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_cpu_lock_has_each_package_once_for_each_python(python):
    found = pins.read_pins(Path(__file__).parents[2] / "launch" / "cpu.lock")
    markers = [(pin, Requirement(pin.requirement).marker) for pin in found]
    names = [pin.name for pin, marker in markers if not marker or marker.evaluate({"python_version": python})]
    assert sorted(names) == sorted({pin.name for pin in found}) == sorted(set(names))
    assert set(environment.FIRST) <= set(names)


def test_pip_keeps_no_cache_in_a_home_that_cannot_be_written(commands, env, monkeypatch):
    (pins.LOCKS / "cpu.lock").write_text("a-1==2\n")
    packages = env / "lib" / "python3.11" / "site-packages"
    asked = []
    monkeypatch.setattr(Steps, "run", lambda steps, title, commands, **_: asked.extend(commands))
    monkeypatch.setenv("XDG_CACHE_HOME", str(env / "cache" / "of" / "mine"))
    for only in (env, packages):
        monkeypatch.setattr(environment.os, "access", lambda path, _, only=only: Path(path) in (only, packages))
        make_environment(["cpu"])
    assert ["--no-cache-dir" in command for command in asked] == [False, True]


def test_outside_an_environment_is_made_as_far_as_megasync_and_goes_on_by_itself(env, monkeypatch, tmp_path):
    """Also where it was stopped before it had a Python."""
    titles, became = [], []
    folder = tmp_path / "a new one"
    (pins.LOCKS / "cpu.lock").write_text("packaging==1\nother==1\n")
    monkeypatch.setattr(Steps, "run", lambda steps, title, commands, **_: titles.append((title, commands)))

    def become(program, words):
        became.append(words)
        raise SystemExit

    monkeypatch.setattr(environment.os, "execv", become)
    for _ in range(2):
        with pytest.raises(SystemExit):
            make_environment(["cpu", "extra"], folder)
        (folder / environment.STAMP).unlink()
        (folder / "install.log").touch()
        (folder / "pyvenv.cfg").touch()
    assert [title for title, _ in titles] == ["virtual environment", "build tools", "megasync"] * 2
    (first,) = titles[1][1]
    assert requirements(first) == ["packaging==1"]
    inside = [f"{folder}/bin/python", "-P", "-m", "megasync.install", "cpu", "extra"]
    assert became == [inside, inside]


@pytest.mark.processes
def test_an_environment_whose_python_is_gone_is_refused(env, tmp_path):
    (folder := tmp_path / "old" / "bin").mkdir(parents=True)
    (folder / "python").symlink_to("/nonexistent/python")
    with pytest.raises(ConfigError, match="the Python in .*old does not start; remove that folder"):
        make_environment(["cpu"], folder.parent)

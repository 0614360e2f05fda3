"""The launch scripts refuse bad input clearly, repeat no work and kill nothing by name. These tests install nothing."""

import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megasync.install.environment import APART

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), *sorted((ROOT / "launch").glob("*.sbatch")), ROOT / ".ci" / "run"]


def requirements_of(lock: str) -> list[Requirement]:
    lines = (ROOT / "launch" / lock).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


# Of Python 3.12. tests/install/test_install.py has what differs between Pythons.
LOCK = [
    pin for pin in requirements_of("cpu.lock") if pin.marker is None or pin.marker.evaluate({"python_version": "3.12"})
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh copy of the files that the scripts need."""
    for name in ("launch", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def bash(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    path = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["bash", script, *arguments], capture_output=True, text=True, env=path | environment, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_the_first_error_and_kill_nothing_by_name(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert not re.search(r"\b(pkill|killall)\b", text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_an_old_python_is_refused_with_a_fix(checkout):
    old = program(checkout / "old-python", "exit 1")
    result = bash(checkout / "launch" / "setup.sh", PYTHON=str(old))
    assert result.returncode == 1
    assert "3.11" in result.stderr and "PYTHON=" in result.stderr
    assert not (checkout / ".venv").exists()


def fake_python(checkout: Path) -> Path:
    """An interpreter that is of a supported version and prints what it is called with."""
    return program(checkout / "python", '[ "$1" = -c ] || echo "$*"')


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [((), "cpu"), (("cpu", "verl"), "cpu verl"), (("gpu", "--env", "/x y"), "gpu --env /x y")],
)
def test_set_up_installs_into_the_checkouts_environment(checkout, arguments, asked):
    result = bash(checkout / "launch" / "setup.sh", *arguments, PYTHON=str(fake_python(checkout)))
    assert (result.returncode, result.stdout) == (0, f"-m megasync.install --env {checkout}/.venv {asked}\n"), (
        result.stderr
    )


def test_a_gpu_environment_is_set_up_and_checked(checkout):
    program(checkout / "launch" / "setup.sh", 'echo "setup $*"')
    program(checkout / "my env" / "bin" / "python", 'echo "python $*"')
    script, folder = checkout / "launch" / "gpu_environment.sh", str(checkout / "my env")
    made = f"setup gpu --env {folder}\n"
    assert bash(script, folder).stdout == f"{made}python {checkout}/launch/check_gpu_environment.py\n"
    assert bash(script, folder, "--no-check").stdout == made
    assert "unknown option --chek" in bash(script, "--chek").stderr


def test_quickstart_and_test_scripts_forward_their_arguments(checkout):
    program(checkout / "launch" / "setup.sh", 'echo "setup $*"')
    program(checkout / ".venv" / "bin" / "megasync", 'echo "megasync $*"')
    program(checkout / ".venv" / "bin" / "python", 'echo "python $*"')
    result = bash(checkout / "launch" / "quickstart.sh", "schedule.total_steps=3")
    assert result.stdout.splitlines() == ["setup ", "megasync quickstart schedule.total_steps=3"]
    assert bash(checkout / "launch" / "test.sh", "-k", "x").stdout == "setup cpu\npython -m pytest -n 2 -k x\n"


def test_continuous_integration_checks_lint_and_types_before_the_tests(checkout):
    program(checkout / "launch" / "lint.sh", "echo lint")
    program(checkout / "launch" / "test.sh", 'echo "test $*"')
    program(checkout / "launch" / "browser.sh", "")
    assert bash(checkout / ".ci" / "run").stdout == "lint\ntest --affected --minutes=40\n"
    program(checkout / "launch" / "lint.sh", "exit 1")
    failed = bash(checkout / ".ci" / "run")
    assert (failed.returncode, failed.stdout) == (1, "")


def test_a_single_machine_is_checked_for_its_configuration_before_training(checkout):
    script = checkout / "launch" / "single_node.sh"
    arguments = ("my run.yaml", "seed=3", "--continue", "this.run", "name=x")
    doctor, train = bash(script, "--dry-run", *arguments).stdout.splitlines()
    assert doctor == r".venv/bin/megasync doctor my\ run.yaml seed=3 name=x"
    assert train == r".venv/bin/megasync train my\ run.yaml seed=3 name=x --continue this.run"
    program(checkout / ".venv" / "bin" / "megasync", 'echo "$*"')
    assert bash(script, *arguments).stdout.splitlines() == [
        "doctor my run.yaml seed=3 name=x",
        "train my run.yaml seed=3 name=x --continue this.run",
    ]
    program(checkout / ".venv" / "bin" / "megasync", 'echo "$1"; [ "$1" != doctor ]')
    sick = bash(script, *arguments)
    assert (sick.returncode, sick.stdout) == (2, "doctor\n") and "not ready" in sick.stderr


@pytest.mark.processes
def test_a_service_is_refused_on_a_single_machine_with_its_command(checkout):
    real = f'exec {sys.executable} -m megasync "$@"'
    program(checkout / ".venv" / "bin" / "megasync", f'echo "$1"; [ "$1" = doctor ] || {real}')
    refused = bash(checkout / "launch" / "single_node.sh", str(ROOT / "configs" / "serve_quickstart.yaml"))
    assert (refused.returncode, refused.stdout) == (2, "doctor\ntrain\n")
    assert "start it with that command" in refused.stderr and "megasync serve CONFIG" in refused.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("single_node.sh", [], "give a configuration, such as"),
        ("single_node.sh", ["--dryrun", "x.yaml"], "unknown option --dryrun"),
        ("single_node.sh", ["x.yaml", "--continue"], "--continue needs a FILE"),
        ("single_node.sh", ["x.yaml"], "no megasync on PATH or in"),
        ("multi_node.sh", ["x.yaml", "--hosts", "a"], "create the environment with: bash launch/setup.sh"),
    ],
)
def test_scripts_refuse_bad_arguments_clearly(checkout, script, arguments, words):
    refused = bash(checkout / "launch" / script, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "") and words in refused.stderr


def test_the_script_for_one_machine_has_a_help_text(checkout):
    helped = bash(checkout / "launch" / "single_node.sh", "--help")
    assert helped.returncode == 0 and helped.stdout.startswith("Trains on this machine only")


EXTRAS = "cpu verl trackers engines serve anthropic mcp manifests rehearsal docs openenv verifiers"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((), "cpu"),
        (("--tier", "fast", "tests/buffer"), "cpu"),
        (("--tier=standard",), "cpu"),
        (("--tier", "full"), EXTRAS),
        (("--tier=full", "-x"), EXTRAS),
        (("--affected",), EXTRAS),
        (("--affected=HEAD~1",), EXTRAS),
    ],
)
def test_the_tests_of_extras_alone_need_more_than_a_run(checkout, arguments, names):
    program(checkout / "launch" / "setup.sh", 'echo "$*"')
    program(checkout / ".venv" / "bin" / "python", "true")
    ran = bash(checkout / "launch" / "test.sh", *arguments)
    assert (ran.returncode, ran.stdout) == (0, f"{names}\n")


def test_the_checks_run_all_and_name_those_that_fail(checkout):
    program(checkout / "launch" / "setup.sh", 'echo "setup $*"')
    program(checkout / ".venv" / "bin" / "python", 'echo "ran python $*"')
    for name in ("ruff", "lint-imports", "basedpyright"):
        program(checkout / ".venv" / "bin" / name, f'echo "ran {name} $*"')
    run = partial(bash, checkout / "launch" / "lint.sh")
    passed = run()
    assert passed.returncode == 0, passed.stderr
    ran = [line.strip() for line in passed.stdout.splitlines() if line.startswith("ran ")]
    docstrings = "ran python launch/check_docstrings.py"
    assert ran == ["ran ruff check .", "ran ruff format --check .", docstrings, "ran lint-imports", "ran basedpyright"]
    assert passed.stdout.startswith("setup cpu lint\n")
    program(checkout / ".venv" / "bin" / "lint-imports", "exit 1")
    failed = run()
    assert (failed.returncode, failed.stderr) == (1, "\nlint: failed: lint-imports\n")
    assert "ran basedpyright" in failed.stdout


ADDED = (
    "verl.lock", "lint.lock", "trackers.lock", "engines.lock", "serve.lock", "anthropic.lock", "mcp.lock",
    "kuberay.lock", "manifests.lock",
)  # fmt: skip


@pytest.mark.parametrize("lock", ADDED)
def test_the_locks_do_not_overlap(lock):
    pins = requirements_of(lock)
    assert {str(requirement.specifier)[:2] for requirement in pins} == {"=="}
    assert not {requirement.name for requirement in pins} & {requirement.name for requirement in LOCK}


@pytest.mark.parametrize("name", APART)
def test_the_lock_of_an_environment_of_its_own_pins_each_package_once(name):
    pins = requirements_of(f"{name}.lock")
    assert {str(requirement.specifier)[:2] for requirement in pins} == {"=="}
    names = [requirement.name.lower().replace("_", "-") for requirement in pins]
    assert name in names and len(names) == len(set(names))


def test_locks_that_share_a_package_pin_the_same_version():
    """They are installed into one environment, in any order."""
    pins = {str(pin) for lock in ADDED for pin in requirements_of(lock)}
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert sorted(names) == sorted(set(names))


def test_the_locks_pin_exactly_and_fit_the_projects_requirements():
    trackers = [pin for pin in requirements_of("trackers.lock") if pin.name in ("wandb", "mlflow-skinny")]
    serve = [pin for pin in requirements_of("serve.lock") if pin.name == "tinker"]
    locked = [*LOCK, *requirements_of("lint.lock"), *trackers, *serve]
    pins = {requirement.name.lower().replace("_", "-"): requirement for requirement in locked}
    assert len(pins) == len(locked)
    for requirement in locked:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==" and requirement.url is None and "+" not in specifier.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = ("train", "tasks", "deepresearch", "trackers", "serve", "test", "lint")
    wanted = chain(project["dependencies"], *(extras[name] for name in names), project_build())
    for requirement in map(Requirement, wanted):
        if requirement.name == "megasync":
            continue
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(next(iter(pin.specifier)).version), requirement


def project_build() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]


def test_a_clone_contains_every_source_file():
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", "megasync", "configs", "patches"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    assert [path for path in found.stdout.splitlines() if "__pycache__" not in path] == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    found = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout

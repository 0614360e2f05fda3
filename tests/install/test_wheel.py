"""A wheel and an sdist stand alone: they have all of it and nothing else, and make an environment without a network."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from wheels import VERSION, build, copied

from megasync.errors import ConfigError
from megasync.install.environment import rebuilt_wheel
from megasync.starters.copies import FOLDERS, copy_out

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
# A lock of packages that this environment has.
SMALL = ("packaging", "setuptools", "setuptools-scm", "vcs-versioning", "six", "iniconfig")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_has_the_code_the_shipped_files_and_the_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    there = [path for path in ROOT.glob("megasync/**/*.*") if path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)) for path in there}
    expected |= {f"megasync_{path.relative_to(ROOT)}" for path in ROOT.glob("patches/**/*.*") if path.suffix != ".pyc"}
    for folder in ("configs", "examples"):
        files = [path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]
        expected |= {f"megasync/shipped/{path.relative_to(ROOT)}" for path in files}
    assert expected <= names
    # Besides those: launch scripts and locks, and the metadata.
    others = {re.sub(r"^megasync-[^/]*\.dist-info/", "", name) for name in names - expected}
    others = {name.removeprefix("megasync/shipped/launch/") for name in others}
    names_of_locks = "cpu engines gpu kuberay mcp openenv rehearsal serve trackers verifiers verl"
    locks = {f"{name}.lock" for name in names_of_locks.split()}
    scripts = {"check_gpu_environment.py", "multi_node.sh", "single_node.sh", "slurm.sbatch", "slurm_het.sbatch"}
    written = {"METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "RECORD", "licenses/LICENSE"}
    assert others == locks | scripts | written
    assert "megasync = megasync.cli:main" in points and "[sglang.srt.plugins]" in points and "[verl.plugins]" in points
    assert f"\nVersion: {VERSION}\n" in metadata and "\nRequires-Python: <3.13,>=3.11\n" in metadata
    assert not re.search(r"^Requires-Dist: (?:torch|ray|megatron-core|sglang)\b(?!.*extra ==)", metadata, re.MULTILINE)
    assert wheel.stat().st_size < 3_000_000


def test_nothing_names_the_machine_that_built_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        content = b"".join(map(archive.read, archive.namelist()))
    assert str(ROOT).encode() not in content and os.fsencode(Path.home()) + b"/" not in content


@pytest.mark.matrix
def test_an_sdist_builds_the_same_wheel_without_git_and_has_no_tests(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not {"tests", "docs", "benchmarks", ".github"} & {path.name for path in folder.iterdir()}
    again = build("wheel", folder, tmp_path / "again", version=None)
    assert again.name == wheel.name
    with zipfile.ZipFile(again) as ours, zipfile.ZipFile(wheel) as theirs:
        assert set(ours.namelist()) == set(theirs.namelist())
        different = [name for name in ours.namelist() if ours.read(name) != theirs.read(name)]
    assert different == []


@pytest.mark.matrix
def test_a_wheel_is_the_same_bytes_whenever_it_is_built(wheel, source, tmp_path):
    for path in source.rglob("*.py"):
        os.utime(path, (1, 1))
    assert build("wheel", source, tmp_path / "again").read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def small_wheel(tmp_path_factory):
    """megasync with locks of a few packages that this environment has, and a folder with those packages as wheels."""
    source = copied(tmp_path_factory.mktemp("small"))
    pins = "".join(f"{name}=={distribution(name).version}\n" for name in SMALL)
    (source / "launch" / "cpu.lock").write_text(pins)
    packages = tmp_path_factory.mktemp("packages")
    for name in SMALL:
        rebuilt_wheel(name, packages)
    return build("wheel", source, tmp_path_factory.mktemp("small wheel")), packages


def run(python: Path, arguments: list[object], packages: Path, home: Path) -> subprocess.CompletedProcess:
    """Runs Python with pip bound to a folder, a home that cannot be written, and no git."""
    env = {"PATH": "/nonexistent", "HOME": str(home), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": packages.as_uri()}
    words = [python, *arguments]
    return subprocess.run(words, env=env, cwd=home, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.real
def test_an_environment_is_made_from_a_wheel_alone_and_goes_on_where_it_stopped(small_wheel, tmp_path):
    wheel, packages = small_wheel
    home = tmp_path / "a home"
    home.mkdir(mode=0o555)
    first, second = tmp_path / "first env", tmp_path / "second env"
    subprocess.run([sys.executable, "-m", "venv", first], check=True, timeout=300)
    python = first / "bin" / "python"
    done = run(python, ["-m", "pip", "install", "--no-deps", wheel], packages, home)
    assert done.returncode == 0, done.stderr
    install = ["-P", "-m", "megasync.install", "cpu", "--env", second]

    (six,) = packages.glob("six-*")
    hidden = six.rename(tmp_path / six.name)
    failed = run(python, install, packages, home)
    assert failed.returncode == 2 and "no six==" in failed.stderr and "goes on where it stopped" in failed.stderr
    assert "megasync ... " in failed.stdout, "the new environment had megasync before"

    hidden.rename(six)
    done = run(python, install, packages, home)
    assert done.returncode == 0, done.stderr
    assert "virtual environment" not in done.stdout and "2 packages of cpu.lock (4 are there)" in done.stdout
    assert (second / "bin" / "megasync").is_file()
    probe = "import six, megasync; from megasync.base.shipped import ROOT; print(megasync.__version__, ROOT)"
    answer = run(second / "bin" / "python", ["-P", "-c", probe], packages, home).stdout.split(maxsplit=1)
    assert answer[0] == VERSION and Path(answer[1].strip()).is_relative_to(second)
    again = run(python, install, packages, home)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    # Stopped while it wrote a package, as far as pip can tell.
    (info,) = second.glob("lib/*/site-packages/six-*.dist-info")
    (info / "INSTALLER").unlink()
    (info.parent / "six.py").unlink()
    repaired = run(python, install, packages, home)
    assert repaired.returncode == 0, repaired.stderr
    assert "1 packages of cpu.lock" in repaired.stdout and (info.parent / "six.py").is_file()


def test_shipped_files_are_copied_and_changed_ones_are_kept(tmp_path):
    target = tmp_path / "my files"
    written, there = copy_out(target)
    assert there == 0 and {path.name for path in target.iterdir()} == set(FOLDERS)
    assert (target / "configs" / "quickstart.yaml").is_file() and (target / "verl_plugin" / "engine.py").is_file()
    assert copy_out(target) == (0, written)
    (target / "configs" / "base.yaml").write_text("mine\n")
    (target / "launch" / "cpu.lock").unlink()
    with pytest.raises(ConfigError, match=r"1 file\(s\) in .* differ .*configs/base\.yaml.*--overwrite"):
        copy_out(target)
    assert (target / "configs" / "base.yaml").read_text() == "mine\n" and not (target / "launch" / "cpu.lock").exists()
    assert copy_out(target, overwrite=True) == (2, written - 2)
    assert (target / "configs" / "base.yaml").read_text() == (ROOT / "configs" / "base.yaml").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a folder that can be written"):
        copy_out(tmp_path / "file")

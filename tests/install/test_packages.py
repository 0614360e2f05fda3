"""An installation has all of the code: the packages that pyproject.toml names are those that there are."""

import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import megasync_patches
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_named():
    there = {".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("megasync/**/__init__.py")}
    assert {*there, "megasync_patches"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_extra_is_in_the_table_of_the_documentation():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in PROJECT["project"]["optional-dependencies"] if f"| `{extra}` |" not in page] == []


@pytest.mark.processes
def test_a_wheel_has_the_code_the_patches_and_the_entry_points(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for folder in ("megasync", "patches"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=240)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        (points,) = (wheel.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    code = {str(path.relative_to(ROOT)) for path in ROOT.glob("megasync/**/*.*") if path.suffix != ".pyc"}
    patches = {f"megasync_{path.relative_to(ROOT)}" for path in ROOT.glob("patches/**/*.py")}
    assert code | patches <= names
    assert "megasync = megasync.cli:main" in points and "[sglang.srt.plugins]" in points and "[verl.plugins]" in points


def test_an_unknown_extra_is_refused_at_once_with_the_list():
    for arguments in ([], ["nonesuch"], ["gpu"], ["trackers verl"]):
        asked = subprocess.run(["bash", "launch/setup_extra.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert asked.returncode == 2 and "docs engines lint rehearsal trackers verl" in asked.stderr


def test_no_requirement_begins_with_a_version_that_a_patch_refuses():
    requirements = {each.name: each for each in map(Requirement, PROJECT["project"]["dependencies"])}
    for module in pkgutil.iter_modules(megasync_patches.__path__):
        patch = getattr(import_module(f"megasync_patches.{module.name}"), "PATCH", None)
        if patch is None or patch.package not in requirements:
            continue
        specifier = requirements[patch.package].specifier
        lowest = min(each.version for each in specifier if each.operator in (">=", "=="))
        assert any(Version(known) == Version(lowest) for known in patch.versions), (patch.name, str(specifier))

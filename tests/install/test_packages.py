"""An installation has all of the code: the packages that pyproject.toml names are those that there are."""

import pkgutil
import tomllib
from importlib import import_module
from pathlib import Path

import megasync_patches
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_named():
    there = {".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("megasync/**/__init__.py")}
    assert {*there, "megasync.shipped", "megasync_patches"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_extra_is_in_the_table_of_the_documentation():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in PROJECT["project"]["optional-dependencies"] if f"| `{extra}` |" not in page] == []


def test_no_requirement_begins_with_a_version_that_a_patch_refuses():
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    requirements = {each.name: each for each in map(Requirement, wanted)}
    for module in pkgutil.iter_modules(megasync_patches.__path__):
        patch = getattr(import_module(f"megasync_patches.{module.name}"), "PATCH", None)
        if patch is None or patch.package not in requirements:
            continue
        specifier = requirements[patch.package].specifier
        lowest = min(each.version for each in specifier if each.operator in (">=", "=="))
        assert any(Version(known) == Version(lowest) for known in patch.versions), (patch.name, str(specifier))

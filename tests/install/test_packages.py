"""An installation has all of the code: the packages that pyproject.toml names are those that there are."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_named():
    there = {".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("megasync/**/__init__.py")}
    assert {*there, "megasync_patches"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_extra_is_in_the_table_of_the_documentation():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in PROJECT["project"]["optional-dependencies"] if f"| `{extra}` |" not in page] == []

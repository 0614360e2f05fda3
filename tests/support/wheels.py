"""Wheels and sdists, built without a network from a copy of what an sdist has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EPOCH = "1700000000"
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, f'build_{sys.argv[1]}')(sys.argv[2])"
# Of the repository, what an sdist has; without .git, so the version is the one that is told.
PARTS = ("megasync", "patches", "configs", "launch", "examples", "tests/install", "pyproject.toml", "MANIFEST.in")
PARTS += ("README.md", "LICENSE", "CHANGELOG.md")
VERSION = "1.2.3.dev4"


def copied(folder: Path) -> Path:
    for part in PARTS:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    # What importing leaves behind.
    (folder / "patches" / "__pycache__").mkdir()
    (folder / "patches" / "__pycache__" / "x.pyc").touch()
    return folder


def build(kind: str, source: Path, out: Path, version: str | None = VERSION) -> Path:
    out.mkdir(exist_ok=True)
    told = {"SETUPTOOLS_SCM_PRETEND_VERSION": version} if version else {}
    env = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, **told}
    subprocess.run([sys.executable, "-c", BUILD, kind, out], cwd=source, env=env, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made

"""What a change reaches: through imports at any depth, names of modules and files, and conftest.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import affected
import pytest

FILES = {
    "megasync/__init__.py": "",
    "megasync/__main__.py": "from megasync.cli import main\n",
    "megasync/cli/__init__.py": "def main():\n    from megasync.core import run\n",
    "megasync/core/__init__.py": "from megasync.core.loop import run\n",
    "megasync/core/loop.py": 'CHILD = "megasync.core.child"\nPAGE = "page.css"\n',
    "megasync/core/child.py": "",
    "megasync/core/page.css": "",
    "megasync/alone.py": "",
    "patches/fix.py": "",
    "configs/small.yaml": "",
    "launch/start.sh": "",
    "docs/page.md": "",
    "examples/demo/__init__.py": "",
    "examples/demo/agent.py": "import megasync.alone\n",
    "tests/conftest.py": "",
    "tests/support/rig.py": "from megasync.core.loop import run\n",
    "tests/support/deadly.py": "",
    "tests/core/conftest.py": "import rig\n",
    "tests/core/test_inside.py": "",
    "tests/cli/test_command.py": 'import sys\nCOMMAND = [sys.executable, "-m", "megasync", "train"]\n',
    "tests/cli/test_names.py": 'import logging\nlogging.getLogger("megasync")\nWORKFLOW = "deadly:Workflow"\n',
    "tests/cli/test_files.py": 'SCRIPT, CONFIG = "launch/start.sh", "small.yaml"\n',
    "tests/cli/test_demo.py": "from demo.agent import Agent\nimport megasync_patches.fix\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("megasync/core/child.py", {"core/test_inside": 4, "cli/test_command": 5}),
        ("megasync/core/page.css", {"core/test_inside": 4, "cli/test_command": 5}),
        ("megasync/alone.py", {"cli/test_demo": 2}),
        ("patches/fix.py", {"cli/test_demo": 1}),
        ("tests/support/deadly.py", {"cli/test_names": 1}),
        ("tests/core/conftest.py", {"core/test_inside": 1}),
        ("tests/cli/test_files.py", {"cli/test_files": 0}),
        ("launch/start.sh", {"cli/test_files": 1}),
        ("configs/small.yaml", {"cli/test_files": 1}),
        ("docs/page.md", {}),
        ("megasync/deleted.py", {}),
    ],
)
def test_what_one_changed_file_reaches(tree, changed, reached):
    assert affected.distances(tree, {changed}) == {f"tests/{test}.py": far for test, far in reached.items()}


def test_the_top_conftest_reaches_everything(tree):
    tests = {name for name in FILES if Path(name).name.startswith("test_")}
    assert affected.distances(tree, {"tests/conftest.py"}).keys() == tests


@pytest.fixture
def repository(tree: Path) -> Path:
    git(tree, "init", "--quiet", "--initial-branch=main")
    git(tree, "config", "user.email", "someone@example.org")
    git(tree, "config", "user.name", "Someone")
    commit(tree)
    return tree


def git(tree: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(tree), *words], check=True, capture_output=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message=x")


def test_changes_are_those_since_the_merge_base_committed_or_not(repository):
    git(repository, "switch", "--quiet", "--create=branch")
    (repository / "megasync/alone.py").write_text("x = 1\n")
    commit(repository)
    (repository / "megasync/core/child.py").unlink()
    (repository / "tests/core/test_new.py").write_text("")
    git(repository, "stash", "--include-untracked")
    git(repository, "switch", "--quiet", "main")
    (repository / "docs/page.md").write_text("of main alone")
    commit(repository)
    git(repository, "switch", "--quiet", "branch")
    git(repository, "stash", "pop")
    _, changed = affected.changed_files(repository)
    assert changed == {"megasync/alone.py", "megasync/core/child.py", "tests/core/test_new.py"}


@pytest.mark.parametrize(("ref", "reason"), [("", "origin/main, main; name a commit"), ("nowhere", "nowhere")])
def test_a_clone_without_the_base_says_so(repository, ref, reason):
    git(repository, "branch", "--move", "main", "other")
    with pytest.raises(affected.NoBase, match=reason):
        affected.changed_files(repository, ref)


def test_a_shallow_clone_without_a_merge_base_says_so(repository):
    git(repository, "switch", "--quiet", "--orphan=unrelated")
    (repository / "a.txt").write_text("")
    commit(repository)
    with pytest.raises(affected.NoBase, match="merge-base"):
        affected.changed_files(repository)

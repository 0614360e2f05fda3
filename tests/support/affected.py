"""Which test files a change reaches: by imports, by names of modules and files in texts, and by conftest.py.

A file *uses* another one if it imports it, also inside a function, or names it in a string: as a module
(`python -m megasync`, `"deadly_workflow:Deadly"`) or by its file name. Every test also uses the conftest.py of its
folder and of those above. A change reaches what uses a changed file, directly or not.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

# Folders that are packages, by their names in imports.
PACKAGES = {"megasync": "megasync", "patches": "megasync_patches"}
FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks", "launch", "docs")
# A change here is text for readers, or is checked by tests that always run.
IGNORED = re.compile(r"docs/.*\.md|docs/images/.*|[A-Z]+(\.md)?|\.github/.*")
MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
BASES = ("origin/main", "main")


class NoBase(Exception):
    """The repository cannot say what has changed."""


def git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if ran.returncode:
        raise NoBase(ran.stderr.strip() or f"git {arguments[0]} ended with {ran.returncode}")
    return ran.stdout


def changed_files(root: Path, ref: str = "") -> tuple[str, set[str]]:
    """The commit compared with and the files, committed or not, that differ from it.

    The commit is the merge base of HEAD and ``ref``, by default that of the first of `BASES` that exists.

    Raises:
        NoBase: this is no git repository, or its history is too shallow to have a merge base.
    """
    refs = [ref] if ref else [name for name in BASES if knows(root, name)]
    if not refs:
        raise NoBase(f"this clone has none of {', '.join(BASES)}; name a commit with --affected=REF")
    base = git(root, "merge-base", "HEAD", refs[0]).strip()
    names = git(root, "diff", "--name-only", "--no-renames", "-z", base) + git(
        root, "ls-files", "--others", "--exclude-standard", "-z"
    )
    return base, {name for name in names.split("\0") if name}


def knows(root: Path, ref: str) -> bool:
    try:
        git(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except NoBase:
        return False
    return True


def modules(files: Iterable[str]) -> dict[str, str]:
    """Python files by the names under which others import them: of examples/ below it, of scripts the bare name."""
    names = {}
    for file in files:
        top, _, below = file.removesuffix(".py").partition("/")
        parts = below.removesuffix("/__init__").split("/") if below != "__init__" else []
        if top in PACKAGES:
            names[".".join([PACKAGES[top], *parts])] = file
        elif top == "examples":
            names[".".join(parts)] = file
        else:
            names[parts[-1]] = file
    return names


def uses(text: str, names: dict[str, str], by_file_name: dict[str, str]) -> set[str]:
    """The files that a program uses."""
    used = set()

    def name(dotted: str) -> None:
        while dotted:
            if dotted in names:
                used.add(names[dotted])
                return
            dotted = dotted.rpartition(".")[0]

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import():
                for alias in node.names:
                    name(alias.name)
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    name(f"{module}.{alias.name}")
                if module in names:
                    used.add(names[module])
            case ast.Constant(value=str(value)) if len(value) < 200:
                base = value.rpartition("/")[2]
                if base in by_file_name:
                    used.add(by_file_name[base])
                module = value.partition(":")[0]
                if MODULE.fullmatch(module) and ("." in module or ":" in value):
                    name(module)
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                values = [word.value if isinstance(word, ast.Constant) else None for word in words]
                for flag, module in pairwise(values):
                    if flag == "-m" and module in names:
                        used |= {names[module], names.get(f"{module}.__main__", names[module])}
    return used


def distances(root: Path, changed: set[str]) -> dict[str, int]:
    """Test files that the changed files reach, with the length of the shortest way."""
    return reached_by(changed, users_of_files(root, changed))


def users_of_files(root: Path, changed: Iterable[str] = ()) -> dict[str, set[str]]:
    """The programs that use each file; of ``changed`` also those that name it otherwise."""
    files = [
        path.relative_to(root).as_posix()
        for top in FOLDERS
        for path in sorted((root / top).rglob("*"))
        if path.is_file()
    ]
    programs = [file for file in files if file.endswith(".py")]
    names = modules(programs)
    by_file_name = {file.rpartition("/")[2]: file for file in files if not file.endswith("__init__.py")}
    users = defaultdict(set)
    for file in programs:
        for used in uses((root / file).read_text(), names, by_file_name):
            users[used].add(file)
        if file.startswith("tests/"):
            folder = Path(file).parent
            for above in (folder, *folder.parents):
                users[f"{above.as_posix()}/conftest.py"].add(file)
    for file in changed:
        if not file.endswith(".py") and file not in by_file_name.values() and not IGNORED.fullmatch(file):
            users[file] |= {user for user in programs if Path(file).name in (root / user).read_text()}
    return users


def reached_by(changed: Iterable[str], users: dict[str, set[str]]) -> dict[str, int]:
    """As `distances`, given the users of each file."""
    reached = {file: 0 for file in changed if not IGNORED.fullmatch(file)}
    front = list(reached)
    while front:
        users_of_front = {
            user: reached[file] + 1 for file in front for user in users.get(file, ()) if user not in reached
        }
        reached |= users_of_front
        front = list(users_of_front)
    return {file: far for file, far in reached.items() if re.fullmatch(r"tests/.*/test_\w+\.py", file)}

"""Small files are replaced atomically, and no module writes them in another way."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import socket
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from killed import cut_short

import megasync
from megasync.base import files
from megasync.base.files import (
    SOCKET_NAME_BYTES,
    atomic_write,
    durable_rename,
    fsync,
    fsync_tree,
    home,
    leaves_room_for_sockets,
    ray_environment,
    ray_token,
    read_object,
    socket_folder,
)


def test_a_write_replaces_the_file_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    atomic_write(file, "é\n")
    assert file.read_bytes() == "é\n".encode()
    atomic_write(file, b"\x00")
    assert file.read_bytes() == b"\x00"
    (tmp_path / "link").symlink_to(file)
    atomic_write(tmp_path / "link", "through a link")
    assert (tmp_path / "link").is_symlink() and file.read_text() == "through a link"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a", "link"]


@pytest.mark.processes
def test_a_kill_at_any_line_or_a_full_disk_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    setup = """
from megasync.base.files import atomic_write

def begin(folder):
    (folder / "a").write_text("old")

def work(folder):
    atomic_write(folder / "a", "new" * 1000)
"""
    cases = cut_short(setup, tmp_path, ("megasync/base/files.py",), (0, 1, 2999, 3000))
    seen = set()
    for case in cases:
        found = (case.folder / "a").read_text()
        assert found in ("old", "new" * 1000)
        assert (found == "old") or case.ended != "failed"
        seen.add((case.ended, found[:3]))
        if case.ended != "killed":
            assert [left.name for left in case.folder.iterdir()] == ["a"]
    assert seen == {("killed", "old"), ("killed", "new"), ("failed", "old"), ("done", "new")}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_any_call_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file = tmp_path / "a"
    file.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no"):
        atomic_write(file, "new")
    monkeypatch.undo()
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_the_content_is_flushed_before_the_rename_and_the_rename_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    sync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def replaced(source: Path, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    atomic_write(tmp_path / "a", "x")
    part, *rest = order
    assert part.startswith(".a.") and rest == ["rename", tmp_path.name]
    order.clear()
    (tmp_path / "draft" / "below").mkdir(parents=True)
    (tmp_path / "draft" / "below" / "file").touch()
    fsync_tree(tmp_path / "draft")
    durable_rename(tmp_path / "draft", tmp_path / "done")
    assert order == ["below", "file", "draft", "rename", tmp_path.name]


def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EINVAL, "cannot")

    monkeypatch.setattr(os, "fsync", fail)
    fsync(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="cannot"):
        fsync(tmp_path / "a")


# Modules that write files in another way, and why.
OTHER_WRITERS = {
    "lab/chaos/experiment.py": "a log, appended to",
    "lab/chaos/faults.py": "fills up a disk",
    "offline/report.py": "answers, appended to while the evaluation runs",
    "base/files.py": "atomic_write itself",
    "integrations/verifiers/side.py": "what its starter reads, a pipe",
    "install/environment.py": "requirements for pip, in a temporary folder",
    "install/steps.py": "a log, appended to",
    "launch/node.py": "copies of logs",
    "tenants/saved_adapter.py": "files of a draft, which is flushed and renamed whole",
    "service/sampling.py": "files of a draft, which is flushed and renamed whole",
    "service/tenant_logs.py": "a log, appended to",
    "base/locks.py": "the lock itself: its inode must stay",
    "models/hub.py": "weights on their way, appended to by the next attempt, and named by their digest once whole",
    "observe/metrics.py": "a log, appended to; a damaged line costs only itself",
    "observe/rollouts.py": "a log, appended to; a torn last line is dropped",
    "observe/samples.py": "a log, appended to; a torn last line is dropped",
    "watch/spans.py": "a copy of a trace for other programs, which can be made again",
    "observe/stacks.py": "memory of a process that tells its stacks",
    "observe/state_file.py": "replaced whole, but not flushed: a crash of the machine makes it out of date anyway",
    "observe/trace.py": "a log, appended to; a torn last line is dropped",
    "planning/cluster_checks.py": "a probe of a shared folder, removed afterwards",
    "lab/rehearsal/child.py": "the pipe to another process",
    "lab/rehearsal/driver.py": "the log of a process, in a temporary folder",
    "sandboxes/containers.py": "archives in memory, and errors of a container in a file without a name",
    "sandboxes/protocol.py": "archives in memory",
    "sandboxes/guest/inside.py": "files of a sandbox",
    "sandboxes/guest/namespaces.py": "what the kernel reads of namespaces",
    "lab/engine_blueprint.py": "a scratch folder of two processes",
    "serving/process.py": "a log, appended to",
    "starters/folder.py": "files of a draft, which are renamed once all are written",
    "lab/sim/ranks.py": "a simulated checkpoint",
    "sync/disk/writer.py": "weights, with their own fsync, in a folder that is sealed later",
}


def test_no_module_writes_a_small_file_in_another_way() -> None:
    root = Path(megasync.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if _writes(node)]
        if lines:
            found[str(path.relative_to(root))] = lines
    assert found.keys() <= OTHER_WRITERS.keys(), f"use megasync.base.files.atomic_write, or say why not: {found}"
    assert OTHER_WRITERS.keys() <= found.keys(), "a reason without a writer"


def _writes(node: ast.AST) -> bool:
    """`x.write_text(...)`, `x.write_bytes(...)`, `open(..., mode)` and `x.open(mode)` with a mode that writes."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("write_text", "write_bytes"):
        return True
    modes = [*node.args[:2], *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return name in ("open", "fdopen") and any(set(text) <= set("rwaxbt+") and set(text) & set("wax+") for text in texts)


def test_the_module_imports_no_heavy_packages() -> None:
    imported = {
        node.module
        for node in ast.walk(ast.parse(Path(files.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert not any(module.startswith("megasync") for module in imported)


# Folders


def names(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir())


@pytest.mark.processes
def test_a_kill_at_any_line_of_a_write_of_a_folder_leaves_the_old_one_or_the_new_one_or_none(tmp_path: Path) -> None:
    setup = """
from megasync.base.files import new_folder

def begin(folder):
    (folder / "a").mkdir()
    for name in "xyz":
        (folder / "a" / name).write_text("old")

def work(folder):
    with new_folder(folder / "a", replace=True) as draft:
        (draft / "below").mkdir()
        for name in ("x", "y", "below/z"):
            (draft / name).write_text("new")
"""
    seen = set()
    for case in cut_short(setup, tmp_path, ("megasync/base/files.py",)):
        found = {str(path.relative_to(case.folder / "a")): path.read_text() for path in files_in(case.folder / "a")}
        assert found in (dict.fromkeys("xyz", "old"), dict.fromkeys(("x", "y", "below/z"), "new"), {})
        seen.add((case.ended, *found.values()))
        with files.new_folder(case.folder / "a", replace=True):
            pass
        assert names(case.folder) == ["a"], "the next write removes what the killed one has left"
    assert seen == {("killed", *["old"] * 3), ("killed", *["new"] * 3), ("killed",), ("done", *["new"] * 3)}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.processes
def test_a_kill_at_any_line_of_a_removal_leaves_the_whole_folder_or_nothing_under_its_name(tmp_path: Path) -> None:
    setup = """
from megasync.base.files import remove_tree

def begin(folder):
    for name in ("a", "a/below"):
        (folder / name).mkdir()
        (folder / name / "file").touch()

def work(folder):
    remove_tree(folder / "a")
"""
    seen = set()
    for case in cut_short(setup, tmp_path, ("megasync/base/files.py", "shutil.py")):
        found = len(files_in(case.folder / "a"))
        seen.add((case.ended, found))
        files.sweep(case.folder)
        assert names(case.folder) == (["a"] if found else [])
    assert seen == {("killed", 2), ("killed", 0), ("done", 0)}


def test_a_folder_that_could_not_be_written_leaves_the_old_one_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    with pytest.raises(OSError, match="full"), files.new_folder(tmp_path / "a", replace=True):
        raise OSError("full")
    with pytest.raises(OSError, match="not empty"), files.new_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["file"]


def test_the_draft_of_a_living_writer_and_foreign_names_stay(tmp_path: Path) -> None:
    foreign = [".a.part", ".a.12345678.part.bak", "a.incomplete", ".b.12345678.part", ".a.1234567g.part", ".removed"]
    for name in foreign:
        (tmp_path / name).mkdir()
    with files.new_folder(tmp_path / "a") as first, files.new_folder(tmp_path / "a") as second:
        files.sweep(tmp_path)
        assert first.is_dir() and second.is_dir() and first != second
        first.rmdir()
        first.mkdir()
    assert names(tmp_path) == sorted([*foreign, "a"])


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_a_new_folder_is_as_readable_as_the_umask_allows(
    tmp_path: Path, umask: int, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(umask)
    try:
        with files.new_folder(tmp_path / "a") as draft:
            (draft / "private").touch(0o600)
        atomic_write(tmp_path / "b", "x", files.PRIVATE)
        atomic_write(tmp_path / "c", "x")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/private", "b", "c")]
    assert modes == [folder_mode, file_mode, 0o600, file_mode]


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.remove_tree(tmp_path / "link")
    assert names(tmp_path) == ["there"] and names(tmp_path / "there") == ["file"]
    with pytest.raises(FileNotFoundError):
        files.remove_tree(tmp_path / "link")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_whatever_is_wrong_with_a_json_object_names_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="a.json"):
        read_object(tmp_path / "a.json")
    with pytest.raises(ValueError, match="gone.json"):
        read_object(tmp_path / "gone.json")


def test_sockets_go_to_a_short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    assert socket_folder("/tmp") == "/tmp" and ray_environment({"TMPDIR": "/tmp"}) == {}
    for env in ({"TMPDIR": str(long)}, {"TMPDIR": "/tmp", "RAY_TMPDIR": str(long)}):
        (folder,) = ray_environment(env).values()
        # The longest name that Ray binds.
        with closing(socket.socket(socket.AF_UNIX)) as unix:
            session = Path(folder) / f"ray-test-{os.getpid()}"
            place = session / ("s" * (SOCKET_NAME_BYTES - len(f"/{session.name}/")))
            session.mkdir()
            try:
                unix.bind(str(place))
            finally:
                shutil.rmtree(session)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert socket_folder() == "/tmp"
    assert not leaves_room_for_sockets(str(long))


def test_a_user_without_a_home_gets_a_token_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers run under any number."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert home("/nowhere") == Path("/nowhere")
    monkeypatch.setattr(files, "writable", lambda folder: folder != Path("/.ray"))
    assert len(ray_token({})["RAY_AUTH_TOKEN"]) == 64
    assert ray_token({"RAY_AUTH_TOKEN_PATH": "/tmp/x/token"}) == {}


def test_without_a_short_folder_sockets_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasync.base.files._SHORT_FOLDERS", (str(tmp_path / "gone"),))
    assert socket_folder("/a" * 60) == "/a" * 60

"""A folder has its final name only when it is complete, and is removed only when nobody may be reading it."""

import errno
import json
import os
import threading

import msgspec
import pytest
import torch
from waits import PATIENCE

from megasync.errors import SyncError
from megasync.layout.layout import Layout
from megasync.layout.shards import HfFolder, load_shards, part_name
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.disk import version_folders
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.disk.writer import write_bucket
from megasync.sync.groups import Deadline


@pytest.fixture
def world(make_model, save_model, tmp_path):
    """(folders, write): ``write`` makes the weight files of a draft, all zeros."""
    source = tmp_path / "source"
    layout = Layout(save_model(make_model(), source), Topology())
    plan = plan_broadcast(layout, 3000, "float32")
    folders = VersionFolders(tmp_path / "shared" / "sync", source, plan, keep=2)

    def write(draft):
        return {
            name: write_bucket(draft / name, bucket, torch.zeros(bucket.nbytes, dtype=torch.uint8), Deadline(5))
            for name, bucket in ((part_name(i, len(plan.buckets)), b) for i, b in enumerate(plan.buckets))
        }

    folders.prepare()
    return folders, write, layout


def names(folders):
    """Without the lock."""
    return sorted(path.name for path in folders.root.iterdir() if path.name != version_folders.LOCK)


def publish(folders, write, version):
    draft = folders.draft(version)
    return folders.seal(draft, version, write(draft))


def test_a_sealed_version_is_a_whole_hugging_face_folder_with_digests(world):
    folders, write, layout = world
    draft = folders.draft(7)
    assert names(folders) == ["v7.incomplete"]
    files = write(draft)
    sealed = folders.seal(draft, 7, files)
    assert names(folders) == ["v7"]
    assert all((tensor == 0).all() for tensor in load_shards(sealed, layout, 0).values())
    with HfFolder(sealed) as folder:
        assert folder._where.keys() == layout.hf_tensors.keys()
    assert json.loads((sealed / "config.json").read_text())["dtype"] == "float32"
    manifest = json.loads((sealed / "manifest.json").read_text())
    assert manifest == {"version": 7, "dtype": "float32", "files": msgspec.to_builtins(files)}


def test_a_draft_with_a_missing_or_a_short_file_is_not_sealed(world):
    folders, write, _ = world
    draft = folders.draft(7)
    files = write(draft)
    (draft / part_name(0, len(files))).write_bytes(b"short")
    with pytest.raises(SyncError, match=r"has 5 bytes here, but \d+ on the rank .*sync.disk_dir must be one folder"):
        folders.seal(draft, 7, files)
    del files[part_name(0, len(files))]
    with pytest.raises(SyncError, match="but the plan says"):
        folders.seal(draft, 7, files)
    folders.discard(draft)
    assert names(folders) == []


def test_what_an_earlier_process_left_unfinished_is_removed_and_what_it_sealed_is_kept(world):
    folders, write, _ = world
    publish(folders, write, 1)
    write(folders.draft(2))
    (folders.root / ".v0.0123abcd.removed").mkdir()
    foreign = ["v2-best.incomplete", "vX.incomplete", "v1.5.0", "removed-v0", "v3.incomplete.bak"]
    for name in foreign:
        (folders.root / name).mkdir()
    folders.prepare()
    assert names(folders) == sorted(["v1", *foreign])


def test_a_folder_has_one_run_at_a_time(world, monkeypatch):
    monkeypatch.setattr("megasync.base.locks.PATIENCE_SECONDS", 0.0)
    folders, write, _ = world
    other = VersionFolders(folders.root, folders._source, folders._plan, keep=2)
    draft = folders.draft(7)
    with pytest.raises(SyncError, match=rf"{folders.root} is in use by the run of process {os.getpid()} on .*its own"):
        other.prepare()
    folders.prepare()
    draft = folders.draft(7)
    folders.seal(draft, 7, write(draft))
    folders.close()
    other.prepare()
    assert names(other) == ["v7"]


def test_a_file_system_without_locks_is_used_with_a_warning(world, monkeypatch, caplog):
    folders, write, _ = world

    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("megasync.base.locks.fcntl.flock", unsupported)
    other = VersionFolders(folders.root / "other", folders._source, folders._plan, keep=2)
    other.prepare()
    assert publish(other, write, 1).name == "v1" and "let no other run use it" in caplog.text


def test_a_version_that_is_written_again_leaves_the_first_one_to_its_readers(world):
    folders, write, _ = world
    assert [publish(folders, write, 3).name for _ in range(3)] == ["v3", "v3.1", "v3.2"]


def test_old_versions_go_but_none_that_is_busy_and_nothing_that_is_not_ours(world):
    folders, write, _ = world
    (folders.root / "v0").mkdir()
    sealed = [publish(folders, write, version) for version in (9, 10, 11, 12)]
    folders.prune({sealed[1]})
    assert names(folders) == ["v0", "v10", "v11", "v12"]
    folders.prune(set())
    assert names(folders) == ["v0", "v11", "v12"]


def test_a_draft_that_is_discarded_while_it_is_sealed_never_gets_a_final_name(world, monkeypatch):
    folders, write, _ = world
    draft = folders.draft(5)
    files = write(draft)
    sealing, discarded = threading.Event(), threading.Event()

    def slow(path):
        sealing.set()
        discarded.wait(PATIENCE)

    monkeypatch.setattr(version_folders, "fsync", slow)
    failure = []

    def seal():
        try:
            folders.seal(draft, 5, files)
        except SyncError as error:
            failure.append(error)

    thread = threading.Thread(target=seal)
    thread.start()
    assert sealing.wait(PATIENCE)
    folders.discard(draft)
    discarded.set()
    thread.join(PATIENCE)
    assert "cannot be completed" in str(failure[0])
    assert names(folders) == []


def test_a_root_that_cannot_be_made_is_named(world, tmp_path):
    (tmp_path / "file").write_text("")
    folders = VersionFolders(tmp_path / "file" / "sync", tmp_path, world[0]._plan, keep=1)
    with pytest.raises(SyncError, match=r"sync\.disk_dir=.*file/sync cannot be created"):
        folders.prepare()

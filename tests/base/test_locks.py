"""Locks on files."""

from __future__ import annotations

from pathlib import Path

from megasync.base.locks import FileLock, holder_of, is_locked, named_holder


def test_a_lock_has_one_holder_who_is_named_and_may_take_it_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("megasync.base.locks.PATIENCE_SECONDS", 0.0)
    path = tmp_path / "lock"
    first, second = FileLock(path), FileLock(path)
    assert not is_locked(path) and holder_of(path) is None and named_holder(path) == "another process"
    assert first.take(run="a") and first.take() and is_locked(path)
    assert not second.take()
    found = holder_of(path)
    assert found is not None and found["run"] == "a" and str(found["pid"]) in named_holder(path)
    first.release()
    assert not is_locked(path) and second.take()


def test_damaged_text_names_nobody(tmp_path: Path) -> None:
    for text in ("", "[]", "3", '{"pid": 1}', "[" * 100_000):
        (tmp_path / "lock").write_text(text)
        assert holder_of(tmp_path / "lock") is None

"""Runs of fakes need no second between two looks of the watch loop."""

import pytest


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasync.control.controller.WATCH_SECONDS", 0.01)

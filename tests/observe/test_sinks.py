"""A sink gets everything in order, and neither slows nor fails a run, whatever it does."""

import logging
import threading
import time

import pytest
from waits import PATIENCE

from megasync.observe import sinks
from megasync.observe.sinks import Answers, Sinks, StepMetrics


class RecordingSink:
    """Records its calls. `failing` raises in these methods, `stuck` waits there until it is set free."""

    name = "Recorder"

    def __init__(self, failing=(), stuck=()):
        self.calls = []
        self.failing, self.stuck = set(failing), set(stuck)
        self.free = threading.Event()
        self.reached = threading.Event()

    def _do(self, method, *arguments):
        self.calls.append((method, *arguments))
        if method in self.stuck:
            self.reached.set()
            self.free.wait(PATIENCE)
        if method in self.failing:
            raise ConnectionError("refused")

    def open(self):
        self._do("open")
        return "recording"

    def log(self, row):
        self._do("log", row.step, dict(row.values))

    def answers(self, answers):
        self._do("answers", answers.step)

    def close(self, failed):
        self._do("close", failed)

    def abandon(self):
        self._do("abandon")


def row(step):
    return StepMetrics(step, 0.0, {"train/loss": float(step)})


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_sink_gets_everything_in_order_and_its_messages_come_back():
    sink = RecordingSink()
    all_sinks = Sinks([sink])
    all_sinks.start()
    all_sinks.log(row(1))
    all_sinks.answers(Answers(1, 1, [("2+2=", "4", 1.0)]))
    all_sinks.log(row(1))
    all_sinks.close(failed=True)
    values = {"train/loss": 1.0}
    assert sink.calls == [
        ("open",),
        ("log", 1, values),
        ("answers", 1),
        ("log", 1, values),
        ("close", True),
    ]
    assert all_sinks.messages() == ["recording"] and all_sinks.messages() == []


def test_a_sink_that_fails_is_reported_once_and_does_not_disturb_the_others(caplog):
    broken, sound = RecordingSink(failing=["log"]), RecordingSink()
    all_sinks = Sinks([broken, sound])
    all_sinks.start()
    for step in (1, 2, 3):
        all_sinks.log(row(step))
    all_sinks.close()
    assert [call[0] for call in sound.calls] == ["open", "log", "log", "log", "close"]
    assert warnings(caplog) == [
        "Recorder lacks metrics, and the run goes on: ConnectionError: refused",
        "Recorder: 3 rows were not delivered; metrics.jsonl has them",
    ]


def test_what_is_logged_before_a_sink_opens_waits_for_it(monkeypatch, caplog):
    monkeypatch.setattr(sinks, "RETRY_SECONDS", 0.01)
    sink = RecordingSink(failing=["open"])
    all_sinks = Sinks([sink])
    all_sinks.start()
    all_sinks.log(row(1))
    while len(sink.calls) < 3:
        time.sleep(0.005)
    sink.failing.clear()
    while ("log", 1, {"train/loss": 1.0}) not in sink.calls:
        time.sleep(0.005)
    all_sinks.close()
    assert sink.calls[-1] == ("close", False)
    assert warnings(caplog) == ["Recorder lacks metrics, and the run goes on: ConnectionError: refused"]


def test_a_sink_that_never_opens_costs_its_rows_and_nothing_else(caplog):
    sink = RecordingSink(failing=["open"])
    all_sinks = Sinks([sink])
    all_sinks.start()
    all_sinks.log(row(1))
    all_sinks.close()
    assert set(sink.calls) == {("open",)}
    assert warnings(caplog)[-1] == "Recorder: 1 rows were not delivered; metrics.jsonl has them"


def test_a_sink_that_blocks_never_makes_the_run_wait(monkeypatch, caplog):
    monkeypatch.setattr(sinks, "QUEUED", 5)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.1)
    sink = RecordingSink(stuck=["log"])
    all_sinks = Sinks([sink])
    all_sinks.start()
    all_sinks.log(row(1))
    assert sink.reached.wait(PATIENCE)
    # One is in the sink, five in the queue; this returns at all because the others are left out.
    for step in range(2, 11):
        all_sinks.log(row(step))
    all_sinks.close()
    assert warnings(caplog) == [
        "Recorder lacks metrics, and the run goes on: it is too slow, 5 rows wait for it",
        "Recorder: not finished in time; the run ends without it",
        "Recorder: 9 rows were not delivered; metrics.jsonl has them",
    ]
    assert sink.calls[-1] == ("abandon",)
    sink.free.set()


@pytest.mark.parametrize("method", ["answers", "log", "close"])
def test_an_error_in_any_method_is_only_a_warning(method, caplog):
    sink = RecordingSink(failing=[method])
    all_sinks = Sinks([sink])
    all_sinks.start()
    all_sinks.answers(Answers(1, 1, []))
    all_sinks.log(row(2))
    all_sinks.close()
    assert [call[0] for call in sink.calls] == ["open", "answers", "log", "close"]
    assert warnings(caplog)[0].endswith("ConnectionError: refused")

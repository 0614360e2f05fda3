"""A failed log write is reported once, and nothing fails because of it."""

import logging

import pytest

from megasync.observe.logfile import log_to_file

LOGGER = logging.getLogger("megasync")


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Opens the log logs/<name> of a run, without the test runner's handlers, which raise formatting errors."""
    monkeypatch.setattr(LOGGER, "handlers", [])
    opened = []

    def start(name):
        opened.append(log_to_file(tmp_path / "logs" / name))
        return opened[-1]

    yield start
    for handler in reversed(opened):
        handler.close()


def test_log_records_are_written_to_the_file_immediately(log, tmp_path):
    log("trainer-0.log")
    logging.getLogger("megasync.trainer").info("rank %d is up", 0)
    assert (tmp_path / "logs" / "trainer-0.log").read_text().endswith("INFO megasync.trainer: rank 0 is up\n")


def test_a_full_disk_is_reported_only_once_by_the_log_file(log, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "controller.log").symlink_to("/dev/full")
    handler = log("controller.log")
    for number in range(3):
        LOGGER.info("message %d", number)
    handler.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "controller.log: [Errno 28] No space left on device" in line
    assert handler.stream is None


def test_a_record_that_cannot_be_formatted_keeps_its_traceback(log, capsys):
    log("controller.log")
    LOGGER.info("message %d", "not a number")
    assert "Traceback" in capsys.readouterr().err


def test_closing_the_log_file_restores_the_logger(log, tmp_path):
    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    log("controller.log").close()
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers) == before
    LOGGER.warning("nobody writes this")
    assert (tmp_path / "logs" / "controller.log").read_text() == ""

"""Reports that a run wrote of things that went wrong."""

import json
import os

import watched_run

from megasync.watch.evidence import MOST_BYTES, find_evidence, read_evidence


def test_reports_come_newest_first_with_what_they_are_about(tmp_path):
    run = watched_run.finished_run(tmp_path / "run", 2)
    watched_run.add_faults(run)
    for number, name in enumerate(("failed_steps/step-00000034-0-7.json", "hang/20261124-231500.txt")):
        os.utime(run / name, (number, number))
    hang, failed = find_evidence(run)
    assert (hang.kind, hang.title) == ("hang report", "No progress for 600 s.")
    assert (failed.kind, failed.title) == ("failed step", "step-00000034-0-7: rank 1 ended with exit code 1")


def test_the_batch_of_a_failed_step_is_not_read(tmp_path):
    folder = tmp_path / "skipped"
    folder.mkdir()
    record = {"name": "step-1", "loss": "nan", "grad_norm": 2.0, "batch": ["x" * (2 * MOST_BYTES)]}
    (folder / "step-1.json").write_text(json.dumps(record))
    (found,) = find_evidence(tmp_path)
    assert found.title == "step-1: loss nan, gradient norm 2.0"
    text = read_evidence(found)
    assert "loss: nan" in text and "xxx" not in text


def test_a_long_report_is_cut_and_says_where_the_rest_is(tmp_path):
    folder = tmp_path / "hang"
    folder.mkdir()
    (folder / "now.txt").write_text("y" * (MOST_BYTES + 5))
    (found,) = find_evidence(tmp_path)
    assert str(folder / "now.txt") in read_evidence(found)[-200:]


def test_a_damaged_or_absent_report_is_still_listed(tmp_path):
    assert find_evidence(tmp_path) == []
    folder = tmp_path / "failed_steps"
    folder.mkdir()
    (folder / "step-2.json").write_text('{"step": 2, "err')
    (found,) = find_evidence(tmp_path)
    assert found.title == "step-2"
    assert read_evidence(found).startswith('{"step": 2')
    (folder / "step-2.json").unlink()
    assert "cannot be read" in read_evidence(found)

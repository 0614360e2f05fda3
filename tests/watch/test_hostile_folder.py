"""A run folder that somebody made to harm its reader, or that a disk has damaged: it is read to its end, and named."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from made_runs import make_run
from mutations import SEEDS, mutated

from megasync.observe.trace import TRACE_FOLDER
from megasync.watch import growing_file, run_folder
from megasync.watch.growing_file import GrowingFile
from megasync.watch.html_page import render_html
from megasync.watch.report import make_report
from megasync.watch.run_folder import RunFolder
from megasync.watch.spans import TraceReader

DEEP = "[" * 200_000
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "events.jsonl", "state.json", "custom.json", "ledger.db")
Change = Callable[[Path], object]


def appended(name: str, *lines: str) -> Change:
    def change(run_dir: Path) -> None:
        with (run_dir / name).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(f"{line}\n" for line in lines)

    return change


def written(name: str, text: str) -> Change:
    return lambda run_dir: (run_dir / name).write_text(text)


def bomb(levels: int) -> str:
    return "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, levels))


def endless_view(run_dir: Path) -> None:
    (run_dir / "ledger.db").unlink()
    with sqlite3.connect(run_dir / "ledger.db") as database:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i state, i reason FROM n"
        database.execute(f"CREATE VIEW groups AS {numbers}")


def odd_ledger(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / "ledger.db") as database:
        database.execute("UPDATE groups SET state = x'00ff' WHERE number = 3")


HOSTILE: dict[str, Change] = {
    "huge step": appended("metrics.jsonl", f'{{"step": {"9" * 20}, "time": 1.0, "a": 1}}'),
    "negative step": appended("metrics.jsonl", '{"step": -1, "time": 1.0, "a": 1}'),
    "huge number": appended("metrics.jsonl", f'{{"step": 2, "time": 1.0, "a": {"9" * 400}}}'),
    "number of 5,000 digits": appended("metrics.jsonl", f'{{"step": 2, "time": 1.0, "a": {"9" * 5000}}}'),
    "deep metrics": appended("metrics.jsonl", f'{{"step": 2, "time": 1.0, "a": {DEEP}{"]" * 200_000}}}'),
    "time beyond clocks": appended("metrics.jsonl", '{"step": 2, "time": 1e300, "a": 1}'),
    "time that is none": appended("metrics.jsonl", '{"step": 2, "time": NaN, "a": 1}'),
    "torn bytes": appended("metrics.jsonl", '{"step": 2, "time": 1.0, "\udcff\udcfe": 1}'),
    "a surrogate": appended("metrics.jsonl", '{"step": 2, "time": 1.0, "\\ud800": 1}'),
    "deep events": appended("events.jsonl", f'{{"time": 1.0, "kind": "fault", "x": {DEEP}{"]" * 200_000}}}'),
    "event beyond clocks": appended("events.jsonl", '{"time": 1e300, "kind": "fault"}'),
    "event of a huge time": appended("events.jsonl", f'{{"time": {"9" * 400}, "kind": "fault"}}'),
    "fields of odd types": appended("events.jsonl", '{"time": 1.0, "kind": "start", "versions": [1], "step": {}}'),
    "deep samples": appended("samples.jsonl", DEEP),
    "alias loop": written("config.yaml", "a: &a\n  b: *a\n"),
    "alias bomb": written("config.yaml", bomb(40)),
    "deep configuration": written("config.yaml", f"a: {DEEP}"),
    "deep blocks": written("config.yaml", "\n".join(" " * i + "a:" for i in range(3000))),
    "configuration of lists": written("config.yaml", "[1, 2]"),
    "configuration of infinities": written("config.yaml", "schedule: {groups_per_step: .inf, max_staleness: .nan}"),
    "configuration of 5,000 digits": written("config.yaml", f"schedule: {{groups_per_step: {'9' * 5000}}}"),
    "configuration with unhashable keys": written("config.yaml", "? [a]\n: 1\n? {b: 1}\n: 2\n"),
    "configuration of another encoding": lambda run_dir: (run_dir / "config.yaml").write_bytes(b"\xff\xfe\x00n"),
    "deep state": written("state.json", DEEP),
    "state beyond clocks": written("state.json", '{"time": 1e300, "started": -1e300, "status": "running"}'),
    "state of nonsense": written("state.json", '{"time": 1, "status": "nonsense"}'),
    "deep custom.json": written("custom.json", DEEP),
    "custom.json of numbers": written("custom.json", '{"reward": 3}'),
    "endless ledger": endless_view,
    "odd ledger": odd_ledger,
}


@pytest.mark.every(7)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_read_to_its_end_and_reported(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(run_folder, "COUNT_SECONDS", 0.1)
    run_dir = make_run(tmp_path, steps=5)
    HOSTILE[kind](run_dir)
    run = RunFolder(run_dir)
    render_html(make_report(run))
    assert run.step == 5, "the other lines and files are shown"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [*FILES, "driver.lock", "logs/controller.log", "hang/report.txt"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    run_dir = make_run(tmp_path, steps=5)
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name)
    run = RunFolder(run_dir)
    make_report(run)
    assert name in FILES[5:] or "/" in name or any(name in sentence for sentence in run.missing), run.missing


def test_a_trace_of_pipes_and_odd_times_is_left_out(tmp_path):
    folder = tmp_path / TRACE_FOLDER
    folder.mkdir()
    os.mkfifo(folder / "driver-1.json")
    late = {"ph": "X", "name": "n", "pid": 1, "tid": 0, "ts": 10**18 * 9, "dur": 1, "cat": "c"}
    good = late | {"ts": 1_000_000}
    lines = [json.dumps(late), json.dumps(good), DEEP, '{"ph": "X"}']
    (folder / "driver-2.json").write_text("[\n" + "".join(f"{line},\n" for line in lines))
    reader = TraceReader(tmp_path)
    assert [span.start for span in reader.update()] == [1.0]
    assert reader.damaged >= 1


def test_a_line_without_an_end_takes_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(growing_file, "PIECE", 1000)
    monkeypatch.setattr(growing_file, "LONGEST_LINE", 1000)
    path = tmp_path / "file"
    path.write_bytes(b"first\n" + b"x" * 5000 + b"\nsecond\n" + b"y" * 300)
    file = GrowingFile(path)

    def lines() -> list[bytes]:
        return [line for piece in file.read()[1] for line in piece]

    assert lines() == [b"first", b"second"] and file.left_out == 1
    with path.open("ab") as more:
        more.write(b"\nthird\n")
    assert lines() == [b"y" * 300, b"third"] and not file.full


def test_a_file_beyond_the_limit_is_read_up_to_it(tmp_path, monkeypatch):
    for name, value in (("PIECE", 64), ("LONGEST_LINE", 64), ("MOST_BYTES", 128)):
        monkeypatch.setattr(growing_file, name, value)
    path = tmp_path / "file"
    path.write_bytes(b"line\n" * 1000)
    file = GrowingFile(path)
    read = [line for piece in file.read()[1] for line in piece]
    assert set(read) == {b"line"} and len(read) < 40 and file.full and not file.torn()


def read_mutations(folder: Path, seeds: Iterable[int]) -> None:
    run_dir = make_run(folder, steps=5)
    whole = {name: (run_dir / name).read_bytes() for name in FILES if (run_dir / name).is_file()}
    for seed in seeds:
        chance = random.Random(seed)
        name = chance.choice(list(whole))
        (run_dir / name).write_bytes(mutated(whole[name], chance))
        try:
            render_html(make_report(RunFolder(run_dir)))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {name}") from error
        (run_dir / name).write_bytes(whole[name])


@pytest.mark.matrix
@pytest.mark.every(4)
@pytest.mark.parametrize("seeds", SEEDS)
def test_changed_files_are_reported_on(tmp_path, seeds):
    read_mutations(tmp_path, seeds)

"""Recorded responses read back as they were written, in bounded space, whatever happens to writer and disk."""

import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megasync.errors import DataError
from megasync.observe.rollouts import FOLDER, IndexRow, Response, RolloutLog, chosen, is_sampled, recorded
from megasync.trajectory import ANSWER, Call, Line, Trajectory, Turn
from megasync.trajectory.runs import Runs
from megasync.watch.recorded import DROPPED, TRAINED, Filters, RolloutIndex

LIMIT = 2**20


def row(uid="0:1", sample=0, step=1, **fields):
    return IndexRow(
        **{"version": 1, "time": float(step), "tokens": 3, "prompt_tokens": 2} | fields,
        uid=uid,
        sample=sample,
        step=step,
    )


def response(tokens=3, **fields):
    return Response(
        np.arange(2, dtype=np.int32),
        np.arange(tokens, dtype=np.int32),
        np.linspace(-1, 0, tokens, dtype=np.float32),
        Runs.fill(1, tokens),
        Runs.fill(7, tokens),
        **fields,
    )


def index_of(folder):
    index = RolloutIndex(folder)
    index.update()
    return index


def test_a_response_reads_back_as_it_was_written(tmp_path):
    scores = np.array([-1.5, math.nan, -0.25], np.float32)
    written = row(reward=0.5, advantage=-1.0, staleness=2, set="easy", gap=0.125, metrics={"turns": np.float32(2)})
    whole = response(
        trainer_logprobs=scores, advantages=scores, rewards=scores, text="1 + 1 = 2\n\u2028", problem="none"
    )
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(written, whole)])
    index = index_of(tmp_path)
    (found,) = index.rows
    assert (found.uid, found.reward, found.advantage, found.gap, found.set) == ("0:1", 0.5, -1.0, 0.125, "easy")
    assert found.metrics == {"turns": 2.0}
    read = index.read(found)
    for name in ("prompt_ids", "ids", "logprobs", "trainer_logprobs", "advantages", "rewards"):
        np.testing.assert_array_equal(getattr(read, name), getattr(whole, name))
    assert (read.mask, read.versions, read.text, read.problem) == (whole.mask, whole.versions, whole.text, "none")


def test_the_notes_of_a_trajectory_read_back(tmp_path):
    line = Line("sub-agent", "branch", 1, 0, 2, 4)
    turns = (Turn(0, 2, ANSWER, calls=(Call("add", "{}"),)), Turn(2, 3, "tool", "add"))
    answer = Trajectory([1], [5] * 3, [1, 1, 0], [-0.5] * 3, [0] * 3, turns=turns, line=line)
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([recorded("0:1", 0, answer, step=1, version=1, time=1.0)])
    index = index_of(tmp_path)
    assert (index.read(index.rows[0]).turns, index.rows[0].line) == (turns, line)


def test_a_body_that_was_recorded_without_turns_is_read(tmp_path):
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(row(), response(text="said"))])
    index = index_of(tmp_path)
    (path,) = (tmp_path / FOLDER).glob("*.body")
    fields = msgspec.msgpack.decode(path.read_bytes())
    assert fields.pop() == []
    index.rows[0].size = path.write_bytes(msgspec.msgpack.encode(fields))
    read = index.read(index.rows[0])
    assert (read.turns, read.text) == ((), "said")


def test_a_body_whose_index_a_kill_has_prevented_is_not_continued(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "trainer-0-3.body").write_bytes(b"the body of a response")
    foreign = [
        "trainer-0-9.index.bak",
        "trainer-0-9 (copy).index",
        "trainer-0-x.body",
        "trainer-0-\N{SUPERSCRIPT TWO}.index",
    ]
    for name in foreign:
        (tmp_path / FOLDER / name).touch()
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(row("0:1"), response(tokens=5))])
    index = index_of(tmp_path)
    (found,) = index.rows
    assert found.pair == "trainer-0-4" and len(index.read(found).ids) == 5


def test_a_body_that_a_full_disk_has_torn_is_not_continued(tmp_path, monkeypatch):
    log = RolloutLog(tmp_path, "trainer-0", LIMIT)
    log.append([(row("0:1"), response())])

    class Full:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def write(self, data):
            self._file.write(data[: len(data) // 2])
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(open(path, mode)))  # noqa: SIM115
        log.append([(row("0:2"), response())])
        log.append([(row("0:3"), response())])
    log.append([(row("0:4"), response(tokens=5))])
    index = index_of(tmp_path)
    assert {found.uid: len(index.read(found).ids) for found in index.rows} == {"0:1": 3, "0:4": 5}


def test_a_damaged_line_costs_one_response(tmp_path):
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(row(uid), response()) for uid in ("0:1", "0:2")])
    (path,) = (tmp_path / FOLDER).glob("*.index")
    path.write_bytes(path.read_bytes().replace(b'{"uid":"0:1"', b"\0{broken"))
    index = index_of(tmp_path)
    assert [found.uid for found in index.rows] == ["0:2"]
    assert index.damaged == 1


def test_what_is_trained_again_counts_once(tmp_path):
    log = RolloutLog(tmp_path, "trainer-0", LIMIT)
    log.append([(row("0:1", step=12, time=100.0, reward=1.0), response())])
    RolloutLog(tmp_path, "trainer-1", LIMIT).append([(row("0:1", step=13, time=200.0, reward=1.0), response())])
    assert [found.step for found in index_of(tmp_path).rows] == [13]


def test_disk_use_is_bounded_and_the_newest_stay(tmp_path):
    limit = 400_000
    log = RolloutLog(tmp_path, "trainer-0", limit)
    index = RolloutIndex(tmp_path)
    for step in range(1, 301):
        log.append([(row(f"0:{step}", step=step), response(tokens=500))])
        index.update()
        used = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
        assert used < limit * 1.05
    steps = sorted(found.step for found in index.rows)
    assert steps == list(range(steps[0], 301))
    assert len(steps) > 300 * 0.05
    assert {found.step for found in index_of(tmp_path).rows} == set(steps)
    assert all(len(index.read(found).ids) == 500 for found in index.rows)


def test_other_processes_keep_their_files(tmp_path):
    RolloutLog(tmp_path, "trainer-1", LIMIT).append([(row("1:0"), response())])
    log = RolloutLog(tmp_path, "trainer", 8_000)
    for step in range(1, 100):
        log.append([(row(f"0:{step}", step=step), response(tokens=100))])
    assert "1:0" in {found.uid for found in index_of(tmp_path).rows}


def test_recording_never_raises(tmp_path, caplog):
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    log = RolloutLog(tmp_path, "trainer-0", LIMIT)
    log.append([(row(), response())])
    assert "Could not record responses" in caplog.text
    (tmp_path / FOLDER).unlink()
    log.append([(row("0:2"), response())])
    assert [found.uid for found in index_of(tmp_path).rows] == ["0:2"]


def test_a_body_that_is_gone_is_named(tmp_path):
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(row(), response())])
    index = index_of(tmp_path)
    (path,) = (tmp_path / FOLDER).glob("*.body")
    os.truncate(path, 10)
    with pytest.raises(DataError, match="response 0 of group 0:1"):
        index.read(index.rows[0])
    path.unlink()
    with pytest.raises(DataError, match="response 0 of group 0:1"):
        index.read(index.rows[0])


class Odd:
    def __repr__(self):
        raise SystemExit


@pytest.mark.parametrize(
    ("answer", "recorded_text"),
    [
        ("4\u20282", "4\u20282"),
        (42, "42"),
        (["4", 2], "['4', 2]"),
        ("\ud800", "?"),
        ("x" * 5000, f"{'x' * 2000} ..."),
        (Odd(), "<Odd, whose repr raises ForeignExit>"),
    ],
)
def test_the_beginning_of_any_reference_answer_is_recorded(tmp_path, answer, recorded_text):
    log = RolloutLog(tmp_path, "worker-0", LIMIT)
    for uid, other in (("0:11", "another"), ("0:1", "an earlier one"), ("0:1", answer)):
        log.append_answer(uid, other)
    index = index_of(tmp_path)
    assert (index.answer("0:1"), index.answer("0:11"), index.answer("0:12")) == (recorded_text, "another", None)
    assert index.rows == [] and index.damaged == 0


def test_answers_count_in_the_bound_and_go_with_the_responses(tmp_path):
    limit = 100_000
    log = RolloutLog(tmp_path, "worker-0", limit)
    for step in range(1, 301):
        log.append([(row(f"0:{step}", step=step), response(tokens=50))])
        log.append_answer(f"0:{step}", "y" * 1000)
        assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) < limit * 1.05
    index = index_of(tmp_path)
    assert {found.uid for found in index.rows} == {f"0:{s}" for s in range(1, 301) if index.answer(f"0:{s}")}


def test_answers_in_hostile_files_are_looked_for_within_a_bound(tmp_path, monkeypatch):
    index = RolloutIndex(tmp_path)
    assert index.answer("0:1") is None
    RolloutLog(tmp_path, "worker-0", LIMIT).append_answer("0:1", "right")
    folder = tmp_path / FOLDER
    os.mkfifo(folder / "worker-1-1.answers")
    (folder / "worker-2-1.answers").symlink_to(folder / "nowhere")
    for number, line in enumerate((b'["0:1",' + b"[" * 100_000, b'["0:1",3]', b'["0:1","a","b"]', b"\xff\n\0")):
        (folder / f"worker-3-{number}.answers").write_bytes(line + b"\n")
    assert index.answer("0:1") == "right"
    monkeypatch.setattr("megasync.watch.recorded.ANSWER_BYTES", 1000)
    (folder / "worker-4-1.answers").write_bytes(b"line\n" * 1000)
    assert index.answer("0:1") is None


ROWS = [
    row("0:1", 0, 1, reward=1.0, tokens=10, staleness=0, set="easy"),
    row("0:1", 1, 1, reward=0.0, tokens=20, staleness=1, set="easy"),
    row("0:2", 0, 2, reward=0.5, tokens=30, staleness=2, set="hard"),
    row("0:3", 0, 0, reward=None, tokens=40, dropped="uniform", time=9.0),
    row("0:4", 0, 0, reward=0.0, tokens=50, dropped="reward_error", time=9.5),
]


@pytest.mark.parametrize(
    ("filters", "tokens"),
    [
        (Filters(), [50, 40, 30, 10, 20]),
        (Filters(reward=(0.5, None)), [30, 10]),
        (Filters(reward=(None, 0.0)), [50, 20]),
        (Filters(length=(20, 40)), [40, 30, 20]),
        (Filters(staleness=(1, None)), [30, 20]),
        (Filters(step=(1, 1)), [10, 20]),
        (Filters(set="hard"), [30]),
        (Filters(dropped=TRAINED), [30, 10, 20]),
        (Filters(dropped=DROPPED), [50, 40]),
        (Filters(dropped="uniform"), [40]),
        (Filters(uid="0:1"), [10, 20]),
    ],
)
def test_filters(tmp_path, filters, tokens):
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(each, response()) for each in ROWS])
    assert [found.tokens for found in index_of(tmp_path).select(filters)] == tokens


@pytest.mark.parametrize(
    ("uid", "found"),
    [("0:1", ["0:1"]), ("0:1*", ["0:1", "0:12"]), ("0:", []), (":1", []), ("*", ["0:1", "0:12", "0:2"])],
)
def test_a_group_is_named_whole_or_by_its_beginning(uid, found):
    assert [each for each in ("0:1", "0:12", "0:2") if Filters(uid=uid).passes(row(each))] == found


def test_rows_without_a_value_are_last_in_both_orders(tmp_path):
    RolloutLog(tmp_path, "trainer-0", LIMIT).append([(each, response()) for each in ROWS])
    index = index_of(tmp_path)
    assert [found.reward for found in index.select(sort="reward")] == [1.0, 0.5, 0.0, 0.0, None]
    assert [found.reward for found in index.select(sort="reward", descending=False)] == [0.0, 0.0, 0.5, 1.0, None]


def test_search_reads_the_text_or_makes_it_of_tokens(tmp_path):
    log = RolloutLog(tmp_path, "trainer-0", LIMIT)
    log.append(
        [(row("0:1"), response(text="The ANSWER is 4")), (row("0:2"), response()), (row("0:3"), response(text="5"))]
    )
    index = index_of(tmp_path)
    rows = {row.uid for row in index.rows if index.contains(row, "Answer", lambda response: "an answer of tokens")}
    assert rows == {"0:1", "0:2"}


def test_chosen_groups_are_whole_few_and_the_same_in_any_order():
    groups = [(f"0:{row}", 8) for row in range(64)]
    taken = chosen(groups, 100)
    assert len(taken) == 12
    assert taken == sorted(taken)
    order = list(np.random.default_rng(0).permutation(64))
    shuffled = chosen([groups[at] for at in order], 100)
    assert {groups[at] for at in taken} == {groups[order[at]] for at in shuffled}
    assert chosen(groups, 0) == []
    assert len(chosen(groups, 3)) == 1
    assert chosen(groups, 10**6) == list(range(64))


def test_sampled_groups_are_spread_evenly():
    uids = [f"{epoch}:{row}" for epoch in range(20) for row in range(500)]
    assert sum(is_sampled(uid, 0.25) for uid in uids) == pytest.approx(2500, rel=0.05)
    assert not any(is_sampled(uid, 0.0) for uid in uids)
    assert all(is_sampled(uid, 1.0) for uid in uids)

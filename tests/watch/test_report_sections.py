"""The parts of a report that read traces and recorded responses: true to the files, bounded, and without markup."""

import re
from itertools import pairwise

import numpy as np
import pytest
from made_runs import BEGIN, HOSTILE, STEP_SECONDS, make_run, write_trace
from msgspec.structs import replace

from megasync.observe import trace
from megasync.observe.rollouts import IndexRow, Response, RolloutLog
from megasync.trajectory import Turn
from megasync.trajectory.runs import Runs
from megasync.watch.document import Chart, Document, Table, Text, Tokens, Verbatim
from megasync.watch.html_page import render_html
from megasync.watch.markdown_page import render_markdown
from megasync.watch.recorded import RolloutIndex
from megasync.watch.run_folder import RunFolder
from megasync.watch.sections.responses import MEMBERS, TOKENS, responses
from megasync.watch.sections.timeline import MOST_BARS, timeline
from megasync.watch.timeline_figure import TRAINING

STEPS = 20


@pytest.fixture
def run(tmp_path):
    run_dir = make_run(tmp_path, steps=STEPS, settings=["model.path=/no/such/model"])
    write_trace(run_dir, STEPS)
    return RunFolder(run_dir)


def of(kind, section):
    return [block for block in section.blocks if isinstance(block, kind)]


def rendered(section):
    document = Document("title", "", "", "", [section])
    return render_html(document), render_markdown(document, "figures")[0]


# The timeline


def test_the_last_steps_are_drawn_where_they_were(run):
    chart, _ = of(Chart, timeline(run))
    (bars,) = [bars for bars in chart.figure.data if bars.name == TRAINING]
    train = [
        (base, x)
        for base, x, text in zip(bars.base, bars.x, bars.hovertext, strict=True)
        if "trainer<br>train:" in text
    ]
    # A step begins when the one before is published, 0.1 s before its wait of 0.6 s, and then trains for 1 s.
    assert [base for base, _ in train] == pytest.approx([0.7, 2.7, 4.7])
    assert [x for _, x in train] == pytest.approx([1.0] * 3)
    assert f"steps {STEPS - 2} to {STEPS}" in chart.caption


def test_phases_of_the_traced_steps_add_up(run):
    (table,) = of(Table, timeline(run))
    assert table.headings == ("Phase", "Step 18", "Step 19", "Step 20", "Mean of 20")
    columns = {row[0]: np.array([cell.value for cell in row[1:]]) for row in table.rows}
    assert columns["wait for groups"] == pytest.approx(np.full(4, 0.6))
    assert columns["the step"][:3] == pytest.approx(np.full(3, STEP_SECONDS))
    of_rank = {label for label in columns if "rank 0" in label}
    phases = [column for label, column in columns.items() if label not in {"the step", *of_rank}]
    assert sum(phases) == pytest.approx(columns["the step"])
    assert sum(columns[label] for label in of_rank) == pytest.approx(columns["train"])


def test_the_fault_that_delayed_training_most_has_a_figure(run):
    _, chart = of(Chart, timeline(run))
    assert "server-0" in chart.caption and "steps 5 to 7" in chart.caption


def test_a_figure_is_bounded_however_many_spans_there_are(run):
    begun = BEGIN + 10 + STEP_SECONDS * (STEPS - 1)
    with trace.recording(run.path, "worker-0"):
        for number in range(3 * MOST_BARS):
            trace.complete("tool", "call", begun + number * 1e-4, begun + number * 1e-4 + 5e-5)
    chart, _ = of(Chart, timeline(run))
    assert 0 < sum(len(bars.x) for bars in chart.figure.data if bars.type == "bar") <= MOST_BARS
    assert "too many spans" in chart.caption


def test_lines_of_a_trace_that_cannot_be_read_are_counted(run):
    with (run.path / "trace" / "driver-1.json").open("a") as file:
        file.write("{no json},\n")
    assert "1 damaged line was left out" in of(Text, timeline(run))[0].text


@pytest.mark.parametrize("supervised", [False, True])
def test_a_run_without_a_trace_says_so(tmp_path, supervised):
    (text,) = timeline(RunFolder(make_run(tmp_path, steps=2, supervised=supervised))).blocks
    assert isinstance(text, Text) and "left no trace" in text.text


def test_names_of_spans_are_text(run):
    html, _ = rendered(timeline(run))
    assert len(re.findall("<script", html)) == 3
    chart, _ = of(Chart, timeline(run))
    described = [text for bars in chart.figure.data for text in bars.hovertext if "script" in text]
    assert described and all(HOSTILE.replace("&", "&amp;").replace("<", "&lt;") in text for text in described)


# Recorded responses


def test_the_newest_group_whose_rewards_differ_is_shown(run):
    same = [(row(sample, reward=1.0), response(3)) for sample in (0, 1)]
    RolloutLog(run.path, "trainer-1", 1 << 20).append(same)
    table = of(Table, responses(run))[0]
    index = RolloutIndex(run.path)
    index.update()
    newest = max(each.time for each in index.rows if each.uid != "new")
    (uid,) = {each.uid for each in index.rows if f"Group {each.uid}." in table.caption}
    members = index.group(uid)
    assert uid != "new" and max(each.time for each in members) == newest
    assert [[cell.value for cell in line[:5]] for line in table.rows] == [
        [each.sample, each.reward, each.advantage, each.tokens, each.staleness] for each in members
    ]


def test_its_response_with_the_highest_reward_is_shown_token_by_token(run):
    RolloutLog(run.path, "trainer-1", 1 << 20).append(
        [(row(0, reward=0.0), response(3)), (row(1, reward=1.0), response(4))]
    )
    (tokens,) = of(Tokens, responses(run))
    assert "Response 1," in tokens.caption and tokens.pieces == ["0 ", "1 ", "2 ", "3 "]
    assert tokens.generated == [True, True, True, False]
    assert list(tokens.shadings) == ["log-prob", "trainer/server gap"]
    assert "log-prob -1.0000 · trainer -0.9000" in tokens.about[1]
    assert tokens.about[3].endswith("not generated")


def test_tokens_that_others_wrote_name_their_writers(run):
    answer = replace(response(4), turns=(Turn(1, 3, "tool", "<b>search"),), mask=Runs.of([1, 0, 0, 1]))
    RolloutLog(run.path, "trainer-1", 1 << 20).append(
        [(row(sample, reward=float(sample)), answer) for sample in (0, 1)]
    )
    section = responses(run)
    (tokens,) = of(Tokens, section)
    assert tokens.generated == [True, False, False, True] and tokens.about[1].endswith("· tool <b>search")
    assert "<b>search" not in rendered(section)[0]


def test_what_is_shown_of_responses_is_bounded(run):
    long = [(row(sample, reward=float(sample)), response(5 * TOKENS)) for sample in range(3 * MEMBERS)]
    RolloutLog(run.path, "trainer-1", 1 << 24).append(long)
    section = responses(run)
    (tokens,) = of(Tokens, section)
    assert len(tokens.pieces) == TOKENS and f"of {5 * TOKENS:,} tokens" in tokens.caption
    assert tokens.about[-1].startswith(f"token {5 * TOKENS - 1} ")
    table = of(Table, section)[0]
    assert len(table.rows) == MEMBERS and f"The first {MEMBERS} of {3 * MEMBERS}." in table.caption
    assert sum(map(len, rendered(section))) < 1_000_000


def test_dropped_groups_are_counted_by_reason(run):
    table = of(Table, responses(run))[-1]
    assert [(line[0], line[1].value, line[2].value) for line in table.rows] == [
        ("reward_failed", STEPS // 4, STEPS // 4)
    ]


def test_a_response_that_cannot_be_read_says_why(run):
    (run.path / "rollouts" / "trainer-0-1.body").unlink()
    section = responses(run)
    assert "cannot be read" in of(Table, section)[0].rows[0][-1] and not of(Tokens, section)


def test_a_run_without_recorded_responses_says_so(tmp_path):
    (text,) = responses(RunFolder(make_run(tmp_path, steps=2, older=True))).blocks
    assert "recorded no responses" in text.text
    assert responses(RunFolder(make_run(tmp_path, "sft", steps=2, supervised=True))).blocks == []


def test_responses_are_text(run, monkeypatch):
    class Hostile:
        def decode(self, ids, skip_special_tokens):
            return HOSTILE * len(ids)

    monkeypatch.setattr("megasync.watch.decoder._tokenizer", lambda path: Hostile())
    (run.path / "export").mkdir()
    section = responses(run)
    assert HOSTILE in of(Verbatim, section)[0].text and HOSTILE[:20] in of(Tokens, section)[0].pieces[0]
    html, markdown = rendered(section)
    assert len(re.findall("<script", html)) == 1 and "&lt;script&gt;" in html
    # In Markdown whole tokens stand in a code block, whose fence is longer than any in the text.
    fences = re.findall("(?m)^`+$", markdown)
    assert len(fences) == 4 and all(one == other and len(one) == 4 for one, other in pairwise(fences))
    outside = re.sub("(?ms)^````$.*?^````$", "", markdown)
    assert "<script" not in outside and "&lt;script&gt;" in outside


def row(sample, reward):
    return IndexRow(
        "new", sample, step=STEPS, version=STEPS, time=BEGIN + 1e6, tokens=3, prompt_tokens=2, reward=reward
    )


def response(count):
    logprobs = -np.arange(count, dtype=np.float32)
    trainer = logprobs + np.float32(0.1)
    mask = Runs.of([1] * (count - 1) + [0])
    ids = np.arange(count, dtype=np.int32)
    return Response(ids[:2], ids, logprobs, mask, Runs.fill(STEPS, count), trainer_logprobs=trainer)

"""A comparison tells what each run reached, what it took, and what differs; it guesses nothing."""

import io
import json

import pytest
from made_runs import BEGIN, STEP_SECONDS, make_run
from rich.console import Console

from megasync.errors import ConfigError
from megasync.watch.comparison import compare, goal_of, label_apart, outcomes, settings_table, terminal, times_to
from megasync.watch.document import Number
from megasync.watch.files import write_document
from megasync.watch.html_page import render_html
from megasync.watch.run_folder import RunFolder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    fast = make_run(folder, "fast", steps=40, total_steps=40)
    slow = make_run(folder, "slow", steps=30, total_steps=60, status="stopped", settings=["schedule.max_staleness=3"])
    return [RunFolder(fast), RunFolder(slow)]


def values(cells):
    return [cell.value if isinstance(cell, Number) else cell for cell in cells]


def row_of(table, *labels):
    return values(next(row for row in table.rows if row[: len(labels)] == labels)[len(labels) :])


def test_outcomes_are_those_of_the_metrics_files(runs):
    table = outcomes(runs)
    assert row_of(table, "Status") == ["finished", "stopped"]
    assert row_of(table, "Trained steps") == [40, 30]
    assert row_of(table, "Held-out score, best") == [1.0, 0.5]
    for label, name in (("Trained tokens", "train/tokens"), ("Reward, last", "train/reward")):
        expected = []
        for run in runs:
            rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
            found = [row[name] for row in rows if row.get(name) is not None]
            expected.append(sum(found) if name == "train/tokens" else found[-1])
        assert row_of(table, label) == pytest.approx(expected)
    assert not any(row[0] == "Loss, last" for row in table.rows)


def test_a_threshold_takes_steps_tokens_and_time_to_the_first_evaluation_that_reached_it(runs):
    table = times_to(runs, goal_of(runs), [0.5])
    assert row_of(table, "0.5", "trained steps") == [20, 30]
    assert row_of(table, "0.5", "trained tokens") == [sum(320 + s for s in range(1, n + 1)) for n in (20, 30)]
    # The first step began when the metrics did.
    assert row_of(table, "0.5", "time") == pytest.approx([20 * STEP_SECONDS, 30 * STEP_SECONDS])


def test_thresholds_of_their_own_span_what_the_runs_did(runs):
    levels = [float(row[0]) for row in times_to(runs, goal_of(runs)).rows]
    assert levels == sorted(levels) and levels[0] > 0 and levels[-1] <= 1


def test_less_loss_is_better(tmp_path):
    runs = [RunFolder(make_run(tmp_path, name, supervised=True, seed=n)) for n, name in enumerate("ab")]
    goal = goal_of(runs)
    assert goal.name == "sft/validation_loss" and not goal.more
    assert row_of(times_to(runs, goal, [1.5]), "1.5", "trained steps") == [10, 10]
    assert row_of(outcomes(runs), "Validation loss, best") == [1.0, 1.0]


def test_only_keys_that_differ_are_listed_with_their_default(runs):
    table = settings_table(runs)
    assert [tuple(row) for row in table.rows] == [
        ("schedule.total_steps", "40", "60", "100"),
        ("schedule.max_staleness", "1", "3", "1"),
    ]


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [RunFolder(make_run(tmp_path / place, "run", steps=1)) for place in ("a", "b")]
    label_apart(runs)
    assert [run.name for run in runs] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]
    with pytest.raises(ConfigError, match="named twice"):
        label_apart([runs[0], RunFolder(runs[0].path)])


def test_a_terminal_shows_the_tables(runs):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(terminal(compare(runs)))
    text = console.export_text()
    assert "schedule.max_staleness" in text and "never" in text and "By their best held-out score: fast" in text


def test_a_comparison_is_a_page_and_markdown(runs, tmp_path):
    text = render_html(compare(runs))
    assert "fast and slow" in text and 'aria-label="Mean reward in training, and held-out scores, by time.' in text
    assert (
        "schedule.max\\_staleness" in write_document(compare(runs), tmp_path / "c.md", "c", markdown=True).read_text()
    )


def test_runs_that_measured_nothing_can_be_compared(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    empty = RunFolder(tmp_path / "empty")
    document = compare([runs[0], empty])
    assert row_of(document.sections[0].blocks[0], "Trained steps") == [40, 0]
    assert any(note.startswith("empty: ") for note in document.notes)
    assert compare([empty, RunFolder(tmp_path)]).abstract == "None of the runs has measured anything yet."
    assert runs[0].start == BEGIN + 10

"""The display shows the state of a run, with or without a terminal, and never hides a warning."""

import logging
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megasync.observe.display import (
    BLOCKS,
    Activity,
    LiveDisplay,
    RunSnapshot,
    duration,
    line,
    sparkline,
    view,
)

SNAP = RunSnapshot(
    name="quickstart",
    run_dir=Path("runs/quickstart-1"),
    step=12,
    total_steps=300,
    version=11,
    seconds=75,
    step_seconds=2.0,
    rewards=(0.1, None, 0.4),
    scores=((0, 0.0), (10, 0.25)),
    target=0.9,
    trained_rate=1234.5,
    sampled_rate=2000.0,
    staleness_mean=0.5,
    staleness_max=1.0,
    staleness_limit=1,
    buffer={"generating": 12, "finished": 4},
    capacity=32,
    activities=(Activity("trainer", "waiting for groups", 42.0),),
    messages=("held-out score 0.250 after step 10",),
)
EMPTY = RunSnapshot(name="new", run_dir=Path("runs/new"), step=0, total_steps=10, version=0, seconds=0.4)


def rendered(snapshot, width=110):
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(view(snapshot))
    return text.getvalue()


def console(terminal):
    text = StringIO()
    return Console(file=text, width=110, force_terminal=terminal, color_system=None), text


def test_the_view_shows_the_whole_snapshot():
    text = rendered(SNAP)
    for part in (
        "step 12 of 300",
        "1m 15s elapsed",
        "9m 36s left",
        "version 11",
        "0.400",
        "0.250",
        "stops above 0.9",
        "2,000 sampled",
        "1,234 trained",
        "0.50 mean, 1 max, limit 1",
        "16 of 32 groups",
        "12 generating, 4 finished",
        "waiting for groups",
        "42s",
        "held-out score 0.250 after step 10",
        "runs/quickstart-1",
    ):
        assert part in text, part


def test_unknown_values_are_not_shown_as_zero():
    text = rendered(EMPTY)
    assert "at most - left" in text and "- sampled, - trained" in text and "0.000" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_view_fits_any_terminal_width(width):
    assert all(len(row) <= width for row in rendered(SNAP, width).splitlines())


def test_markup_in_messages_is_shown_literally():
    snapshot = RunSnapshot(
        **{name: getattr(SNAP, name) for name in SNAP.__slots__} | {"messages": ("[red]x[/red] [/]",)}
    )
    assert "[red]x[/red] [/]" in rendered(snapshot)


def test_without_a_terminal_the_display_prints_one_plain_line_per_step():
    target, text = console(terminal=False)
    with LiveDisplay(lambda: SNAP, console=target) as display:
        display.step()
        display.message("checkpoint: [somewhere]")
    assert text.getvalue() == line(SNAP) + "\ncheckpoint: [somewhere]\n"
    assert "step 12/300" in line(SNAP) and "reward 0.400" in line(SNAP)


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_and_errors_are_printed_in_full(terminal):
    target, text = console(terminal)
    log = logging.getLogger("megasync.somewhere")
    with LiveDisplay(lambda: SNAP, console=target):
        log.warning("server 1 answered late: %s", "x" * 300)
        log.error("it failed", exc_info=ValueError("the cause"))
        log.info("not for the screen")
    shown = text.getvalue().replace("\n", "")
    assert "x" * 300 in shown and "the cause" in shown and "not for the screen" not in shown
    assert not [h for h in logging.getLogger("megasync").handlers if type(h).__name__ == "_ConsoleHandler"]


def test_an_error_in_the_run_propagates_through_the_display_and_leaves_the_last_view():
    target, text = console(terminal=True)
    with pytest.raises(RuntimeError, match="died"), LiveDisplay(lambda: SNAP, console=target):
        raise RuntimeError("a server died")
    assert "step 12 of 300" in text.getvalue()


def test_a_sparkline_scales_to_its_own_range_and_keeps_gaps():
    assert sparkline([0, 1]) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([0, None, float("nan"), 1]) == f"{BLOCKS[0]}  {BLOCKS[-1]}"
    assert sparkline([5, 5, 5]) == BLOCKS[0] * 3
    assert sparkline([]) == sparkline([None]) == ""


@given(st.lists(st.none() | st.floats(-1e300, 1e300), max_size=80))
def test_a_sparkline_accepts_any_finite_values_and_has_a_bounded_width(values):
    assert len(sparkline(values)) <= 32


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.9, "59s"), (125, "2m 05s"), (11220, "3h 07m")])
def test_durations_are_formatted_as_hours_minutes_and_seconds(seconds, text):
    assert duration(seconds) == text

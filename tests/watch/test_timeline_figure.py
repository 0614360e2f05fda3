"""The figure of a timeline: every bar and mark in its place, and nothing that a run recorded as markup."""

from itertools import pairwise

import pytest

from megasync.watch.spans import Span
from megasync.watch.timeline import Timeline
from megasync.watch.timeline_figure import COLOURS, SCORING, SYNC, TRAINING, figure_of, milliseconds, parsed


def figure(*spans):
    found = Timeline()
    found.add(spans)
    return figure_of(found.picture(0.0, 10.0))


def test_rows_do_not_overlap_and_have_their_names():
    drawn = figure(
        Span("driver", "trainer", 0, "train", 1.0, 3.0),
        Span("driver", "trainer", 0, "train", 2.0, 4.0),
        Span("trainer-0", "rank", 0, "load", 1.0, 2.0),
    )
    train, load = drawn["data"]
    places = [
        (y - width / 2, y + width / 2)
        for y, width in zip(train["y"] + load["y"], train["width"] + load["width"], strict=True)
    ]
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert drawn["layout"]["yaxis"]["ticktext"] == ["driver<br>trainer", "trainer-0<br>rank"]
    assert train["base"] == [milliseconds(1.0), milliseconds(2.0)]
    assert train["x"] == [2000.0, 2000.0]


def test_a_colour_has_one_meaning():
    drawn = figure(
        Span("driver", "trainer", 0, "train", 1.0, 3.0),
        Span("trainer-0", "rank", 0, "optimizer", 2.0, 3.0),
        Span("driver", "sync", 0, "a phase without a colour", 3.0, 4.0),
        Span("driver", "tool", 0, "<script>", 3.0, 4.0),
    )
    looks = {bars["name"]: bars["marker"]["color"] for bars in drawn["data"]}
    assert looks == {name: COLOURS[name] for name in (TRAINING, SYNC, SCORING)}
    assert len({*COLOURS.values()}) == len(COLOURS)
    assert all("<script" not in text for bars in drawn["data"] for text in bars["hovertext"])


@pytest.mark.parametrize("moment", [1795566214.25, 1782000000.0])
def test_a_window_that_the_browser_reports_is_the_one_that_was_drawn(moment):
    assert parsed(milliseconds(moment)) == pytest.approx(moment)

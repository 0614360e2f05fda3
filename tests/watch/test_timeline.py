"""A picture is bounded and true to its spans; the phases of a step add up; a group is followed across processes."""

import random

import pytest

from megasync.watch.spans import Span
from megasync.watch.timeline import OTHER, Timeline


def span(process, track, name, start, end, **args):
    return Span(process, track, 0, name, start, end, args)


def timeline(*spans):
    found = Timeline()
    found.add(spans)
    return found


def row(picture, process, track):
    return next(row for row in picture.rows if (row.process, row.track) == (process, track))


def test_what_probes_learn_of_a_server_is_a_row_of_that_server():
    spans = [span("driver", f"server-{n}", "generating", at, at + 2.0, running=4) for n in (0, 1) for at in (0.0, 2.0)]
    found = timeline(*spans, span("driver", "trainer", "train", 1.0, 3.0)).picture(0.0, 4.0)
    assert [(each.process, len(each.bars)) for each in found.rows] == [("driver", 1), ("server-0", 2), ("server-1", 2)]


def test_bars_of_a_row_do_not_overlap():
    rng = random.Random(3)
    spans = [
        span("driver", "generate", "g", at, at + rng.random() * 3) for at in (rng.random() * 40 for _ in range(60))
    ]
    bars = row(timeline(*spans).picture(0.0, 50.0), "driver", "generate").bars
    assert len(bars) == 60
    for one in bars:
        for other in bars:
            apart = one.end <= other.start or other.end <= one.start or one.high <= other.low or other.high <= one.low
            assert one is other or apart


@pytest.mark.parametrize("window", [(0.0, 1000.0), (10.0, 40.0), (500.0, 500.5)])
def test_a_picture_is_bounded_however_many_spans_there_are(window):
    rng = random.Random(1)
    spans = [
        span(f"worker-{n % 40}", track, "g", at, at + rng.random())
        for n in range(3000)
        for track in ("group", "generate")
        for at in [rng.random() * 1000]
    ]
    found = timeline(*spans).picture(*window, most=200)
    assert len(found.rows) == 2
    assert 0 < sum(len(row.bars) for row in found.rows) <= 200


def test_a_density_is_as_high_as_spans_were_in_progress():
    spans = [span("driver", "generate", "g", 0.0, 10.0) for _ in range(30)]
    spans += [span("driver", "generate", "g", 5.0, 10.0) for _ in range(30)]
    found = row(timeline(*spans).picture(0.0, 10.0, most=10), "driver", "generate")
    assert found.density and found.peak == pytest.approx(60.0)
    assert [bar.high for bar in found.bars] == pytest.approx([0.5] * 5 + [1.0] * 5)
    assert found.bars[0].count == 30 and found.bars[-1].count == 60


def test_zooming_in_turns_a_density_into_spans():
    found = timeline(*(span("driver", "tool", "t", n, n + 0.5) for n in range(1000)))
    assert row(found.picture(0.0, 1000.0, most=100), "driver", "tool").density
    near = row(found.picture(10.0, 20.0, most=100), "driver", "tool")
    assert not near.density and len(near.bars) == 10


STEPS = (
    span("driver", "trainer", "wait for groups", 0.0, 4.0, step=1),
    span("driver", "trainer", "train", 5.0, 7.0, step=1),
    span("driver", "trainer", "publish", 7.0, 8.0, step=1, version=1),
    span("driver", "trainer", "checkpoint", 8.0, 8.5, step=1),
    span("driver", "trainer", "wait for groups", 8.5, 9.0, step=2),
    span("driver", "trainer", "train", 9.0, 12.0, step=2),
    span("driver", "trainer", "publish", 12.0, 14.0, step=2, version=2),
)


def test_the_phases_of_a_step_add_up_to_its_duration():
    first, second = timeline(*reversed(STEPS)).steps()
    assert (first.number, first.start, first.end) == (1, 0.0, 8.0)
    assert first.phases == {"wait for groups": 4.0, OTHER: 1.0, "train": 2.0, "publish": 1.0}
    assert (second.number, second.start, second.end) == (2, 8.0, 14.0)
    assert second.phases == {"checkpoint": 0.5, "wait for groups": 0.5, "train": 3.0, "publish": 2.0}


def test_a_restart_counts_into_the_step_that_is_trained_next():
    found = timeline(
        span("driver", "trainer", "train", 0.0, 2.0, step=2),
        span("driver", "trainer", "publish", 2.0, 3.0, step=2),
        span("driver", "trainer", "restart", 3.0, 8.0),
        span("driver", "trainer", "publish", 8.0, 9.0, step=1),
        span("driver", "trainer", "train", 9.0, 10.0, step=2),
    )
    first, again = found.steps()
    assert first.phases == {"train": 2.0, "publish": 1.0}
    assert again.phases == {"restart": 5.0, "publish": 1.0, "train": 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_phases_add_up_whatever_the_spans(seed):
    rng = random.Random(seed)
    names = ("train", "publish", "wait for groups", "restart")
    found = timeline(
        *(
            span("driver", "trainer", rng.choice(names), at, at + rng.random() * 4, step=n)
            for n, at in enumerate(range(50))
        )
    )
    for step in found.steps():
        assert sum(step.phases.values()) == pytest.approx(step.seconds)


def test_a_group_is_followed_from_its_prompt_to_its_version():
    found = timeline(
        *STEPS,
        span("worker-0", "generate", "generate", 0.0, 2.0, uid="0:1", sample=0),
        span("worker-0", "generate", "generate", 1.0, 2.5, uid="0:1", sample=1),
        span("worker-0", "reward", "math", 2.5, 3.0, uid="0:1"),
        span("worker-0", "group", "group", 0.0, 3.0, uid="0:1", outcome="committed"),
        span("driver", "buffer", "finished", 3.0, 9.0, uid="0:1", step=2),
        span("worker-1", "generate", "generate", 0.0, 2.0, uid="0:2"),
    )
    life = found.life("0:1")
    assert (life.step, life.outcome) == (2, "committed")
    assert life.phases == {"generate": 2.5, "reward": 0.5, "buffer": 6.0, "train": 3.0, "publish": 2.0}
    assert found.groups_of(2) == ["0:1"] and found.groups_of(1) == []
    assert found.life("0:3") is None


def test_faults_and_recoveries_are_marks():
    found = timeline(
        Span("driver", "faults", 0, "rank 1", 4.0, 4.0, {"kind": "fault", "text": "it died"}),
        Span("driver", "faults", 0, "rank 1", 6.0, 6.0, {"kind": "recovery", "text": "restarted"}),
    )
    marks = found.picture(0.0, 5.0).marks
    assert [(mark.time, mark.kind, mark.what, mark.text) for mark in marks] == [(4.0, "fault", "rank 1", "it died")]

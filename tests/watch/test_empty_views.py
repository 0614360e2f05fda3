"""Views of runs that have little or nothing to show say why, and one that failed says so first, in one folded line."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from made_runs import make_run
from nicegui import ui
from nicegui.testing import user_simulation

from megasync.config import SERVICE_FOLDER
from megasync.observe.events import END, EventLog
from megasync.observe.state_file import ModelState, TenantState, read_state, write_state
from megasync.watch import figures
from megasync.watch.page import VIEWS
from megasync.watch.run_folder import RunFolder
from megasync.watch.view import Place

# Tenths of a second: traces are read in threads.
LONG = 300
ALONE = [name for name, view in VIEWS.items() if not view.across]
FIRST_STEP = "they come with the first trained step"
NO_STEP = "this run ended before its first step"
UNMEASURED = "This run has measured no"
KINDS = {
    "begun": {"steps": 0, "status": "running", "rollouts": False},
    "ended": {"steps": 0, "status": "failed", "rollouts": False},
    "supervised": {"steps": 3, "supervised": True},
    "served": {"steps": 2, "rollouts": False},
    "silent": {"steps": 2, "rollouts": False, "settings": ["observe.trace=false", "observe.rollouts=0"]},
}


@contextmanager
def made(folder, kind) -> Iterator[RunFolder]:
    run_dir = make_run(folder, **KINDS[kind])
    with (run_dir / "driver.lock").open() as lock:
        if kind == "served":
            (run_dir / SERVICE_FOLDER).mkdir()
        if KINDS[kind].get("status") == "running":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield RunFolder(run_dir)


async def opened(user, run, name):
    @ui.page("/view")
    def page():
        VIEWS[name].build(run, Place(name, "run", ("run",), {}))

    await user.open("/view")


def words(user) -> list[str]:
    """The texts and labels that are shown, from the top."""
    found = []
    for element in user.client.elements.values():
        if all(part.visible for part in (element, *element.ancestors())):
            found += [getattr(element, "text", None), element.props.get("label")]
    return [word for word in found if isinstance(word, str) and word]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("kind", "view", "told", "absent"),
    [
        ("begun", "overview", f"No times of steps yet: {FIRST_STEP}.", "Trainer"),
        ("begun", "timeline", "No trace yet: it comes with what the processes do first.", "previous step"),
        ("begun", "rollouts", "No responses yet: they come with the first trained step", "text contains"),
        ("begun", "weights", f"No gaps, norms or shares yet: {FIRST_STEP}.", "KL of servers"),
        ("begun", "faults", f"No counts yet: {FIRST_STEP}.", "All are zero."),
        ("ended", "overview", f"No times of steps: {NO_STEP}.", "yet"),
        ("ended", "timeline", "This run has no trace: trace/ is missing or empty.", "previous step"),
        ("ended", "rollouts", "This run has recorded no responses: rollouts/ is missing or empty.", "text contains"),
        ("ended", "weights", f"No gaps, norms or shares: {NO_STEP}.", "KL of servers"),
        ("supervised", "rollouts", "A supervised run generates no responses", "text contains"),
        ("supervised", "weights", "Gradient norm", "Log-prob gap"),
        ("supervised", "faults", f"{UNMEASURED} counts.", "Prompts lost"),
        ("supervised", "timeline", "This run has no trace: trace/ is missing or empty.", "previous step"),
        ("served", "overview", "No tenant is known", "Buffer"),
        ("served", "rollouts", "A service records no responses", "text contains"),
        ("served", "faults", "All are zero.", "Prompts lost"),
        ("silent", "timeline", "This run has no trace: observe.trace is false.", "previous step"),
        ("silent", "rollouts", "This run has recorded no responses: observe.rollouts is 0.", "text contains"),
    ],
)
async def test_a_view_without_anything_to_show_says_why(tmp_path, kind, view, told, absent):
    with made(tmp_path, kind) as run:
        async with user_simulation() as user:
            await opened(user, run, view)
            await user.should_see(told, retries=LONG)
            assert not [word for word in words(user) if absent in word]


@pytest.mark.every(5)
@pytest.mark.parametrize("view", ALONE)
async def test_every_view_of_a_failed_run_begins_with_the_reason_in_one_line(tmp_path, view):
    run_dir = make_run(tmp_path, steps=3, status="failed")
    reason = "ServerError: the router was not ready\n" + "\n".join(f"line {number} of its log" for number in range(50))
    state = read_state(run_dir)
    assert state is not None
    write_state(run_dir, msgspec.structs.replace(state, reason=reason))
    async with user_simulation() as user:
        await opened(user, RunFolder(run_dir), view)
        await user.should_see("Run failed: ServerError: the router was not ready")
        (log,) = user.find(content="line 49 of its log").elements
        assert log.parent_slot.parent.tag == "details"
        notices = [element for element in user.client.elements.values() if "notice" in element.classes]
        assert len(notices) == 1 and words(user)[0] == "Run failed: ServerError: the router was not ready"


def test_a_run_of_one_step_is_drawn_as_points_at_that_step(tmp_path):
    run = RunFolder(make_run(tmp_path, steps=1))
    figure = figures.throughput(run)
    assert figure is not None
    assert [trace.mode for trace in figure.data] == ["lines+markers"] * 2
    assert (figure.layout.xaxis.range, figure.layout.xaxis.dtick) == ((0.5, 1.5), 1)


async def test_the_end_of_a_run_is_named_among_its_messages(tmp_path):
    run_dir = make_run(tmp_path, steps=2)
    events = EventLog(run_dir)
    events.write(END, "", status="finished")
    events.close()
    async with user_simulation() as user:
        await opened(user, RunFolder(run_dir), "overview")
        await user.should_see("run finished")


async def test_the_overview_of_a_service_lists_tenants_and_their_models(tmp_path):
    run_dir = make_run(tmp_path, steps=2, rollouts=False)
    (run_dir / SERVICE_FOLDER).mkdir()
    state = read_state(run_dir)
    assert state is not None
    model = ModelState(name="model-1", rank=8, steps=41, loss=0.25, waiting=2, waited=2.0)
    tenant = TenantState(
        name="<b>lab</b>", models=[model], steps=41, promises=3, tokens_in_flight=1200, rate=512.0, disk_bytes=10**9
    )
    write_state(run_dir, msgspec.structs.replace(state, tenants=[tenant]))
    async with user_simulation() as user:
        await opened(user, RunFolder(run_dir), "overview")
        for shown in ("<b>lab</b>", "<b>lab</b> model-1", "3 (1.20k tokens)", "512", "2 s", "1.0 GB", "0.250"):
            await user.should_see(shown, retries=LONG)

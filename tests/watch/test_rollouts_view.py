"""The view of recorded responses: it pages, filters and searches on the server, and shows text as text."""

import pytest
from made_runs import HOSTILE, make_run
from nicegui import ui
from nicegui.testing import user_simulation
from nicegui.testing.user_interaction import UserInteraction

from megasync.observe.rollouts import RolloutLog, recorded
from megasync.trajectory import Line, Trajectory
from megasync.watch.elements import Text
from megasync.watch.run_folder import RunFolder
from megasync.watch.view import Place
from megasync.watch.views import rollouts

# Two groups of two responses in each of 20 steps, and 5 that were dropped.
TRAINED, DROPPED = 80, 5
# Tenths of a second: responses are read in threads.
LONG = 300


@pytest.fixture
def run(tmp_path):
    return RunFolder(make_run(tmp_path, steps=20, settings=["model.path=/no/such/model"]))


async def opened(user, run, **query):
    views = []

    @ui.page("/view")
    def page():
        views.append(rollouts.build(run, Place("rollouts", "run", ("run",), query)))

    await user.open("/view")
    return views


def choose(user, content):
    """Clicks on the first row with this text."""
    cells = [cell for cell in user.find(content=content, kind=Text).elements if cell.text == content]
    cell = min(cells, key=lambda cell: cell.id)
    UserInteraction(user, {cell.parent_slot.parent}, None).click()


async def test_rows_come_in_pages(run):
    async with user_simulation() as user:
        await opened(user, run)
        await user.should_see(f"{TRAINED + DROPPED} of {TRAINED + DROPPED} recorded responses")
        await user.should_see("page 1 of 4")
        user.find("older").click()
        await user.should_see("page 2 of 4")


async def test_the_group_in_the_address_is_that_group_alone(run):
    async with user_simulation() as user:
        (view,) = await opened(user, run, uid="0:4")
        await user.should_see(f"2 of {TRAINED + DROPPED} recorded responses")
        view.__self__._uid.value = "0:4*"
        # 0:4, 0:40, 0:41, 0:44, 0:45, 0:48 and 0:49
        await user.should_see(f"14 of {TRAINED + DROPPED} recorded responses")


async def test_dropped_responses_tell_why(run):
    async with user_simulation() as user:
        await opened(user, run, dropped="reward_failed")
        await user.should_see(f"{DROPPED} of {TRAINED + DROPPED} recorded responses")
        choose(user, "1:20")
        await user.should_see("ValueError: no answer", retries=LONG)


async def test_a_response_is_shown_with_its_group_and_as_text(run):
    async with user_simulation() as user:
        await opened(user, run, uid="0:4")
        choose(user, "0:4")
        await user.should_see("Group 0:4 side by side", retries=LONG)
        await user.should_see(HOSTILE.replace("\u2028", "\ufffd"))
        await user.should_see(f"answer 1 {HOSTILE}".replace("\u2028", "\ufffd"))
        await user.should_see("Tokens are shown by their ids")
        assert not [element for element in user.client.elements.values() if isinstance(element, ui.html)]


async def test_the_lines_of_a_sample_are_a_tree_that_opens_them(run):
    lines = [Line("sub-agent", "new", 0, None, 1, 2), Line("final", "<b>new", 1, None, 0, 3)]
    written = [
        recorded("9:9", place, Trajectory([1], [5], [1], [-0.5], [0], sample=4, line=line), step=1, version=1, time=1e9)
        for place, line in enumerate(lines)
    ]
    RolloutLog(run.path, "worker-1", 1 << 20).append(written)
    run.rollouts.update()
    async with user_simulation() as user:
        (view,) = await opened(user, run, uid="9:9")
        choose(user, "9:9")
        await user.should_see("Lines of sample 4 of group 9:9", retries=LONG)
        await user.should_see("2 lines, 4 answers")
        await user.should_see("<b>new")
        shown = view.__self__._open.sample
        answers = ("answers 2 to 3", "answers 1 to 4")
        choose(user, f"response {1 - shown}, {answers[1 - shown]}, 1 token")
        await user.should_see(f"Response: group 9:9, response {1 - shown}", retries=LONG)


async def test_a_long_response_comes_in_portions(run, monkeypatch):
    monkeypatch.setattr(rollouts, "PORTION", 3)
    async with user_simulation() as user:
        (view,) = await opened(user, run, uid="0:4")
        tokens = view.__self__._rows[0].tokens
        choose(user, "0:4")
        await user.should_see(f"show more, {tokens - 3} tokens are left", retries=LONG)
        user.find("show more").click()
        await user.should_see(f"show more, {tokens - 6} tokens are left", retries=LONG)
        await user.should_not_see(f"show more, {tokens - 3} tokens are left")


async def test_every_filter_can_stand_in_the_address(run):
    query = {"reward": "0.2..0.9", "length": "5..", "staleness": "1", "set": "train", "dropped": "trained"}
    async with user_simulation() as user:
        (view,) = await opened(user, run, **query)
        filters = view.__self__.filters()
        assert (filters.reward, filters.length, filters.staleness) == ((0.2, 0.9), (5, None), (1, 1))
        assert (filters.set, filters.dropped) == ("train", "trained")
        (view,) = await opened(user, run, reward="nonsense..inf", step="")
        assert view.__self__.filters().reward is None and view.__self__.filters().step is None

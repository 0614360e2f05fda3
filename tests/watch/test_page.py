"""The page of `megasync watch` in a real browser, on runs that are live, finished, crashed, half written and old."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import watched_run
from browser import number, reading
from made_runs import BEGIN, step_metrics
from playwright.sync_api import Page, expect
from watch_process import Watch

from megasync.observe.events import MESSAGE, EventLog
from megasync.observe.metrics import MetricsLog
from megasync.observe.rollouts import FOLDER as ROLLOUTS
from megasync.observe.rollouts import RolloutLog, recorded
from megasync.trajectory import ANSWER, Call, Trajectory, Turn

pytestmark = pytest.mark.processes

FINISHED, CRASHED, HALF, OLD, LIVE = "digits-1", "digits-2", "half-3", "old-4", "live-5"
CALL = '{"a": 1, "b": 2}'
MARKUP = "<img src=x onerror=\"document.title='broken'\">"

DIALOGUE = (
    (Turn(0, 1, ANSWER, calls=(Call("add", CALL),)), f"So <tool_call>{CALL}</tool_call><eos>"),
    (Turn(0, 1, "tool", "add"), f"<bos>tool: 3 {MARKUP}"),
    (Turn(0, 1, "user"), "<eos><bos>user: Sure?<eos><bos>assistant: "),
    (Turn(0, 1, ANSWER), "three\n\nand no more<eos>"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of runs in every state."""
    folder = tmp_path_factory.mktemp("runs")
    watched_run.add_faults(watched_run.finished_run(folder / FINISHED, 60))
    events = EventLog(folder / FINISHED)
    events.write(MESSAGE, MARKUP, at=BEGIN + 61)
    events.close()
    watched_run.add_dialogue(folder / FINISHED, DIALOGUE)
    watched_run.finished_run(folder / CRASHED, 40, 200, "running")
    half = folder / HALF
    half.mkdir()
    row = {"step": 7, "time": BEGIN} | step_metrics(7, np.random.default_rng(0))
    whole = json.dumps(row) + "\n"
    (half / "metrics.jsonl").write_text(whole + whole[: len(whole) // 2])
    old = watched_run.finished_run(folder / OLD, 30)
    for later in ("state.json", "events.jsonl", "ledger.db"):
        (old / later).unlink()
    return folder


@pytest.fixture(scope="module")
def watch(folder) -> Iterator[Watch]:
    watch = Watch(folder, "--port", "0")
    yield watch
    watch.end()


@pytest.fixture
def live(folder) -> Iterator[subprocess.Popen]:
    command = [sys.executable, watched_run.__file__, str(folder / LIVE), "100000", "0.5"]
    driver = subprocess.Popen(command)
    yield driver
    driver.kill()
    driver.wait()


# Where the first curve of the first chart ends.
LAST_POINT = "document.querySelector('.js-plotly-plot')._fullData[0].x.at(-1)"


def _x_of_last_point(page: Page) -> float:
    page.wait_for_function("document.querySelector('.js-plotly-plot .main-svg')")
    return page.evaluate(LAST_POINT)


def logged(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if row.get(name) is not None]


@pytest.mark.matrix
def test_the_numbers_are_those_of_the_metrics_file(open_page, watch, folder):
    page = open_page(watch.of("overview", FINISHED))
    assert number(page, "Step") == 60
    for name, metric in {
        "Reward": "train/reward",
        "Held-out score": "eval/score",
        "Generated": "rollout/tokens_per_second",
        "Staleness": "train/staleness_mean",
    }.items():
        shown = reading(page, name).locator("span").first.inner_text()
        latest = logged(folder / FINISHED, metric)[-1]
        scale = 1000 if shown.endswith("k") else 1
        assert float(shown.rstrip("k")) * scale == pytest.approx(latest, rel=6e-3)
    expect(page.locator(".bar .chip")).to_have_text("finished")


def test_a_live_run_moves_on_and_its_death_is_reported(open_page, watch, live):
    page = open_page(watch.of("overview"))
    expect(page.locator("body")).to_be_visible()
    # The run may not be there yet when the page is asked for it.
    expect(page.locator(".bar .chip")).not_to_have_text("")
    _wait_for_run(page, watch)
    expect(page.locator(".bar .chip")).to_have_text("running")
    first = number(page, "Step")
    page.wait_for_function(
        "first => parseFloat(document.querySelector('.reading .value span').textContent) > first", arg=first
    )
    expect(page.get_by_text("waiting for groups").first).to_be_visible()
    live.send_signal(signal.SIGKILL)
    live.wait()
    expect(page.locator(".bar .chip")).to_have_text("crashed")
    expect(page.locator(".notice.bad")).to_contain_text("The driver of this run is gone")


def _wait_for_run(page: Page, watch: Watch) -> None:
    for _ in range(120):
        page.goto(watch.of("overview", LIVE))
        page.wait_for_selector(".page")
        if page.locator(".bar .chip").count() and page.locator(".bar .chip").inner_text() == "running":
            return
        page.wait_for_timeout(500)
    raise AssertionError("the live run does not appear on the page")


@pytest.mark.matrix
def test_a_half_written_folder_shows_what_there_is_and_names_what_is_missing(open_page, watch):
    page = open_page(watch.of("overview", HALF))
    assert number(page, "Step") == 7
    expect(page.get_by_text("There is no config.yaml")).to_be_visible()
    expect(page.get_by_text("The last line of metrics.jsonl is torn")).to_be_visible()


@pytest.mark.matrix
def test_faults_have_their_times_and_the_ledger_balances(open_page, watch):
    page = open_page(watch.of("faults", FINISHED))
    assert number(page, "Faults") == 4
    row = page.locator("tr", has_text="signal 9")
    expect(row).to_contain_text("server-0")
    expect(row).to_contain_text("6.7 s")
    expect(page.locator("tr", has_text="probes")).to_contain_text("never")
    expect(page.locator(".verdict")).to_contain_text("260 admitted = 240 trained + 15 dropped + 5 live")
    page.get_by_text("No progress for 600 s.").click()
    expect(page.locator("details[open] pre")).to_contain_text("trainer: waiting for groups")


@pytest.mark.matrix
def test_the_gaps_of_the_weights_are_by_age(open_page, watch, folder):
    page = open_page(watch.of("weights", FINISHED))
    assert number(page, "Gradient norm") == pytest.approx(logged(folder / FINISHED, "train/grad_norm")[-1], rel=6e-3)
    table = page.locator(".card", has_text="KL of servers against trainer")
    expect(table.locator("tbody tr")).to_have_count(2)


@pytest.mark.matrix
def test_number_keys_choose_views_and_going_back_returns(open_page, watch):
    page = open_page(watch.of("overview", FINISHED))
    current = page.locator(".tabs a[aria-current=page]")
    second = page.locator(".tabs a").nth(1).inner_text()
    page.keyboard.press("2")
    expect(current).to_have_text(second)
    page.go_back()
    expect(current).to_have_text("Overview")
    page.keyboard.press("0")
    expect(page.get_by_text("choose several to see them side by side")).to_be_visible()


@pytest.mark.matrix
@pytest.mark.parametrize("view", ["overview", "rollouts", "weights", "faults", ""])
def test_a_narrow_window_does_not_scroll_sideways(open_page, watch, view):
    page = open_page(watch.of(view, FINISHED), width=390)
    page.wait_for_selector("section")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.matrix
def test_the_list_tells_runs_apart_and_opens_several_side_by_side(open_page, watch):
    page = open_page(watch.of(""))
    row = page.locator("tr", has=page.get_by_text(FINISHED, exact=True))
    expect(row).to_contain_text("60 / 60")
    expect(row.locator(".chip")).to_have_text("finished")
    expect(page.locator("tr", has_text=CRASHED).locator(".chip")).to_have_text("crashed")
    for name in (FINISHED, CRASHED):
        page.get_by_label(f"Choose {name}").check()
    page.get_by_text("Open 2 side by side").click()
    expect(page.locator(".run-column")).to_have_count(2)
    for head, name in zip(page.locator(".run-head").all(), (FINISHED, CRASHED), strict=True):
        expect(head).to_contain_text(name)


@pytest.mark.matrix
def test_the_comparison_has_the_outcomes_of_each_run_and_turns_its_curves_to_another_axis(open_page, watch, folder):
    page = open_page(watch.of("compare", FINISHED, CRASHED))
    cells = {
        row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()[1:]
        for row in page.locator(".card", has_text="Outcomes").locator("tbody tr").all()
    }
    assert cells["Status"] == ["finished", "crashed"]
    assert cells["Trained steps"] == ["60", "40"]
    for at, name in enumerate((FINISHED, CRASHED)):
        scores = logged(folder / name, "eval/score")
        assert float(cells["Held-out score, last"][at]) == pytest.approx(scores[-1], abs=1e-3)
        assert float(cells["Reward, best"][at]) == pytest.approx(max(logged(folder / name, "train/reward")), abs=1e-3)
    took = page.locator(".card", has_text="What it took").locator("tbody tr")
    expect(took.first).to_contain_text("trained steps")
    expect(page.locator(".card", has_text="Settings that differ")).to_contain_text("schedule.total_steps")
    assert _x_of_last_point(page) == 60
    page.get_by_role("button", name="Tokens").click()
    page.wait_for_function(f"{LAST_POINT} !== 60")
    assert _x_of_last_point(page) == pytest.approx(sum(logged(folder / FINISHED, "train/tokens")), rel=1e-6)


def test_text_of_a_run_is_not_markup(open_page, watch):
    page = open_page(watch.of("overview", FINISHED))
    expect(page.get_by_text(MARKUP)).to_be_visible()
    assert "broken" not in page.title()


@pytest.mark.matrix
def test_turns_and_tool_calls_are_folded_and_named(open_page, watch):
    page = open_page(watch.of("rollouts", FINISHED))
    page.locator("tr.open", has_text="0:1").first.click()
    blocks = page.locator(".tokens > * > details")
    expect(blocks).to_have_count(4)
    answer, tool, user, last = blocks.all()
    for block, beginning in (
        (answer, "answer, 43 tokens: So"),
        (tool, "tool add, "),
        (user, "user, "),
        (last, "answer, "),
    ):
        expect(block.locator("> summary")).to_contain_text(beginning)
    # The last answer is open, and with the keyboard so is any other turn.
    expect(last.locator("pre")).to_have_text("three↵\n↵\nand no more<eos>")
    expect(tool.locator("pre")).to_have_count(0)
    tool.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(tool.locator("pre")).to_have_text(f"<bos>tool: 3 {MARKUP}")
    expect(tool.locator("pre span[title^='token 43 ']")).to_be_visible()
    answer.locator("> summary").click()
    call = answer.locator("details")
    expect(call.locator("summary")).to_have_text(f"add({CALL})")
    expect(call.locator("pre")).to_have_count(0)
    call.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(call.locator("pre")).to_have_text(CALL)
    page.keyboard.press("Enter")
    expect(call.locator("pre")).to_be_hidden()
    assert "broken" not in page.title()


# The elements of the table that moved within it, or with it.
SHIFTED = """() => {
  window.shifted = [];
  const note = entries => entries.forEach(entry => entry.sources.forEach(source => {
    const element = source.node?.parentElement?.closest(".responses, .pager");
    if (element) shifted.push(source.node.textContent);
  }));
  const observer = new PerformanceObserver(list => note(list.getEntries()));
  observer.observe({type: "layout-shift"});
  window.shiftedUntilNow = () => { note(observer.takeRecords()); return shifted; };
}"""
# Where the cells of a group's row are, and how large.
CELLS = """uid => [...[...document.querySelectorAll("tr.open")].find(row => row.children[1].innerText === uid).children]
  .map(cell => cell.getBoundingClientRect()).map(box => [box.x, box.width, box.height])"""


@pytest.mark.matrix
@pytest.mark.parametrize("width", [1280, 390])
def test_live_updates_shift_no_row_that_stays(open_page, watch, folder, width):
    run = watched_run.finished_run(folder / f"growing-{width}", 10)
    shutil.rmtree(run / ROLLOUTS, ignore_errors=True)
    log, metrics = RolloutLog(run, "trainer-0", 1 << 20), MetricsLog(run, tensorboard=False)

    def train(step: int) -> None:
        """Each step has longer texts than the one before, of which the page shows the beginnings."""
        said = Trajectory([1], [2], [1], [-0.5], [step], reward=10.0**step, text="word " * step, metrics={})
        log.append([recorded(f"0:{step}", 0, said, step=step, version=step, time=float(step))])
        metrics.log(10 + step, {"version": 10.0})

    train(1)
    page = open_page(watch.of("rollouts", run.name), width=width)
    newest = page.locator("tr.open").first
    expect(newest).to_contain_text("word")
    cells = page.evaluate(CELLS, "0:1")
    page.evaluate(SHIFTED)
    for step in range(2, 6):
        train(step)
        expect(newest).to_contain_text("word " * (step - 1))
        assert page.evaluate(CELLS, "0:1") == cells
    assert page.evaluate("shiftedUntilNow()") == []
    # What is being read stays where it is until it is closed.
    newest.click()
    expect(page.locator(".detail .tokens")).to_be_visible()
    place = page.locator(".detail").bounding_box()
    for step in range(6, 8):
        train(step)
        expect(page.get_by_text(f"{step} of {step} recorded responses")).to_be_visible()
    assert page.locator(".detail").bounding_box() == place
    newest.click()
    expect(newest).to_contain_text("word " * 6)
    metrics.close()


def test_nothing_comes_from_outside(open_page, watch, browser):
    context = browser.new_context()
    asked: list[str] = []
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(watch.of("overview", FINISHED))
    page.wait_for_selector(".js-plotly-plot .main-svg", timeout=60_000)
    context.close()
    assert [url for url in asked if not url.startswith((watch.root, "data:", "blob:"))] == []


def test_the_token_leaves_the_address_and_a_wrong_one_gets_nothing(open_page, watch, browser):
    page = open_page(watch.of("overview", FINISHED))
    assert watch.token not in page.url
    context = browser.new_context()
    stranger = context.new_page()
    for address in ("", "overview", "?token=wrong", "_nicegui_ws/socket.io/?EIO=4&transport=polling"):
        answer = stranger.goto(watch.root + address)
        assert answer is not None and answer.status == 401
        assert FINISHED not in answer.text()
    context.close()


@pytest.mark.matrix
def test_an_unknown_run_is_named(open_page, watch):
    page = open_page(watch.of("overview", "../../etc"))
    expect(page.locator(".notice")).to_contain_text("There is no run '../../etc'")


@pytest.mark.matrix
def test_a_port_in_use_gives_a_clear_error(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", "from megasync.cli.commands import main; main()", "watch", str(folder)]
        ended = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=120, check=False
        )
    assert ended.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in ended.stderr
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr

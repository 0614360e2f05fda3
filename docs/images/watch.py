"""Makes the screenshots of docs/watching.md and of the README: `docs/images/watch.py RUN OTHER`.

OTHER is compared with RUN and is in the same folder. Needs chromium (`bash launch/browser.sh`). Each view is opened
once 1440 pixels wide, the overview also as on a phone, and the rollouts also at one response. Turns and tool calls are
those of a made-up response.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import watched_run
from watch_process import Watch

from megasync.trajectory import ANSWER, Call, Turn
from megasync.watch.recorded import RolloutIndex

HERE = Path(__file__).parent
WIDE, NARROW = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=844)
# Each picture shows a little more than the first screen.
MOST_HEIGHT = 1500
QUERY, SUM = '{"query": "population of Lyon", "limit": 3}', '{"a": 522250, "b": 1}'
DIALOGUE = [
    (
        Turn(0, 1, ANSWER, calls=(Call("search", QUERY), Call("add", SUM))),
        f'I look it up.\n<tool_call>{{"name": "search", "arguments": {QUERY}}}</tool_call>\n'
        f'<tool_call>{{"name": "add", "arguments": {SUM}}}</tool_call><eos>',
    ),
    (Turn(0, 1, "tool", "search"), '<bos>tool: [{"title": "Lyon", "text": "Lyon has 522,250 inhabitants."}]'),
    (Turn(0, 1, "tool", "add"), "<eos><bos>tool: 522251<eos><bos>assistant: "),
    (Turn(0, 1, ANSWER), "Lyon has 522,250 inhabitants.<eos>"),
    (Turn(0, 1, "user"), "<bos>user: And with me?<eos><bos>assistant: "),
    (Turn(0, 1, ANSWER), "With you, Lyon has 522,251 inhabitants.<eos>"),
]


def main(run: Path, other: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=WIDE, device_scale_factor=1)
        with watching(run.parent) as watch:
            for view in ("overview", "timeline", "rollouts", "weights", "faults"):
                capture(page, watch.of(view, run.name), view)
            capture(page, watch.of("compare", run.name, other.name), "compare")
            group = f"uid={group_with_differing_rewards(run)}&"
            open_response(page, watch.of("rollouts", run.name).replace("token=", f"{group}token="))
            save(page, "response")
            page.set_viewport_size(NARROW)
            capture(page, watch.of("overview", run.name), "narrow")
            page.set_viewport_size(WIDE)
        with tempfile.TemporaryDirectory() as folder:
            made_up = watched_run.finished_run(Path(folder) / "made-up")
            watched_run.add_dialogue(made_up, DIALOGUE)
            with watching(made_up) as watch:
                open_response(page, watch.of("rollouts", made_up.name))
                turns = page.locator(".tokens > * > details")
                turns.nth(0).locator("> summary").click()
                turns.nth(0).locator("details > summary").first.click()
                turns.nth(1).locator("> summary").click()
                page.wait_for_timeout(2000)
                save(page, "turns")
        browser.close()


@contextmanager
def watching(target: Path) -> Iterator[Watch]:
    watch = Watch(target, "--port", "0")
    try:
        yield watch
    finally:
        watch.end()


def group_with_differing_rewards(run: Path) -> str:
    """The newest trained one."""
    index = RolloutIndex(run)
    index.update()
    rewards: dict[str, set[float | None]] = {}
    for row in index.rows:
        if not row.dropped:
            rewards.setdefault(row.uid, set()).add(row.reward)
    return [uid for uid, of_group in rewards.items() if len(of_group) > 1][-1]


def open_response(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("tr.open").first.click()
    page.wait_for_selector(".tokens")
    page.wait_for_timeout(2000)


def capture(page: Page, address: str, name: str) -> None:
    page.goto(address)
    page.wait_for_selector(".page section")
    # Charts are drawn by scripts that are loaded after the page.
    page.wait_for_timeout(4000)
    save(page, name)


def save(page: Page, name: str) -> None:
    height = min(MOST_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    size = page.viewport_size or WIDE
    path = HERE / f"watch_{name}.png"
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": size["width"], "height": height}, full_page=True)
    sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

"""Makes the screenshots of docs/watching.md and of the README: `docs/images/watch.py RUN OTHER`.

RUN and OTHER are runs in one folder; OTHER is only compared with RUN. Needs chromium (`bash launch/browser.sh`). Each
view is opened once 1440 pixels wide, the overview also as on a phone, and the rollouts also at one response.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from megasync.observe.rollouts import RolloutIndex

HERE = Path(__file__).parent
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
# Each page shows a little more than the first screen.
MOST_HEIGHT = 1500


def main(run: Path, other: Path) -> None:
    command = [sys.executable, "-m", "megasync", "watch", str(run.parent), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise SystemExit(f"megasync watch {run.parent} printed no address")
        root = address[0].partition("?")[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport=WIDE, device_scale_factor=1)
            # The page keeps the access token.
            page.goto(address[0])
            of_run = f"run={run.name}"
            for view in ("overview", "timeline", "rollouts", "weights", "faults"):
                capture(page, f"{root}{view}?{of_run}", f"watch_{view}.png")
            capture(page, f"{root}compare?{of_run}&run={other.name}", "watch_compare.png")
            capture(page, f"{root}rollouts?{of_run}&uid={group_with_differing_rewards(run)}", "watch_response.png", 0)
            page.set_viewport_size(NARROW)
            capture(page, f"{root}overview?{of_run}", "watch_narrow.png")
            browser.close()
    finally:
        process.terminate()
        process.wait()


def group_with_differing_rewards(run: Path) -> str:
    """The newest trained one."""
    index = RolloutIndex(run)
    index.update()
    rewards: dict[str, set[float | None]] = {}
    for row in index.rows:
        if not row.dropped:
            rewards.setdefault(row.uid, set()).add(row.reward)
    return [uid for uid, of_group in rewards.items() if len(of_group) > 1][-1]


def capture(page: Page, address: str, name: str, row: int | None = None) -> None:
    """Saves a view as it opens, or after a click on a row of its table."""
    page.goto(address)
    page.wait_for_selector(".page section")
    # Charts are drawn by scripts that are loaded after the page.
    page.wait_for_timeout(4000)
    if row is not None:
        page.locator(".page tbody tr").nth(row).click()
        page.wait_for_timeout(2000)
    height = min(MOST_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(
        path=HERE / name, clip={"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}, full_page=True
    )
    sys.stdout.write(f"wrote {HERE / name}\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

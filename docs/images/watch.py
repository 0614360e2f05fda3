"""Makes the screenshots of docs/watching.md and of the README from a run: `docs/images/watch.py RUN`.

Needs chromium (`bash launch/browser.sh`). Each view is opened once 1440 pixels wide, the overview also as on a phone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
# Each page shows a little more than the first screen.
MOST_HEIGHT = 1500


def main(run: str) -> None:
    command = [sys.executable, "-m", "megasync", "watch", run, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        if address is None:
            raise SystemExit(f"megasync watch {run} printed no address")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport=WIDE, device_scale_factor=1)
            page.goto(address[0])
            page.wait_for_selector(".tabs a")
            views = page.locator(".tabs a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
            for view in views:
                capture(page, address[0].partition("?")[0] + view, f"watch_{view.partition('?')[0]}.png")
            page.set_viewport_size(NARROW)
            capture(page, address[0].partition("?")[0] + views[0], "watch_narrow.png")
            browser.close()
    finally:
        process.terminate()
        process.wait()


def capture(page: Page, address: str, name: str) -> None:
    page.goto(address)
    page.wait_for_selector(".page section")
    # Charts are drawn by scripts that are loaded after the page.
    page.wait_for_timeout(4000)
    height = min(MOST_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(
        path=HERE / name, clip={"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}, full_page=True
    )
    sys.stdout.write(f"wrote {HERE / name}\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""How long the page of a long run takes to open: `python benchmarks/watch.py [--steps 1000] [--responses 100000]`.

Writes a synthetic run of so many steps, with a trace and as many recorded responses, and opens each view in chromium
(`bash launch/browser.sh`), the timeline also at one step and at one group, and the comparison with a second run as
long: seconds from the request until the view's last chart is drawn, medians over rounds, in a browser that has the
page's scripts in its cache. The first opening of a run also reads its files.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import watched_run
from watch_process import Watch

# A view is open once it has drawn something, every chart in it has its lines, and no trace is being read.
OPEN = """
() => document.querySelector('.page section, .page table') && !document.body.innerText.includes('Reading the trace') &&
      [...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.querySelector('.main-svg'))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = watched_run.finished_run(Path(folder) / "run", options.steps)
        watched_run.add_faults(run)
        watched_run.add_responses(run, options.responses, max(1, options.responses // options.steps))
        watched_run.add_trace(run, options.steps, options.responses)
        other = watched_run.finished_run(Path(folder) / "other", options.steps)
        # Scripts in the cache, but not this run in the server's memory.
        small = watched_run.finished_run(Path(folder) / "small", 10)
        watch = Watch(Path(folder), "--port", "0")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        open_seconds(page, watch.of("overview", small.name))
        views = page.locator(".tabs a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
        names = [view.partition("?")[0] for view in views]
        opened = {name: watch.of(name, run.name) for name in names if name != "compare"}
        opened["timeline, one step"] = opened["timeline"] + f"&step={options.steps // 2}"
        opened["timeline, one group"] = opened["timeline"] + f"&uid=0:{options.responses // 16}"
        opened["compare, two runs"] = watch.of("compare", run.name, other.name)
        print(f"{options.steps} steps, {options.responses} responses", flush=True)
        first = open_seconds(page, watch.of("overview", run.name))
        print(f"{'overview, first opening':<26}{first:6.2f} s", flush=True)
        for name, address in opened.items():
            first = open_seconds(page, address)
            again = [open_seconds(page, address) for _ in range(options.rounds)]
            print(f"{name:<26}{first:6.2f} s, then {statistics.median(again):.2f} s", flush=True)
        browser.close()
        watch.end()


def open_seconds(page: Page, address: str) -> float:
    begun = time.perf_counter()
    page.goto(address)
    page.wait_for_function(OPEN, timeout=120_000)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()

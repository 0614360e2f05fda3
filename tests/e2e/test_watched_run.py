"""A browser looks at a real run while it trains, and after its driver was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import number
from playwright.sync_api import expect
from run_metrics import rows_of
from watch_process import Watch

pytestmark = pytest.mark.real

VIEWS = ("timeline", "rollouts", "weights", "faults")


def last_step(run_dir: Path) -> int:
    rows = rows_of(run_dir)
    return max(row["step"] for row in rows if "time/step" in row)


def test_the_page_follows_a_run_and_says_that_it_crashed(miniature, launch, the_run_dir, open_page) -> None:
    steps = {"total_steps": 5000}
    run = launch("train", miniature(schedule=steps, eval={"every_steps": 1000, "samples": 16}))
    run.wait_for("step 1/")
    watch = Watch(the_run_dir(), "--port", "0")
    try:
        page = open_page(watch.of("overview"))
        status = page.locator(".bar .chip")
        expect(status).to_have_text("running")
        first = number(page, "Step")
        assert first > 0
        page.wait_for_function(
            "first => parseFloat(document.querySelector('.reading .value span').textContent) > first", arg=first
        )
        for part in ("server-0", "server-1", "router", "2 ranks"):
            expect(page.get_by_text(part, exact=True).first).to_be_visible()
        run.process.kill()
        expect(status).to_have_text("crashed")
        expect(page.locator(".reading .value span").first).to_have_text(str(last_step(the_run_dir())))
        for view in VIEWS:
            page.goto(watch.of(view))
            expect(page.locator(".page section").first).to_be_visible()
            expect(page.get_by_text("cannot be drawn")).to_have_count(0)
    finally:
        watch.end()

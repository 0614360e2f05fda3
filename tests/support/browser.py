"""The system's chromium, driven by playwright. A conftest.py imports the fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Locator, Page, expect, sync_playwright

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
# A loaded machine takes long to compile the page's scripts.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file, without asynchronous tests: until it is closed, playwright's event loop is the running one."""
    if not CHROMIUM:
        pytest.skip("no chromium is installed; bash launch/browser.sh installs Debian's")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM,
                args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
                      "--disable-sync", "--no-first-run", "--disable-dev-shm-usage"],
            )  # fmt: skip
        except Error as error:
            pytest.skip(f"{CHROMIUM} does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Pages of one context share the browser's cache."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def open_page(context: BrowserContext) -> Iterator[Callable[..., Page]]:
    """Opens an address in a page of its own. What the browser complains of fails the test."""
    pages: list[Page] = []
    complaints: list[str] = []

    def open_at(address: str, width: int = 1440, scheme: Literal["light", "dark"] = "light") -> Page:
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.wait_for_selector(".page")
        return page

    yield open_at
    for page in pages:
        page.close()
    assert complaints == []


def reading(page: Page, name: str) -> Locator:
    """The large number of this name on a page of `megasync watch`."""
    return page.locator(".reading", has=page.locator(".name", has_text=name)).locator(".value")


def number(page: Page, name: str) -> float:
    return float(reading(page, name).locator("span").first.inner_text())

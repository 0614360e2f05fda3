"""A report in a real browser: it draws its figures, asks for nothing, and can be read without JavaScript."""

import subprocess
import sys

import pytest
from made_runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.matrix]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A report and a comparison, made by the program."""
    folder = tmp_path_factory.mktemp("reports")
    runs = [make_run(folder / "runs", name, seed=n) for n, name in enumerate(("first", "second"))]
    program = [sys.executable, "-c", "from megasync.cli.commands import main; main()"]
    subprocess.run([*program, "report", runs[0], "--out", folder / "report.html"], check=True)
    subprocess.run([*program, "compare", *runs, "--out", folder / "comparison.html"], check=True)
    return {name: folder / f"{name}.html" for name in ("report", "comparison")}


@pytest.fixture
def page(context):
    page = context.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_a_page_draws_its_figures_and_asks_for_nothing(page, files, name):
    requests, troubles = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(files[name].as_uri())
    figures = page.locator("figure.chart")
    for at in range(figures.count()):
        figures.nth(at).scroll_into_view_if_needed()
        figures.nth(at).locator(".live .main-svg").first.wait_for()
    assert figures.count() >= 12 and not page.locator("figure.chart:not(.drawn)").count()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == [] and troubles == []


@pytest.mark.parametrize("cause", ["delete window.DecompressionStream", "window.atob = () => 'damaged'"])
def test_a_browser_that_cannot_inflate_keeps_the_pictures(page, files, cause):
    troubles = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.add_init_script(f"{cause}; addEventListener('unhandledrejection', () => (document.title = 'unhandled'))")
    page.goto(files["report"].as_uri())
    stills = page.locator("figure.chart .still svg")
    for at in range(stills.count()):
        stills.nth(at).scroll_into_view_if_needed()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert stills.count() >= 12 and all(still.is_visible() for still in stills.all())
    assert page.evaluate("typeof Plotly") == "undefined" and page.title() != "unhandled" and troubles == []

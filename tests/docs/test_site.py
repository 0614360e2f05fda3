"""The site: each page has a place in its navigation, links lead somewhere, and a build loads nothing from elsewhere."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import megasync

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("site_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_is_listed_once_on_a_contents_page(conf):
    listed = Counter()
    for contents in conf.CONTENTS:
        page = DOCS / f"{contents}.md"
        if page.exists():
            for _, _, name in conf.ENTRY.findall(page.read_text(encoding="utf-8")):
                if name:
                    listed[str((page.parent / name).relative_to(DOCS))] += 1
    pages = {str(page.relative_to(DOCS).with_suffix("")) for kind in ("md", "rst") for page in DOCS.rglob(f"*.{kind}")}
    assert listed == dict.fromkeys(pages - {"README"}, 1)


def test_lists_below_headings_become_the_navigation(conf):
    text = "- [Start](a.md): one.\n\n## More\n\n- [`key`](keys/b.md): two, see [c](c.md).\n| [Py](api.rst) | three |\n"
    assert conf.toctrees(text) == (
        "\n\n```{toctree}\n:hidden:\n\nStart <a>\n```\n"
        "\n\n```{toctree}\n:hidden:\n:caption: More\n\nkey <keys/b>\nPy <api>\n```\n"
    )


@pytest.mark.parametrize(
    ("text", "without", "with_source"),
    [
        ("[buffer.md](buffer.md)", "[](buffer.md)", "[](buffer.md)"),
        ("[the bound](buffer.md#pacing)", "[the bound](buffer.md#pacing)", "[the bound](buffer.md#pacing)"),
        ("[a](../megasync/observe/metrics.md#training)", "[a](metrics.md#training)", "[a](metrics.md#training)"),
        ("[configs](../configs/base.yaml)", "configs", "[configs](https://host/blob/main/configs/base.yaml)"),
        ("[gone](gone.md)", "[gone](gone.md)", "[gone](gone.md)"),
        ("![curve](images/quickstart.png)", "![curve](images/quickstart.png)", "![curve](images/quickstart.png)"),
    ],
)
def test_links_lead_to_pages_or_to_the_source(conf, monkeypatch, text, without, with_source):
    assert conf.linked("concepts", DOCS, text) == without
    monkeypatch.setattr(conf, "SOURCE", "https://host/blob/main")
    assert conf.linked("concepts", DOCS, text) == with_source


def test_what_the_pages_import_is_in_the_reference():
    """A build imports what is in the reference."""
    reference = set(re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", (DOCS / "api.rst").read_text(), re.MULTILINE))
    named = {f"megasync.{name}" for name in dir(megasync) if not name.startswith("_")}
    for page in DOCS.rglob("*.md"):
        for module, names in re.findall(r"^from (megasync[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE):
            named |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert len(named) > 8
    assert named - reference == set()


class Loaded(HTMLParser):
    """Collects what a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "preconnect"):
            self.urls.append(given.get("href") or "")


@pytest.mark.extra
def test_the_site_builds_without_a_warning_and_is_complete_in_itself(tmp_path):
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(site)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (built.returncode, built.stderr) == (0, "")
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert [url for url in loaded.urls if re.match(r"(https?:)?//", url)] == [], page
    outside = r"(?:@import|url\()\s*['\"]?(?:https?:)?//"
    assert [sheet for sheet in site.rglob("*.css") if re.search(outside, sheet.read_text(encoding="utf-8"))] == []
    api = (site / "api.html").read_text(encoding="utf-8")
    assert all(f'id="megasync.{name}"' in api for name in dir(megasync) if not name.startswith("_"))
    # A comment above a field, an error and a shape.
    assert "Why the run ended before schedule.total_steps" in api and "ContextLengthExceeded for a prompt" in api
    assert "arrays [samples]" in api
    search = (site / "searchindex.js").read_text(encoding="utf-8")
    # A key leads to its page before all others, and every word is found by its stem.
    assert re.search(r'"schedule\.max_staleness":\[\[\d+,"[\w-]+",true\]\]', search)
    assert "kv_pressur" in search and "tokens_per_second_per_devic" in search
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()

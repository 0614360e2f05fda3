"""The browser that opens the page, and figures that are drawn once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import browser, context, open_page

from megasync.watch import html_page, markdown_page
from megasync.watch.picture import picture

__all__ = ["browser", "context", "open_page"]

PICTURES: dict[tuple[object, ...], bytes] = {}


@pytest.fixture(scope="module", autouse=True)
def pictures() -> Iterator[dict[tuple[object, ...], bytes]]:
    """Reports draw equal figures once, which is most of their time. Whoever empties this has them drawn anew."""

    def drawn_once(figure, *arguments, **options) -> bytes:
        key = (figure.to_json(), arguments, *options.items())
        if key not in PICTURES:
            PICTURES[key] = picture(figure, *arguments, **options)
        return PICTURES[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (html_page, markdown_page):
            patch.setattr(module, "picture", drawn_once)
        yield PICTURES

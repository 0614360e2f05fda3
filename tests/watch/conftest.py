"""The browser that opens the page."""

from browser import browser, context, open_page

__all__ = ["browser", "context", "open_page"]

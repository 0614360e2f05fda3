"""The views of the page, one a file: each draws one run from its `RunFolder`."""

"""What `megasync report` and `megasync compare` read and write; neither changes a run directory that it reads."""

from __future__ import annotations

from pathlib import Path

from megasync.base.files import atomic_write
from megasync.errors import ConfigError, DataError
from megasync.watch.document import Document
from megasync.watch.html_page import render_html
from megasync.watch.markdown_page import render_markdown
from megasync.watch.run_folder import RunFolder, find_runs


def open_run(path: Path) -> RunFolder:
    """The run in a directory. Raises ConfigError if there is none."""
    runs = find_runs(path)
    if runs != [path]:
        inside = (
            f"it is a folder with {len(runs)} of them, such as {runs[0].name}; name one" if runs else "name another"
        )
        raise ConfigError(f"{path} is not a run directory: {inside}")
    return RunFolder(path)


def write_document(document: Document, out: Path | None, name: str, markdown: bool = False) -> Path:
    """Writes a document and returns its path; Markdown has its pictures beside it. Without `out`: NAME.html or NAME.md.

    Raises DataError if it cannot be written.
    """
    path = Path(f"{name}.md" if markdown else f"{name}.html") if out is None else out
    if path.is_dir():
        raise DataError(f"{path} cannot be written: it is a folder; choose another file with --out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if markdown:
            folder = path.with_name(f"{path.stem}_figures")
            text, pictures = render_markdown(document, folder.name)
            folder.mkdir(exist_ok=True)
            for file, data in pictures.items():
                atomic_write(folder / file, data)
            atomic_write(path, text)
        else:
            atomic_write(path, render_html(document))
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; choose another file with --out"
        ) from error
    return path

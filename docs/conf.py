"""Makes a site of these pages with Sphinx: `bash launch/docs.sh`. Nothing of it is loaded from elsewhere.

The pages stay readable where they lie. What a site needs beside them is derived while they are read: the navigation
from the lists of the contents pages, links to files outside of this folder, and the pages of metrics and commands.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from typer.cli import get_docs_for_click  # noqa: E402
from typer.main import get_command  # noqa: E402

from megasync import __version__  # noqa: E402
from megasync.cli.commands import app as cli  # noqa: E402
from megasync.planning.reference import comments  # noqa: E402

# Pages whose list items, or rows, begin with the pages below them. A heading above them is one of the navigation.
CONTENTS = (
    *("README", "tutorials", "how_to", "explanation", "reference"),
    *("configuration", "benchmarks", "recipes/README"),
)
# Pages whose text is another file's.
TEXTS = {"metrics": ROOT / "megasync" / "observe" / "metrics.md"}
# The page whose text is that of `megasync --help`.
COMMANDS = "commands"
# Where files outside of this folder can be read, such as https://github.com/OWNER/megasync/blob/main. Links to them
# become plain text without it.
SOURCE = os.environ.get("MEGASYNC_SOURCE_URL", "").rstrip("/")

ENTRY = re.compile(r"^(?:## (.+)|(?:- |\| )\[([^\]]+)\]\(([\w./]+)\.(?:md|rst)\))", re.MULTILINE)
ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
LINK = re.compile(r"\[([^\]]*)\]\(([\w./-]+)(#[\w-]+)?\)")

project, author = "megasync", "The megasync authors"
release = __version__
html_title = f"megasync {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
myst_heading_anchors = 4
# Docstrings write code in single backticks, as Markdown does.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {
    name: name for name in ("Bounds", "Bools", "FloatArray", "Floats", "Given", "Ids", "IntArray", "Ints", "Numbers")
}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
# Commands and drawings have no language; what they say is shown as it is written.
highlight_language = "none"
smartquotes = False

html_theme = "pydata_sphinx_theme"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "megasync"},
    "navbar_align": "left",
    "show_nav_level": 2,
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}


def toctrees(text: str) -> str:
    """The hidden tables of contents of a contents page, one for each heading."""
    trees: list[tuple[str, list[str]]] = [("", [])]
    for heading, title, page in ENTRY.findall(text):
        if heading:
            trees.append((heading, []))
        else:
            trees[-1][1].append(f"{title.strip('`')} <{page}>")
    return "".join(
        "\n".join(
            ("\n\n```{toctree}", ":hidden:", *filter(None, (heading and f":caption: {heading}",)), "", *pages, "```\n")
        )
        for heading, pages in trees
        if pages
    )


def linked(name: str, folder: Path, text: str) -> str:
    """The text of a page with its links as the site has them.

    A link to a page that is labelled with the file's name gets the title of the page. One to a file outside of this
    folder leads to `SOURCE`.
    """

    def of(match: re.Match[str]) -> str:
        label, path, anchor = match[1], match[2], match[3] or ""
        target = (folder / path).resolve()
        if target in TEXTS.values():
            target = DOCS / f"{next(page for page, file in TEXTS.items() if file == target)}.md"
        if not target.exists():
            # Sphinx reports it.
            return match[0]
        if not target.is_relative_to(DOCS):
            return f"[{label}]({SOURCE}/{target.relative_to(ROOT)}{anchor})" if SOURCE else label
        if target.suffix != ".md":
            return match[0]
        named = re.fullmatch(r"`?[\w/]+\.md`?", label)
        path = os.path.relpath(target, (DOCS / name).parent)
        return f"[{'' if named else label}]({path}{anchor})"

    return LINK.sub(of, text)


def found_by_key(text: str) -> str:
    """A page of keys that a search for one of them, whole or without its sections, shows first.

    Its tables also get the width of the second sidebar.
    """
    keys = re.findall(r"^\| `([\w.<>]+)` \|", text, re.MULTILINE)
    entries = "".join(
        f"   ! single: {entry}\n" for key in keys for entry in dict.fromkeys((key, key.rpartition(".")[2]))
    )
    title = re.search(r"^# .*\n", text, re.MULTILINE)
    assert title is not None
    index = f"\n```{{eval-rst}}\n.. index::\n{entries}```\n"
    options = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"
    return options + text[: title.end()] + index + text[title.end() :]


def commands() -> str:
    """The help of all commands."""
    command = get_command(cli)
    context: Any = command.context_class(command, info_name="megasync")
    text = get_docs_for_click(obj=command, ctx=context, name="megasync")
    text = text.replace("# `megasync`\n", "# Commands\n", 1)
    # A list of the commands with the beginnings of their sentences.
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
    text = re.sub(r"\[bold\]Examples\[/\]\n", "**Examples**:\n", text)
    text = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", text)
    # Outside of code, names in angle brackets would be HTML.
    text = re.sub(r"(`[^`]*`)|<", lambda match: match[1] or r"\<", text)
    return re.sub(r"^(megasync .*)\n", r"```\n\1\n```\n", text, flags=re.MULTILINE)


def read(app: Any, name: str, source: list[str]) -> None:
    file = TEXTS.get(name, DOCS / f"{name}.md")
    if not file.exists():
        return
    text = commands() if name == COMMANDS else file.read_text(encoding="utf-8")
    if name.startswith("keys/"):
        text = found_by_key(text)
    source[0] = linked(name, file.parent, text) + (toctrees(text) if name in CONTENTS else "")


def documented(app: Any, what: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Adds the fields of a class, with the comments above them. An indented block of a docstring is code."""
    for place in reversed(range(2, len(lines))):
        if lines[place].startswith("    ") and not lines[place - 1] and not lines[place - 2].startswith(" "):
            lines[place:place] = ["::", ""]
    fields = inspect.get_annotations(object) if what == "class" else {}
    meanings = comments(object) if fields else {}
    for field, kind in fields.items():
        if not field.startswith("_"):
            # A name that ends with an underscore would be a reference.
            written = (kind if isinstance(kind, str) else inspect.formatannotation(kind)).replace("_]", r"\_]")
            lines += [f":ivar {field}: {meanings.get(field, '')}", f":vartype {field}: {written}"]
    lines.append("")


def styled(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if name.startswith("keys/"):
        app.add_css_file("keys.css")


def named(app: Any, what: str, name: str, object: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """Names of types as they are written, where Sphinx shows a type of its own."""
    return tuple(text and ALIAS.sub(r"\1", text) for text in (signature, returns))


def finish(app: Any, error: Exception | None) -> None:
    """Makes the start page the one that a browser opens for the folder."""
    start = Path(app.outdir) / "README.html"
    if error is None and start.exists():
        shutil.copy(start, start.with_name("index.html"))


def setup(app: Any) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", documented)
    app.connect("autodoc-process-signature", named)
    app.connect("html-page-context", styled)
    app.connect("build-finished", finish)

"""Generates the Markdown reference of all keys from the comments, types and defaults in `schema` and from `limits`.

`python -m megasync.planning.reference` writes a page for each section of the configuration into docs/keys, and a list
of them into docs/configuration.md, below the line `MARK`. A test checks that all of them are up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING as REQUIRED

from megasync.base.files import atomic_write
from megasync.config.limits import Checked, Choice, Range, limit_of, schema_fields
from megasync.config.load import entry_of, section_of
from megasync.config.rules import Rule
from megasync.config.schema import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, KEYS = DOCS / "configuration.md", DOCS / "keys"
MARK = "<!-- From here on written by `python -m megasync.planning.reference`; edit megasync/config/schema instead. -->"
# Name of the page with the keys that are in no section.
RUN = "run"
# Placeholder for a name that the user chooses.
NAMED = "<name>"
FIXED = " *Cannot change when a run is resumed.*"
HEAD = "| key | value | default | meaning |\n|---|---|---|---|"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "value"}
LINK = re.compile(r"\bdocs/(\w+\.md)(#[\w-]+)?")
COMMENTED = re.compile(r"((?:^ +#.*\n)+) +(\w+):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the configuration. `prefix` ends with a dot; it is empty for the root.

    Each of its keys has the `rules` of the section too, and is `fixed` if that is.
    """

    prefix: str
    cls: type
    rules: tuple[Rule, ...] = ()
    fixed: str = ""


def pages() -> dict[str, str]:
    """The text of each page of docs/keys by its name, in the order of the schema: one for each section of the root.

    A class that occurs several times is documented once. Raises ValueError for a key without a comment.
    """
    first: dict[type, str] = {}
    below: dict[str, list[Section]] = {}
    for section in _sections(Section("", Config)):
        below.setdefault(_page(section.prefix), []).append(section)
    texts = {}
    for name, (head, *others) in below.items():
        parts = [MARK, *_written(head, first)]
        if others:
            # Behind the heading and the sentence of the section.
            parts.insert(3, f"Below: {', '.join(_link(other) for other in others)}.")
        parts += [part for other in others for part in _written(other, first)]
        texts[name] = "\n\n".join(parts) + "\n"
    return texts


def rewritten(page: str) -> str:
    """The page with everything below `MARK` regenerated. Raises ValueError if the page does not contain `MARK`."""
    above, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"the page has no line {MARK!r}; insert it where the list of sections begins")
    return f"{above}{mark}\n\n{_contents()}"


def write(configuration: Path = PAGE, keys: Path = KEYS) -> None:
    """Writes both. A page whose section is gone is deleted."""
    atomic_write(configuration, rewritten(configuration.read_text(encoding="utf-8")))
    texts = pages()
    for old in keys.glob("*.md"):
        if old.stem not in texts:
            old.unlink()
    keys.mkdir(exist_ok=True)
    for name, text in texts.items():
        atomic_write(keys / f"{name}.md", text)


def _contents() -> str:
    """A line for each page: its section and what it is about."""
    heads: dict[str, Section] = {}
    for section in _sections(Section("", Config)):
        heads.setdefault(_page(section.prefix), section)
    lines = []
    for name, head in heads.items():
        label = f"`{head.prefix.rstrip('.')}`" if head.prefix else "The run"
        lines.append(f"- [{label}](keys/{name}.md): {_about(head, up='')}")
    return "\n".join(lines) + "\n"


def _page(prefix: str) -> str:
    return prefix.partition(".")[0] or RUN


def _link(section: Section, page: str = "") -> str:
    name = section.prefix.rstrip(".")
    return f"[`{name}`]({page}#{re.sub(r'[^a-z_]', '', name)})"


def comments(cls: type) -> dict[str, str]:
    """The comment above each field of a class, by its name, those of its base classes included."""
    sources = "".join(inspect.getsource(base) for base in cls.__mro__ if base is cls or is_dataclass(base))
    commented = COMMENTED.findall(sources)
    return {name: " ".join(line.strip().lstrip("# ") for line in text.splitlines()) for text, name in commented}


def _sections(section: Section) -> Iterator[Section]:
    yield section
    hints = get_type_hints(section.cls)
    for item in schema_fields(section.cls):
        below, entry = section_of(hints[item.name]), entry_of(hints[item.name])
        if below is not None:
            rules = (*section.rules, *item.metadata.get("below", ()))
            fixed = item.metadata.get("fixed") or section.fixed
            yield from _sections(Section(f"{section.prefix}{item.name}.", below, rules, fixed))
        elif entry is not None:
            yield from _sections(Section(f"{section.prefix}{item.name}.{NAMED}.", entry))


def _written(section: Section, first: dict[type, str]) -> Iterator[str]:
    name = section.prefix.rstrip(".")
    level = "#" if name in ("", _page(section.prefix), f"{_page(section.prefix)}.{NAMED}") else "##"
    yield f"{level} `{name}`" if name else f"{level} The run"
    if section.cls in first:
        same = Section(f"{first[section.cls]}.", section.cls)
        yield f"The keys of {_link(same, f'{_page(same.prefix)}.md')}."
        return
    first[section.cls] = name
    yield _about(section)
    hints, meanings = get_type_hints(section.cls), comments(section.cls)
    rows = []
    for item in schema_fields(section.cls):
        key, hint = f"{section.prefix}{item.name}", hints[item.name]
        if section_of(hint) is not None:
            continue
        fixed = item.metadata.get("fixed") or section.fixed
        if item.name not in meanings:
            raise ValueError(f"{section.cls.__name__}.{item.name} has no comment above it; describe {key} there")
        cells = (
            f"`{key}`",
            _value(item, hint),
            _default(item),
            " ".join((_linked(meanings[item.name]), *_rules(item, section))) + FIXED * bool(fixed),
        )
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    if rows:
        yield "\n".join((HEAD, *rows))


def _value(item: Field[Any], hint: Any) -> str:
    """The allowed values of a key, in words."""
    limit, optional = limit_of(item), NoneType in get_args(hint)
    if isinstance(limit, Choice | Checked) and str(limit):
        words = str(limit)
    else:
        words = ", ".join(_kind(kind) for kind in (get_args(hint) if optional else (hint,)) if kind is not NoneType)
    if isinstance(limit, Range):
        words += f", {limit}"
    return f"{words}, or null" if optional else words


def _kind(hint: Any) -> str:
    if get_origin(hint) is list:
        return f"list of {WORDS[get_args(hint)[0]]}s"
    if get_origin(hint) is dict:
        return "sections by name" if entry_of(hint) else "keys and values"
    return WORDS[hint]


def _rules(item: Field[Any], section: Section) -> list[str]:
    """The rules of a key as sentences."""
    rules = (*section.rules, *item.metadata.get("rules", ()))
    words = dict.fromkeys(rule.words(section.prefix.rstrip(".")) for rule in rules)
    return [f"*{each[0].upper()}{each[1:]}.*" if "`" not in each.split(" ")[0] else f"*{each}.*" for each in words]


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if value == REQUIRED:
        return "required"
    words = {"": '""', "None": "null", "True": "true", "False": "false"}
    return f"`{words.get(str(value), str(value))}`".replace("\n", "\\n")


def _about(section: Section, up: str = "../") -> str:
    return _linked(" ".join((section.cls.__doc__ or "").split()), up)


def _linked(text: str, up: str = "../") -> str:
    """The text with each mention of a page in docs/ turned into a link, from a page that is ``up`` from there."""
    return LINK.sub(lambda match: f"[{match[1]}]({up}{match[1]}{match[2] or ''})", text)


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))

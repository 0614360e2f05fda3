"""A configuration as YAML text: the keys that differ from their defaults, each below its sentences of the schema.

The sentences are read from the schema when the text is made, so no copy of them can become wrong. A key that occurs in
several sections of one kind, such as two datasets, is explained at the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent, wrap
from typing import Any, get_type_hints

import yaml

from megasync.config import Config
from megasync.config.limits import schema_fields
from megasync.config.load import BASE_KEY, entry_of, section_of
from megasync.planning.reference import comments

WIDTH = 110
_BASE = "File that this one changes: its keys apply where none stands here."
_Told = set[tuple[type, str]]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if "\n" not in text else "|" if text == text.strip() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def commented(values: Mapping[str, Any], head: str = "") -> str:
    """The YAML text of a configuration, given as nested mappings of the schema's keys, below `head` as a comment.

    Keys are in the schema's order. Raises KeyError for one that the schema lacks.
    """
    keys = dict(values)
    parts = [_comment(head)] if head else []
    if (base := keys.pop(BASE_KEY, None)) is not None:
        parts.append(_comment(_BASE) + _dumped(BASE_KEY, base))
    told: _Told = set()
    parts += [text for name in _ordered(keys, Config) if (text := _key(name, keys[name], Config, Config(), told))]
    return "\n".join(parts)


def _ordered(values: Mapping[str, Any], cls: type) -> list[str]:
    order = {item.name: number for number, item in enumerate(schema_fields(cls))}
    return sorted(values, key=lambda name: order[name])


def _key(name: str, value: Any, cls: type, defaults: Any, told: _Told) -> str:
    """One key with all below it; "" where nothing differs from the defaults."""
    hint, default = get_type_hints(cls)[name], getattr(defaults, name)
    if value == default:
        return ""
    below = section_of(hint)
    if below is not None and isinstance(value, Mapping):
        body = _section(value, below, below() if default is None else default, told)
        if not body:
            # A section that is not there by default says something by being there.
            return "" if default is not None else f"{name}: {{}}\n"
        return f"{name}:\n{indent(body, '  ')}"
    sentence = "" if (cls, name) in told else _comment(comments(cls)[name])
    told.add((cls, name))
    entry = entry_of(hint)
    if entry is None:
        return sentence + _dumped(name, value)
    entries = "".join(f"{each}:\n{indent(_section(keys, entry, entry(), told), '  ')}" for each, keys in value.items())
    return f"{sentence}{name}:\n{indent(entries, '  ')}"


def _section(values: Mapping[str, Any], cls: type, defaults: Any, told: _Told) -> str:
    return "".join(_key(name, values[name], cls, defaults, told) for name in _ordered(values, cls))


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for each in text.splitlines() for line in _wrapped(each))


def _dumped(name: str, value: Any) -> str:
    # Lists and mappings in one line, except for those that hold others.
    flow = None if isinstance(value, list | Mapping) else False
    return yaml.dump(
        {name: value}, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=WIDTH
    )


def _wrapped(text: str) -> list[str]:
    """The lines of a paragraph. Names of keys and addresses stay whole."""
    return wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False) or [""]

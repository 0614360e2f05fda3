"""Fills the format strings of the configuration with the columns of a row."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from megasync.errors import DataError


def fill(key: str, template: str, row: Mapping[str, Any]) -> str:
    """A format string with the columns of a row. Raises DataError that names the configuration's ``key``."""
    try:
        return template.format_map(row)
    except Exception as error:  # a format string calls the __format__ and the attributes of any value
        raise DataError(f"{key}={template!r} {_problem(template, row, error)}") from error


def _problem(template: str, row: Mapping[str, Any], error: Exception) -> str:
    if missing := sorted(column_names(template) - row.keys()):
        return (
            f"names the column {missing[0]!r}, which a row lacks: it has {sorted(map(str, row))}; correct the "
            f"template, or name the right column in data.columns"
        )
    if (name := _refusing(template, row)) is not None:
        return (
            f"cannot write the column {name!r} with the value {row[name]!r:.80}: {error}; correct the value, or the "
            f"format behind the colon"
        )
    return f"is not a valid format string: {error or type(error).__name__}; write {{{{ for a brace"


def column_names(template: str) -> set[str]:
    """The columns that a format string names; empty if it is not a valid one."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return set()
    return {name.partition(".")[0].partition("[")[0] for name in fields}


def _refusing(template: str, row: Mapping[str, Any]) -> str | None:
    """The column whose value does not take the format that the template gives it."""
    for name in sorted(column_names(template)):
        for _, field, form, _ in string.Formatter().parse(template):
            if field == name and form:
                try:
                    format(row[name], form)
                except (TypeError, ValueError):
                    return name
    return None

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
    names = column_names(template)
    if missing := sorted(names - row.keys()):
        return (
            f"names the column {missing[0]!r}, which a row lacks: it has {sorted(map(str, row))}; correct the "
            f"template, or name the right column in data.columns"
        )
    values = ", ".join(f"{name}={row[name]!r:.80}" for name in sorted(names))
    return (
        f"is not a valid format string{' for ' + values if values else ''}: {error or type(error).__name__}; correct "
        f"the value or its format, and write {{{{ for a brace"
    )


def column_names(template: str) -> set[str]:
    """The columns that a format string names; empty if it is not a valid one."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return set()
    return {name.partition(".")[0].partition("[")[0] for name in fields}

"""Whether a resumed run may change a key: it may, unless its field in `schema` says why it is `fixed`.

docs/buffer.md describes how a changed key affects groups in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megasync.config.limits import as_typed, value_of
from megasync.config.load import schema_items, section_of
from megasync.config.schema import Config
from megasync.errors import ConfigError


def leaves() -> Iterator[tuple[str, str]]:
    """Each key of the schema that is no section, with the reason why it is fixed, or ""."""
    return ((item.key, item.fixed) for item in schema_items() if section_of(item.hint) is None)


def check_changes(before: Config, after: Config, step: int) -> None:
    """Raises ConfigError, with every reason, if a run with ``step`` trained steps cannot resume with the changes."""
    fixed = dict(leaves())
    wrong = [
        f"{key}={as_typed(new)} cannot replace {as_typed(old)} when a run is resumed: {fixed[key]}"
        for key, old, new in changes(before, after)
        if fixed[key]
    ]
    if after.schedule.total_steps < step:
        wrong.append(
            f"schedule.total_steps={after.schedule.total_steps} is less than the {step} trained steps; set it to "
            f"at least {step}"
        )
    if wrong:
        raise ConfigError("; ".join(wrong))


def changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """(key, value before, value after) for each key that differs."""
    pairs = ((key, value_of(before, key), value_of(after, key)) for key, _ in leaves())
    return [(key, old, new) for key, old, new in pairs if old != new]

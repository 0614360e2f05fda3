"""What a run was configured to do: the settings that differ from the defaults, or between runs.

Settings are the leaves of `config.yaml` by their dotted keys, as `RunFolder.settings` has them, so that configurations
of other versions can be compared too. Secrets are hidden (`confidential`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf

from megasync.base.confidential import masked
from megasync.base.files import open_regular
from megasync.config import Config

# Of a configuration that is read.
MOST_BYTES, DEEPEST = 4 * 2**20, 64
# Of a key that a configuration does not have.
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """A key, its value in each configuration and its default; `ABSENT` where there is none."""

    key: str
    values: tuple[Any, ...]
    default: Any


@cache
def defaults() -> dict[str, Any]:
    """The default of every key; `ABSENT` for a required one."""
    values = OmegaConf.to_container(OmegaConf.structured(Config), resolve=False)
    assert isinstance(values, dict)
    return {key: ABSENT if value == MISSING else value for key, value in flat(values)}


def read_settings(path: Path) -> dict[str, Any]:
    """The leaves of a YAML file by their dotted keys; references to other keys and to the environment stay as written.

    The file is read as hostile: aliases could expand without end, and deep nesting ends the interpreter. Raises
    OSError, and ValueError for what is no configuration.
    """
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8")
        _check_shape(text)
        values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ArithmeticError, TypeError, AttributeError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(values, dict):
        raise ValueError("it holds no keys")
    return dict(flat(values))


def _check_shape(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has YAML aliases, which no configuration of a run has")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by their dotted keys; a list and an empty mapping are leaves."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed(settings: Mapping[str, Any]) -> list[Difference]:
    """The settings that are not the defaults, in the order of the schema."""
    default_values = defaults()
    changes = [Difference(key, (value,), default_values.get(key, ABSENT)) for key, value in settings.items()]
    # A key that is in no schema belongs to a named entry, such as a held-out set; empty ones say nothing.
    return [
        item
        for item in changes
        if not (_equal(item.values[0], item.default) or (item.default is ABSENT and item.values[0] in (None, {}, [])))
    ]


def differences(runs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """The keys in which runs differ from each other; a key that one does not have stands for its default."""
    default_values = defaults()
    differing = []
    for key in dict.fromkeys(key for settings in runs for key in settings):
        default = default_values.get(key, ABSENT)
        values = tuple(settings.get(key, default) for settings in runs)
        if not all(_equal(values[0], value) for value in values[1:]):
            differing.append(Difference(key, values, default))
    return differing


def shown(value: Any, key: str = "") -> str:
    """A value on one line, as YAML would have it."""
    if value is ABSENT:
        return "–"
    value = masked(value, key)
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=str)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other

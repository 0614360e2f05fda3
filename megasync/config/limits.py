"""Limits of single keys: the ranges, choices and forms that the fields of `schema` declare with `limited`.

A test fails for a number or a word without a limit. Combinations of keys are checked by `megasync.preflight.check`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from megasync.base.confidential import masked
from megasync.config import builtin
from megasync.errors import ConfigError

# A larger number is a typing error. This also refuses infinity, so every wait ends.
LARGEST = 1e18
# Maximum number of characters of a refused text in an error message.
SHOWN_CHARACTERS = 200


class Limit(Protocol):
    """What a key allows; `str` gives it in words."""

    def refusal(self, value: Any) -> str | None:
        """The end of an error message that begins with key and value; None if the value is allowed."""


@dataclass(frozen=True, slots=True)
class Range:
    """An interval. `open_low` and `open_high` exclude the respective endpoint."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def refusal(self, value: float) -> str | None:
        if not abs(value) <= LARGEST:  # this form also refuses NaN
            return f"is not a usable number; it must be {self}"
        return None if self.holds(value) else f"must be {self}"

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:.10g}"
        if self.high == math.inf:
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:.10g}"


class Choice:
    """A fixed set of words."""

    def __init__(self, *options: str) -> None:
        self.options = options

    def refusal(self, value: str) -> str | None:
        return None if value in self.options else f"must be one of {self}"

    def __str__(self) -> str:
        return ", ".join(self.options)


@dataclass(frozen=True, slots=True)
class Form:
    """Text that matches a pattern, which `description` gives in words."""

    pattern: str
    description: str

    def refusal(self, value: str) -> str | None:
        return None if re.fullmatch(self.pattern, value) else f"must be {self}"

    def __str__(self) -> str:
        return self.description


class FilePath:
    """The path of a file or folder on this machine, which need not exist."""

    def refusal(self, value: str) -> str | None:
        problem = path_problem(value)
        return None if problem is None else f"is not a usable path: {problem}; choose another path"


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
AT_LEAST_ONE = Range(1)
FRACTION = Range(0, 1, open_low=True)
PROPER_FRACTION = Range(0, 1, open_low=True, open_high=True)
# The upper limit is more than any cluster runs. It bounds the plan, which lists every process.
PROCESSES = Range(1, 65536)
# SGLang passes the seed to numpy, which accepts 32 bits. Each server adds its index.
SEED = Range(0, 2**31)
DTYPE = Choice("float32", "bfloat16")
DATASET = Choice("digits", "reasoning_gym", "jsonl", "parquet", "hf")
_REFERENCE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
FUNCTION = Form(_REFERENCE, "package.module:function")
ADVANTAGE = Form("|".join([*builtin.ADVANTAGES, _REFERENCE]), f"{', '.join(builtin.ADVANTAGES)} or {FUNCTION}")
LOSS = Form("|".join([*builtin.LOSSES, _REFERENCE]), f"{', '.join(builtin.LOSSES)} or {FUNCTION}")
CURRICULUM = Form("|".join([*builtin.CURRICULA, _REFERENCE]), f"{', '.join(builtin.CURRICULA)} or {FUNCTION}")
REWARD = Form("|".join([*builtin.REWARDS, _REFERENCE]), f"{', '.join(builtin.REWARDS)} or {FUNCTION}")
ENVIRONMENT = Form(
    "|".join([*builtin.ENVIRONMENTS, _REFERENCE]), f"{', '.join(builtin.ENVIRONMENTS)} or package.module:Class"
)
RUN_NAME = Form(r"[\w.-]+", "letters, digits, '.', '_' and '-' only (it names the run's folder)")
HOST = Form(r"[\w.:\-]+", "auto, an address or a host name, such as 127.0.0.1")
RAY_ADDRESS = Form(r"auto|[\w.\-]+:\d+|ray://[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", "auto or host:port")
PATH = FilePath()
# How an address begins, such as s3:// or hf://. As a path it would name a folder `s3:`.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def limited(default: Any, limit: Limit) -> Any:
    """A key of the configuration: a dataclass field with this default and limit. null is always allowed."""
    return field(default=default, metadata={"limit": limit})


def limit_of(item: Field[Any]) -> Limit | None:
    """The limit of a key; None if it allows every value of its type, or if `check` validates it with other keys."""
    return item.metadata.get("limit")


# For a field of the schema that is not a key of a configuration.
NO_KEY = {"omegaconf_ignore": True}


def schema_fields(section: Any) -> list[Field[Any]]:
    """The keys of a section, an instance or a class."""
    return [item for item in fields(section) if not item.metadata.get("omegaconf_ignore")]


def keys_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Each key below a section of a configuration, with the section that holds it and its field."""
    for item in schema_fields(section):
        key, value = f"{prefix}{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            yield from keys_of(value, f"{key}.")
            continue
        yield key, section, item
        if isinstance(value, dict):
            for name, entry in value.items():
                if is_dataclass(entry):
                    yield from keys_of(entry, f"{key}.{name}.")


def check_limits(config: Any) -> None:
    """Raises ConfigError for the first value outside its limits, with the key, the value and what is allowed."""
    for key, section, item in keys_of(config):
        value, limit = getattr(section, item.name), limit_of(item)
        if value is not None and limit is not None and (refusal := limit.refusal(value)) is not None:
            shown = repr(value[:SHOWN_CHARACTERS]) if isinstance(value, str) else value
            raise ConfigError(f"{key}={shown} {refusal}")


def refuse_unused(section: Any, prefix: str, names: Iterable[str], reason: str) -> None:
    """Raises ConfigError for a key of a section that differs from its default although it has no effect.

    `reason` ends the message: it says with which other key, and how to change that.
    """
    defaults = type(section)()
    for name in names:
        value, default = getattr(section, name), getattr(defaults, name)
        if value != default:
            raise ConfigError(
                f"{prefix}.{name}={as_typed(value)} has no effect {reason}, or leave {name} at {as_typed(default)}"
            )


def path_problem(path: str) -> str | None:
    """Why the file system rejects a text as a path; None if it is acceptable, even if nothing exists there.

    Reasons are for example: empty, too long, the home of an unknown user, or a folder without permission to enter.
    """
    if not path:
        return "it is empty"
    if scheme := _SCHEME.match(path):
        return f"{scheme.group()} addresses are not supported, only folders and files of this machine, mounted ones too"
    try:
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError) as error:
        return str(getattr(error, "strerror", None) or error).rstrip(".")
    return None


def as_typed(value: Any) -> str:
    """A value as a user would write it in YAML, without secrets."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(masked(value))


def value_of(section: Any, key: str) -> Any:
    """The value of a dotted key; None if a section on the way to it is null."""
    node: Any = section
    for part in key.split("."):
        if node is None:
            return None
        node = getattr(node, part)
    return node

"""Limits of single keys: the ranges, choices and forms that the fields of `schema` declare with `rules.key`.

A test fails for a number or a word without a limit. Rules about other keys are in `config.rules`.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megasync.base.confidential import masked
from megasync.config import builtin
from megasync.config.host import is_wildcard
from megasync.errors import ConfigError
from megasync.trajectory import MAX_SUPPORT

# A larger number is a typing error. This also refuses infinity, so every wait ends.
LARGEST = 1e18
# Maximum number of characters of a refused text in an error message.
SHOWN_CHARACTERS = 200


class Limit(Protocol):
    """The values that a key allows; `str` gives them in words."""

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
class Checked:
    """Values of which a function says why they are refused; None if they are allowed."""

    check: Callable[[Any], str | None]
    description: str = ""

    def refusal(self, value: Any) -> str | None:
        return self.check(value)

    def __str__(self) -> str:
        return self.description


def form(pattern: str, description: str) -> Checked:
    """Text that matches a pattern, which ``description`` gives in words."""
    return Checked(lambda value: None if re.fullmatch(pattern, value) else f"must be {description}", description)


def every(limit: Limit) -> Checked:
    """A list in which the limit holds for each entry."""
    return Checked(
        lambda value: next((f"has {each!r}, which {why}" for each in value if (why := limit.refusal(each))), None)
    )


def named(pattern: str, words: str) -> Checked:
    """Entries by names of the user's choice."""
    return Checked(
        lambda value: next(
            (f"has an entry {name!r}; {words}" for name in value if not re.fullmatch(pattern, name)), None
        )
    )


def _template(text: str, wanted: Callable[[set[str]], bool], words: str) -> str | None:
    """``wanted`` says whether a format string may name these columns."""
    try:
        columns = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        return f"is not a valid format string ({error}); write {{{{ and }}}} for literal braces"
    return None if wanted(columns) else f"must {words}; write {{{{ and }}}} for literal braces"


def _pattern(text: str) -> str | None:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        return f"is not a regular expression: {error}; correct it"
    return f"has {groups} groups, and the number must be in the first; leave one group" if groups > 1 else None


def _numbers(value: list[float]) -> str | None:
    if not value or not all(0 <= each <= LARGEST for each in value):
        return "must hold at least one number, each finite and at least 0"
    return "names a temperature twice; name each once" if len(set(value)) != len(value) else None


def _server_urls(urls: list[Any]) -> str | None:
    for url in urls:
        if not _is_server_url(url):
            return f"names {url!r}, which is not of the form http://host:port"
    doubled = sorted({url for url in urls if urls.count(url) > 1})
    return f"names {', '.join(doubled)} more than once; name each server once" if doubled else None


def _is_server_url(url: Any) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.username
            and not (parts.path.strip("/") or parts.query or parts.fragment)
        )
    except (ValueError, TypeError, AttributeError):
        return False


def _host(value: str) -> str | None:
    if is_wildcard(value):
        return "binds to every interface, but others need an address to connect to; name one, or set auto"
    return None if re.fullmatch(r"[\w.:\-]+", value) else f"must be {HOST}"


def _betas(value: list[float]) -> str | None:
    sound = len(value) == 2 and all(0 <= beta < 1 for beta in value)
    return None if sound else "must be two numbers, each at least 0 and below 1"


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
DATASET = Choice(*builtin.TASKSETS, *builtin.READERS)
_REFERENCE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
FUNCTION = form(_REFERENCE, "package.module:function")


def _named_or_reference(names: Iterable[str], reference: str = str(FUNCTION)) -> Checked:
    return form("|".join([*names, _REFERENCE]), f"{', '.join(names)} or {reference}")


ADVANTAGE = _named_or_reference(builtin.ADVANTAGES)
LOSS = _named_or_reference(builtin.LOSSES)
CURRICULUM = _named_or_reference(builtin.CURRICULA)
AGENT = _named_or_reference([builtin.EXTERNAL])
REWARD = _named_or_reference(builtin.REWARDS)
ENVIRONMENT = _named_or_reference(builtin.ENVIRONMENTS, "package.module:Class")
RUN_NAME = form(r"[\w.-]+", "letters, digits, '.', '_' and '-' only (it names the run's folder)")
HOST = Checked(_host, "auto, an address or a host name, such as 127.0.0.1")
RAY_ADDRESS = form(r"auto|[\w.\-]+:\d+|ray://[\w.\-]+:\d+|\[[0-9a-fA-F:]+\]:\d+", "auto or host:port")
PATH = Checked(
    lambda value: (problem := path_problem(value)) and f"is not a usable path: {problem}; choose another path"
)
NAMES = named(r"[\w-]+", "a name may have letters, digits, '_' and '-' only")
# `megasync eval` calls the set under data.eval so.
EVAL_NAMES = named(r"(?!eval$)[\w-]+", "a name may have letters, digits, '_' and '-' only, and 'eval' is taken")
FUNCTIONS = every(FUNCTION)
# Megatron's names of the modules that selective recomputation may recompute.
MODULES = every(Choice("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"))
STOPS = Checked(lambda stops: "has an empty string, which would end every response; remove it" if "" in stops else None)
TEMPERATURES, BETAS, PATTERN, SERVER_URLS = map(Checked, (_numbers, _betas, _pattern, _server_urls))
FINITE = Checked(lambda value: None if math.isfinite(value) else "must be a finite number")
TOP_K = Checked(
    lambda k: None if k == -1 or 1 < k <= MAX_SUPPORT else f"must be -1 (all tokens) or from 2 to {MAX_SUPPORT}"
)
EVAL_TOP_K = Checked(lambda k: None if k == -1 or k >= 1 else "must be -1 (all tokens) or at least 1")
COLUMNS = Checked(
    lambda text: _template(
        text, lambda names: bool(names) and all(names), "name the columns it shows, such as {prompt}"
    )
)
ANSWER = Checked(lambda text: _template(text, lambda names: names == {"answer"}, "have {answer}, and no other column"))
JUDGED = Checked(lambda text: _template(text, lambda names: "completion" in names, "contain {completion}"))
# How an address begins, such as s3:// or hf://. As a path it would name a folder `s3:`.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


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
            raise ConfigError(f"{key} {refusal}" if isinstance(value, dict) else f"{key}={shown} {refusal}")


def path_problem(path: str) -> str | None:
    """Why the file system rejects a text as a path; None if it is acceptable, even if nothing exists there.

    Reasons are for example: empty, too long, the home of an unknown user, or a folder without permission to enter.
    """
    if not path:
        return "it is empty"
    if scheme := _SCHEME.match(path):
        return f"{scheme.group()} addresses are not supported, only folders and files of this machine, mounted ones too"
    try:
        path.encode()
        Path(path).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeEncodeError:
        return "it is not UTF-8 text"
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
